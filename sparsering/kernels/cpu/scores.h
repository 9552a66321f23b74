// Applies the extras of a call to the transposed scores S^T [keys, queries] of a pair of tiles, and
// to its weights.

#pragma once

#include "pack.h"

namespace sparsering::cpu {

// Returns tanh x with relative error 3e-7; NaN for NaN. It uses a rational function of x^2 that is
// fitted up to 8, where tanh is 1 up to 2e-7.
[[gnu::always_inline]] inline Vec tanh_of(Vec x) {
  const Vec bounded = at::vec::clamp(x, Vec(-8.f), Vec(8.f)), u = bounded * bounded;
  Vec p(1.523041227e-8f), q(8.522444414e-7f);
  p = at::vec::fmadd(p, u, Vec(2.189465818e-5f));
  q = at::vec::fmadd(q, u, Vec(3.411291658e-4f));
  p = at::vec::fmadd(p, u, Vec(3.571597814e-3f));
  q = at::vec::fmadd(q, u, Vec(2.616444216e-2f));
  p = at::vec::fmadd(p, u, Vec(1.344449781e-1f));
  q = at::vec::fmadd(q, u, Vec(4.677782513e-1f));
  p = at::vec::fmadd(p, u, Vec(9.999999936e-1f));
  q = at::vec::fmadd(q, u, Vec(1.f));
  return bounded * p / q;
}

// Reads a distance table [2 * radius + 1] at `count` distances from `first` on, `step` apart.
inline void read_distances(const float* table, int64_t radius, int64_t first, int64_t step,
                           int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = table[radius + std::clamp(first + i * step, -radius, radius)];
  }
}

// Adds from[i] to a distance table at distance first + i * step, which is clamped to the radius.
inline void add_distances(double* table, int64_t radius, int64_t first, int64_t step, int64_t count,
                          const float* from) {
  for (int64_t i = 0; i < count; ++i) {
    table[radius + std::clamp(first + i * step, -radius, radius)] += from[i];
  }
}

// A pair of tiles of a pass, for a batch entry and an axis (a set of tiles).
struct TilesOfPass {
  int64_t b, axis, row, column;
};

// Reads the biases of token j of a key tile for `queries` tokens of a query tile, if distances do
// not change by the step from token to token.
inline void read_distances_of_key(const Extras& extras, const float* table, const Pass& pass,
                                  const TilesOfPass& x, int64_t j, int64_t queries, float* to) {
  for (int64_t i = 0; i < queries; ++i) {
    to[i] = extras.bias_at(table, pass.distance(x.b, x.axis, x.row, x.column, i, j));
  }
}

// Adds the values [keys, queries] of pairs to a distance table; their rows are `ld` apart.
inline void add_distances_of_pairs(double* table, int64_t radius, const Pass& pass,
                                   const TilesOfPass& x, int64_t keys, int64_t queries, int64_t ld,
                                   const float* from) {
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t distance = pass.distance(x.b, x.axis, x.row, x.column, i, j);
      table[radius + std::clamp(distance, -radius, radius)] += from[j * ld + i];
    }
  }
}

// Scales `size` scores of one key (or of one query), applies softcap `cap` (0 for none) and adds
// `bias`, which may be nullptr if there is a cap. `slope` gets the derivative of the cap, unless it
// is nullptr.
inline void adjust(float* scores, int64_t size, float scale, float cap, const float* bias,
                   float* slope) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = std::min(kLanes, size - i);
    Vec score = Vec::loadu(scores + i, n);
    if (cap > 0.f) {
      const Vec t = tanh_of(score * Vec(scale / cap));
      if (slope) {
        (Vec(1.f) - t * t).store(slope + i, n);
      }
      score = bias ? at::vec::fmadd(t, Vec(cap), Vec::loadu(bias + i, n)) : t * Vec(cap);
    } else {
      score = at::vec::fmadd(score, Vec(scale), Vec::loadu(bias + i, n));
    }
    score.store(scores + i, n);
  }
}

