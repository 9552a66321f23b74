// The backward pass.

#pragma once

#include <vector>

#include "results.h"
#include "scores.h"
#include "softmax.h"
#include "threads.h"

namespace sparsering::cpu {

// Adds to a row of a gradient.
inline void add_to(const Part& sums, int64_t row, const float* part, float scale) {
  with_type(sums.type(), [&](auto value) {
    using S = decltype(value);
    S* to = sums.row<S>(row);
    for (int64_t d = 0; d < sums.width(); ++d) {
      to[d] = static_cast<S>(static_cast<float>(to[d]) + scale * part[d]);
    }
  });
}

// delta = rowsum(dO * O) - dlse of every row, [B, Hq, Nq].
inline Tensor delta_of(const Problem& x, const Tensor& grad_out, const Tensor& out,
                       const Tensor& grad_lse) {
  const Source o(out), dout(grad_out);
  Tensor result = at::empty_like(grad_lse);
  float* to = result.data_ptr<float>();
  const float* dlse = grad_lse.const_data_ptr<float>();
  at::parallel_for(0, x.B * x.Hq * x.Nq, 1024, [&](int64_t begin, int64_t end) {
    Buffer<float> floats(2 * x.Dv);
    float *a = floats.get(), *b = a + x.Dv;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head = row / x.Nq, n = row % x.Nq;
      o.read(head / x.Hq, head % x.Hq, n, a);
      dout.read(head / x.Hq, head % x.Hq, n, b);
      float sum = 0.f;
      for (int64_t d = 0; d < x.Dv; d += kLanes) {
        const int64_t size = std::min(kLanes, x.Dv - d);
        Vec product = Vec::loadu(a + d, size) * Vec::loadu(b + d, size);
        if (size < kLanes) {
          product = Vec::set(Vec(0.f), product, size);
        }
        sum += sum_of_lanes(product);
      }
      to[row] = sum - dlse[row];
    }
  });
  return result;
}

// Gradients of some kv heads and of the query heads that they serve.
struct Gradients {
  Gradients(const Problem& x, const Tensor& dq, const Tensor& dk, const Tensor& dv, int64_t first,
            int64_t count, bool single_pass)
      : q(dq, first * x.group, count * x.group, single_pass),
        k(dk, first, count, single_pass),
        v(dv, first, count, single_pass) {}

  void finish() {
    q.finish();
    k.finish();
    v.finish();
  }

  Part q, k, v;
};

template <typename T>
class Backward {
 public:
  Backward(const Problem& problem, const std::vector<Pass>& passes, const Tensor& grad_out,
           const Tensor& lse, const Tensor& delta, const Tensor& dq, const Tensor& dk,
           const Tensor& dv, const Tensor& dbias, const Tensor& dtable)
      : x_(problem),
        passes_(passes),
        do_(grad_out),
        lse_(lse.const_data_ptr<float>()),
        delta_(delta.const_data_ptr<float>()),
        dq_(dq),
        dk_(dk),
        dv_(dv),
        dbias_(problem.bias ? dbias.data_ptr<float>() : nullptr),
        dtable_(dtable.numel() ? dtable.data_ptr<double>() : nullptr),
        groups_(dtable.numel() ? dtable.size(2) : 0),
        width_(round_up(std::max<int64_t>(problem.D, 1), 2)),
        value_width_(round_up(std::max<int64_t>(problem.Dv, 1), 2)) {
    for (const Pass& pass : passes) {
      bitmaps_.push_back(transposed_bitmaps(pass));
      columns_ = std::max(columns_, pass.columns);
      rows_ = std::max(rows_, pass.rows * x_.group);
    }
  }

  // Five products to a pair of tiles: each thread takes a kv head and sums its dK and dV on the
  // way.
  void run_heads() {
    struct OfThread {
      Scratch scratch;
      Keys keys;
      Buffer<float> dk, dv;
    };
    const int64_t tokens = columns_ * x_.block;
    const auto make = [&] {
      return OfThread{Scratch(*this), Keys(*this, columns_), Buffer<float>(tokens * width_),
                      Buffer<float>(tokens * value_width_)};
    };
    share_out<OfThread>(x_.B * x_.Hkv, 1, make, [&](OfThread& mine, int64_t kv) {
      Gradients sums(x_, dq_, dk_, dv_, kv, 1, passes_.size() == 1);
      for (size_t i = 0; i < passes_.size(); ++i) {
        run_head(passes_[i], i, kv, mine.scratch, mine.keys, mine.dk.get(), mine.dv.get(), sums);
      }
      sums.finish();
    });
  }

