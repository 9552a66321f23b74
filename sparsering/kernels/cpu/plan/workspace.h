// Computes the bytes of a call's buffers for plans, by running the allocating code under a meter.

#pragma once

#include <numeric>
#include <vector>

#include "../backward.h"
#include "../forward.h"

namespace sparsering::cpu {

// True if brgemm multiplies bfloat16 on this processor and, with `in_order`, if loops of our own
// can. Otherwise operands must be floats, because brgemm would throw.
inline bool has_bfloat16_products() {
  if (!multiplies_pairs() || (in_order() && !has_pairs())) {
    return false;
  }
  static const bool has = [] {
    Buffer<BFloat16> a(16 * 32), b(32 * 16);
    Buffer<float> c(16 * 16);
    std::fill_n(a.get(), 16 * 32, BFloat16(1));
    std::fill_n(b.get(), 32 * 16, BFloat16(1));
    try {
      multiply<BFloat16>(16, 16, 32, a.get(), 32, b.get(), c.get(), false);
      release_products();
      return c.get()[0] == 32.f;
    } catch (const std::exception&) {
      return false;
    }
  }();
  return has;
}

// Returns the bytes of the buffers of a call without running it, from counts of its passes
// (planning/memory.py) and meta tensors.
inline int64_t workspace_bytes(const Tensor& query, const Tensor& key, const Tensor& value,
                               int64_t block, Doubles counts, bool backward, bool by_head) {
  constexpr size_t kCounts = 13;
  std::vector<Pass> passes;
  std::vector<Counts> of_passes;
  SPARSERING_CHECK(counts.size() % kCounts == 0, "sparsering cpu: malformed counts of passes");
  for (size_t i = 0; i < counts.size(); i += kCounts) {
    const double* of = counts.data() + i;
    const auto whole = [&](int j) { return static_cast<int64_t>(of[j]); };
    passes.emplace_back(whole(0), block, whole(1), whole(2), whole(3), whole(4), whole(5) != 0);
    passes.back().query_segments = of[11] != 0., passes.back().key_segments = of[12] != 0.;
    of_passes.push_back({of[6], of[7], of[8], of[9], of[10]});
  }
  const Tensor none = empty({0}, kFloat),
               first_entry = zeros({static_cast<int64_t>(passes.size()), 1, 1}, kLong);
  const Problem x(query, key, value, {}, Extras(), first_entry, passes.size(), block, 1.);
  const auto bytes = [&](auto type) {
    using T = decltype(type);
    if (!backward) {
      return Forward<T>(x, passes).workspace(of_passes, query);
    }
    const Delta delta_of(x, query, query, none);
    return Backward<T>(x, passes, delta_of, query, none, none, query, key, value, none, none)
        .workspace(of_passes, by_head);
  };
  return x.q.type == kBFloat16 && has_bfloat16_products() ? bytes(BFloat16()) : bytes(float());
}

// Returns the number of pieces into which all tiles are cut: query tiles by the forward pass or, if
// `by_key`, key tiles by the backward pass. For each tile, `entries` is its number of entries, and
// `segments` the number of segments in which they lie.
inline int64_t pieces(const Tensor& entries, const Tensor& segments, bool by_key) {
  const int64_t *of_tile = values_of<int64_t>(entries), *pieces_of = values_of<int64_t>(segments);
  const int64_t tiles = entries.numel();
  SPARSERING_CHECK(segments.numel() == tiles, "sparsering cpu: each tile has a number of segments");
  const int64_t most = most_entries(std::accumulate(of_tile, of_tile + tiles, int64_t{0}), tiles,
                                    by_key ? 1 : kLeastRowsCut);
  int64_t sum = 0;
  for (int64_t i = 0; i < tiles; ++i) {
    sum += of_tile[i] > most && pieces_of[i] > 1 ? pieces_of[i] : 0;
  }
  return sum;
}

}  // namespace sparsering::cpu