// Mixes the bits of a hash word; ground/dropout.py describes the hash of a (query, key) pair.
inline uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0xD35A2D97u;
  return x ^ (x >> 15);
}

// Computes the hash words a and b of `count` queries.
inline void row_words(int64_t seed, int64_t head, int64_t branch, int64_t first, int64_t step,
                      int64_t count, uint32_t* a, uint32_t* b) {
  constexpr uint32_t kAddends[2] = {0x9E3779B9u, 0x7F4A7C15u};
  for (int word = 0; word < 2; ++word) {
    uint32_t x = static_cast<uint32_t>(word ? seed >> 32 : seed), add = kAddends[word];
    x = mixed((x ^ static_cast<uint32_t>(head)) + add);
    x = mixed((x ^ static_cast<uint32_t>(branch)) + add);
    uint32_t* to = word ? b : a;
    for (int64_t i = 0; i < count; ++i) {
      to[i] = mixed((x ^ static_cast<uint32_t>(first + i * step)) + add);
    }
  }
}

// Computes the hash words of query tile `row` of a head; words of its padding are undefined.
inline void row_words(const Problem& x, const Pass& pass, int64_t b, int64_t head, int64_t row,
                      int64_t count, uint32_t* a, uint32_t* to_b) {
  const int64_t axis = head * pass.axes / x.Hq;
  const int64_t seed = x.extras.seeds[b * x.extras.streams + pass.stream(axis, row)];
  row_words(seed, head, pass.branch, pass.query_origin(axis, row), pass.step, count, a, to_b);
}

inline uint32_t key_word(int64_t position) {
  return static_cast<uint32_t>(position) * 0x9E3779B1u;
}

inline bool is_kept(uint32_t key, uint32_t a, uint32_t b, int32_t threshold) {
  uint32_t x = key ^ a;
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = ((x ^ (x >> 15)) + b) * 0xD35A2D97u;
  return static_cast<int32_t>(x) >= threshold;
}

// The input of dropout for a pair of tiles: hash words of its queries, and positions of its keys.
struct Dropout {
  const uint32_t *a, *b;  // hash words of each query
  int64_t first, step;    // position of the first key, and distance between neighbors
  int32_t threshold;
};

// Sets dropped weights to 0 in a tile [keys, queries].
inline void drop(float* weights, int64_t keys, int64_t queries, const Dropout& x) {
  for (int64_t j = 0; j < keys; ++j) {
    const uint32_t key = key_word(x.first + j * x.step);
    float* row = weights + j * queries;
    for (int64_t i = 0; i < queries; ++i) {
      row[i] = is_kept(key, x.a[i], x.b[i], x.threshold) ? row[i] : 0.f;
    }
  }
}
// Sets dropped weights to 0 in a tile of bfloat16 that `store_pair` has stored.
inline void drop(BFloat16* weights, int64_t keys, int64_t queries, const Dropout& x) {
  using Pair [[gnu::may_alias]] = uint32_t;
  for (int64_t j = 0; j < keys; j += 2) {
    const uint32_t even = key_word(x.first + j * x.step),
                   odd = key_word(x.first + (j + 1) * x.step);
    Pair* row = reinterpret_cast<Pair*>(weights + j * queries);
    for (int64_t i = 0; i < queries; ++i) {
      const uint32_t high = is_kept(even, x.a[i], x.b[i], x.threshold) ? 0xFFFF0000u : 0u;
      const uint32_t low = is_kept(odd, x.a[i], x.b[i], x.threshold) ? 0xFFFFu : 0u;
      row[i] &= low | high;
    }
  }
}

// Writes the factors of dropout [keys, queries]: `factor` for kept pairs, else 0.
inline void keep_factors(float* to, int64_t keys, int64_t queries, const Dropout& x, float factor) {
  std::fill_n(to, keys * queries, factor);
  drop(to, keys, queries, x);
}

}  // namespace sparsering::cpu