  // Seven products, but as parallel as there are tiles: dQ by query tile, then dK and dV by key
  // tile.
  void run_tiles(const std::vector<Transpose>& by_key) {
    const int64_t num_kv = x_.B * x_.Hkv;
    const int64_t wave = wave_of(num_kv, rows_, Keys::size(*this) * columns_ * sizeof(T));
    const Keys keys(*this, wave * columns_);
    for (int64_t first = 0; first < num_kv; first += wave) {
      const int64_t count = std::min(wave, num_kv - first);
      Gradients sums(x_, dq_, dk_, dv_, first, count, passes_.size() == 1);
      for (size_t i = 0; i < passes_.size(); ++i) {
        run_wave(passes_[i], by_key[i], i, first, count, keys, sums);
      }
      sums.finish();
    }
  }

 private:
  // Key tiles packed as operands: K and V in rows, K^T.
  struct Keys {
    static int64_t size(const Backward& f) {
      return f.x_.block * (2 * f.width_ + f.value_width_);
    }
    Keys(const Backward& f, int64_t tiles)
        : k(tiles * f.x_.block * f.width_),
          kt(tiles * f.x_.block * f.width_),
          v(tiles * f.x_.block * f.value_width_) {}
    Buffer<T> k, kt, v;
  };

  struct Scratch {
    explicit Scratch(const Backward& f) {
      const int64_t queries = round_up(f.x_.block, 32), wide = std::max(f.width_, f.value_width_);
      tile = Buffer<T>(queries * wide);
      floats = Buffer<float>(2 * queries * wide);
      q = Buffer<T>(queries * f.width_);
      qt = Buffer<T>(queries * f.width_);
      dout = Buffer<T>(queries * f.value_width_);
      dout_t = Buffer<T>(queries * f.value_width_);
      lse = Buffer<float>(queries);
      delta = Buffer<float>(queries);
      scores = Buffer<float>(queries * queries);
      dscores = Buffer<float>(queries * queries);
      p = Buffer<T>(kPaired<T> ? queries * queries : 0);
      ds = Buffer<T>(kPaired<T> ? queries * queries : 0);
      ds_paired = Buffer<T>(kPaired<T> ? queries * queries : 0);
      dq = Buffer<float>(queries * wide);
      dk = Buffer<float>(queries * f.width_);
      dv = Buffer<float>(queries * f.value_width_);
      const auto& extras = f.x_.extras;
      slope = Buffer<float>(extras.softcap > 0.f ? queries * queries : 0);
      kept = Buffer<float>(extras.drops() ? queries * queries : 0);
      biases = Buffer<float>(extras.adjusts() ? 2 * queries : 0);
      dbiases = Buffer<float>(extras.adjusts() ? 2 * queries : 0);
      a = Buffer<uint32_t>(extras.drops() ? queries : 0);
      b = Buffer<uint32_t>(extras.drops() ? queries : 0);
    }
    Buffer<T> tile, q, qt, dout, dout_t, p, ds, ds_paired;
    Buffer<float> floats, lse, delta, scores, dscores, dq, dk, dv, slope, kept, biases, dbiases;
    Buffer<uint32_t> a, b;
  };

  // A pair of tiles of one head: what extras and masks of its scores go by.
  struct Pair {
    int64_t b, head, row, column;
    const uint8_t* bitmap;
    float bias;
    double* dtable;  // where the gradient of the distance table is added to, or nullptr
  };

