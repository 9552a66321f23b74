// Online softmax: each step computes the weights of a stack of key tiles.
//
// Weights are 2^(x - n), where x is a score times log2 e, and n is the smallest integer that is at
// least every x of the row so far. If n grows, older sums are multiplied by a power of two, which
// rounds nothing. So the bits of a row depend neither on which keys are in one step, nor on keys
// that the row does not see: its total and its weighted values are sums over its keys in order.

#pragma once

#include <bit>
#include <cmath>

#include "pack.h"

namespace sparsering::cpu {

constexpr float kLog2E = 1.44269504f;

// Replaces N vectors x by e^x for x <= 88, with relative error 3e-7; 0 below -88, NaN for NaN. It
// computes e^x = 2^(n + rest): adding a large number rounds to n, which is then in the low bits of
// the sum, and 2^rest is a polynomial. Each line runs for all vectors before the next line, so that
// the vectors need not wait for one another.
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
  each([&](int i) {  // for n = -127 the exponent's bits are 0, which makes 2^n 0
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

// Returns 2^k for integers k <= 127; 0 below -126.
inline Vec power_of_two(Vec k) {
  const Vec moved = at::vec::clamp_min(k, Vec(-127.f)) + Vec(12582912.f + 127.f);  // 1.5 * 2^23
  return at::vec::cast<float>(at::vec::cast<int32_t>(moved) << at::vec::Vectorized<int32_t>(23));
}

// Replaces N vectors x by 2^(x - n) for integers n >= x, with relative error 3e-7; 0 below 2^-126,
// NaN for NaN. The fractional part of x has the same power for each n, so that n changes only the
// exponent.
template <int N>
inline void powers_below(Vec (&x)[N], const Vec (&n)[N]) {
  Vec whole[N], p[N];
  const auto each = [](auto&& line) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      line(i);
    }
  };
  each([&](int i) { x[i] = at::vec::clamp_min(x[i], Vec(-3e38f)); });
  each([&](int i) { whole[i] = x[i].round(); });
  each([&](int i) { x[i] = x[i] - whole[i]; });  // in [-1/2, 1/2]
  each([&](int i) { p[i] = at::vec::fmadd(Vec(1.3276474e-3f), x[i], Vec(9.675543e-3f)); });
  each([&](int i) { p[i] = at::vec::fmadd(p[i], x[i], Vec(5.5507135e-2f)); });
  each([&](int i) { p[i] = at::vec::fmadd(p[i], x[i], Vec(2.402212e-1f)); });
  each([&](int i) { p[i] = at::vec::fmadd(p[i], x[i], Vec(6.9314694e-1f)) * x[i]; });
  each([&](int i) {
    const Vec power = power_of_two(whole[i] - n[i]);
    x[i] = at::vec::fmadd(p[i], power, power);
  });
}

// Factors that turn a score, and what is added to it, into x. Scaled scores are exponents of e; x
// is an exponent of 2.
struct Units {
  explicit Units(float of_scores) : scale(of_scores * kLog2E) {
    constexpr float kLeast = 1e-30f;  // below it, scale itself may be rounded to few digits
    of_lse = of_scores > kLeast ? of_scores / static_cast<double>(scale) : 1. / kLog2E;
  }

  float scale;
  double of_lse;  // turns an exponent of 2 into one of e, without the rounding of `scale`

