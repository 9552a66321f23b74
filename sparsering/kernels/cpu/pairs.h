// Backward of one pair of tiles: its weights, their gradients, and its contributions to dQ, dK and
// dV.

#pragma once

#include <span>
#include <tuple>

#include "coordinates.h"

namespace sparsering::cpu {

template <typename T>
class Pairs {
 public:
  Pairs(const Problem& problem, const Tensor& grad_out, const float* lse, const float* delta)
      : x_(problem),
        do_(grad_out),
        lse_(lse),
        delta_(delta),
        width_(round_up(std::max<int64_t>(problem.D, 1), 2)),
        value_width_(round_up(std::max<int64_t>(problem.Dv, 1), 2)) {}

  // Operands of a key tile: K and V in rows, and K^T.
  struct Keys {
    const T *k, *kt, *v;
  };
  // Operands of a padded query tile: Q, dO and their transposes.
  struct Queries {
    int64_t count;
    const T *q, *qt, *dout, *dout_t;
  };

  struct Scratch {
    explicit Scratch(const Pairs& f) {
      const int64_t queries = round_up(f.x_.block, 32), wide = std::max(f.width_, f.value_width_);
      const int64_t most_keys = round_up(cpu::most_keys(f.x_.block), 32);
      tile = Buffer<T>(queries * wide);
      pairs = Buffer<T>(kPaired<T> ? queries * wide : 0);
      floats = Buffer<float>(queries * wide);
      q = Buffer<T>(queries * f.width_);
      qt = Buffer<T>(queries * f.width_);
      dout = Buffer<T>(queries * f.value_width_);
      dout_t = Buffer<T>(queries * f.value_width_);
      lse = Buffer<float>(queries);
      delta = Buffer<float>(queries);
      scores = Buffer<float>(queries * most_keys);
      dscores = Buffer<float>(queries * most_keys);
      p = Buffer<T>(kPaired<T> ? queries * most_keys : 0);
      ds = Buffer<T>(kPaired<T> ? queries * most_keys : 0);
      ds_paired = Buffer<T>(kPaired<T> ? queries * most_keys : 0);
      dq = Buffer<float>(queries * wide);
      for (Buffer<float>& sums : earlier) {
        sums = Buffer<float>(queries * wide);
      }
      dk = Buffer<float>(queries * f.width_);
      dv = Buffer<float>(queries * f.value_width_);
      earlier_dk = Buffer<float>(queries * f.width_);
      earlier_dv = Buffer<float>(queries * f.value_width_);
      const auto& extras = f.x_.extras;
      slope = Buffer<float>(extras.softcap > 0.f ? queries * queries : 0);
      kept = Buffer<float>(extras.drops() ? queries * queries : 0);
      biases = Buffer<float>(extras.adjusts() ? 2 * queries : 0);
      dbiases = Buffer<float>(extras.adjusts() ? queries * std::max<int64_t>(2, queries) : 0);
      const Coordinates& x = extras.coordinates;
      coordinates = Buffer<float>(x.rows() * queries);
      coordinate_sums = Buffer<float>(x ? (x.dims + 2) * queries : 0);
      a = Buffer<uint32_t>(extras.drops() ? queries : 0);
      b = Buffer<uint32_t>(extras.drops() ? queries : 0);
    }
    Buffer<T> tile, pairs, q, qt, dout, dout_t, p, ds, ds_paired;
    Buffer<float> floats, lse, delta, scores, dscores, dq, dk, dv, slope, kept, biases, dbiases;
    Buffer<float> earlier[2];              // dQ of earlier segments, see `Segments`
    Buffer<float> earlier_dk, earlier_dv;  // dK and dV of earlier segments
    Buffer<float> coordinates, coordinate_sums;
    Buffer<uint32_t> a, b;
    Lanes lanes = {};  // the coordinates of the query tile
    // Where `dbiases` has the sum of dS of key 0 and query 0, and how far the next key's sum is
    // from it. If depths are even, it has a sum per distance, else per pair.
    float* by_distance = nullptr;
    int64_t next_key = 0;
  };