  void run_head(const Pass& pass, int64_t number, int64_t kv, Scratch& s, const Keys& keys,
                float* dk, float* dv, const Gradients& sums) {
    const int64_t b = kv / x_.Hkv, kv_head = kv % x_.Hkv, block = x_.block;
    for (int64_t column = 0; column < pass.columns; ++column) {
      pack_key_tile(s, pass, b, kv_head, column, keys, column);
    }
    std::fill_n(dk, pass.columns * block * width_, 0.f);
    std::fill_n(dv, pass.columns * block * value_width_, 0.f);
    for (int64_t head = kv_head * x_.group; head < (kv_head + 1) * x_.group; ++head) {
      for (int64_t row = 0; row < pass.rows; ++row) {
        sweep_row(s, pass, number, b, head, row, 0, keys, 0, sums, dk, dv);
      }
    }
    for (int64_t column = 0; column < pass.columns; ++column) {
      const Tile tile = pass.key_tile(kv_head * pass.axes / x_.Hkv, column);
      add_keys(pass, b, kv_head, tile, dk + column * block * width_,
               dv + column * block * value_width_, sums);
    }
  }

  void run_wave(const Pass& pass, const Transpose& by_key, int64_t number, int64_t first,
                int64_t count, const Keys& keys, const Gradients& sums) {
    const int64_t columns = pass.columns, heads = count * x_.group;
    const auto make = [&] { return Scratch(*this); };
    share_out<Scratch>(count * columns, 4, make, [&](Scratch& s, int64_t i) {
      const int64_t kv = first + i / columns;
      pack_key_tile(s, pass, kv / x_.Hkv, kv % x_.Hkv, i % columns, keys, i);
    });
    // Rows that share a table of distances are swept one after another.
    const int64_t groups = dtable_ ? groups_ : pass.rows;
    share_out<Scratch>(heads * groups, 1, make, [&](Scratch& s, int64_t i) {
      const int64_t head = first * x_.group + i / groups, local = i / groups / x_.group;
      for (int64_t row = i % groups; row < pass.rows; row += groups) {
        sweep_row(s, pass, number, head / x_.Hq, head % x_.Hq, row, i % groups, keys,
                  local * columns, sums, nullptr, nullptr);
      }
    });
    share_out<Scratch>(count * columns, 1, make, [&](Scratch& s, int64_t i) {
      const int64_t kv = first + i / columns;
      sweep_column(s, pass, by_key, number, kv / x_.Hkv, kv % x_.Hkv, i % columns, keys, i, sums);
    });
  }

  void pack_key_tile(Scratch& s, const Pass& pass, int64_t b, int64_t kv_head, int64_t column,
                     const Keys& keys, int64_t slot) const {
    const Tile tile = pass.key_tile(kv_head * pass.axes / x_.Hkv, column);
    const int64_t rows = round_up(tile.count, 16);
    T* k = keys.k.get() + slot * x_.block * width_;
    const bool* seen = x_.extras.key_mask(b);
    T* v = keys.v.get() + slot * x_.block * value_width_;
    read_tile(x_.k, b, kv_head, tile, pass.step, rows, width_, k);
    clear_unseen(seen, tile, pass.step, width_, k);
    transpose(k, rows, width_, keys.kt.get() + slot * x_.block * width_, s.floats.get());
    read_tile(x_.v, b, kv_head, tile, pass.step, rows, value_width_, v);
    clear_unseen(seen, tile, pass.step, value_width_, v);
  }

  // Q, dO, lse and delta of a query tile. Returns the padded number of queries.
  int64_t pack_query_tile(Scratch& s, const Pass& pass, int64_t b, int64_t head, Tile tile) const {
    const int64_t queries = round_up(tile.count, kQueryUnit<T>);
    read_tile(x_.q, b, head, tile, pass.step, queries, width_, s.tile.get());
    pack(s.tile.get(), queries, width_, s.q.get());
    pack_transposed(s.tile.get(), queries, width_, s.qt.get());
    read_tile(do_, b, head, tile, pass.step, queries, value_width_, s.tile.get());
    pack(s.tile.get(), queries, value_width_, s.dout.get());
    pack_transposed(s.tile.get(), queries, value_width_, s.dout_t.get());
    for (int64_t i = 0; i < queries; ++i) {
      s.lse.get()[i] = kInf;  // exp(score - inf) = 0 where there are no keys, or no query
      s.delta.get()[i] = 0.f;
      if (i < tile.count) {
        const int64_t row = (b * x_.Hq + head) * x_.Nq + tile.start + i * pass.step;
        s.delta.get()[i] = delta_[row];
        s.lse.get()[i] = lse_[row] == -kInf ? kInf : lse_[row];
      }
    }
    return queries;
  }

