// Online softmax: each step computes the weights of a stack of key tiles.

#pragma once

#include <cmath>

#include "pack.h"

namespace sparsering::cpu {

constexpr float kLog2E = 1.44269504f;

// Replaces N vectors x by e^x for x <= 88, with relative error 3e-7; 0 below -88, NaN for NaN.
// e^x = 2^(n + rest): adding a large number rounds to n, in the low bits of the sum; 2^rest is a
// polynomial. Each line is done for all vectors before the next: they do not wait for one another.
template <int N>
inline void exponentiate(Vec (&x)[N]) {
  const Vec large(12582912.f + 127.f);  // 1.5 * 2^23 + 127
  Vec moved[N], p[N];
  const auto each = [](auto&& line) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      line(i);
    }
  };
  each([&](int i) { x[i] = at::vec::clamp_min(x[i] * Vec(kLog2E), Vec(-127.f)); });
  each([&](int i) { moved[i] = x[i] + large; });
  each([&](int i) { x[i] = x[i] - (moved[i] - large); });  // in [-1/2, 1/2]
  each([&](int i) { p[i] = at::vec::fmadd(Vec(1.3276474e-3f), x[i], Vec(9.675543e-3f)); });
  each([&](int i) { p[i] = at::vec::fmadd(p[i], x[i], Vec(5.5507135e-2f)); });
  each([&](int i) { p[i] = at::vec::fmadd(p[i], x[i], Vec(2.402212e-1f)); });
  each([&](int i) { p[i] = at::vec::fmadd(p[i], x[i], Vec(6.9314694e-1f)) * x[i]; });
  each([&](int i) {  // the exponent's bits of n = -127 are 0, so is 2^n
    const auto bits = at::vec::cast<int32_t>(moved[i]) << at::vec::Vectorized<int32_t>(23);
    const Vec power = at::vec::cast<float>(bits);
    x[i] = at::vec::fmadd(p[i], power, power);
  });
}
inline Vec exp_of(Vec x) {
  Vec one[1] = {x};
  exponentiate(one);
  return one[0];
}

inline Vec rounded_to_bfloat16(Vec x) {
  const auto bits = at::vec::cast<int32_t>(x);
  using Ints = at::vec::Vectorized<int32_t>;
  return at::vec::cast<float>(bits + Ints(0x7fff) + ((bits >> Ints(16)) & Ints(1)));
}

// Stores two rows of a right operand, interleaved.
inline void store_pair(BFloat16* to, Vec even, Vec odd) {
  using Ints = at::vec::Vectorized<int32_t>;
  const auto low = at::vec::cast<int32_t>(rounded_to_bfloat16(even)) >> Ints(16);
  const auto high = at::vec::cast<int32_t>(rounded_to_bfloat16(odd));
  at::vec::cast<float>((low & Ints(0xffff)) | (high & Ints(static_cast<int32_t>(0xffff0000))))
      .store(to);
}

// Key tiles of one softmax step, whose scores are stacked in rows.
struct Stack {
  struct Part {
    int64_t column, entry, rows, padded;
    float bias;
  };
  Part parts[kMostTiles];  // a part is a key tile, padded to at least 16 rows
  int64_t size = 0, padded = 0;
};

// Memory that the next products read, fetched some cache lines at a time while exponentials are
// computed: a processor fetches neighbours by itself, but not what lies far away.
class Ahead {
 public:
  void add(const void* from, int64_t bytes) {
    parts_[size_++] = {static_cast<const char*>(from), static_cast<const char*>(from) + bytes};
  }

  void fetch() {
    if (place_ == size_) {
      return;
    }
    Part& part = parts_[place_];
    for (int64_t i = 0; i < kLines && part.at < part.end; ++i, part.at += kLine) {
      __builtin_prefetch(part.at, 0, 2);
    }
    place_ += part.at >= part.end;
  }

