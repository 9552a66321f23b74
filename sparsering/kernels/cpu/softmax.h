// Online softmax: each step computes the weights of a stack of key tiles.

#pragma once

#include <cmath>

#include "pack.h"

namespace sparsering::cpu {

constexpr float kLog2E = 1.44269504f;

// Returns e^x for x <= 88 with relative error 3e-7; 0 below -87, NaN for NaN. e^x = 2^(n + rest):
// adding a large number rounds to n, in the low bits of the sum; 2^rest is a polynomial.
inline Vec exp_of(Vec x) {
  const Vec large(12582912.f + 127.f), smallest(1.17549435e-38f);  // 1.5 * 2^23, 2^-126
  const Vec bounded = at::vec::clamp_min(x * Vec(kLog2E), Vec(-126.f));
  const Vec moved = bounded + large, rest = bounded - (moved - large);  // in [-1/2, 1/2]
  Vec p(1.3276474e-3f);
  p = at::vec::fmadd(p, rest, Vec(9.675543e-3f));
  p = at::vec::fmadd(p, rest, Vec(5.5507135e-2f));
  p = at::vec::fmadd(p, rest, Vec(2.402212e-1f));
  p = at::vec::fmadd(p, rest, Vec(6.9314694e-1f));
  const auto bits = at::vec::cast<int32_t>(moved) << at::vec::Vectorized<int32_t>(23);
  const Vec power = at::vec::cast<float>(bits);
  return at::vec::fmadd(p * rest, power, power) - smallest;
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
  static constexpr int64_t kLines = 16, kLine = 64;
  struct Part {
    const char *at, *end;
  };
  Part parts_[2 * kMostTiles];
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
    const auto weight = [&](int64_t j, int w) {  // at most 1: the maximum has the same rounding
      const Vec score = Vec::loadu(row + j * ld + w * kLanes);
      return exp_of(at::vec::fmadd(score, Vec(scale), Vec(part.bias)) + base[w]);
    };
    for (int64_t j = 0; j < part.padded; j += 2) {
      ahead.fetch();
      for (int w = 0; w < W; ++w) {
        const Vec even = j < part.rows ? weight(j, w) : Vec(0.f);
        const Vec odd = j + 1 < part.rows ? weight(j + 1, w) : Vec(0.f);
        sum[w] = sum[w] + (even + odd);
        if constexpr (kPaired<T>) {
          store_pair(weights + (row - scores) + j * ld + 2 * w * kLanes, even, odd);
        } else {
          even.store(weights + (row - scores) + j * ld + w * kLanes);
          odd.store(weights + (row - scores) + (j + 1) * ld + w * kLanes);
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