  // P^T and dS^T of one pair of tiles, as left operands; dS^T also as a right one. Returns the sum
  // of dS. What is not zero of P where dropout has dropped it counts in dS alone.
  float differentiate(Scratch& s, const Pass& pass, const T* k, const T* v, Tile tile,
                      int64_t queries, const Pair& pair) const {
    const int64_t axis = pair.head * pass.axes / x_.Hq;
    const Tile key_tile = pass.key_tile(axis, pair.column);
    const int64_t keys = key_tile.count, padded = round_up(keys, 16);
    float *scores = s.scores.get(), *dscores = s.dscores.get();
    multiply(padded, queries, width_, k, width_, s.qt.get(), scores, false);
    multiply(padded, queries, value_width_, v, value_width_, s.dout_t.get(), dscores, false);
    const bool extras = x_.extras.adjusts() || x_.extras.drops();
    int64_t distance = 0;  // of the last key and the first query
    if (extras) {
      distance = pass.key_origin(axis, pair.column) + (keys - 1) * pass.step -
                 pass.query_origin(axis, pair.row);
      prepare_extras(s, pass, pair, axis, keys, queries, distance);
    }
    hide_unseen(x_.extras.key_mask(pair.b), key_tile, pass.step, scores, queries);
    if (pair.bitmap) {
      apply_mask(pair.bitmap, x_.block, keys, tile.count, scores, queries);
    }
    const float total =
        extras ? weights<true>(s, keys, queries, pair) : weights<false>(s, keys, queries, pair);
    if (pair.dtable) {
      add_distances(pair.dtable, x_.extras.radius, distance, -pass.step, keys - 1 + tile.count,
                    s.dbiases.get());
    }
    return total;
  }

  void prepare_extras(Scratch& s, const Pass& pass, const Pair& pair, int64_t axis, int64_t keys,
                      int64_t queries, int64_t distance) const {
    const auto& extras = x_.extras;
    const float* table = extras.table(pair.b, pair.head);
    if (table) {
      read_distances(table, extras.radius, distance, -pass.step, keys - 1 + queries,
                     s.biases.get());
      std::fill_n(s.dbiases.get(), keys - 1 + queries, 0.f);
    }
    for (int64_t j = 0; j < keys && extras.adjusts(); ++j) {
      adjust(s.scores.get() + j * queries, queries, x_.scale, extras.softcap,
             table ? s.biases.get() + keys - 1 - j : nullptr,
             extras.softcap > 0.f ? s.slope.get() + j * queries : nullptr);
    }
    if (extras.drops()) {
      const int64_t seed = extras.seeds[pair.b * extras.streams + pass.stream(axis, pair.row)];
      row_words(seed, pair.head, pass.branch, pass.query_origin(axis, pair.row), pass.step, queries,
                s.a.get(), s.b.get());
      keep_factors(
          s.kept.get(), keys, queries,
          {s.a.get(), s.b.get(), pass.key_origin(axis, pair.column), pass.step, extras.threshold},
          extras.factor);
    }
  }

