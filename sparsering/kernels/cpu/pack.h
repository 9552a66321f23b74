// Packs tiles into operands of matrix products, and applies bitmaps to transposed scores.

#pragma once

#include <cstring>
#include <tuple>

#include "layout.h"
#include "machine/products.h"
#include "machine/sanitizers.h"

namespace sparsering::cpu {

inline Vec load_lanes(const float* from) {
  return Vec::loadu(from);
}
inline Vec load_lanes(const BFloat16* from) {
  Vec result;
  at::vec::load_fp32_from_bf16(from, result);
  return result;
}
inline Vec load_lanes(const Half* from) {
  Vec result;
  at::vec::load_fp32_from_fp16(from, result);
  return result;
}

inline float sum_of_lanes(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, x);
}

template <typename S>
void copy_lanes(const S* from, float* to, int64_t size) {
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) {
    load_lanes(from + d).store(to + d);
  }
  for (; d < size; ++d) {
    to[d] = static_cast<float>(from[d]);
  }
}

// Loads up to kLanes values; the other lanes are 0.
template <typename S>
Vec lanes_of(const S* from, int64_t size) {
  if (size == kLanes) {
    return load_lanes(from);
  }
  float lanes[kLanes] = {};
  copy_lanes(from, lanes, size);
  return Vec::loadu(lanes);
}

// The queries of a tile are padded to a multiple of this number.
template <typename T>
constexpr int64_t kQueryUnit = kPaired<T> ? 32 : 16;

inline void convert_row(const BFloat16* from, BFloat16* to, int64_t width) {
  std::copy_n(from, width, to);
}
template <typename S>
void convert_row(const S* from, float* to, int64_t width) {
  copy_lanes(from, to, width);
}

// Transposes a square in registers.
#if defined(CPU_CAPABILITY_AVX2)
// Exchanges the halves of registers last, because AVX2 shuffles fastest within halves.
inline void transpose_square(Vec (&a)[kLanes]) {
  __m256 b[8], c[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // rows i / 2 * 4 to + 3 of columns i % 2 * 2, + 1
    const int at = i / 2 * 4 + i % 2;
    c[2 * i] = _mm256_shuffle_ps(b[at], b[at + 2], 0x44);
    c[2 * i + 1] = _mm256_shuffle_ps(b[at], b[at + 2], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x20);
    a[i + 4] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x31);
  }
}
#elif defined(CPU_CAPABILITY_AVX512)
// Exchanges the quarters of registers last.
inline void transpose_square(Vec (&a)[kLanes]) {
  __m512 b[16], c[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // rows i / 2 * 4 to + 3 of columns i % 2 * 2, + 1 of each quarter
    const int at = i / 2 * 4 + i % 2;
    c[2 * i] = _mm512_shuffle_ps(b[at], b[at + 2], 0x44);
    c[2 * i + 1] = _mm512_shuffle_ps(b[at], b[at + 2], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // column i of each quarter, from rows 0, 4, 8 and 12 on
    const __m512 even_top = _mm512_shuffle_f32x4(c[i], c[i + 4], 0x88),
                 odd_top = _mm512_shuffle_f32x4(c[i], c[i + 4], 0xdd),
                 even_low = _mm512_shuffle_f32x4(c[i + 8], c[i + 12], 0x88),
                 odd_low = _mm512_shuffle_f32x4(c[i + 8], c[i + 12], 0xdd);
    a[i] = _mm512_shuffle_f32x4(even_top, even_low, 0x88);
    a[i + 8] = _mm512_shuffle_f32x4(even_top, even_low, 0xdd);
    a[i + 4] = _mm512_shuffle_f32x4(odd_top, odd_low, 0x88);
    a[i + 12] = _mm512_shuffle_f32x4(odd_top, odd_low, 0xdd);
  }
}
#else
inline void transpose_square(Vec (&a)[kLanes]) {
  Vec b[kLanes];
#pragma GCC unroll 4
  for (int64_t n = 1; n < kLanes; n *= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < kLanes / 2; ++i) {
      std::tie(b[2 * i], b[2 * i + 1]) = at::vec::interleave2(a[i], a[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) {
      a[i] = b[i];
    }
  }
}
#endif
inline void transpose_square(Vec (&a)[kLanes], float* to, int64_t ld_to) {
  transpose_square(a);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) {
    a[i].store(to + i * ld_to);
  }
}
// Transposes kLanes x kLanes values; multiplies by `factor` if Scaled.
template <bool Scaled = false>
void transpose_square(const float* from, int64_t ld_from, float* to, int64_t ld_to,
                      Vec factor = Vec(1.f)) {
  Vec a[kLanes];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) {
    a[i] = Vec::loadu(from + i * ld_from);
    if constexpr (Scaled) {
      a[i] = a[i] * factor;
    }
  }
  transpose_square(a, to, ld_to);
}