 private:
  // with AVX2, enough for tiles of 32 queries and D 128
  static constexpr int64_t kLines = kLanes <= 8 ? 32 : 16, kLine = 64;
  struct Part {
    const char *at, *end;
  };
  Part parts_[3 * kMostTiles];  // keys and values, or (backward) K^T, dV and dK
  int64_t size_ = 0, place_ = 0;
};

// One softmax step for W * kLanes queries: replaces scores by weights exp(score - highest), updates
// the running (highest, total), and sets `factor`, by which older sums must be multiplied.
template <typename T, int W>
void softmax_step(const Stack& stack, float* scores, T* weights, int64_t ld, float scale,
                  float* highest, float* total, float* factor, Ahead& ahead) {
  Vec top[W], base[W], sum[W];
  for (int w = 0; w < W; ++w) {
    top[w] = Vec::loadu(highest + w * kLanes);
    sum[w] = Vec(0.f);
  }
  const float* s = scores;
  for (int64_t i = 0; i < stack.size; ++i) {
    const auto& part = stack.parts[i];
    Vec most[W];
    for (int w = 0; w < W; ++w) {
      most[w] = Vec(-kInf);
    }
    for (int64_t j = 0; j < part.rows; ++j) {
      for (int w = 0; w < W; ++w) {
        // The maximum may skip a NaN score, but the NaN weight still reaches the sum.
        most[w] = at::vec::clamp_min(Vec::loadu(s + j * ld + w * kLanes), most[w]);
      }
    }
    s += part.padded * ld;
    for (int w = 0; w < W; ++w) {
      top[w] = at::vec::maximum(top[w], at::vec::fmadd(most[w], Vec(scale), Vec(part.bias)));
    }
  }
  for (int w = 0; w < W; ++w) {
    base[w] = Vec::blendv(top[w].neg(), Vec(0.f), top[w] == Vec(-kInf));
    exp_of(Vec::loadu(highest + w * kLanes) + base[w]).store(factor + w * kLanes);
    top[w].store(highest + w * kLanes);
  }
  float* row = scores;
  for (int64_t i = 0; i < stack.size; ++i) {
    const auto& part = stack.parts[i];
    const auto weigh = [&](int64_t j, Vec(&x)[W]) {  // at most 1: the maximum is rounded alike
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
        const Vec score = Vec::loadu(row + j * ld + w * kLanes);
        x[w] = at::vec::fmadd(score, Vec(scale), Vec(part.bias)) + base[w];
      }
      exponentiate(x);
    };
    for (int64_t j = 0; j < part.padded; j += 2) {
      ahead.fetch();
      Vec even[W], odd[W];
      std::fill_n(even, W, Vec(0.f));
      std::fill_n(odd, W, Vec(0.f));
      if (j < part.rows) {
        weigh(j, even);
      }
      if (j + 1 < part.rows) {
        weigh(j + 1, odd);
      }
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
        sum[w] = sum[w] + (even[w] + odd[w]);
        if constexpr (kPaired<T>) {
          store_pair(weights + (row - scores) + j * ld + 2 * w * kLanes, even[w], odd[w]);
        } else {
          even[w].store(weights + (row - scores) + j * ld + w * kLanes);
          odd[w].store(weights + (row - scores) + (j + 1) * ld + w * kLanes);
        }
      }
    }
    row += part.padded * ld;
  }
  for (int w = 0; w < W; ++w) {
    const Vec scaled = Vec::loadu(total + w * kLanes) * Vec::loadu(factor + w * kLanes);
    (scaled + sum[w]).store(total + w * kLanes);
  }
}

// Computes the factor that normalizes a row's sums, and its lse; 0 and -inf without keys.
inline void finish(float highest, float total, float& factor, float& lse) {
  const bool empty = highest == -kInf && total == 0.f;
  factor = empty ? 0.f : 1.f / (total + (highest - highest));  // NaN if highest is not finite
  lse = empty ? -kInf : highest + std::log(total);
}

}  // namespace sparsering::cpu
