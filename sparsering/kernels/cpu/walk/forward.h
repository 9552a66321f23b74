// Forward pass in a loop over key tiles. The softmax state and the sums of all rows of a chunk
// (some query tiles) stay in memory, because the loop returns to a row for each key tile that the
// row visits.

#pragma once

#include <optional>

#include "../few.h"
#include "../machine/threads.h"
#include "../results.h"
#include "../stored.h"
#include "visits.h"

namespace sparsering::cpu {

inline const float* pack_values(const float* from, int64_t, int64_t, float*) {
  return from;
}
// Packs values in pairs of rows, with the first row in the high half, as `transpose` does.
inline const BFloat16* pack_values(const BFloat16* from, int64_t rows, int64_t width,
                                   BFloat16* to) {
  return pack_pairs<true>(from, rows, width, to);
}

// The right operands of a key tile: K^T, and V if needed. Scores are [rows, keys] here, because
// transposing one key tile is cheaper than transposing the many rows that visit it.
template <typename T>
class RowKeys {
 public:
  explicit RowKeys(const Problem& problem)
      : x_(problem), width_(round_up(std::max<int64_t>(problem.D, 1), 2)) {
    const int64_t keys = round_up(x_.block, 32);
    tile_ = Buffer<T>(keys * std::max(width_, x_.Dv));
    kt_ = Buffer<T>(keys * width_);
    v_ = Buffer<T>(keys * x_.Dv);
  }

  int64_t width() const {
    return width_;
  }

  // Reads a key tile. Returns false if it has no unmasked key.
  bool read_keys(const Pass& pass, int64_t b, int64_t kv_head, int64_t column) {
    tile = pass.key_tile(kv_head * pass.axes / x_.Hkv, column);
    padded = round_up(tile.count, kQueryUnit<T>);
    step_ = pass.step;
    seen_ = x_.extras.key_mask(b);
    if (tile.count == 0 || !x_.extras.sees(b, tile, step_)) {
      return false;
    }
    const T* k = tile_rows(x_.k, b, kv_head, tile, step_, padded, width_, tile_.get());
    pack_transposed(k, padded, width_, kt_.get());
    return true;
  }
  void read_values(int64_t b, int64_t kv_head) {
    T* to = kPaired<T> ? tile_.get() : v_.get();
    const T* rows = to;
    if (seen_) {
      read_tile(x_.v, b, kv_head, tile, step_, padded, x_.Dv, to);
      clear_unseen(seen_, tile, step_, x_.Dv, to);
    } else {
      rows = tile_rows(x_.v, b, kv_head, tile, step_, padded, x_.Dv, to);
    }
    v = pack_values(rows, padded, x_.Dv, v_.get());
  }

  // Computes the products of a gathered tile's rows with the keys; -inf where there is no pair.
  void score(const Walk& walk, const Chunk& chunk, const Gathered& rows, const T* q,
             float* scores) const {
    const int64_t count = rows.size * chunk.heads;
    multiply(round_up(count, kLanes), padded, width_, q, width_, kt_.get(), scores, false);
    for (int64_t r = 0; tile.count < padded && r < count; ++r) {
      std::fill(scores + r * padded + tile.count, scores + (r + 1) * padded, -kInf);
    }
    for (int64_t j = 0; seen_ && j < tile.count; ++j) {
      for (int64_t r = 0; !seen_[tile.start + j * step_] && r < count; ++r) {
        scores[r * padded + j] = -kInf;
      }
    }
    const int32_t* bitmaps =
        walk.pass.bitmap_numbers(walk.pass.table(chunk.batch, chunk.head, x_.Hq));
    for (int64_t i = 0; i < rows.size; ++i) {
      if (const int64_t number = bitmaps[rows.entry[i]]; number >= 0) {
        const uint8_t* bits = walk.pass.bits_of_query(number, rows.place[i]);
        for (int64_t r = i * chunk.heads; r < (i + 1) * chunk.heads; ++r) {
          keep_bits(bits, tile.count, scores + r * padded);
        }
      }
    }
  }

