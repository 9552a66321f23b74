// Attention of a few queries, as in decoding. Each key and value is read once, because packing
// would read and write each once more.

#pragma once

#include "softmax.h"
#include "stored.h"

namespace sparsering::cpu {

// Returns the head dim of a loop. For a common head dim it is the constant `W`, so that the
// compiler unrolls the loop; for others W is 0.
template <int W>
int64_t width_or(int64_t width) {
  return W ? W : width;
}

// Calls f with the width of keys and values as a constant if it is a common one, else with 0.
template <typename F>
auto with_width(int64_t key_width, int64_t value_width, const F& f) {
  if (key_width == value_width && key_width == 64) {
    return f(std::integral_constant<int, 64>());
  }
  return key_width == value_width && key_width == 128 ? f(std::integral_constant<int, 128>())
                                                      : f(std::integral_constant<int, 0>());
}

// Queries of one kv head, all with the same keys; row r of scores begins at r * ld.
struct FewQueries {
  int64_t count, key_width, value_width, ld;
  int64_t width;  // numbers of a query: the head dim, padded with zeros to whole vectors
  const float* queries;
  float *scores, *sums;
  float* spare;  // memory for few_spare(width) numbers

  // Returns a copy whose scores begin at another key.
  FewQueries from(int64_t key) const {
    FewQueries result = *this;
    result.scores += key;
    return result;
  }
  // Returns a copy without the first rows.
  FewQueries without(int64_t rows) const {
    FewQueries result = from(rows * ld);
    result.count -= rows;
    result.queries += rows * width;
    result.sums += sums ? rows * value_width : 0;
    return result;
  }
};

// Rows of keys or values: row j begins at `first + j * stride`.
template <typename S>
struct Strided {
  const S* operator[](int64_t j) const {
    return first + j * stride;
  }
  Strided from(int64_t j) const {
    return {first + j * stride, stride};
  }
  const S* first;
  int64_t stride;
};

// Prefetches a row into the second-level cache, which has room for the keys and values of a tile.
template <int W, typename S>
void prefetch(const S* from, int64_t size) {
#pragma GCC unroll 8
  for (int64_t d = 0; d < width_or<W>(size); d += 64 / sizeof(S)) {
    __builtin_prefetch(from + d, 0, 2);
  }
}

template <int W, typename S>
void prefetch(StoredRow<S> from, int64_t size) {
  prefetch<W>(from.data, size);
}

// Up to so many groups of kLanes keys are transposed before products are computed. Then one query
// has several sums, which need not wait for one another.
constexpr int64_t kTurned = kLanes > 8 ? 4 : 2;
// Returns the size of `FewQueries::spare` for queries of `width` numbers.
constexpr int64_t few_spare(int64_t width) {
  return (1 + kTurned) * kLanes * width;
}

// Computes dot products of R queries, from `row` on, with G * kLanes transposed keys. Each dot
// product is one sum in the order of the head dim, as in products of tiles.
template <int R, int G>
void score_rows(const FewQueries& x, int64_t row, const float* turned, int64_t first) {
  const float* query = x.queries + row * x.width;
  const int64_t size = x.width * kLanes;
  Vec sum[R * G];
  std::fill_n(sum, R * G, Vec(0.f));
  for (int64_t d = 0; d < x.key_width; ++d) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Vec keys = Vec::loadu(turned + g * size + d * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sum[r * G + g] = at::vec::fmadd(Vec(query[r * x.width + d]), keys, sum[r * G + g]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * G; ++i) {
    sum[i].store(x.scores + (row + i / G) * x.ld + first + i % G * kLanes);
  }
}
template <int G>
void score_all_rows(const FewQueries& x, const float* turned, int64_t first) {
  int64_t row = 0;
  for (; G == 1 && row + 8 <= x.count; row += 8) {
    score_rows<8, G>(x, row, turned, first);
  }
  for (; row + 4 <= x.count; row += 4) {
    score_rows<4, G>(x, row, turned, first);
  }
  for (; row < x.count; ++row) {
    score_rows<1, G>(x, row, turned, first);
  }
}

// Transposes kLanes rows, whose width is a multiple of kLanes.
template <int W, typename Rows>
void transpose_rows(const Rows& rows, int64_t width, float* to) {
  decltype(rows[0]) row[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    row[i] = rows[i];
  }
  for (int64_t d = 0; d < width_or<W>(width); d += kLanes) {
    Vec square[kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) {
      square[i] = load_lanes(row[i] + d);
    }
    transpose_square(square, to + d * kLanes, kLanes);
  }
}

// Computes dot products of a query with G * kLanes keys, which it transposes in registers.
template <int G, int W, typename Rows>
void score_row(const float* query, const Rows& keys, int64_t width, float* scores) {
  Vec sum[G];
  std::fill_n(sum, G, Vec(0.f));
  for (int64_t d = 0; d < width_or<W>(width); d += kLanes) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        square[i] = load_lanes(keys[g * kLanes + i] + d);
      }
      transpose_square(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        sum[g] = at::vec::fmadd(Vec(query[d + i]), square[i], sum[g]);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    sum[g].store(scores + g * kLanes);
  }
}

// Calls turn(first, n, to) for kLanes keys at a time from `first` on, of which n are real; then
// calls score(groups, first) for up to kTurned transposed groups.
template <typename Turn, typename Score>
void for_turned_keys(int64_t first, int64_t count, int64_t size, float* turned, const Turn& turn,
                     const Score& score) {
  while (first < count) {
    const int64_t groups = std::min(kTurned, (count - first + kLanes - 1) / kLanes);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t from = first + g * kLanes;
      turn(from, std::min(kLanes, count - from), turned + g * size);
    }
    if (groups == kTurned) {
      score(std::integral_constant<int, kTurned>(), turned, first);
    } else {
      for (int64_t g = 0; g < groups; ++g) {
        score(std::integral_constant<int, 1>(), turned + g * size, first + g * kLanes);
      }
    }
    first += groups * kLanes;
  }
}

