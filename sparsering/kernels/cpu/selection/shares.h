// Computes the shares of key blocks: a softmax over the parts of blocks, summed over the queries of
// a result row.

#pragma once

#include "../machine/threads.h"
#include "../softmax.h"
#include "operands.h"

namespace sparsering::cpu {

// The input: `count` ranges of `width` queries each. The first range begins at token `offset` of
// block `first`, and each later one at the next block. A result row sums over `row` queries and all
// heads of a group.
struct Shares {
  Shares(const Operands& of, const std::optional<Tensor>& last_, float log_part_, int64_t blocks_,
         int64_t length, int64_t first_, int64_t offset_, int64_t count_, int64_t width_,
         int64_t row_, bool causal_)
      : operands(of),
        last(last_ ? values_of<float>(*last_) : nullptr),
        log_part(log_part_),
        blocks(blocks_),
        Nk(length),
        first(first_),
        offset(offset_),
        count(count_),
        width(width_),
        row(row_),
        causal(causal_) {
    SPARSERING_CHECK(count > 0 && row > 0 && width > 0 && width % row == 0 && offset >= 0 &&
                         offset <= of.block && width <= of.block - offset &&
                         (count == 1 || width == of.block) && of.first_query >= 0 &&
                         of.first_query <= of.Nq && count <= (of.Nq - of.first_query) / width,
                     "sparsering cpu: shares got rows of queries that there are not");
    const int64_t lowest = std::max<int64_t>(first, 0), end = std::min(first + count, blocks);
    const bool has_own =
        !causal || lowest >= end || (lowest >= of.first_own && end - of.first_own <= of.own_blocks);
    SPARSERING_CHECK(Nk > 0 && blocks == (Nk + of.block - 1) / of.block && has_own &&
                         seen(first + count - 1) <= of.blocks &&
                         (!last_ || (last_->numel() == of.slots && last_->is_contiguous())),
                     "sparsering cpu: shares lack blocks that queries see");
  }

  // Returns for how many blocks the queries of block `own` use estimates: all, or if causal those
  // before `own`.
  int64_t seen(int64_t own) const {
    return causal ? std::clamp<int64_t>(own, 0, blocks) : blocks;
  }

  Operands operands;
  const float* last;  // for each part of the last block, log of the share of its tokens that exist
  float log_part;
  int64_t blocks, Nk, first, offset, count, width, row;
  bool causal;
};

inline float highest_of_lanes(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, x);
}
inline float least_of_lanes(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::minimum(a, b); }, x);
}

// Returns the maximum. It may skip a NaN, because the NaN still reaches the sum of exponentials.
inline Vec highest_of(const float* from, int64_t size, Vec top) {
  Vec tops[4] = {top, top, top, top};  // four independent maxima hide the latency of each
  int64_t j = 0;
  for (; j + 4 * kLanes <= size; j += 4 * kLanes) {
    for (int64_t k = 0; k < 4; ++k) {
      tops[k] = at::vec::clamp_min(Vec::loadu(from + j + k * kLanes), tops[k]);
    }
  }
  for (; j < size; j += kLanes) {
    tops[0] = at::vec::clamp_min(Vec::loadu(from + j), tops[0]);
  }
  return at::vec::maximum(at::vec::maximum(tops[0], tops[1]), at::vec::maximum(tops[2], tops[3]));
}

// Replaces each x by exp(x - base), and returns the sum.
inline float exponentiate(float* x, int64_t size, float base) {
  Vec total(0.f);
  for (int64_t j = 0; j < size; j += kLanes) {
    const Vec weight = exp_of(Vec::loadu(x + j) - Vec(base));
    weight.store(x + j);
    total = total + weight;
  }
  return sum_of_lanes(total);
}

// Shares below this are computed again from logs, because exp_of has an absolute error of 2^-126.
constexpr float kLeastShare = 0x1p-96f;

// Returns log x, by torch's vectorized Sleef if torch has it, else lane by lane.
inline Vec log_of(Vec x) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#if defined(CPU_CAPABILITY_AVX512)
  using Lanes = __m512;
#else
  using Lanes = __m256;
#endif
  static const auto log = [] {
    Lanes (*function)(Lanes);
    look_up(function, kLanes == 16 ? "Sleef_logf16_u10" : "Sleef_logf8_u10");
    return function;
  }();
  if (log) {
    return log(x);
  }
#endif
  float lanes[kLanes];
  x.store(lanes);
  for (float& lane : lanes) {
    lane = std::log(lane);
  }
  return Vec::loadu(lanes);
}

// Writes the logs of numbers. Returns true if a number was less than kLeastShare.
inline bool write_logs(const float* from, int64_t size, float* to) {
  Vec least(kInf);
  for (int64_t j = 0; j < size; j += kLanes) {
    const int64_t there = std::min<int64_t>(kLanes, size - j);
    const Vec x = Vec::loadu(from + j);
    least = at::vec::clamp_max(there == kLanes ? x : Vec::set(Vec(kInf), x, there), least);
    log_of(x).store(to + j, there);
  }
  return least_of_lanes(least) < kLeastShare;
}