  Tile tile;
  int64_t padded;  // padded number of keys
  const T* v;

 private:
  const Problem& x_;
  const int64_t width_;
  int64_t step_ = 1;
  const bool* seen_ = nullptr;
  Buffer<T> tile_, kt_, v_;
};

// Reads the block bias of each row of a gathered tile, if there is a bias.
inline void read_biases(const Problem& x, const Chunk& chunk, const Gathered& tile, int64_t number,
                        float* to) {
  for (int64_t h = 0; x.bias && h < chunk.heads; ++h) {
    const float* of_head = x.bias + x.bias_of(number, chunk.batch, chunk.head + h);
    for (int64_t i = 0; i < tile.size; ++i) {
      to[i * chunk.heads + h] = of_head[tile.entry[i]];
    }
  }
}

template <typename T>
class WalkForward {
 public:
  struct Scratch {
    Scratch(const Problem& x, const Walk& walk) : keys(x), tile(walk) {
      const int64_t width = keys.width(), most_keys = round_up(x.block, 32);
      gathered = Buffer<T>::zeros(walk.rows * width);
      scores = Buffer<float>(walk.rows * most_keys);
      weights = Buffer<T>(kPaired<T> ? walk.rows * most_keys : 0);
      part = Buffer<float>::zeros(walk.rows * x.Dv);
      bias = Buffer<float>::zeros(walk.rows);
      factor = Buffer<float>::zeros(walk.rows);
    }
    // Allocates memory for a chunk (see visits.h) of `rows` query rows.
    void reserve(const Problem& x, const Walk& walk, int64_t rows) {
      const int64_t room = rows + walk.rows;
      q.at_least(room * keys.width());
      sums.at_least(rows * x.Dv);
      highest.at_least(room);
      total.at_least(room);
      if (walk.pass.key_segments) {
        for (Earlier& of : earlier) {
          of.values.at_least(rows * x.Dv);
          of.highest.at_least(rows);
          of.total.at_least(rows);
        }
        segment.at_least(rows);
      }
    }
    RowKeys<T> keys;
    Gathered tile;
    Visits visits;
    Buffer<T> gathered, weights, q;
    Buffer<float> scores, part, bias, factor, sums, highest, total;
    struct Earlier {
      Buffer<float> highest, total, values;
    };
    Earlier earlier[2];       // sums of earlier segments in a row's group, and of earlier groups
    Buffer<int32_t> segment;  // segment of each row's latest key tile
  };

  WalkForward(const Problem& problem, const Walk& walk, int64_t number)
      : x_(problem), walk_(walk), number_(number), units_(problem.scale) {}

  void run(Scratch& s, const Chunk& chunk, bool fresh, Output& out) const {
    const Pass& pass = walk_.pass;
    const int64_t kv_head = chunk.head / x_.group, width = s.keys.width();
    s.visits.sort(walk_, chunk);
    const int64_t rows = s.visits.tokens() * chunk.heads, room = rows + walk_.rows;
    s.reserve(x_, walk_, rows);
    T* q = s.q.get();
    read_chunk(walk_, chunk, s.visits, x_.q, width, q);
    std::fill_n(q + rows * width, walk_.rows * width, T(0));
    std::fill_n(s.sums.get(), rows * x_.Dv, 0.f);
    std::fill_n(s.highest.get(), room, -kInf);
    std::fill_n(s.total.get(), room, 0.f);
    if (pass.key_segments) {
      for (const auto& of : s.earlier) {
        clear(rows, of.highest.get(), of.total.get(), of.values.get());
      }
      std::fill_n(s.segment.get(), rows, -1);
    }
    for (int64_t column = 0; column < pass.columns; ++column) {
      if (s.visits.any(column) && s.keys.read_keys(pass, chunk.batch, kv_head, column)) {
        s.keys.read_values(chunk.batch, kv_head);
        const int64_t segment = pass.key_segment(walk_.axis(chunk.head), column);
        s.visits.for_tiles(column, s.tile, [&] {
          end_segments(s, chunk, segment);
          add_tile(s, chunk);
        });
      }
    }
    put(s, chunk, fresh, out);
  }

