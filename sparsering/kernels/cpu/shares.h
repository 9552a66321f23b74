// Shares of blocks of keys: softmax over parts of blocks, summed over the queries of a row.

#pragma once

#include "softmax.h"
#include "threads.h"

namespace sparsering::cpu {

// Queries [entries, M, D], what products with parts make logits of [entries, M, F], parts of blocks
// [entries, slots, F, held] and keys [entries, D, held_keys] from `first_key` on, these padded with
// zeros; `first` is the block of the first query, `offset` its place there, `per_block` the queries
// in each block and `per_row` in each row, all heads counted, `group` of them at each place.
struct Shares {
  const float *query, *feature, *parts, *key;
  const float* last;  // [slots] of the last block, the tokens of a part over those of a whole one
  float log_part;
  int64_t entries, M, F, D, slots, held, held_keys, first_key, blocks, Nk, block, first, offset,
      per_block, per_row, group;
  bool causal;
};

inline Vec highest_of(const float* from, int64_t size, Vec top) {
  for (int64_t j = 0; j < size; j += kLanes) {
    top = at::vec::maximum(top, Vec::loadu(from + j));
  }
  return top;
}

// Replaces numbers by their powers of e, and returns the sum of these.
inline float exponentiate(float* x, int64_t size, float base) {
  Vec total(0.f);
  for (int64_t j = 0; j < size; j += kLanes) {
    const Vec weight = exp_of(Vec::loadu(x + j) - Vec(base));
    weight.store(x + j);
    total = total + weight;
  }
  return sum_of_lanes(total);
}

// Log of the shares of every block, [entries, M / per_row, blocks]; -inf for those not visible.
// Returns whether a share was too small for a number.
inline bool block_shares(const Shares& x, float* out) {
  std::atomic<bool> lost{false};
  constexpr int64_t kQueries = 64, kColumns = 128;  // at a time
  const int64_t in_entry = x.M / x.per_block, rows = x.M / x.per_row;
  const int64_t most = round_up(x.blocks, 16), near_most = round_up(x.block, 16);
  struct Scratch {
    Buffer<float> logits, near, sums;
  };
  const auto make = [&] {
    return Scratch{Buffer<float>(kQueries * x.slots * most), Buffer<float>(kQueries * near_most),
                   Buffer<float>(most + 1)};
  };
  // In few widths, for each is compiled.
  const auto product = [&](const float* a, int64_t k, int64_t m, const float* b, int64_t ldb,
                           int64_t n, float* c, int64_t ldc) {
    for (int64_t j = 0; j < n; j += kColumns) {
      at::native::cpublas::brgemm(m, std::min(kColumns, n - j), k, k, ldb, ldc, false, a, b + j,
                                  c + j, false);
    }
  };
  const auto work = [&](Scratch& s, int64_t item) {
    item = x.entries * in_entry - 1 - item;  // the longest first
    const int64_t e = item % x.entries, piece = item / x.entries, own = x.first + piece;
    const int64_t seen = x.causal ? std::clamp<int64_t>(own, 0, x.blocks) : x.blocks;
    const int64_t wide = round_up(seen, 16), columns = x.slots * wide, begin = piece * x.per_block;
    const bool has_own = x.causal && own >= 0 && own < x.blocks;
    const int64_t keys = has_own ? std::min(x.block, x.Nk - own * x.block) : 0;
    const int64_t near_wide = round_up(keys, 16);
    float* sums = s.sums.get();
    for (int64_t q = begin; q < begin + x.per_block; q += kQueries) {
      const int64_t count = std::min(kQueries, begin + x.per_block - q), at = e * x.M + q;
      for (int64_t c = 0; c < x.slots; ++c) {
        product(x.feature + at * x.F, x.F, count, x.parts + (e * x.slots + c) * x.F * x.held,
                x.held, wide, s.logits.get() + c * wide, columns);
      }
      product(x.query + at * x.D, x.D, count,
              x.key + e * x.D * x.held_keys + own * x.block - x.first_key, x.held_keys, near_wide,
              s.near.get(), near_wide);
      for (int64_t i = 0; i < count; ++i) {
        if ((q + i) % x.per_row == 0) {
          std::fill_n(sums, wide + 1, 0.f);
        }
        float *logits = s.logits.get() + i * columns, *near = s.near.get() + i * near_wide;
        for (int64_t c = 0; c < x.slots; ++c) {
          std::fill(logits + c * wide + seen, logits + (c + 1) * wide, -kInf);
        }
        const int64_t place = x.offset + (q + i - begin) / x.group;
        std::fill(near + std::min(keys, place + 1), near + near_wide, -kInf);
        const Vec top = highest_of(near, near_wide, Vec(-kInf)) - Vec(x.log_part);
        float lanes[kLanes];
        highest_of(logits, columns, top).store(lanes);
        float highest = -kInf;
        for (const float lane : lanes) {
          highest = lane > highest || lane != lane ? lane : highest;
        }
        float total = exponentiate(logits, columns, highest);
        if (x.last && seen == x.blocks) {
          for (int64_t c = 0; c < x.slots; ++c) {
            float& weight = logits[c * wide + seen - 1];
            total += weight * (x.last[c] - 1.f);
            weight *= x.last[c];
          }
        }
        const float of_own = exponentiate(near, near_wide, highest + x.log_part);
        const float share = 1.f / (total + of_own);
        for (int64_t c = 0; c < x.slots; ++c) {
          for (int64_t j = 0; j < wide; j += kLanes) {
            const Vec weight = Vec::loadu(logits + c * wide + j);
            at::vec::fmadd(weight, Vec(share), Vec::loadu(sums + j)).store(sums + j);
          }
        }
        sums[wide] += of_own * share;
        if ((q + i + 1) % x.per_row == 0) {
          float* result = out + (e * rows + (q + i) / x.per_row) * x.blocks;
          for (int64_t b = 0; b < x.blocks; ++b) {
            result[b] = b < seen ? std::log(sums[b]) : -kInf;
            if (b < seen && sums[b] == 0.f) {
              lost = true;
            }
          }
          if (has_own) {
            result[own] = std::log(sums[wide]);
            if (sums[wide] == 0.f) {
              lost = true;
            }
          }
        }
      }
    }
  };
  share_out<Scratch>(x.entries * in_entry, 1, make, work);
  return lost;
}

}  // namespace sparsering::cpu
