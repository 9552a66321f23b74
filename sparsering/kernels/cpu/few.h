// Attention of a few queries, as in decoding. Each key and value is read once; packing would read
// and write each once more.

#pragma once

#include "softmax.h"

namespace sparsering::cpu {

// Head dim of a loop. Common head dims are the constant `W`, so that the compiler unrolls the loop;
// W = 0 for others.
template <int W>
int64_t width_or(int64_t width) {
  return W ? W : width;
}

// Calls f with the width of keys and values as a constant, if it is a common one; else with 0.
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
  int64_t width;  // values of a query: the head dim, padded with zeros to whole vectors
  const float* queries;
  float *scores, *sums;
  float* spare;  // room for 2 * kLanes * width values

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

// Returns a vector whose lane i is the sum of the lanes of x[i]: shuffles add up halves.
inline Vec sums_of_lanes(Vec (&x)[kLanes]) {
#pragma GCC unroll 4
  for (int64_t n = kLanes / 2; n > 0; n /= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < n; ++i) {
      const auto [low, high] = at::vec::interleave2(x[i], x[i + n]);
      x[i] = low + high;
    }
  }
  return x[0];
}

// Computes dot products of a query with kLanes keys; keeps `P` vectors of the query in registers.
template <int P, int W, typename Rows>
Vec products(const float* query, const Rows& keys, int64_t width) {
  Vec sum[kLanes];
#pragma GCC unroll 16
  for (int64_t j = 0; j < kLanes; ++j) {
    sum[j] = Vec(0.f);
  }
  for (int64_t d = 0; d < width_or<W>(width); d += P * kLanes) {
    Vec part[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      part[p] = Vec::loadu(query + d + p * kLanes);
    }
#pragma GCC unroll 16
    for (int64_t j = 0; j < kLanes; ++j) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const Vec key = load_lanes(keys[j] + d + p * kLanes);
        sum[j] = at::vec::fmadd(part[p], key, sum[j]);
      }
    }
  }
  return sums_of_lanes(sum);
}

// Computes dot products of R queries, from `row` on, with kLanes keys that are transposed.
template <int R>
void score_rows(const FewQueries& x, int64_t row, const float* turned, int64_t first) {
  const float* query = x.queries + row * x.width;
  Vec sum[R];
  std::fill_n(sum, R, Vec(0.f));
  for (int64_t d = 0; d < x.key_width; ++d) {
    const Vec keys = Vec::loadu(turned + d * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sum[r] = at::vec::fmadd(Vec(query[r * x.width + d]), keys, sum[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    sum[r].store(x.scores + (row + r) * x.ld + first);
  }
}

// Transposes kLanes rows of whole vectors.
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

// Computes dot products of each query with `count` keys, kLanes at a time; prefetches the values.
template <int W, typename Rows>
void score_keys(const FewQueries& x, const Rows& keys, int64_t count, const Rows& values) {
  const int64_t in_fours = x.count / 4 * 4;  // four queries share the cost of transposing keys
  float *block = x.spare, *turned = block + kLanes * x.width;
  const auto score = [&](const auto& from, int64_t first) {
    if (in_fours) {
      transpose_rows<W>(from, x.width, turned);
    }
    int64_t row = 0;
    for (; row + 8 <= in_fours; row += 8) {  // eight sums do not wait for one another
      score_rows<8>(x, row, turned, first);
    }
    if (row < in_fours) {
      score_rows<4>(x, row, turned, first);
    }
    for (int64_t r = in_fours; r < x.count; ++r) {
      const float* query = x.queries + r * x.width;
      const Vec score = width_or<W>(x.width) % (4 * kLanes) ? products<1, W>(query, from, x.width)
                                                            : products<4, W>(query, from, x.width);
      score.store(x.scores + r * x.ld + first);
    }
  };
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t n = std::min(kLanes, count - first);
    for (int64_t j = 0; j < n; ++j) {
      prefetch<W>(values[first + j], x.value_width);
    }
    if (n == kLanes && x.key_width == x.width) {
      score(keys.from(first), first);
      continue;
    }
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t size = j < n ? x.key_width : 0;
      if (size) {
        copy_lanes(keys[first + j], block + j * x.width, size);
      }
      std::fill(block + j * x.width + size, block + (j + 1) * x.width, 0.f);
    }
    score(Strided<float>{block, x.width}, first);
  }
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

// Runs a softmax step of one query: replaces `count` scores by weights.
inline void weigh(const FewQueries& x, int64_t row, int64_t count, float& highest, float& total) {
  float *scores = x.scores + row * x.ld, *sums = x.sums + row * x.value_width;
  const auto largest = [](Vec a, Vec b) { return at::vec::maximum(a, b); };
  const float top = std::max(at::vec::reduce_all<float>(largest, scores, count), highest);
  const float base = top == -kInf ? 0.f : top, factor = std::exp(highest - base);
  Vec sum(0.f);
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t n = std::min(kLanes, count - j);
    const Vec weight = exp_of(Vec::loadu(scores + j, n) - Vec(base));
    weight.store(scores + j, n);
    sum = sum + Vec::set(Vec(0.f), weight, n);
  }
  total = total * factor + sum_of_lanes(sum);
  for (int64_t d = 0; d < x.value_width && factor != 1.f; ++d) {
    sums[d] *= factor;
  }
  highest = top;
}

template <int R, int Width, typename Rows>
void add_to_rows(const FewQueries& x, int64_t row, const Rows& values, int64_t count) {
  constexpr int W = R > 1 && kLanes <= 8 ? 2 : 4;  // AVX2 has 16 registers
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
        const float value = static_cast<float>(values[j][i]);
        sums[r * x.value_width + i] += weights[r * x.ld + j] * value;
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