 private:
  // Adds a row's sums to those of earlier segments if its next key tile is in another segment.
  void end_segments(Scratch& s, const Chunk& chunk, int64_t segment) const {
    for (int64_t i = 0; walk_.pass.key_segments && i < s.tile.size; ++i) {
      for (int64_t r = 0; r < chunk.heads; ++r) {
        const int64_t at = s.tile.token[i] * chunk.heads + r;
        if (s.segment.get()[at] >= 0 && s.segment.get()[at] != segment) {
          end_segment(s, at, s.segment.get()[at] / Pass::kGroup != segment / Pass::kGroup);
        }
        s.segment.get()[at] = static_cast<int32_t>(segment);
      }
    }
  }
  void end_segment(Scratch& s, int64_t row, bool ends_group) const {
    move(s.highest, s.total, s.sums, s.earlier[0], row);
    if (ends_group) {
      auto& group = s.earlier[0];
      move(group.highest, group.total, group.values, s.earlier[1], row);
    }
  }
  // Adds the sums of a row to the earlier sums `to`, and clears them.
  void move(Buffer<float>& highest, Buffer<float>& total, Buffer<float>& values,
            typename Scratch::Earlier& to, int64_t row) const {
    float* of_row = values.get() + row * x_.Dv;
    add_segment(to.highest.get()[row], to.total.get()[row], to.values.get() + row * x_.Dv,
                highest.get()[row], total.get()[row], of_row, x_.Dv);
    clear(1, highest.get() + row, total.get() + row, of_row);
  }
  void clear(int64_t rows, float* highest, float* total, float* values) const {
    std::fill_n(highest, rows, -kInf);
    std::fill_n(total, rows, 0.f);
    std::fill_n(values, rows * x_.Dv, 0.f);
  }

  void add_tile(Scratch& s, const Chunk& chunk) const {
    const int64_t heads = chunk.heads, count = s.tile.size * heads, Dv = x_.Dv;
    const T* q = gather(s.tile, s.q.get(), heads * s.keys.width(), s.gathered.get());
    s.keys.score(walk_, chunk, s.tile, q, s.scores.get());
    read_biases(x_, chunk, s.tile, number_, s.bias.get());
    T* weights;
    if constexpr (kPaired<T>) {
      weights = s.weights.get();
    } else {
      weights = s.scores.get();
    }
    for (int64_t first = 0; first < count; first += kLanes) {
      weigh(s, heads, first, std::min(kLanes, count - first), weights + first * s.keys.padded);
    }
    const auto for_sums = [&](const auto& f) {  // f gets each row's place in `sums` and in the tile
      for (int64_t i = 0; i < s.tile.size; ++i) {
        for (int64_t r = i * heads; r < (i + 1) * heads; ++r) {
          f(s.sums.get() + ((s.tile.token[i] - i) * heads + r) * Dv, s.part.get() + r * Dv, r);
        }
      }
    };
    for_sums([&](const float* __restrict sum, float* __restrict part, int64_t r) {
      const float factor = s.factor.get()[r];
      for (int64_t d = 0; d < Dv; ++d) {
        part[d] = sum[d] * factor;
      }
    });
    multiply(round_up(count, kLanes), Dv, s.keys.padded, weights, s.keys.padded, s.keys.v,
             s.part.get(), true);
    for_sums([&](float* sum, const float* part, int64_t) { std::copy_n(part, Dv, sum); });
  }

