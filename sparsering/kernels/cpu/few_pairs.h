// Attention of a few queries in bfloat16. Products are added in pairs and in order, as for query
// tiles (machine/pairs_in_order.h).

#pragma once

#include "few.h"

namespace sparsering::cpu {

// The rows of a tile's keys or values; a masked key has a row of zeros, because it may be NaN.
struct PairRows {
  const BFloat16* operator[](int64_t j) const {
    return seen && !seen[j * step] ? zeros : rows[j];
  }
  Strided<BFloat16> rows;
  const bool* seen;  // the key mask from the tile's first key on, or nullptr if all are seen
  int64_t step;
  const BFloat16* zeros;
};

#if defined(SPARSERING_PAIRS)

// Computes dot products of R queries with G * kLanes keys, whose pairs of values are transposed.
template <int R, int G>
SPARSERING_PAIRS void score_pair_rows(const FewQueries& x, int64_t row, const float* turned,
                                      int64_t first) {
  const int64_t pairs = x.width / 2, size = pairs * kLanes;
  const float* query = x.queries + row * pairs;  // a float holds a pair of bfloat16
  __m512 sum[R * G];
#pragma GCC unroll 16
  for (int i = 0; i < R * G; ++i) {
    sum[i] = _mm512_setzero_ps();
  }
  for (int64_t d = 0; d < (x.key_width + 1) / 2; ++d) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const __m512bh keys = (__m512bh)_mm512_loadu_ps(turned + g * size + d * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512bh of_query = (__m512bh)_mm512_set1_ps(query[r * pairs + d]);
        sum[r * G + g] = _mm512_dpbf16_ps(sum[r * G + g], keys, of_query);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * G; ++i) {
    _mm512_storeu_ps(x.scores + (row + i / G) * x.ld + first + i % G * kLanes, sum[i]);
  }
}

// Computes dot products of a query with G * kLanes keys, whose pairs it transposes in registers.
template <int G>
SPARSERING_PAIRS void score_pair_row(const float* query, const Strided<float>& keys, int64_t pairs,
                                     float* scores) {
  __m512 sum[G];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    sum[g] = _mm512_setzero_ps();
  }
  for (int64_t d = 0; d < pairs; d += kLanes) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        square[i] = Vec::loadu(keys[g * kLanes + i] + d);
      }
      transpose_square(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        const __m512 of_query = _mm512_set1_ps(query[d + i]), of_keys = square[i];
        sum[g] = _mm512_dpbf16_ps(sum[g], (__m512bh)of_keys, (__m512bh)of_query);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    _mm512_storeu_ps(scores + g * kLanes, sum[g]);
  }
}

// Computes dot products of each query with `count` keys, and prefetches the values. `x.queries` has
// rows of `x.width` numbers of bfloat16.
template <int W>
void score_pairs(const FewQueries& x, const Strided<BFloat16>& keys, int64_t count,
                 const Strided<BFloat16>& values) {
  const int64_t pairs = x.width / 2;
  float *block = x.spare, *turned = block + kLanes * pairs;
  const bool whole = x.key_width == x.width && keys.stride % 2 == 0;
  const Strided<float> in_place{reinterpret_cast<const float*>(keys[0]), keys.stride / 2};
  constexpr int64_t kTwo = 2 * kLanes;
  int64_t done = 0;
  for (; x.count == 1 && whole && done + kTwo <= count; done += kTwo) {
    for (int64_t j = 0; j < kTwo; ++j) {
      prefetch<W>(values[done + j], x.value_width);
    }
    score_pair_row<2>(x.queries, in_place.from(done), pairs, x.scores + done);
  }
  const auto turn = [&](int64_t first, int64_t n, float* to) {
    for (int64_t j = 0; j < n; ++j) {
      prefetch<W>(values[first + j], x.value_width);
    }
    Strided<float> rows = in_place.from(first);
    if (n < kLanes || !whole) {
      auto* copies = reinterpret_cast<BFloat16*>(block);
      std::fill_n(copies, kLanes * x.width, BFloat16(0));
      for (int64_t j = 0; j < n; ++j) {
        std::copy_n(keys[first + j], x.key_width, copies + j * x.width);
      }
      rows = {block, pairs};
    }
    transpose_rows<0>(rows, pairs, to);
  };
  for_turned_keys(done, count, pairs * kLanes, turned, turn,
                  [&](auto groups, const float* of_groups, int64_t first) {
                    int64_t row = 0;
                    for (; row + 4 <= x.count; row += 4) {
                      score_pair_rows<4, groups()>(x, row, of_groups, first);
                    }
                    for (; row < x.count; ++row) {
                      score_pair_rows<1, groups()>(x, row, of_groups, first);
                    }
                  });
}