  // A query tile and a key tile of one head, with the pair's bitmap and extras.
  struct Pair {
    int64_t b, head, row, column, entry;
    int64_t bitmap;  // index of the bitmap, -1 for none
    float bias;
    double* dtable;  // gradient of the distance table, which it adds to; or nullptr
    Keys keys;
    int64_t padded;       // padded number of keys in the tile
    int64_t first;        // row of the first key in the scratch, which has room for most_keys
    const uint8_t* seen;  // result of `apart` (pack.h): the bitmap, or nullptr
  };

  // Which gradients of coordinates and slopes `differentiate` adds to: those of the query tile, in
  // `queries`, and those of the kv head's keys, [Nk, dims], unless `keys` is nullptr.
  struct Learned {
    CoordinateSums queries = {};
    float* keys = nullptr;
  };

  int64_t width() const {
    return width_;
  }
  int64_t value_width() const {
    return value_width_;
  }

  // True if K and V of whole key tiles can be read from their tensors, without a copy.
  bool in_place(const Pass& pass) const {
    return pass.step == 1 && x_.k.template lies_as<T>(width_) &&
           x_.v.template lies_as<T>(value_width_);
  }
  bool is_copied(const Pass& pass, int64_t b, int64_t kv_head, int64_t column) const {
    return !in_place(pass) || x_.extras.key_mask(b) ||
           pass.key_tile(kv_head * pass.axes / x_.Hkv, column).count % 16;
  }

  // Packs K^T of a key tile to `kt`, and copies K and V to `k` and `v` if the tile `is_copied`.
  // `kt` and `k` need room for block * width values, and `v` for block * value_width. `spare`,
  // which bfloat16 uses, needs room for the larger of these.
  Keys pack_keys(T* spare, const Pass& pass, int64_t b, int64_t kv_head, int64_t column, T* k,
                 T* kt, T* v) const {
    const Tile tile = pass.key_tile(kv_head * pass.axes / x_.Hkv, column);
    const int64_t rows = round_up(tile.count, 16);
    const auto rows_of = [&](const Source& x, int64_t width, T* to) {
      if (const bool* seen = x_.extras.key_mask(b)) {
        read_tile(x, b, kv_head, tile, pass.step, rows, width, to);
        clear_unseen(seen, tile, pass.step, width, to);
        return static_cast<const T*>(to);
      }
      return tile_rows(x, b, kv_head, tile, pass.step, rows, width, to);
    };
    const T* keys = rows_of(x_.k, width_, k);
    transpose(keys, rows, width_, kt, spare);
    return {keys, kt, rows_of(x_.v, value_width_, v)};
  }

  // Packs Q and dO of a query tile, and reads its lse and delta.
  Queries pack_queries(Scratch& s, const Pass& pass, int64_t b, int64_t head, Tile tile) const {
    const int64_t count = round_up(tile.count, kQueryUnit<T>);
    const auto operands = [&](const Source& x, int64_t width, T* to, T* transposed) {
      // Copy bfloat16 rows to another buffer first, because packing interleaves them.
      T* spare = kPaired<T> ? s.tile.get() : to;
      const T* rows = tile_rows(x, b, head, tile, pass.step, count, width, spare);
      pack_transposed(rows, count, width, transposed);
      return pack(rows, count, width, to);
    };
    const T* q = operands(x_.q, width_, s.q.get(), s.qt.get());
    const T* dout = operands(do_, value_width_, s.dout.get(), s.dout_t.get());
    if (const Coordinates& x = x_.extras.coordinates) {
      s.lanes = read_lanes(x, x.query, b, tile, pass.step, count, s.coordinates.get());
    }
    const int64_t first = (b * x_.Hq + head) * x_.Nq + tile.start;
    for (int64_t i = 0; i < count; ++i) {
      s.lse.get()[i] = kInf;  // so that exp(score - lse) = 0 in rows without keys and in padding
      s.delta.get()[i] = 0.f;
      if (i < tile.count) {
        const int64_t row = first + i * pass.step;
        s.delta.get()[i] = delta_[row];
        s.lse.get()[i] = lse_[row] == -kInf ? kInf : lse_[row];
      }
    }
    return {count, q, s.qt.get(), dout, s.dout_t.get()};
  }