  // Computes the factor that normalizes a row's sums, and its lse; 0 and -inf without keys.
  void finish(float highest, float total, float& factor, float& lse) const {
    const bool empty = highest == -kInf && total == 0.f;
    factor = empty ? 0.f : 1.f / (total + (highest - highest));  // NaN if highest is not finite
    lse = empty ? -kInf
                : static_cast<float>((highest + std::log2(static_cast<double>(total))) * of_lse);
  }
};

// Returns the factor that turns a row's sums with exponent `from` into sums with exponent `to`.
inline float rescaling(float from, float to) {
  const float k = from - (to == -kInf ? 0.f : to);
  return k > -127.f ? std::bit_cast<float>((static_cast<int32_t>(k) + 127) << 23)
         : k == k   ? 0.f
                    : k;  // NaN for NaN
}

// Adds the sums of a segment to those of earlier segments: the total and `size` sums of one row.
inline void add_segment(float& highest, float& total, float* sums, float of_segment,
                        float total_of_segment, const float* sums_of_segment, int64_t size) {
  const float top = of_segment > highest || of_segment != of_segment ? of_segment : highest,
              a = rescaling(highest, top), b = rescaling(of_segment, top);
  total = total * a + total_of_segment * b;
  for (int64_t d = 0; d < size; ++d) {
    sums[d] = sums[d] * a + sums_of_segment[d] * b;
  }
  highest = top;
}

inline Vec rounded_to_bfloat16(Vec x) {
  const auto bits = at::vec::cast<int32_t>(x);
  using Ints = at::vec::Vectorized<int32_t>;
  return at::vec::cast<float>(bits + Ints(0x7fff) + ((bits >> Ints(16)) & Ints(1)));
}

// Stores two rows of a right operand interleaved, with the first one in the high half, as
// `transpose` does.
inline void store_pair(BFloat16* to, Vec even, Vec odd) {
  using Ints = at::vec::Vectorized<int32_t>;
  const auto low = at::vec::cast<int32_t>(rounded_to_bfloat16(odd)) >> Ints(16);
  const auto high = at::vec::cast<int32_t>(rounded_to_bfloat16(even));
  at::vec::cast<float>((low & Ints(0xffff)) | (high & Ints(static_cast<int32_t>(0xffff0000))))
      .store(to);
}

// The key tiles of one softmax step; their scores are stacked in rows.
struct Stack {
  struct Part {
    int64_t column, entry, rows, padded, segment;
    float bias;
  };
  Part parts[kMostTiles];  // a part is a key tile, padded to a multiple of 16 rows
  int64_t size = 0, padded = 0;
};

// Memory that the next products will read. Some cache lines at a time are prefetched while
// exponentials are computed, because a processor prefetches only memory nearby by itself.
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
  // With AVX2, this is enough for tiles of 32 queries and head dim 128.
  static constexpr int64_t kLines = kLanes <= 8 ? 32 : 16, kLine = 64;
  struct Part {
    const char *at, *end;
  };
  Part parts_[3 * kMostTiles];  // keys and values, or (backward) K^T, dV and dK
  int64_t size_ = 0, place_ = 0;
};

// Runs a softmax step for W * kLanes queries: replaces scores by weights 2^(x - highest), updates
// `highest`, and sets `factor`, by which older sums must be multiplied. Writes the total of each
// run of parts in one segment to `totals`, which are `ld` apart; the first continues from `total`.
// `scale` turns scores into x.
template <typename T, int W>
void softmax_step(const Stack& stack, float* scores, T* weights, int64_t ld, float scale,
                  float* highest, const float* total, float* totals, float* factor, Ahead& ahead) {
  Vec top[W], least[W], sum[W];
  for (int w = 0; w < W; ++w) {
    top[w] = Vec::loadu(highest + w * kLanes);
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
        // The maximum may skip a NaN score, but its NaN weight still reaches the sum.
        most[w] = at::vec::clamp_min(Vec::loadu(s + j * ld + w * kLanes), most[w]);
      }
    }
    s += part.padded * ld;
    const Vec bias(part.bias * kLog2E);
    for (int w = 0; w < W; ++w) {
      top[w] = at::vec::maximum(top[w], at::vec::fmadd(most[w], Vec(scale), bias).ceil());
    }
  }
  for (int w = 0; w < W; ++w) {
    least[w] = Vec::blendv(top[w], Vec(0.f), top[w] == Vec(-kInf));
    const Vec older = power_of_two(Vec::loadu(highest + w * kLanes) - least[w]);
    older.store(factor + w * kLanes);
    sum[w] = Vec::loadu(total + w * kLanes) * older;
    top[w].store(highest + w * kLanes);
  }
  const auto end_run = [&] {
    for (int w = 0; w < W; ++w) {
      sum[w].store(totals + w * kLanes);
      sum[w] = Vec(0.f);
    }
    totals += ld;
  };
  float* row = scores;
  for (int64_t i = 0; i < stack.size; ++i) {
    const auto& part = stack.parts[i];
    if (i > 0 && part.segment != stack.parts[i - 1].segment) {
      end_run();
    }
    const Vec bias(part.bias * kLog2E);
    const auto weigh = [&](int64_t j, Vec(&x)[W]) {
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
        x[w] = at::vec::fmadd(Vec::loadu(row + j * ld + w * kLanes), Vec(scale), bias);
      }
      powers_below(x, least);
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
        sum[w] = sum[w] + even[w];
        sum[w] = sum[w] + odd[w];
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
  end_run();
}

}  // namespace sparsering::cpu
