// Tiles as operands of matrix products, and bitmaps as masks of transposed scores.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <tuple>

#include "layout.h"

namespace sparsering::cpu {

inline Vec load_lanes(const float* from) {
  return Vec::loadu(from);
}
inline Vec load_lanes(const BFloat16* from) {
  Vec result;
  at::vec::load_fp32_from_bf16(from, result);
  return result;
}
inline Vec load_lanes(const at::Half* from) {
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

// Query tiles are padded to whole pairs of vectors.
template <typename T>
constexpr int64_t kQueryUnit = kPaired<T> ? 32 : 16;

// Copies a tile's tokens to `rows` rows of `width` values, zeros where there is nothing.
template <typename T>
void read_tile(const Source& x, int64_t b, int64_t h, Tile tile, int64_t step, int64_t rows,
               int64_t width, T* to) {
  for (int64_t i = 0; i < tile.count; ++i) {
    x.read(b, h, tile.start + i * step, to + i * width);
    std::fill(to + i * width + x.width, to + (i + 1) * width, T(0));
  }
  std::fill(to + tile.count * width, to + rows * width, T(0));
}

// A kLanes x kLanes transpose: log2(kLanes) perfect shuffles of its rows.
inline void transpose_square(const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  Vec a[kLanes], b[kLanes];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) {
    a[i] = Vec::loadu(from + i * ld_from);
  }
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
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) {
    a[i].store(to + i * ld_to);
  }
}

// [rows, width] -> [width, rows].
inline void transpose(const float* from, int64_t rows, int64_t width, float* to) {
  const int64_t whole_rows = rows / kLanes * kLanes, whole_width = width / kLanes * kLanes;
  for (int64_t i = 0; i < whole_rows; i += kLanes) {
    for (int64_t j = 0; j < whole_width; j += kLanes) {
      transpose_square(from + i * width + j, width, to + j * rows + i, rows);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < whole_rows ? whole_width : 0; j < width; ++j) {
      to[j * rows + i] = from[i * width + j];
    }
  }
}

// The same by way of float; `spare` holds 2 * rows * width of them.
inline void transpose(const float* from, int64_t rows, int64_t width, float* to, float*) {
  transpose(from, rows, width, to);
}
inline void transpose(const BFloat16* from, int64_t rows, int64_t width, BFloat16* to,
                      float* spare) {
  at::vec::convert(from, spare, rows * width);
  transpose(spare, rows, width, spare + rows * width);
  at::vec::convert(spare + rows * width, to, rows * width);
}

// Right operand X^T of X [rows, width]: pairs of values lie together already.
inline void pack_transposed(const float* from, int64_t rows, int64_t width, float* to) {
  transpose(from, rows, width, to);
}
inline void pack_transposed(const BFloat16* from, int64_t rows, int64_t width, BFloat16* to) {
  transpose(reinterpret_cast<const float*>(from), rows, width / 2, reinterpret_cast<float*>(to));
}

// Right operand X [rows, width].
inline void pack(const float* from, int64_t rows, int64_t width, float* to) {
  std::memcpy(to, from, rows * width * sizeof(float));
}
inline void pack(const BFloat16* from, int64_t rows, int64_t width, BFloat16* to) {
  for (int64_t i = 0; i < rows; i += 2) {
    const BFloat16 *a = from + i * width, *b = a + width;
    for (int64_t j = 0; j < width; ++j) {
      to[i * width + 2 * j] = a[j];
      to[i * width + 2 * j + 1] = b[j];
    }
  }
}

// C [M, N] (+)= A [M, K] B [K, N].
template <typename T>
void multiply(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, const T* B, float* C,
              bool add) {
  if (M == 0) {
    return;
  }
  at::native::cpublas::brgemm(M, N, K, lda, N, N, add, A, B, C, kPaired<T>);
}

// Bitmaps with queries along the bits of a key's row, 8 x 8 cells at a time.
inline Buffer<uint8_t> transposed_bitmaps(const Pass& p) {
  const int64_t bytes = p.block / 8, size = p.block * bytes;
  Buffer<uint8_t> result(p.num_bitmaps * size);
  at::parallel_for(0, p.num_bitmaps, 8, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const uint8_t* from = p.bitmaps + n * size;
      uint8_t* to = result.get() + n * size;
      for (int64_t i = 0; i < bytes; ++i) {
        for (int64_t j = 0; j < bytes; ++j) {
          uint64_t x = 0, t;
          for (int64_t k = 0; k < 8; ++k) {
            x |= static_cast<uint64_t>(from[(8 * i + k) * bytes + j]) << (8 * k);
          }
          t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAull, x ^= t ^ (t << 7);
          t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCull, x ^= t ^ (t << 14);
          t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0ull, x ^= t ^ (t << 28);
          for (int64_t k = 0; k < 8; ++k) {
            to[(8 * j + k) * bytes + i] = static_cast<uint8_t>(x >> (8 * k));
          }
        }
      }
    }
  });
  return result;
}

// Zeros in the rows of keys that are not seen, whose numbers may be none.
template <typename T>
void clear_unseen(const bool* seen, Tile tile, int64_t step, int64_t width, T* rows) {
  for (int64_t j = 0; seen && j < tile.count; ++j) {
    if (!seen[tile.start + j * step]) {
      std::fill_n(rows + j * width, width, T(0));
    }
  }
}

// Sets the scores [keys, ld] of keys that are not seen to -inf.
inline void hide_unseen(const bool* seen, Tile tile, int64_t step, float* scores, int64_t ld) {
  for (int64_t j = 0; seen && j < tile.count; ++j) {
    if (!seen[tile.start + j * step]) {
      std::fill_n(scores + j * ld, ld, -kInf);
    }
  }
}

// Calls f(first, count) for each run of keys of a tile that are seen.
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

// Sets scores [keys, ld] to -inf where the bitmap (of keys, see above) has no pair.
inline void apply_mask(const uint8_t* bitmap, int64_t block, int64_t keys, int64_t queries,
                       float* scores, int64_t ld) {
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t i = 0; i < (queries + 7) / 8; ++i) {
      const uint32_t bits = bitmap[j * (block / 8) + i];
      if (bits == 255) {
        continue;
      }
      float* s = scores + j * ld + 8 * i;
      for (uint32_t k = 0; k < 8; ++k) {
        s[k] = bits & (1u << k) ? s[k] : -kInf;
      }
    }
  }
}

}  // namespace sparsering::cpu
