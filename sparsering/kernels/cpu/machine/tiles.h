// Products of small tiles of bfloat16 in the processor's tile registers (AMX). torch's products set
// the registers up again for each new shape, which takes longer than a product of 32 x 32 values.
// Sums have the same order as in torch, so results have the same bits.

#pragma once

#include "torch.h"

#if defined(__x86_64__) && defined(__linux__) && defined(CPU_CAPABILITY_AVX512) && \
    __has_include(<amxbf16intrin.h>)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define SPARSERING_TILES [[gnu::target("amx-tile,amx-bf16"), gnu::noinline]]
#endif

namespace sparsering::cpu {

#if defined(SPARSERING_TILES)

// True if the processor has tile registers, and Linux lets this process use them.
inline bool has_tiles() {
  static const bool result = [] {
    uint32_t a, b, c, d;
    constexpr uint32_t kBFloat16Tiles = 1u << 22, kTiles = 1u << 24;
    constexpr long kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBFloat16Tiles) && (d & kTiles) &&
           syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
  }();
  return result;
}

// True if `multiply_tiles` multiplies this shape; torch is faster for larger ones.
inline bool fits_tiles(int64_t M, int64_t N, int64_t K) {
  return (M | N | K) % 32 == 0 && M * N * K <= 64 * 64 * 64 && has_tiles();
}

// Sets up 8 registers of 16 rows of 64 bytes in this thread.
SPARSERING_TILES inline void set_up_tiles() {
  struct alignas(64) Shapes {
    uint8_t palette, start_row, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  static constexpr Shapes shapes = {
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  _tile_loadconfig(&shapes);
}

// Computes C = A B, or C + A B if `add`; pairs of rows of B are interleaved.
SPARSERING_TILES inline void multiply_tiles(int64_t M, int64_t N, int64_t K, const BFloat16* A,
                                            int64_t lda, const BFloat16* B, int64_t ldb, float* C,
                                            int64_t ldc, bool add) {
  for (int64_t j = 0; j < N; j += 32) {
    for (int64_t i = 0; i < M; i += 32) {
      float *top = C + i * ldc + j, *bottom = top + 16 * ldc;
      if (add) {
        _tile_loadd(0, top, ldc * 4);
        _tile_loadd(1, top + 16, ldc * 4);
        _tile_loadd(2, bottom, ldc * 4);
        _tile_loadd(3, bottom + 16, ldc * 4);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t k = 0; k < K; k += 32) {
        const BFloat16 *a = A + i * lda + k, *b = B + k * ldb + 2 * j;
        _tile_loadd(4, a, lda * 2);
        _tile_loadd(6, b, ldb * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 32, ldb * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 16 * lda, lda * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, top, ldc * 4);
      _tile_stored(1, top + 16, ldc * 4);
      _tile_stored(2, bottom, ldc * 4);
      _tile_stored(3, bottom + 16, ldc * 4);
    }
  }
}

#else

inline bool has_tiles() {
  return false;
}
inline bool fits_tiles(int64_t, int64_t, int64_t) {
  return false;
}
inline void set_up_tiles() {}
inline void multiply_tiles(int64_t, int64_t, int64_t, const BFloat16*, int64_t, const BFloat16*,
                           int64_t, float*, int64_t, bool) {}

#endif

}  // namespace sparsering::cpu