// Converts each query's weights to bfloat16 in place, with the first of a pair in the high half.
inline void pack_weights(const FewQueries& x, int64_t count) {
  for (int64_t r = 0; r < x.count; ++r) {
    float* weights = x.scores + r * x.ld;
    if (count % 2) {
      weights[count] = 0.f;
    }
    for (int64_t j = 0; j < count; j += 2) {
      const uint32_t pair =
          static_cast<uint32_t>(BFloat16(weights[j]).x) << 16 | BFloat16(weights[j + 1]).x;
      std::memcpy(weights + j / 2, &pair, sizeof(pair));
    }
  }
}

template <int R>
SPARSERING_PAIRS void add_pairs_to_rows(const FewQueries& x, int64_t row, const PairRows& values,
                                        int64_t count) {
  constexpr int W = R > 1 ? 2 : 4;  // vectors of sums, which do not wait for one another
  const float* weights = x.scores + row * x.ld;
  float* sums = x.sums + row * x.value_width;
  for (int64_t d = 0; d < x.value_width; d += 16 * W) {
    __mmask16 mask[W];
    __m512 sum[R][W];
    for (int w = 0; w < W; ++w) {
      const int64_t rest = std::clamp<int64_t>(x.value_width - d - w * 16, 0, 16);
      mask[w] = static_cast<__mmask16>((1u << rest) - 1);
      for (int r = 0; r < R; ++r) {
        sum[r][w] = _mm512_maskz_loadu_ps(mask[w], sums + r * x.value_width + d + w * 16);
      }
    }
    for (int64_t j = 0; j < count; j += 2) {
      const BFloat16 *one = values[j], *two = j + 1 < count ? values[j + 1] : values.zeros;
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
        const auto load = [&](const BFloat16* from) {
          return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask[w], from + d + w * 16));
        };
        const __m512bh pair =
            (__m512bh)_mm512_or_si512(_mm512_slli_epi32(load(one), 16), load(two));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m512bh weight = (__m512bh)_mm512_set1_ps(weights[r * x.ld + j / 2]);
          sum[r][w] = _mm512_dpbf16_ps(sum[r][w], weight, pair);
        }
      }
    }
    for (int i = 0; i < R * W; ++i) {
      _mm512_mask_storeu_ps(sums + i / W * x.value_width + d + i % W * 16, mask[i % W],
                            sum[i / W][i % W]);
    }
  }
}

// Adds the values of `count` keys, weighted by the result of `pack_weights`, to each query's sums.
// It also prefetches the keys of the next tile.
template <int W>
void add_pairs(const FewQueries& x, const PairRows& values, int64_t count,
               const Strided<BFloat16>& next_keys, int64_t num_next) {
  for (int64_t j = 0; j < num_next; ++j) {
    prefetch<W>(next_keys[j], x.key_width);
  }
  int64_t r = 0;
  for (; r + 4 <= x.count; r += 4) {
    add_pairs_to_rows<4>(x, r, values, count);
  }
  for (; r < x.count; ++r) {
    add_pairs_to_rows<1>(x, r, values, count);
  }
}

#else

template <int W>
void score_pairs(const FewQueries&, const Strided<BFloat16>&, int64_t, const Strided<BFloat16>&) {}
inline void pack_weights(const FewQueries&, int64_t) {}
template <int W>
void add_pairs(const FewQueries&, const PairRows&, int64_t, const Strided<BFloat16>&, int64_t) {}

#endif

}  // namespace sparsering::cpu
