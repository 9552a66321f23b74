// Products of bfloat16 that add their terms in order (AVX512-BF16). An instruction adds two
// products to a sum, first that of the high halves.

#pragma once

#include "tiles.h"

#if defined(__x86_64__) && defined(__linux__) && defined(CPU_CAPABILITY_AVX512) && \
    __has_include(<avx512bf16intrin.h>)
#include <cpuid.h>
#include <immintrin.h>
#define SPARSERING_PAIRS [[gnu::target("avx512bf16")]]
#endif

namespace sparsering::cpu {

#if defined(SPARSERING_PAIRS)

// True if the processor has AVX512-BF16.
inline bool has_pairs() {
  static const bool result = [] {
    uint32_t a, b, c, d;
    constexpr uint32_t kPairs = 1u << 5;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kPairs);
  }();
  return result;
}

// Computes R rows and W vectors of columns of C = A B, or C + A B if `add`. The last vector has the
// columns of `last`.
template <int R, int W>
SPARSERING_PAIRS inline void multiply_pair_registers(int64_t K, const BFloat16* A, int64_t lda,
                                                     const BFloat16* B, int64_t ldb, float* C,
                                                     int64_t ldc, bool add, __mmask16 last) {
  constexpr __mmask16 kAll = 0xffff;
  const auto mask = [&](int w) { return w + 1 == W ? last : kAll; };
  __m512 sum[R * W];
#pragma GCC unroll 16
  for (int i = 0; i < R * W; ++i) {
    sum[i] = add ? _mm512_maskz_loadu_ps(mask(i % W), C + i / W * ldc + i % W * 16)
                 : _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < K; k += 2) {
    __m512bh columns[W];
#pragma GCC unroll 16
    for (int w = 0; w < W; ++w) {
      columns[w] = (__m512bh)_mm512_maskz_loadu_epi32(mask(w), B + k * ldb + w * 32);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, A + r * lda + k, sizeof(pair));
      const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) {
        sum[r * W + w] = _mm512_dpbf16_ps(sum[r * W + w], row, columns[w]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * W; ++i) {
    _mm512_mask_storeu_ps(C + i / W * ldc + i % W * 16, mask(i % W), sum[i]);
  }
}

// Computes C = A B, or C + A B if `add`; pairs of rows of B are interleaved.
SPARSERING_PAIRS inline void multiply_pairs_in_order(int64_t M, int64_t N, int64_t K,
                                                     const BFloat16* A, int64_t lda,
                                                     const BFloat16* B, int64_t ldb, float* C,
                                                     int64_t ldc, bool add) {
  for (int64_t j = 0; j < N; j += 32) {
    const int64_t rest = N - j, of_last = rest > 16 ? (rest < 32 ? rest - 16 : 16) : rest;
    const __mmask16 last = static_cast<__mmask16>((1u << of_last) - 1);
    const BFloat16* columns = B + 2 * j;
    const auto rows = [&](auto count, int64_t i) {
      if (rest > 16) {
        multiply_pair_registers<count(), 2>(K, A + i * lda, lda, columns, ldb, C + i * ldc + j, ldc,
                                            add, last);
      } else {
        multiply_pair_registers<count(), 1>(K, A + i * lda, lda, columns, ldb, C + i * ldc + j, ldc,
                                            add, last);
      }
    };
    int64_t i = 0;
    for (; i + 8 <= M; i += 8) {
      rows(std::integral_constant<int, 8>(), i);
    }
    for (; i < M; ++i) {
      rows(std::integral_constant<int, 1>(), i);
    }
  }
}

#else

inline bool has_pairs() {
  return false;
}
inline void multiply_pairs_in_order(int64_t, int64_t, int64_t, const BFloat16*, int64_t,
                                    const BFloat16*, int64_t, float*, int64_t, bool) {}

#endif

}  // namespace sparsering::cpu