// Transposes [rows, width]. A value may be a pair of bfloat16, whose address may be unaligned.
inline void transpose(const float* from, int64_t rows, int64_t width, float* to) {
  const int64_t whole_rows = rows / kLanes * kLanes, whole_width = width / kLanes * kLanes;
  for (int64_t i = 0; i < whole_rows; i += kLanes) {
    for (int64_t j = 0; j < whole_width; j += kLanes) {
      transpose_square(from + i * width + j, width, to + j * rows + i, rows);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < whole_rows ? whole_width : 0; j < width; ++j) {
      std::memcpy(to + j * rows + i, from + i * width + j, sizeof(float));
    }
  }
}

// Transposes [rows, width] and multiplies column j by factor[j]; width is a multiple of kLanes.
inline void transpose_scaled(const float* from, int64_t rows, int64_t width, float* to,
                             const float* factor) {
  const int64_t whole_rows = rows / kLanes * kLanes;
  for (int64_t j = 0; j < width; j += kLanes) {
    const Vec factors = Vec::loadu(factor + j);
    for (int64_t i = 0; i < whole_rows; i += kLanes) {
      transpose_square<true>(from + i * width + j, width, to + j * rows + i, rows, factors);
    }
    for (int64_t i = whole_rows; i < rows; ++i) {
      for (int64_t k = j; k < j + kLanes; ++k) {
        to[k * rows + i] = from[i * width + k] * factor[k];
      }
    }
  }
}

// Packs the right operand X [rows, width] into `to`; float needs no packing.
inline const float* pack(const float* from, int64_t rows, int64_t width, float* to) {
  return from;
}
// Packs bfloat16: interleaves pairs of rows. The first row of a pair is in the high half if
// FirstIsHigh, else in the low half.
template <bool FirstIsHigh>
const BFloat16* pack_pairs(const BFloat16* from, int64_t rows, int64_t width, BFloat16* to) {
  using Ints = at::vec::Vectorized<int32_t>;
  for (int64_t i = 0; i < rows; i += 2) {
    const BFloat16 *a = from + i * width, *b = a + width;
    if constexpr (FirstIsHigh) {
      std::swap(a, b);
    }
    int64_t j = 0;
    for (; j + kLanes <= width; j += kLanes) {
      const Ints low = at::vec::cast<int32_t>(load_lanes(a + j)) >> Ints(16),
                 high = at::vec::cast<int32_t>(load_lanes(b + j));
      ((low & Ints(0xffff)) | high).store(to + i * width + 2 * j);
    }
    for (; j < width; ++j) {
      to[i * width + 2 * j] = a[j];
      to[i * width + 2 * j + 1] = b[j];
    }
  }
  return to;
}
inline const BFloat16* pack(const BFloat16* from, int64_t rows, int64_t width, BFloat16* to) {
  return pack_pairs<false>(from, rows, width, to);
}

// Transposes [rows, width]. For bfloat16, `spare` must have room for rows * width values, and the
// first of two rows is put in the high half, because products add the high half first
// (pairs_in_order.h).
inline void transpose(const float* from, int64_t rows, int64_t width, float* to, float*) {
  transpose(from, rows, width, to);
}
inline void transpose(const BFloat16* from, int64_t rows, int64_t width, BFloat16* to,
                      BFloat16* spare) {
  pack_pairs<true>(from, rows, width, spare);
  transpose(reinterpret_cast<const float*>(spare), rows / 2, width, reinterpret_cast<float*>(to));
}

// Packs X^T of X [rows, width] as a right operand. In bfloat16, a pair's values are adjacent.
inline void pack_transposed(const float* from, int64_t rows, int64_t width, float* to) {
  transpose(from, rows, width, to);
}
inline void pack_transposed(const BFloat16* from, int64_t rows, int64_t width, BFloat16* to) {
  transpose(reinterpret_cast<const float*>(from), rows, width / 2, reinterpret_cast<float*>(to));
}

// Computes C [M, N] = A [M, K] B [K, N], or adds the product to C if `add`; K > 0.
template <typename T>
void multiply(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, const T* B, int64_t ldb,
              float* C, int64_t ldc, bool add) {
  if (M == 0 || N == 0) {  // brgemm would allocate gigabytes
    return;
  }
  will_read(A, (M - 1) * lda + K);
  will_read(B, (K - 1) * ldb + N);
  will_write(C, (M - 1) * ldc + N);
  multiply_blocks(M, N, K, A, lda, B, ldb, C, ldc, add);
}
// Computes C = A B, or C + A B if `add`, for contiguous B and C.
template <typename T>
void multiply(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, const T* B, float* C,
              bool add) {
  multiply(M, N, K, A, lda, B, N, C, N, add);
}