  // Computes S^T and dP^T for some pairs of one query tile. Here and below, products of one shape
  // follow each other, because for a new shape the processor's tile registers must be set up again.
  void multiply_keys(Scratch& s, const Queries& q, std::span<const Pair> pairs) const {
    const auto products = [&](const Pair& x, const T* keys, int64_t width, const T* queries,
                              float* to) {
      to += x.first * q.count;
      if (x.seen) {  // zeros, because scores that are not multiplied are read, too
        std::fill_n(to, x.padded * q.count, 0.f);
      }
      for_parts(x.seen, x_.block, x.padded, q.count,
                [&](int64_t i, int64_t size, int64_t first, int64_t count) {
                  multiply(count, size, width, keys + first * width, width, queries + i, q.count,
                           to + first * q.count + i, q.count, false);
                });
    };
    for (const Pair& x : pairs) {
      products(x, x.keys.k, width_, q.qt, s.scores.get());
    }
    for (const Pair& x : pairs) {
      products(x, x.keys.v, value_width_, q.dout_t, s.dscores.get());
    }
  }

  // Returns memory to prefetch for the products after `differentiate`: K^T of some pairs' key
  // tiles, and their tiles of `dv` and `dk`. Prefetching gained nothing for smaller tiles or with
  // AVX-512.
  Ahead later_operands(std::span<const Pair> pairs, const float* dk, const float* dv) const {
    Ahead ahead;
    if (kLanes > 8 || x_.block * width_ < 128 * 64) {
      return ahead;
    }
    const auto add = [&](const void* from, int64_t width, int64_t item) {
      ahead.add(from, x_.block * width * item);
    };
    for (const Pair& x : pairs) {
      add(x.keys.kt, width_, sizeof(T));
    }
    for (int64_t i = 0; dv && i < std::ssize(pairs); ++i) {
      add(dv + pairs[i].column * x_.block * value_width_, value_width_, sizeof(float));
    }
    for (int64_t i = 0; dk && i < std::ssize(pairs); ++i) {
      add(dk + pairs[i].column * x_.block * width_, width_, sizeof(float));
    }
    return ahead;
  }

  // Computes P^T and dS^T of a multiplied pair as left operands, and dS^T also as a right operand.
  // Returns the sum of dS. dS is computed from P before dropout; the stored P^T is after dropout.
  float differentiate(Scratch& s, const Pass& pass, const Queries& q, Tile tile, const Pair& pair,
                      Ahead& ahead, const Learned* learned) const {
    const int64_t axis = pair.head * pass.axes / x_.Hq;
    const Tile key_tile = pass.key_tile(axis, pair.column);
    const int64_t keys = key_tile.count, queries = q.count;
    float* scores = s.scores.get() + pair.first * queries;
    const bool extras = x_.extras.adjusts() || x_.extras.drops();
    const Coordinates& coordinates = x_.extras.coordinates;
    const auto spots = coordinates.key.spots(pair.b, key_tile.start, pass.step);
    if (coordinates) {
      lower_by_distance(coordinates, s.lanes, coordinates.slopes[pair.head], spots, keys, queries,
                        queries, scores);
    }
    int64_t distance = 0;  // from the first query to the last key
    if (extras) {
      distance = pass.even_distance(pair.b, axis, pair.row, pair.column) + (keys - 1) * pass.step;
      prepare_extras(s, pass, pair, axis, keys, queries, distance);
    }
    hide_unseen(x_.extras.key_mask(pair.b), key_tile, pass.step, scores, queries);
    if (pair.bitmap >= 0) {
      apply_mask(pass.bitmap(pair.bitmap), x_.block, keys, tile.count, scores, queries);
    }
    const float total = extras || learned
                            ? weights<true>(s, keys, queries, pair, ahead, learned != nullptr)
                            : weights<false>(s, keys, queries, pair, ahead, false);
    if (learned) {
      float* first = learned->keys ? learned->keys + key_tile.start * coordinates.dims : nullptr;
      add_coordinate_gradients(
          coordinates, s.lanes, coordinates.slopes[pair.head] * x_.scale, spots, keys, queries,
          queries, s.dscores.get() + pair.first * queries, learned->queries,
          [&](int64_t j) { return first ? first + j * pass.step * coordinates.dims : nullptr; });
    }
    if (pair.dtable && pass.has_even_depths()) {
      add_distances(pair.dtable, x_.extras.radius, distance, -pass.step, keys - 1 + tile.count,
                    s.dbiases.get());
    } else if (pair.dtable) {
      add_distances_of_pairs(pair.dtable, x_.extras.radius, pass,
                             {pair.b, axis, pair.row, pair.column}, keys, tile.count, queries,
                             s.dbiases.get());
    }
    return total;
  }

