// A few queries against keys and values where they lie: decoding reads each of them once, and a
// packed copy would double that.

#pragma once

#include "softmax.h"

namespace sparsering::cpu {

// Some queries of one kv head, all of whose keys they share; row r of scores begins at r * ld.
struct FewQueries {
  int64_t count, width, value_width, ld;
  const float* queries;
  float *scores, *sums;
  float* spare;  // 2 * kLanes * width

  // The same from another key on.
  FewQueries from(int64_t key) const {
    FewQueries result = *this;
    result.scores += key;
    return result;
  }
};

template <typename S>
void prefetch(const S* from, int64_t size) {
  for (int64_t d = 0; d < size; d += 64 / sizeof(S)) {
    __builtin_prefetch(from + d);
  }
}

template <int R>
void score_rows(const FewQueries& x, int64_t row, const float* turned, int64_t first) {
  constexpr int P = 4 / R;  // parts of a sum, which need not wait for each other
  const float* query = x.queries + row * x.width;
  Vec sum[R * P];
  for (auto& part : sum) {
    part = Vec(0.f);
  }
  const auto add = [&](int64_t d, int p) {
    const Vec keys = Vec::loadu(turned + d * kLanes);
    for (int r = 0; r < R; ++r) {
      sum[r * P + p] = at::vec::fmadd(Vec(query[r * x.width + d]), keys, sum[r * P + p]);
    }
  };
  int64_t d = 0;
  for (; d + P <= x.width; d += P) {
    for (int p = 0; p < P; ++p) {
      add(d + p, p);
    }
  }
  for (; d < x.width; ++d) {
    add(d, 0);
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 1; p < P; ++p) {
      sum[r * P] = sum[r * P] + sum[r * P + p];
    }
    sum[r * P].store(x.scores + (row + r) * x.ld + first);
  }
}

// Products of each query with `count` keys, kLanes keys at a time; fetches the values meanwhile.
template <typename S>
void score_keys(const FewQueries& x, const S* keys, int64_t stride, int64_t count, const S* values,
                int64_t value_stride) {
  float *block = x.spare, *turned = block + kLanes * x.width;
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t n = std::min(kLanes, count - first);
    for (int64_t j = 0; j < n; ++j) {
      copy_lanes(keys + (first + j) * stride, block + j * x.width, x.width);
      prefetch(values + (first + j) * value_stride, x.value_width);
    }
    std::fill(block + n * x.width, block + kLanes * x.width, 0.f);
    transpose(block, kLanes, x.width, turned);
    int64_t r = 0;
    for (; r + 4 <= x.count; r += 4) {
      score_rows<4>(x, r, turned, first);
    }
    for (; r < x.count; ++r) {
      score_rows<1>(x, r, turned, first);
    }
  }
}

// One softmax step of one query over `count` scores, which become weights.
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

template <int R, typename S>
void add_to_rows(const FewQueries& x, int64_t row, const S* values, int64_t stride, int64_t count) {
  constexpr int W = 4;
  const float* weights = x.scores + row * x.ld;
  float* sums = x.sums + row * x.value_width;
  int64_t d = 0;
  for (; d + W * kLanes <= x.value_width; d += W * kLanes) {
    Vec sum[R][W];
    for (int i = 0; i < R * W; ++i) {
      sum[i / W][i % W] = Vec::loadu(sums + i / W * x.value_width + d + i % W * kLanes);
    }
    for (int64_t j = 0; j < count; ++j) {
      for (int w = 0; w < W; ++w) {
        const Vec value = load_lanes(values + j * stride + d + w * kLanes);
        for (int r = 0; r < R; ++r) {
          sum[r][w] = at::vec::fmadd(Vec(weights[r * x.ld + j]), value, sum[r][w]);
        }
      }
    }
    for (int i = 0; i < R * W; ++i) {
      sum[i / W][i % W].store(sums + i / W * x.value_width + d + i % W * kLanes);
    }
  }
  for (int64_t j = 0; j < count && d < x.value_width; ++j) {
    for (int r = 0; r < R; ++r) {
      for (int64_t i = d; i < x.value_width; ++i) {
        const float value = static_cast<float>(values[j * stride + i]);
        sums[r * x.value_width + i] += weights[r * x.ld + j] * value;
      }
    }
  }
}

// Adds the weighted values to each query's sums; fetches the next keys meanwhile.
template <typename S>
void add_values(const FewQueries& x, const S* values, int64_t stride, int64_t count,
                const S* next_keys, int64_t key_stride, int64_t num_next) {
  for (int64_t j = 0; j < num_next; ++j) {
    prefetch(next_keys + j * key_stride, x.width);
  }
  int64_t r = 0;
  for (; r + 4 <= x.count; r += 4) {
    add_to_rows<4>(x, r, values, stride, count);
  }
  for (; r < x.count; ++r) {
    add_to_rows<1>(x, r, values, stride, count);
  }
}

}  // namespace sparsering::cpu
