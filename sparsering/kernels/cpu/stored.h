// Rows of keys or values that a cache stores in 8 bits: `width` numbers, then a float, their scale.
// kernels/rounding.py does the same with torch.

#pragma once

#include <torch/headeronly/util/Float8_e4m3fn.h>

#include <cmath>
#include <cstring>

#include "machine/threads.h"
#include "pack.h"

namespace sparsering::cpu {

using Float8 = c10::Float8_e4m3fn;

// The largest number that a stored row of type S can have.
template <typename S>
constexpr float kMostStored = std::is_same_v<S, int8_t> ? 127.f : 448.f;

// One row; its value d is `data[d] * scale`.
template <typename S>
struct StoredRow {
  StoredRow operator+(int64_t d) const {
    return {data + d, scale};
  }
  float operator[](int64_t d) const {
    return static_cast<float>(data[d]) * scale;
  }
  const S* data;
  float scale;
};

// Rows of `width` numbers: row j begins `j * stride` bytes after the first.
template <typename S>
struct StoredRows {
  StoredRow<S> operator[](int64_t j) const {
    const char* row = first + j * stride;
    float scale;
    std::memcpy(&scale, row + width, sizeof(scale));
    return {reinterpret_cast<const S*>(row), scale};
  }
  StoredRows from(int64_t j) const {
    return {first + j * stride, stride, width};
  }
  const char* first;
  int64_t stride, width;
};

template <typename S>
StoredRows<S> stored_rows(const Source& x, int64_t b, int64_t h, int64_t n, int64_t step) {
  return {x.rows<char>(b, h, n), x.strides[2] * step, x.width};
}

// Calls f with a number of the type in which rows are stored.
template <typename F>
void with_stored_type(Dtype type, const F& f) {
  if (type == kChar) {
    f(int8_t());
  } else {
    f(Float8());
  }
}

// Shifting the bits of a float8 number gives a half-precision number with 2^-8 of its value.
#if defined(CPU_CAPABILITY_AVX512)
inline Vec load_lanes(StoredRow<int8_t> from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from.data));
  return Vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))) * Vec(from.scale);
}
inline Vec load_lanes(StoredRow<Float8> from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from.data));
  const __m256i wide = _mm256_cvtepu8_epi16(bytes);
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
  return Vec(_mm512_cvtph_ps(_mm256_or_si256(sign, rest))) * Vec(256.f) * Vec(from.scale);
}
#elif defined(CPU_CAPABILITY_AVX2)
inline Vec load_lanes(StoredRow<int8_t> from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from.data));
  return Vec(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))) * Vec(from.scale);
}
inline Vec load_lanes(StoredRow<Float8> from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from.data));
  const __m128i wide = _mm_cvtepu8_epi16(bytes);
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
  const __m128i rest = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7);
  return Vec(_mm256_cvtph_ps(_mm_or_si128(sign, rest))) * Vec(256.f) * Vec(from.scale);
}
#else
template <typename S>
Vec load_lanes(StoredRow<S> from) {
  float lanes[kLanes];
  for (int64_t d = 0; d < kLanes; ++d) {
    lanes[d] = from[d];
  }
  return Vec::loadu(lanes);
}
#endif

template <typename S>
void copy_lanes(StoredRow<S> from, float* to, int64_t size) {
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) {
    load_lanes(from + d).store(to + d);
  }
  for (; d < size; ++d) {
    to[d] = from[d];
  }
}

// Stores a row of `width` values. A row that has NaN or infinity becomes NaN as a whole.
template <typename S, typename From>
void store_row(const From* from, int64_t width, char* to) {
  float most = 0.f;
  bool finite = true;
  for (int64_t d = 0; d < width; ++d) {
    const float x = std::abs(static_cast<float>(from[d]));
    most = std::max(most, x);
    finite = finite && x <= std::numeric_limits<float>::max();
  }
  const float scale = finite ? most / kMostStored<S> : std::numeric_limits<float>::quiet_NaN();
  S* numbers = reinterpret_cast<S*>(to);
  for (int64_t d = 0; d < width; ++d) {
    const float x = scale > 0.f ? static_cast<float>(from[d]) / scale : 0.f;
    if constexpr (std::is_same_v<S, int8_t>) {
      numbers[d] = static_cast<int8_t>(std::clamp(std::nearbyint(x), -127.f, 127.f));
    } else {
      numbers[d] = S(std::clamp(x, -448.f, 448.f));
    }
  }
  std::memcpy(to + width, &scale, sizeof(scale));
}

// Rounds rows [B, H, n, width] to 8 bits: returns int8 or (for float8) uint8 [B, H, n, width + 4].
inline Tensor store(const Tensor& rows, bool float8) {
  const Tensor dense = contiguous(rows);
  const int64_t width = dense.size(3), count = dense.numel() / std::max<int64_t>(width, 1);
  constexpr int64_t kScale = sizeof(float);
  Tensor result =
      empty({dense.size(0), dense.size(1), dense.size(2), width + kScale}, float8 ? kByte : kChar);
  char* to = static_cast<char*>(result.mutable_data_ptr());
  const auto run = [&](auto number) {
    using S = decltype(number);
    with_type(dense.dtype(), [&](auto value) {
      using From = decltype(value);
      const auto* from = static_cast<const From*>(dense.const_data_ptr());
      parallel_for(0, count, 1 + (1 << 15) / (width + 1), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          store_row<S>(from + i * width, width, to + i * (width + kScale));
        }
      });
    });
  };
  with_stored_type(result.dtype(), run);
  return result;
}

// Copies the rows of a tile's tokens to `rows` rows of `width` values, padded with zeros.
template <typename T>
void read_tile(const Source& x, int64_t b, int64_t h, Tile tile, int64_t step, int64_t rows,
               int64_t width, T* to) {
  const auto read = [&](auto value) {
    using S = decltype(value);
    const S* from = x.rows<S>(b, h, tile.start);
    const int64_t stride = x.strides[2] * step;
    for (int64_t i = 0; i < tile.count; ++i) {
      convert_row(from + i * stride, to + i * width, x.width);
    }
  };
  if constexpr (kPaired<T>) {
    read(T());
  } else if (x.is_stored()) {
    with_stored_type(x.type, [&](auto number) {
      const auto from = stored_rows<decltype(number)>(x, b, h, tile.start, step);
      for (int64_t i = 0; i < tile.count; ++i) {
        copy_lanes(from[i], to + i * width, x.width);
      }
    });
  } else {
    with_type(x.type, read);
  }
  for (int64_t i = 0; i < tile.count; ++i) {
    std::fill(to + i * width + x.width, to + (i + 1) * width, T(0));
  }
  std::fill(to + tile.count * width, to + rows * width, T(0));
}

// Returns a tile's rows: a pointer into the tensor if they are contiguous and need no padding, else
// a copy in `spare`.
template <typename T>
const T* tile_rows(const Source& x, int64_t b, int64_t h, Tile tile, int64_t step, int64_t rows,
                   int64_t width, T* spare) {
  if (step == 1 && tile.count == rows && x.lies_as<T>(width)) {
    return x.rows<T>(b, h, tile.start);
  }
  read_tile(x, b, h, tile, step, rows, width, spare);
  return spare;
}

}  // namespace sparsering::cpu