  // Adds dQ^T of a differentiated pair to `dq`.
  void add_to_queries(Scratch& s, const Queries& q, const Pair& x, float* dq) const {
    const T* ds = std::get<2>(operands(s, q, x));
    for_parts(x.seen, x_.block, x.padded, q.count,
              [&](int64_t i, int64_t size, int64_t first, int64_t count) {
                multiply(width_, size, count, x.keys.kt + first, x.padded, ds + first * q.count + i,
                         q.count, dq + i, q.count, true);
              });
  }

  // Adds dV of a differentiated pair to `dv`.
  void add_to_values(Scratch& s, const Queries& q, const Pair& x, float* dv) const {
    add_to_rows(q, x, std::get<0>(operands(s, q, x)), q.dout, value_width_, dv);
  }
  void add_to_keys(Scratch& s, const Queries& q, const Pair& x, float* dk) const {
    add_to_rows(q, x, std::get<1>(operands(s, q, x)), q.q, width_, dk);
  }

 private:
  // Adds a product [keys, queries] [queries, width] to `to`.
  void add_to_rows(const Queries& q, const Pair& x, const T* weights, const T* rows, int64_t width,
                   float* to) const {
    for_parts(x.seen, x_.block, x.padded, q.count,
              [&](int64_t i, int64_t size, int64_t first, int64_t count) {
                multiply(count, width, size, weights + first * q.count + i, q.count,
                         rows + i * width, width, to + first * width, width, true);
              });
  }

  void prepare_extras(Scratch& s, const Pass& pass, const Pair& pair, int64_t axis, int64_t keys,
                      int64_t queries, int64_t distance) const {
    const auto& extras = x_.extras;
    const float* table = extras.table(pair.b, pair.head);
    const bool even = pass.has_even_depths();
    if (table && even) {
      read_distances(table, extras.radius, distance, -pass.step, keys - 1 + queries,
                     s.biases.get());
    }
    if (table) {
      std::fill_n(s.dbiases.get(), even ? keys - 1 + queries : keys * queries, 0.f);
    }
    s.by_distance = even ? s.dbiases.get() + keys - 1 : s.dbiases.get();
    s.next_key = even ? -1 : queries;
    for (int64_t j = 0; j < keys && extras.adjusts(); ++j) {
      if (table && !even) {
        read_distances_of_key(extras, table, pass, {pair.b, axis, pair.row, pair.column}, j,
                              queries, s.biases.get());
      }
      adjust(s.scores.get() + (pair.first + j) * queries, queries, x_.scale, extras.softcap,
             table ? s.biases.get() + (even ? keys - 1 - j : 0) : nullptr,
             extras.softcap > 0.f ? s.slope.get() + j * queries : nullptr);
    }
    if (extras.drops()) {
      row_words(x_, pass, pair.b, pair.head, pair.row, queries, s.a.get(), s.b.get());
      keep_factors(
          s.kept.get(), keys, queries,
          {s.a.get(), s.b.get(), pass.key_origin(axis, pair.column), pass.step, extras.threshold},
          extras.factor);
    }
  }