  // Runs a softmax step for up to kLanes rows from `first` on, like softmax_step for query tiles.
  void weigh(Scratch& s, int64_t heads, int64_t first, int64_t count, T* weights) const {
    const int64_t padded = s.keys.padded;
    const float* scores = s.scores.get() + first * padded;
    const Vec scale(units_.scale);
    float highest[kLanes], total[kLanes];
    const auto place = [&](int64_t r) {
      return s.tile.token[(first + r) / heads] * heads + (first + r) % heads;
    };
    std::fill_n(highest, kLanes, -kInf);
    std::fill_n(total, kLanes, 0.f);
    for (int64_t r = 0; r < count; ++r) {
      highest[r] = s.highest.get()[place(r)];
      total[r] = s.total.get()[place(r)];
    }
    Vec of_rows[kLanes];
#pragma GCC unroll 16
    for (int64_t r = 0; r < kLanes; ++r) {
      of_rows[r] = Vec::loadu(scores + r * padded);
    }
    for (int64_t j = kLanes; j < padded; j += kLanes) {
#pragma GCC unroll 16
      for (int64_t r = 0; r < kLanes; ++r) {
        of_rows[r] = at::vec::maximum(of_rows[r], Vec::loadu(scores + r * padded + j));
      }
    }
    const Vec bias = Vec::loadu(s.bias.get() + first) * Vec(kLog2E), old = Vec::loadu(highest);
    const Vec most = at::vec::fmadd(highest_of_lanes(of_rows), scale, bias).ceil();
    const Vec top = at::vec::maximum(old, most);
    const Vec least = Vec::blendv(top, Vec(0.f), top == Vec(-kInf));
    const Vec factor = power_of_two(old - least);
    float leasts[kLanes], biases[kLanes];
    least.store(leasts), bias.store(biases);
    Vec sum = Vec::loadu(total) * factor;  // adds keys in order, as for query tiles
    for (int64_t j = 0; j < padded; j += kLanes) {
      float square[kLanes * kLanes];
#pragma GCC unroll 16
      for (int64_t r = 0; r < kLanes; ++r) {
        Vec weight[1] = {
            at::vec::fmadd(Vec::loadu(scores + r * padded + j), scale, Vec(biases[r]))};
        powers_below(weight, {Vec(leasts[r])});
        store_weights(weight[0], weights + r * padded + j);
        of_rows[r] = weight[0];
      }
      transpose_square(of_rows, square, kLanes);
      for (int64_t i = 0; i < kLanes; ++i) {
        sum = sum + Vec::loadu(square + i * kLanes);
      }
    }
    factor.store(s.factor.get() + first);
    top.store(highest);
    sum.store(total);
    for (int64_t r = 0; r < count; ++r) {
      s.highest.get()[place(r)] = highest[r];
      s.total.get()[place(r)] = total[r];
    }
  }

  static void store_weights(Vec x, float* to) {
    x.store(to);
  }
  // Stores weights in bfloat16, with the first of two keys in the high half, as values have it.
  static void store_weights(Vec x, BFloat16* to) {
    float lanes[kLanes];
    x.store(lanes);
    for (int64_t j = 0; j < kLanes; j += 2) {
      to[j] = lanes[j + 1], to[j + 1] = lanes[j];
    }
  }

  void put(Scratch& s, const Chunk& chunk, bool fresh, Output& out) const {
    const int64_t heads = chunk.heads;
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      const Tile tile = walk_.pass.query_tile(walk_.axis(chunk.head), row);
      const int64_t first = s.visits.first_token(row - chunk.begin);
      for (int64_t r = 0; r < tile.count * heads; ++r) {
        const int64_t at = first * heads + r, i = r / heads, head = chunk.head + r % heads;
        float factor, lse, *sum = s.sums.get() + at * x_.Dv, highest = s.highest.get()[at],
                           total = s.total.get()[at];
        if (walk_.pass.key_segments) {
          end_segment(s, at, true);
          sum = s.earlier[1].values.get() + at * x_.Dv;
          highest = s.earlier[1].highest.get()[at], total = s.earlier[1].total.get()[at];
        }
        units_.finish(highest, total, factor, lse);
        for (int64_t d = 0; d < x_.Dv; ++d) {
          sum[d] *= factor;
        }
        out.put((chunk.batch * x_.Hq + head) * x_.Nq + tile.start + i * walk_.pass.step, 1, 1, sum,
                &lse, fresh);
      }
    }
  }

  const Problem& x_;
  const Walk& walk_;
  const int64_t number_;
  const Units units_;
};

}  // namespace sparsering::cpu
