// Forward pass in a loop over key tiles. The softmax state and sums of all rows of a chunk (some
// query tiles) are in memory, because the loop returns to a row for each key tile that it visits.

#pragma once

#include <optional>

#include "../few.h"
#include "../machine/threads.h"
#include "../results.h"
#include "visits.h"

namespace sparsering::cpu {

// Right operands of a key tile: K^T, and V if needed. Scores are [rows, keys] here, because it is
// cheaper to transpose one key tile than the many rows that visit it.
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
    v = pack(rows, padded, x_.Dv, v_.get());
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
  int64_t padded;  // number of keys, padded
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
      part = Buffer<float>(walk.rows * x.Dv);
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
    }
    RowKeys<T> keys;
    Gathered tile;
    Visits visits;
    Buffer<T> gathered, weights, q;
    Buffer<float> scores, part, bias, factor, sums, highest, total;
  };

  WalkForward(const Problem& problem, const Walk& walk, int64_t number)
      : x_(problem), walk_(walk), number_(number) {}

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
    for (int64_t column = 0; column < pass.columns; ++column) {
      if (s.visits.any(column) && s.keys.read_keys(pass, chunk.batch, kv_head, column)) {
        s.keys.read_values(chunk.batch, kv_head);
        s.visits.for_tiles(column, s.tile, [&] { add_tile(s, chunk); });
      }
    }
    put(s, chunk, fresh, out);
  }

 private:
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
    multiply(round_up(count, kLanes), Dv, s.keys.padded, weights, s.keys.padded, s.keys.v,
             s.part.get(), false);
    for (int64_t i = 0; i < s.tile.size; ++i) {
      for (int64_t r = i * heads; r < (i + 1) * heads; ++r) {
        float* __restrict sum = s.sums.get() + ((s.tile.token[i] - i) * heads + r) * Dv;
        const float* __restrict part = s.part.get() + r * Dv;
        const float factor = s.factor.get()[r];
        for (int64_t d = 0; d < Dv; ++d) {
          sum[d] = sum[d] * factor + part[d];
        }
      }
    }
  }

  // Runs a softmax step of up to kLanes rows from `first` on, as softmax_step does for queries.
  void weigh(Scratch& s, int64_t heads, int64_t first, int64_t count, T* weights) const {
    const int64_t padded = s.keys.padded;
    const float* scores = s.scores.get() + first * padded;
    const Vec scale(x_.scale);
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
    const Vec bias = Vec::loadu(s.bias.get() + first), old = Vec::loadu(highest);
    const Vec top = at::vec::maximum(old, at::vec::fmadd(highest_of_lanes(of_rows), scale, bias));
    const Vec base = Vec::blendv(top.neg(), Vec(0.f), top == Vec(-kInf));
    const Vec factor = exp_of(old + base);
    float bases[kLanes];
    base.store(bases);
    for (int64_t r = 0; r < kLanes; ++r) {
      const Vec bias_of_row(s.bias.get()[first + r]), base_of_row(bases[r]);
      const float* row = scores + r * padded;
      const auto weight = [&](int64_t j) {
        return exp_of(at::vec::fmadd(Vec::loadu(row + j), scale, bias_of_row) + base_of_row);
      };
      Vec sum(0.f);
      if constexpr (kPaired<T>) {
        for (int64_t j = 0; j < padded; j += 2 * kLanes) {
          const Vec a = weight(j), b = weight(j + kLanes);
          sum = sum + (a + b);
          at::vec::convert_float_bfloat16(a, b).store(weights + r * padded + j);
        }
      } else {
        for (int64_t j = 0; j < padded; j += kLanes) {
          const Vec a = weight(j);
          sum = sum + a;
          a.store(weights + r * padded + j);
        }
      }
      of_rows[r] = sum;
    }
    factor.store(s.factor.get() + first);
    top.store(highest);
    at::vec::fmadd(Vec::loadu(total), factor, sums_of_lanes(of_rows)).store(total);
    for (int64_t r = 0; r < count; ++r) {
      s.highest.get()[place(r)] = highest[r];
      s.total.get()[place(r)] = total[r];
    }
  }

  void put(Scratch& s, const Chunk& chunk, bool fresh, Output& out) const {
    const int64_t heads = chunk.heads;
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      const Tile tile = walk_.pass.query_tile(walk_.axis(chunk.head), row);
      const int64_t first = s.visits.first_token(row - chunk.begin);
      for (int64_t r = 0; r < tile.count * heads; ++r) {
        const int64_t at = first * heads + r, i = r / heads, head = chunk.head + r % heads;
        float factor, lse, *sum = s.sums.get() + at * x_.Dv;
        finish(s.highest.get()[at], s.total.get()[at], factor, lse);
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
};

}  // namespace sparsering::cpu