// Computes dot products of each query with `count` keys, and prefetches the values.
template <int W, typename Rows>
void score_keys(const FewQueries& x, const Rows& keys, int64_t count, const Rows& values) {
  float *block = x.spare, *turned = block + kLanes * x.width;
  constexpr int64_t kTwo = 2 * kLanes;
  int64_t done = 0;
  for (; x.count == 1 && x.key_width == x.width && done + kTwo <= count; done += kTwo) {
    for (int64_t j = 0; j < kTwo; ++j) {
      prefetch<W>(values[done + j], x.value_width);
    }
    score_row<2, W>(x.queries, keys.from(done), x.width, x.scores + done);
  }
  const auto turn = [&](int64_t first, int64_t n, float* to) {
    for (int64_t j = 0; j < n; ++j) {
      prefetch<W>(values[first + j], x.value_width);
    }
    if (n == kLanes && x.key_width == x.width) {
      transpose_rows<W>(keys.from(first), x.width, to);
      return;
    }
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t size = j < n ? x.key_width : 0;
      if (size) {
        copy_lanes(keys[first + j], block + j * x.width, size);
      }
      std::fill(block + j * x.width + size, block + (j + 1) * x.width, 0.f);
    }
    transpose_rows<W>(Strided<float>{block, x.width}, x.width, to);
  };
  for_turned_keys(done, count, kLanes * x.width, turned, turn,
                  [&](auto groups, const float* of_groups, int64_t first) {
                    score_all_rows<groups()>(x, of_groups, first);
                  });
}

// Sets the scores whose bit is 0 to -inf.
inline void keep_bits(const uint8_t* bits, int64_t count, float* scores) {
  for (int64_t first = 0; first < count; first += 8) {
    const int byte = bits[first / 8];
    for (int64_t j = 0; j < std::min<int64_t>(8, count - first) && byte != 0xFF; ++j) {
      scores[first + j] = byte >> j & 1 ? scores[first + j] : -kInf;
    }
  }
}