  // Scores and dP to P and dS, as operands. Returns the sum of dS.
  template <bool kExtras>
  float weights(Scratch& s, int64_t keys, int64_t queries, const Pair& pair) const {
    constexpr int W = kPaired<T> ? 2 : 1;
    float *scores = s.scores.get(), *dscores = s.dscores.get();
    const bool capped = kExtras && x_.extras.softcap > 0.f, drops = kExtras && x_.extras.drops();
    const Vec scale(x_.rest_of_scale()), shift(pair.bias);
    Vec total(0.f);
    for (int64_t j = 0; j < round_up(keys, 16); j += 2) {
      for (int64_t c = 0; c < queries; c += W * kLanes) {
        Vec p[2][W], ds[2][W];
        for (int row = 0; row < 2; ++row) {
          for (int w = 0; w < W; ++w) {
            const int64_t i = c + w * kLanes, at = (j + row) * queries + i;
            p[row][w] = ds[row][w] = Vec(0.f);
            if (j + row < keys) {
              Vec dp = Vec::loadu(dscores + at);
              // At most 1, but for the rounding of a large lse.
              const Vec x = at::vec::fmadd(Vec::loadu(scores + at), scale,
                                           shift - Vec::loadu(s.lse.get() + i));
              p[row][w] = exp_of(at::vec::clamp_max(x, Vec(44.f)));
              if (drops) {
                dp = dp * Vec::loadu(s.kept.get() + at);
              }
              ds[row][w] = p[row][w] * (dp - Vec::loadu(s.delta.get() + i));
              total = total + ds[row][w];
              if (kExtras && pair.dtable) {
                float* of_distance = s.dbiases.get() + keys - 1 - (j + row) + i;
                (Vec::loadu(of_distance) + ds[row][w]).store(of_distance);
              }
              if (capped) {
                ds[row][w] = ds[row][w] * Vec::loadu(s.slope.get() + at);
              }
              if (drops) {
                p[row][w] = p[row][w] * Vec::loadu(s.kept.get() + at);
              }
            }
          }
        }
        for (int row = 0; row < 2; ++row) {
          const int64_t at = (j + row) * queries + c;
          if constexpr (kPaired<T>) {
            at::vec::convert_float_bfloat16(p[row][0], p[row][1]).store(s.p.get() + at);
            at::vec::convert_float_bfloat16(ds[row][0], ds[row][1]).store(s.ds.get() + at);
          } else {
            p[row][0].store(scores + at);
            ds[row][0].store(dscores + at);
          }
        }
        if constexpr (kPaired<T>) {
          for (int w = 0; w < W; ++w) {
            store_pair(s.ds_paired.get() + j * queries + 2 * (c + w * kLanes), ds[0][w], ds[1][w]);
          }
        }
      }
    }
    return sum_of_lanes(total);
  }

  std::tuple<const T*, const T*, const T*> operands(const Scratch& s) const {
    if constexpr (kPaired<T>) {
      return {s.p.get(), s.ds.get(), s.ds_paired.get()};
    } else {
      return {s.scores.get(), s.dscores.get(), s.dscores.get()};
    }
  }

  void add_to_keys(Scratch& s, int64_t padded, int64_t queries, float* dk, float* dv) const {
    const auto [p, ds, unused] = operands(s);
    multiply(padded, value_width_, queries, p, queries, s.dout.get(), dv, true);
    multiply(padded, width_, queries, ds, queries, s.q.get(), dk, true);
  }

  // dQ (and the bias's gradient) of a query tile; with `dk` and `dv` also its share of those.
  void sweep_row(Scratch& s, const Pass& pass, int64_t number, int64_t b, int64_t head, int64_t row,
                 int64_t row_group, const Keys& keys, int64_t first, const Gradients& sums,
                 float* dk, float* dv) {
    const int64_t axis = head * pass.axes / x_.Hq, table = pass.table(b, head, x_.Hq),
                  block = x_.block;
    const Tile tile = pass.query_tile(axis, row);
    const int64_t begin = pass.row_ptr(table)[row], end = pass.row_ptr(table)[row + 1];
    if (begin == end || tile.count == 0) {
      return;
    }
    const int64_t queries = pack_query_tile(s, pass, b, head, tile);
    double* dtable = !dtable_ ? nullptr
                              : dtable_ + ((b * x_.Hq + head) * groups_ + row_group) *
                                              (2 * x_.extras.radius + 1);
    std::fill_n(s.dq.get(), queries * width_, 0.f);
    for (int64_t entry = begin; entry < end; ++entry) {
      const int64_t column = pass.keys(table)[entry], slot = first + column;
      const Tile key_tile = pass.key_tile(axis, column);
      const int64_t padded = round_up(key_tile.count, 16);
      if (key_tile.count == 0 || !x_.extras.sees(b, key_tile, pass.step)) {
        continue;
      }
      const Pair pair{b,
                      head,
                      row,
                      column,
                      bitmap_of(pass, number, table, entry),
                      x_.bias_at(number, b, head, entry),
                      dtable};
      const float sum =
          differentiate(s, pass, keys.k.get() + slot * block * width_,
                        keys.v.get() + slot * block * value_width_, tile, queries, pair);
      if (dbias_) {
        dbias_[x_.bias_of(number, b, head) + entry] = sum;
      }
      multiply(width_, queries, padded, keys.kt.get() + slot * block * width_, padded,
               std::get<2>(operands(s)), s.dq.get(), true);
      if (dk) {
        add_to_keys(s, padded, queries, dk + column * block * width_,
                    dv + column * block * value_width_);
      }
    }
    transpose(s.dq.get(), width_, queries, s.floats.get());
    for (int64_t i = 0; i < tile.count; ++i) {
      add_to(sums.q, (b * x_.Hq + head) * x_.Nq + tile.start + i * pass.step,
             s.floats.get() + i * width_, x_.scale);
    }
  }