// Writes the log of every block's share to `result` [entries, rows, blocks]; -inf for blocks that
// are not visible. Returns true if a share was too small for sums in float.
inline bool block_shares(const Shares& x, const Tensor& result) {
  SPARSERING_CHECK(
      result.is_cpu() && result.dtype() == kFloat &&
          result.has_sizes({x.operands.entries, x.count * (x.width / x.row), x.blocks}) &&
          (x.blocks == 1 || result.stride(2) == 1),
      "sparsering cpu: shares need a result [entries, rows, blocks], dense in blocks");
  float* const out = result.mutable_data_ptr<float>();
  const int64_t of_entry = result.stride(0), of_row = result.stride(1);
  std::atomic<bool> lost{false};
  constexpr int64_t kQueries = 64;  // queries per matrix product
  const Operands& from = x.operands;
  const int64_t group = from.group, slots = from.slots, D = from.D, F = from.F;
  const int64_t per_run = x.width * group, per_row = x.row * group;
  const int64_t most = round_up(x.seen(x.first + x.count - 1), 16);
  const int64_t near_most = round_up(from.block, 16);
  const bool same = from.kind == Features::kMean;  // features are the queries themselves
  const Panels panels(from, x.seen(x.first + x.count - 1));
  struct Scratch {
    Buffer<float> query, feature, key, logits, near, sums;
  };
  const auto make = [&] {
    return Scratch{Buffer<float>(kQueries * D),         Buffer<float>(same ? 0 : kQueries * F),
                   Buffer<float>(D * near_most),        Buffer<float>(kQueries * slots * most),
                   Buffer<float>(kQueries * near_most), Buffer<float>(most + kLanes)};
  };
  const auto product = [](int64_t m, int64_t n, int64_t k, const float* a, const float* b,
                          int64_t ldb, float* c, int64_t ldc) {
    for (int64_t i = 0; !k && i < m; ++i) {
      std::fill_n(c + i * ldc, n, 0.f);
    }
    if (k) {
      multiply(m, n, k, a, k, b, ldb, c, ldc, false);
    }
  };
  const auto work = [&](Scratch& s, int64_t item) {
    item = from.entries * x.count - 1 - item;  // so that threads take the longest items first
    const int64_t e = item % from.entries, run = item / from.entries, own = x.first + run;
    const int64_t seen = x.seen(own), wide = round_up(seen, 16), columns = slots * wide;
    const bool has_own = x.causal && own >= 0 && own < x.blocks;
    const int64_t keys = has_own ? std::min(from.block, x.Nk - own * from.block) : 0;
    float* sums = s.sums.get();
    if (has_own) {
      turn_keys(from, e, own, std::min(keys, x.offset + x.width), s.key.get(), near_most);
    }
    for (int64_t q = 0; q < per_run; q += kQueries) {
      const int64_t count = std::min(kQueries, per_run - q);
      const int64_t place = x.offset + (q + count - 1) / group;  // last token of these queries
      const int64_t near_wide = round_up(std::min(keys, place + 1), 16);
      const float *query = s.query.get(), *feature = same ? query : s.feature.get();
      read_queries(from, e, run * per_run + q, count, s.query.get());
      if (!same) {
        write_features(from, query, count, s.feature.get());
      }
      for (int64_t c = 0; c < slots; ++c) {
        for (int64_t j = 0; j < wide; j += panels.columns()) {
          product(count, std::min(panels.columns(), wide - j), F, feature, panels.of(e, c, j),
                  panels.columns(), s.logits.get() + c * wide + j, columns);
        }
      }
      // Only a few widths are used, because brgemm compiles a kernel for each width.
      for (int64_t j = 0; j < near_wide; j += Panels::kColumns) {
        product(count, std::min(Panels::kColumns, near_wide - j), D, query, s.key.get() + j,
                near_most, s.near.get() + j, near_wide);
      }
      for (int64_t i = 0; i < count; ++i) {
        if ((q + i) % per_row == 0) {
          std::fill_n(sums, wide + 1, 0.f);
        }
        float *logits = s.logits.get() + i * columns, *near = s.near.get() + i * near_wide;
        for (int64_t c = 0; c < slots; ++c) {
          std::fill(logits + c * wide + seen, logits + (c + 1) * wide, -kInf);
          if (x.last && seen == x.blocks) {  // a part without tokens must not be the maximum
            logits[c * wide + seen - 1] += x.last[c];
          }
        }
        std::fill(near + std::min(keys, x.offset + (q + i) / group + 1), near + near_wide, -kInf);
        const Vec top = highest_of(near, near_wide, Vec(-kInf)) - Vec(x.log_part);
        const float highest = highest_of_lanes(highest_of(logits, columns, top));
        const float total = exponentiate(logits, columns, highest);
        const float of_own = exponentiate(near, near_wide, highest + x.log_part);
        const float share = 1.f / (total + of_own);
        for (int64_t j = 0; j < wide; j += kLanes) {
          Vec sum = Vec::loadu(sums + j);
          for (int64_t c = 0; c < slots; ++c) {
            sum = at::vec::fmadd(Vec::loadu(logits + c * wide + j), Vec(share), sum);
          }
          sum.store(sums + j);
        }
        sums[wide] += of_own * share;
        if ((q + i + 1) % per_row == 0) {
          const int64_t row = (run * per_run + q + i) / per_row;
          float* to = out + e * of_entry + row * of_row;
          bool small = write_logs(sums, seen, to);
          std::fill(to + seen, to + x.blocks, -kInf);
          if (has_own) {
            to[own] = std::log(sums[wide]);
            small |= sums[wide] < kLeastShare;
          }
          if (small) {
            lost = true;
          }
        }
      }
    }
  };
  share_out<Scratch>(from.entries * x.count, 1, make, work);
  return lost;
}

}  // namespace sparsering::cpu