// Runs a softmax step of one query: replaces `count` scores by weights, as softmax.h defines them.
// `scale` turns scores into exponents of 2; `bias` is an exponent of e.
inline void weigh(const FewQueries& x, int64_t row, int64_t count, float scale, float bias,
                  float& highest, float& total) {
  float *scores = x.scores + row * x.ld, *sums = x.sums + row * x.value_width;
  const auto largest = [](Vec a, Vec b) { return at::vec::maximum(a, b); };
  const Vec factor(scale), shift(bias * kLog2E);
  const Vec most(at::vec::reduce_all<float>(largest, scores, count));
  float tops[kLanes];
  at::vec::maximum(at::vec::fmadd(most, factor, shift).ceil(), Vec(highest)).store(tops);
  const float top = tops[0], older = rescaling(highest, top);
  const Vec least[1] = {Vec(top == -kInf ? 0.f : top)};
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t n = std::min(kLanes, count - j);
    Vec weight[1] = {at::vec::fmadd(Vec::loadu(scores + j, n), factor, shift)};
    powers_below(weight, least);
    weight[0].store(scores + j, n);
  }
  total *= older;
  for (int64_t j = 0; j < count; ++j) {
    total += scores[j];
  }
  for (int64_t d = 0; d < x.value_width && older != 1.f; ++d) {
    sums[d] *= older;
  }
  highest = top;
}

template <int R, int Width, typename Rows>
void add_to_rows(const FewQueries& x, int64_t row, const Rows& values, int64_t count) {
  // Enough sums that they need not wait for one another, but AVX2 has only 16 registers.
  constexpr int W = kLanes <= 8 ? (R > 1 ? 2 : 4) : R > 1 || Width == 64 ? 4 : 8;
  const int64_t width = width_or<Width>(x.value_width);
  const float* weights = x.scores + row * x.ld;
  float* sums = x.sums + row * x.value_width;
  int64_t d = 0;
  for (; d + W * kLanes <= width; d += W * kLanes) {
    Vec sum[R][W];
    for (int i = 0; i < R * W; ++i) {
      sum[i / W][i % W] = Vec::loadu(sums + i / W * x.value_width + d + i % W * kLanes);
    }
    for (int64_t j = 0; j < count; ++j) {
      for (int w = 0; w < W; ++w) {
        const Vec value = load_lanes(values[j] + d + w * kLanes);
        for (int r = 0; r < R; ++r) {
          sum[r][w] = at::vec::fmadd(Vec(weights[r * x.ld + j]), value, sum[r][w]);
        }
      }
    }
    for (int i = 0; i < R * W; ++i) {
      sum[i / W][i % W].store(sums + i / W * x.value_width + d + i % W * kLanes);
    }
  }
  for (int64_t j = 0; j < count && d < width; ++j) {
    for (int r = 0; r < R; ++r) {
      for (int64_t i = d; i < width; ++i) {
        float& sum = sums[r * x.value_width + i];
        sum = std::fma(weights[r * x.ld + j], static_cast<float>(values[j][i]), sum);
      }
    }
  }
}

// Adds the weighted values to each query's sums; also prefetches the keys of the next tile.
template <int W, typename Rows>
void add_values(const FewQueries& x, const Rows& values, int64_t count, const Rows& next_keys,
                int64_t num_next) {
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t n = std::min(kLanes, count - first);
    for (int64_t j = first; j < std::min(first + n, num_next); ++j) {
      prefetch<W>(next_keys[j], x.key_width);
    }
    const FewQueries part = x.from(first);
    int64_t r = 0;
    for (; r + 4 <= x.count; r += 4) {
      add_to_rows<4, W>(part, r, values.from(first), n);
    }
    for (; r < x.count; ++r) {
      add_to_rows<1, W>(part, r, values.from(first), n);
    }
  }
}

}  // namespace sparsering::cpu