  // dK and dV of a key tile.
  void sweep_column(Scratch& s, const Pass& pass, const Transpose& by_key, int64_t number,
                    int64_t b, int64_t kv_head, int64_t column, const Keys& keys, int64_t slot,
                    const Gradients& sums) {
    const int64_t axis = kv_head * pass.axes / x_.Hkv, block = x_.block;
    const Tile keys_of = pass.key_tile(axis, column);
    if (keys_of.count == 0 || !x_.extras.sees(b, keys_of, pass.step)) {
      return;
    }
    const int64_t padded = round_up(keys_of.count, 16);
    std::fill_n(s.dk.get(), padded * width_, 0.f);
    std::fill_n(s.dv.get(), padded * value_width_, 0.f);
    for (int64_t head = kv_head * x_.group; head < (kv_head + 1) * x_.group; ++head) {
      const int64_t table = pass.table(b, head, x_.Hq);
      const int32_t* row_ptr = by_key.row_ptr + table * (pass.columns + 1);
      for (int64_t i = row_ptr[column]; i < row_ptr[column + 1]; ++i) {
        const int64_t row = by_key.query_tile[table * pass.entries + i];
        const Tile tile = pass.query_tile(axis, row);
        if (tile.count == 0) {
          continue;
        }
        const int64_t entry = by_key.entry[table * pass.entries + i];
        const int64_t queries = pack_query_tile(s, pass, b, head, tile);
        const Pair pair{b,
                        head,
                        row,
                        column,
                        bitmap_of(pass, number, table, entry),
                        x_.bias_at(number, b, head, entry),
                        nullptr};
        differentiate(s, pass, keys.k.get() + slot * block * width_,
                      keys.v.get() + slot * block * value_width_, tile, queries, pair);
        add_to_keys(s, padded, queries, s.dk.get(), s.dv.get());
      }
    }
    add_keys(pass, b, kv_head, keys_of, s.dk.get(), s.dv.get(), sums);
  }

  void add_keys(const Pass& pass, int64_t b, int64_t kv_head, Tile tile, const float* dk,
                const float* dv, const Gradients& sums) {
    for (int64_t i = 0; i < tile.count; ++i) {
      const int64_t row = (b * x_.Hkv + kv_head) * x_.Nk + tile.start + i * pass.step;
      add_to(sums.k, row, dk + i * width_, x_.scale);
      add_to(sums.v, row, dv + i * value_width_, 1.f);
    }
  }

  const uint8_t* bitmap_of(const Pass& pass, int64_t number, int64_t table, int64_t entry) const {
    const int64_t bitmap = pass.bitmap_numbers(table)[entry];
    return bitmap < 0 ? nullptr : bitmaps_[number].get() + bitmap * (x_.block * x_.block / 8);
  }

  const Problem& x_;
  const std::vector<Pass>& passes_;
  Source do_;
  const float *lse_, *delta_;
  Tensor dq_, dk_, dv_;
  float* dbias_;
  double* dtable_;  // [B, Hq, groups, 2R + 1]
  int64_t groups_;
  int64_t width_, value_width_, columns_ = 0, rows_ = 0;
  std::vector<Buffer<uint8_t>> bitmaps_;  // of each pass
};

}  // namespace sparsering::cpu