  // Computes P and dS from scores and dP, as operands of later products. Returns the sum of dS. If
  // `keeps`, dS is also left in `s.dscores`, in float.
  template <bool kExtras>
  float weights(Scratch& s, int64_t keys, int64_t queries, const Pair& pair, Ahead& ahead,
                bool keeps) const {
    constexpr int W = kPaired<T> ? 2 : kQueryUnit<T> / kLanes;
    const int64_t offset = pair.first * queries;
    float *scores = s.scores.get() + offset, *dscores = s.dscores.get() + offset;
    T *p_of = s.p.get() + offset, *ds_of = s.ds.get() + offset,
      *ds_paired = s.ds_paired.get() + offset;
    const bool capped = kExtras && x_.extras.softcap > 0.f, drops = kExtras && x_.extras.drops();
    const Vec scale(x_.rest_of_scale()), shift(pair.bias);
    Vec total(0.f);
    for (int64_t j = 0; j < round_up(keys, 16); j += 2) {
      for (int64_t c = 0; c < queries; c += W * kLanes) {
        ahead.fetch();
        Vec p[2 * W], ds[2 * W];  // for two keys, W vectors each
#pragma GCC unroll 8
        for (int n = 0; n < 2 * W; ++n) {
          const int64_t i = c + n % W * kLanes, at = (j + n / W) * queries + i;
          // P is at most 1 but for the rounding of a large lse; the clamp avoids an overflow.
          const Vec x =
              at::vec::fmadd(Vec::loadu(scores + at), scale, shift - Vec::loadu(s.lse.get() + i));
          p[n] = at::vec::clamp_max(x, Vec(44.f));
        }
        exponentiate(p);
#pragma GCC unroll 8
        for (int n = 0; n < 2 * W; ++n) {
          const int64_t key = j + n / W, i = c + n % W * kLanes, at = key * queries + i;
          if (key >= keys) {
            p[n] = ds[n] = Vec(0.f);
            continue;
          }
          Vec dp = Vec::loadu(dscores + at);
          if (drops) {
            dp = dp * Vec::loadu(s.kept.get() + at);
          }
          ds[n] = p[n] * (dp - Vec::loadu(s.delta.get() + i));
          total = total + ds[n];
          if (kExtras && pair.dtable) {
            float* of_distance = s.by_distance + key * s.next_key + i;
            (Vec::loadu(of_distance) + ds[n]).store(of_distance);
          }
          if (capped) {
            ds[n] = ds[n] * Vec::loadu(s.slope.get() + at);
          }
          if (drops) {
            p[n] = p[n] * Vec::loadu(s.kept.get() + at);
          }
          if (kExtras && kPaired<T> && keeps) {
            ds[n].store(dscores + at);
          }
        }
        for (int row = 0; row < 2; ++row) {
          const int64_t at = (j + row) * queries + c;
          if constexpr (kPaired<T>) {
            at::vec::convert_float_bfloat16(p[row * W], p[row * W + 1]).store(p_of + at);
            at::vec::convert_float_bfloat16(ds[row * W], ds[row * W + 1]).store(ds_of + at);
          } else {
            for (int w = 0; w < W; ++w) {
              p[row * W + w].store(scores + at + w * kLanes);
              ds[row * W + w].store(dscores + at + w * kLanes);
            }
          }
        }
        if constexpr (kPaired<T>) {
          for (int w = 0; w < W; ++w) {
            store_pair(ds_paired + j * queries + 2 * (c + w * kLanes), ds[w], ds[W + w]);
          }
        }
      }
    }
    return sum_of_lanes(total);
  }

  // Returns P^T and dS^T of a pair, and dS^T as a right operand.
  std::tuple<const T*, const T*, const T*> operands(const Scratch& s, const Queries& q,
                                                    const Pair& pair) const {
    const int64_t offset = pair.first * q.count;
    if constexpr (kPaired<T>) {
      return {s.p.get() + offset, s.ds.get() + offset, s.ds_paired.get() + offset};
    } else {
      const float* ds = s.dscores.get() + offset;
      return {s.scores.get() + offset, ds, ds};
    }
  }

  const Problem& x_;
  const Source do_;
  const float *lse_, *delta_;
  const int64_t width_, value_width_;
};

}  // namespace sparsering::cpu