// Zeroes the rows of masked keys, which may be NaN.
template <typename T>
void clear_unseen(const bool* seen, Tile tile, int64_t step, int64_t width, T* rows) {
  for (int64_t j = 0; seen && j < tile.count; ++j) {
    if (!seen[tile.start + j * step]) {
      std::fill_n(rows + j * width, width, T(0));
    }
  }
}

// Sets the scores [keys, ld] of masked keys to -inf.
inline void hide_unseen(const bool* seen, Tile tile, int64_t step, float* scores, int64_t ld) {
  for (int64_t j = 0; seen && j < tile.count; ++j) {
    if (!seen[tile.start + j * step]) {
      std::fill_n(scores + j * ld, ld, -kInf);
    }
  }
}

// Calls f(first, count) for each range of consecutive unmasked keys of a tile.
template <typename F>
void for_runs(const bool* seen, Tile tile, int64_t step, const F& f) {
  for (int64_t j = 0; j < tile.count;) {
    int64_t end = seen ? j : tile.count;
    while (end < tile.count && seen[tile.start + end * step]) {
      ++end;
    }
    if (end > j) {
      f(j, end - j);
    }
    j = end + 1;
  }
}

// Sets scores [keys, ld] to -inf where the bitmap has no pair. A row of the bitmap is a key, a bit
// is a query.
inline void apply_mask(const uint8_t* bitmap, int64_t block, int64_t keys, int64_t queries,
                       float* scores, int64_t ld) {
  static_assert(8 % kLanes == 0 || kLanes % 8 == 0);
  using Ints = at::vec::Vectorized<int32_t>;
  constexpr int64_t kBits = std::max<int64_t>(8, kLanes);  // of a step: whole bytes, whole vectors
  Ints own[kBits / kLanes];                                // the bit of each lane
  for (int64_t v = 0; v < kBits / kLanes; ++v) {
    int32_t bits[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      bits[i] = 1 << (v * kLanes + i);
    }
    own[v] = Ints::loadu(bits);
  }
  const Vec none(-kInf);
  for (int64_t j = 0; j < keys; ++j) {
    const uint8_t* row = bitmap + j * (block / 8);
    float* s = scores + j * ld;
    for (int64_t i = 0; i < queries; i += kBits) {
      int32_t bits = row[i / 8];
      for (int64_t byte = 1; byte < kBits / 8; ++byte) {
        bits |= static_cast<int32_t>(row[i / 8 + byte]) << (8 * byte);
      }
      if (bits == (int32_t{1} << kBits) - 1) {
        continue;
      }
      for (int64_t v = 0; v < kBits / kLanes; ++v) {
        float* at = s + i + v * kLanes;
        const auto seen = at::vec::cast<float>((Ints(bits) & own[v]) == own[v]);
        Vec::blendv(none, Vec::loadu(at), seen).store(at);
      }
    }
  }
}

// The queries of a masked tile are multiplied in parts of so many, each with only the keys that one
// of them sees.
constexpr int64_t kApart = 32;

// Returns bitmap `number` if the tile's queries are multiplied in such parts, else nullptr. Parts
// gain nothing for fewer queries, and were not measured with AVX-512.
template <typename T>
const uint8_t* apart(const Pass& pass, int64_t number, int64_t queries) {
  const bool gains = !kPaired<T> && kLanes <= 8 && queries >= 128 && queries % kApart == 0;
  return gains && number >= 0 ? pass.bitmap(number) : nullptr;
}

// Calls f(first query, number of queries, first key, number of keys) for each part of a pair of
// tiles that must be multiplied. Given a bitmap from `apart`, a part has kApart queries that see
// keys, and the keys from the first to the last that they see, rounded to multiples of 16. Without
// a bitmap the only part is the whole pair.
template <typename F>
void for_parts(const uint8_t* bitmap, int64_t block, int64_t keys, int64_t queries, const F& f) {
  if (!bitmap) {
    f(0, queries, 0, keys);
    return;
  }
  for (int64_t i = 0; i < queries; i += kApart) {
    const auto seen = [&](int64_t j) {
      uint32_t bits;
      std::memcpy(&bits, bitmap + (j * block + i) / 8, sizeof(bits));
      return bits != 0;
    };
    int64_t first = 0, stop = keys;
    while (first < stop && !seen(first)) {
      ++first;
    }
    while (first < stop && !seen(stop - 1)) {
      --stop;
    }
    if (first < stop) {
      first = first / 16 * 16;
      f(i, kApart, first, round_up(stop, 16) - first);
    }
  }
}

}  // namespace sparsering::cpu
