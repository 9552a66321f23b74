// Backward pass in a loop over key tiles. It gathers the query rows that visit a key tile, adds
// their contribution to dK and dV of the tile, and the tile's contribution to dQ of the rows.

#pragma once

#include "../machine/threads.h"
#include "../pairs.h"
#include "../results.h"
#include "visits.h"

namespace sparsering::cpu {

template <typename T>
class WalkBackward {
 public:
  // Tensors with a row per query, and the gradient of the block bias, which may be nullptr.
  struct Rows {
    const Source& dout;
    const float *lse, *delta;
    float* dbias;
  };

  struct Scratch {
    Scratch(const Problem& x, const Pairs<T>& pairs, const Walk& walk)
        : tile(walk), width(pairs.width()), value_width(pairs.value_width()) {
      const int64_t keys = round_up(x.block, 32), wide = std::max(width, value_width);
      spare = Buffer<T>(kPaired<T> ? keys * wide : 0);
      k = Buffer<T>(keys * width);
      kt = Buffer<T>(keys * width);
      v = Buffer<T>(keys * value_width);
      gathered = Buffer<T>(kPaired<T> ? walk.rows * wide : 0);
      q = Buffer<T>(walk.rows * width);
      qt = Buffer<T>(walk.rows * width);
      dout = Buffer<T>(walk.rows * value_width);
      dout_t = Buffer<T>(walk.rows * value_width);
      scores = Buffer<float>(walk.rows * keys);
      dscores = Buffer<float>(walk.rows * keys);
      for (Buffer<T>* operand : {&p, &ds, &ds_paired}) {
        *operand = Buffer<T>(kPaired<T> ? walk.rows * keys : 0);
      }
      dq_t = Buffer<float>(walk.rows * width);
      dq = Buffer<float>::zeros(walk.rows * width);
      lse = Buffer<float>(walk.rows);
      delta = Buffer<float>(walk.rows);
      totals = Buffer<float>(walk.rows);
    }
    // Allocates memory for a chunk (see visits.h) of `rows` query rows.
    void reserve(int64_t rows, bool segments) {
      all_q.at_least(rows * width);
      all_dout.at_least(rows * value_width);
      all_lse.at_least(rows);
      all_delta.at_least(rows);
      all_dq.at_least(rows * width);
      group.at_least(segments ? rows * width : 0);
      groups.at_least(segments ? rows * width : 0);
      segment.at_least(rows);
    }
    Gathered tile;
    int64_t width, value_width;
    Visits visits;
    Buffer<T> spare, k, kt, v, gathered, q, qt, dout, dout_t, p, ds, ds_paired;
    Buffer<float> scores, dscores, dq_t, dq, lse, delta, totals;
    // Q and dO of all rows of a chunk.
    Buffer<T> all_q, all_dout;
    Buffer<float> all_lse, all_delta, all_dq;
    // dQ of earlier segments in a token's group, and of earlier groups
    Buffer<float> group, groups;
    Buffer<int32_t> segment;  // segment of each token's latest key tile
  };

  WalkBackward(const Problem& problem, const Pairs<T>& pairs, const Pass& pass, int64_t number,
               const Rows& rows)
      : x_(problem),
        walk_(problem, pass),
        pairs_(pairs),
        number_(number),
        rows_(rows),
        width_(pairs.width()),
        value_width_(pairs.value_width()) {}

  // Computes the gradients of a kv head; `dk` and `dv` have room for all of its key tiles.
  void run_head(int64_t kv, float* dk, float* dv, const Gradients& sums) const {
    const std::vector<Chunk> chunks = walk_.chunks(kv, 1);
    add_chunks(chunks, 0, chunks.size(), dk, dv, sums);
    for (int64_t column = 0; column < walk_.pass.columns; ++column) {
      add_key_tile(x_, walk_.pass, kv, column, dk + column * x_.block * width_, width_,
                   dv + column * x_.block * value_width_, value_width_, sums);
    }
  }

  // Computes some kv heads. A head's chunks of query tiles form groups, and each group sums dK and
  // dV by itself, so that threads can share a head. The number of groups depends on memory, not on
  // threads.
  void run_wave(int64_t first, int64_t count, const Gradients& sums) const {
    const Groups of(*this, count, walk_.chunks(0, 1).size());
    for (int64_t kv = first; kv < first + count; kv += of.heads) {
      run_groups(kv, std::min(of.heads, first + count - kv), of.groups, of.size, of.parts.get(),
                 sums);
    }
  }

  // Returns the bytes that `run_wave` needs for a plan's pass; `scratch` returns what each thread
  // needs in addition.
  int64_t workspace(int64_t count, double entries) const {
    return bytes_of([&] { Groups(*this, count, walk_.num_chunks(entries)); });
  }
  int64_t scratch(double entries) const {
    return bytes_of([&] {
      Scratch(x_, pairs_, walk_).reserve(walk_.most_rows(entries), walk_.pass.key_segments);
    });
  }

 private:
  static constexpr int64_t kRoom = 1 << 26;  // more than two groups have at most so many values

  // Memory for dK and dV of `heads` kv heads at a time, with `size` values for each of `groups`
  // groups.
  struct Groups {
    Groups(const WalkBackward& f, int64_t count, int64_t num_chunks)
        : size(f.walk_.pass.columns * f.x_.block * (f.width_ + f.value_width_)) {
      const int64_t room = kRoom / std::max<int64_t>(1, size);
      const int64_t chunks = std::max<int64_t>(1, num_chunks);
      groups = std::clamp<int64_t>(std::min(room, chunks), std::min<int64_t>(2, chunks), 8);
      heads = std::clamp<int64_t>(room / groups, 1, count);
      parts = Buffer<float>(heads * groups * size);
    }
    int64_t size, groups, heads;
    Buffer<float> parts;
  };

  void run_groups(int64_t first, int64_t count, int64_t groups, int64_t size, float* parts,
                  const Gradients& sums) const {
    const Pass& pass = walk_.pass;
    const int64_t dk_tile = x_.block * width_, dv_tile = x_.block * value_width_;
    std::vector<std::vector<Chunk>> chunks;
    for (int64_t kv = first; kv < first + count; ++kv) {
      chunks.push_back(walk_.chunks(kv, 1));
    }
    const auto nothing = [] { return 0; };
    share_out<int>(count * groups, 1, nothing, [&](int, int64_t i) {
      const std::vector<Chunk>& of_head = chunks[i / groups];
      const int64_t group = i % groups, n = of_head.size();
      float* part = parts + i * size;
      add_chunks(of_head, group * n / groups, (group + 1) * n / groups, part,
                 part + pass.columns * dk_tile, sums);
    });
    share_out<int>(count * pass.columns, 4, nothing, [&](int, int64_t i) {
      const int64_t head = i / pass.columns, column = i % pass.columns;
      float* part = parts + head * groups * size;
      float *dk = part + column * dk_tile, *dv = part + pass.columns * dk_tile + column * dv_tile;
      for (int64_t group = 1; group < groups; ++group) {
        add(dk + group * size, dk_tile, dk);
        add(dv + group * size, dv_tile, dv);
      }
      add_key_tile(x_, pass, first + head, column, dk, width_, dv, value_width_, sums);
    });
  }

  static void add(const float* __restrict from, int64_t size, float* __restrict to) {
    for (int64_t d = 0; d < size; ++d) {
      to[d] += from[d];
    }
  }

  // Computes dQ of some chunks of query tiles of a kv head, and their part of dK and dV by key
  // tile.
  void add_chunks(const std::vector<Chunk>& chunks, int64_t begin, int64_t end, float* dk,
                  float* dv, const Gradients& sums) const {
    Scratch s(x_, pairs_, walk_);
    std::fill_n(dk, walk_.pass.columns * x_.block * width_, 0.f);
    std::fill_n(dv, walk_.pass.columns * x_.block * value_width_, 0.f);
    for (int64_t i = begin; i < end; ++i) {
      add_chunk(s, chunks[i], dk, dv, sums);
    }
  }

  void add_chunk(Scratch& s, const Chunk& chunk, float* dk, float* dv,
                 const Gradients& sums) const {
    const Pass& pass = walk_.pass;
    const int64_t kv_head = chunk.head / x_.group, heads = chunk.heads;
    s.visits.sort(walk_, chunk);
    const int64_t rows = s.visits.tokens() * heads;
    s.reserve(rows, pass.key_segments);
    read_chunk(walk_, chunk, s.visits, x_.q, width_, s.all_q.get());
    read_chunk(walk_, chunk, s.visits, rows_.dout, value_width_, s.all_dout.get());
    read_sums(s, chunk, s.all_lse.get(), s.all_delta.get());
    std::fill_n(s.all_dq.get(), rows * width_, 0.f);
    std::fill_n(s.group.get(), pass.key_segments ? rows * width_ : 0, 0.f);
    std::fill_n(s.groups.get(), pass.key_segments ? rows * width_ : 0, 0.f);
    std::fill_n(s.segment.get(), s.visits.tokens(), -1);
    for (int64_t column = 0; column < pass.columns; ++column) {
      const Tile keys = pass.key_tile(walk_.axis(chunk.head), column);
      if (!s.visits.any(column) || !keys.count || !x_.extras.sees(chunk.batch, keys, pass.step)) {
        continue;
      }
      const auto operands = pairs_.pack_keys(s.spare.get(), pass, chunk.batch, kv_head, column,
                                             s.k.get(), s.kt.get(), s.v.get());
      const int64_t segment = pass.key_segment(walk_.axis(chunk.head), column);
      s.visits.for_tiles(column, s.tile, [&] {
        end_segments(s, chunk, segment);
        add_tile(s, chunk, keys, operands, dk + column * x_.block * width_,
                 dv + column * x_.block * value_width_);
      });
    }
    for (int64_t token = 0; pass.key_segments && token < s.visits.tokens(); ++token) {
      end_segment(s, chunk, token);
      end_group(s, chunk, token);
    }
    const float* all = pass.key_segments ? s.groups.get() : s.all_dq.get();
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      const Tile tile = pass.query_tile(walk_.axis(chunk.head), row);
      const float* dq = all + s.visits.first_token(row - chunk.begin) * heads * width_;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t of_head = (chunk.batch * x_.Hq + chunk.head + h) * x_.Nq;
        add_rows(sums.q, of_head + tile.start, pass.step, tile.count, dq + h * width_,
                 heads * width_, x_.scale);
      }
    }
  }

  // Ends the segments of tokens whose next key tile is in another segment.
  void end_segments(Scratch& s, const Chunk& chunk, int64_t segment) const {
    for (int64_t i = 0; walk_.pass.key_segments && i < s.tile.size; ++i) {
      const int64_t token = s.tile.token[i], old = s.segment.get()[token];
      if (old >= 0 && old != segment) {
        end_segment(s, chunk, token);
        if (old / Pass::kGroup != segment / Pass::kGroup) {
          end_group(s, chunk, token);
        }
      }
      s.segment.get()[token] = static_cast<int32_t>(segment);
    }
  }
  // Adds dQ of a token to that of earlier segments in its group, and clears it.
  void end_segment(const Scratch& s, const Chunk& chunk, int64_t token) const {
    move(chunk, token, s.all_dq.get(), s.group.get());
  }
  void end_group(const Scratch& s, const Chunk& chunk, int64_t token) const {
    move(chunk, token, s.group.get(), s.groups.get());
  }
  void move(const Chunk& chunk, int64_t token, float* from, float* to) const {
    const int64_t size = chunk.heads * width_;
    add(from + token * size, size, to + token * size);
    std::fill_n(from + token * size, size, 0.f);
  }

  // Copies lse and delta of a chunk's rows.
  void read_sums(const Scratch& s, const Chunk& chunk, float* lse, float* delta) const {
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      const Tile tile = walk_.pass.query_tile(walk_.axis(chunk.head), row);
      for (int64_t r = 0; r < tile.count * chunk.heads; ++r) {
        const int64_t head = chunk.batch * x_.Hq + chunk.head + r % chunk.heads;
        const int64_t from = head * x_.Nq + tile.start + r / chunk.heads * walk_.pass.step;
        const int64_t to = s.visits.first_token(row - chunk.begin) * chunk.heads + r;
        lse[to] = rows_.lse[from] == -kInf ? kInf : rows_.lse[from];
        delta[to] = rows_.delta[from];
      }
    }
  }

  // Packs the rows of a gathered tile and their transpose as right operands, padded with zeros.
  const T* operands(Scratch& s, const T* all, int64_t heads, int64_t count, int64_t width, T* to,
                    T* transposed) const {
    const int64_t size = s.tile.size * heads;
    T* spare = kPaired<T> ? s.gathered.get() : to;
    const T* rows = spare;
    if (size == count && s.tile.lies_together()) {
      rows = all + s.tile.token[0] * heads * width;
    } else {
      for (int64_t i = 0; i < s.tile.size; ++i) {
        std::copy_n(all + s.tile.token[i] * heads * width, heads * width,
                    spare + i * heads * width);
      }
      std::fill(spare + size * width, spare + count * width, T(0));
    }
    pack_transposed(rows, count, width, transposed);
    return pack(rows, count, width, to);
  }

  void add_tile(Scratch& s, const Chunk& chunk, Tile keys, const typename Pairs<T>::Keys& k,
                float* dk, float* dv) const {
    const int64_t heads = chunk.heads, size = s.tile.size * heads,
                  padded = round_up(keys.count, 16), rows = round_up(size, kQueryUnit<T>);
    float *scores = s.scores.get(), *dscores = s.dscores.get();
    const T* q = operands(s, s.all_q.get(), heads, rows, width_, s.q.get(), s.qt.get());
    const T* dout =
        operands(s, s.all_dout.get(), heads, rows, value_width_, s.dout.get(), s.dout_t.get());
    for (int64_t i = 0; i < s.tile.size; ++i) {
      const int64_t from = s.tile.token[i] * heads;
      std::copy_n(s.all_lse.get() + from, heads, s.lse.get() + i * heads);
      std::copy_n(s.all_delta.get() + from, heads, s.delta.get() + i * heads);
    }
    for (int64_t h = 0; x_.bias && h < heads; ++h) {
      const float* bias = x_.bias + x_.bias_of(number_, chunk.batch, chunk.head + h);
      for (int64_t i = 0; i < s.tile.size; ++i) {
        s.lse.get()[i * heads + h] -= bias[s.tile.entry[i]];
      }
    }
    std::fill(s.lse.get() + size, s.lse.get() + rows, kInf);
    std::fill(s.delta.get() + size, s.delta.get() + rows, 0.f);
    multiply(padded, rows, width_, k.k, width_, s.qt.get(), scores, false);
    multiply(padded, rows, value_width_, k.v, value_width_, s.dout_t.get(), dscores, false);
    hide(s, chunk, keys, rows, scores);
    weigh(s, keys.count, padded, rows);
    const T *p, *ds, *ds_right;
    if constexpr (kPaired<T>) {
      p = s.p.get(), ds = s.ds.get(), ds_right = s.ds_paired.get();
    } else {
      p = scores, ds = ds_right = dscores;
    }
    multiply(padded, value_width_, rows, p, rows, dout, dv, true);
    multiply(padded, width_, rows, ds, rows, q, dk, true);
    const auto for_tokens = [&](const auto& f) {  // f gets dQ of each token, in chunk and in tile
      for (int64_t i = 0; i < s.tile.size; ++i) {
        f(s.all_dq.get() + s.tile.token[i] * heads * width_, s.dq.get() + i * heads * width_);
      }
    };
    for_tokens([&](const float* from, float* to) { std::copy_n(from, heads * width_, to); });
    transpose(s.dq.get(), rows, width_, s.dq_t.get());
    multiply(width_, rows, padded, k.kt, padded, ds_right, s.dq_t.get(), true);
    transpose(s.dq_t.get(), width_, rows, s.dq.get());
    for_tokens([&](float* to, const float* from) { std::copy_n(from, heads * width_, to); });
    for (int64_t h = 0; rows_.dbias && h < heads; ++h) {
      float* dbias = rows_.dbias + x_.bias_of(number_, chunk.batch, chunk.head + h);
      for (int64_t i = 0; i < s.tile.size; ++i) {
        dbias[s.tile.entry[i]] += s.totals.get()[i * heads + h];
      }
    }
  }

  // Sets the transposed scores [keys, rows] to -inf where there is no pair.
  void hide(const Scratch& s, const Chunk& chunk, Tile keys, int64_t rows, float* scores) const {
    const Pass& pass = walk_.pass;
    hide_unseen(x_.extras.key_mask(chunk.batch), keys, pass.step, scores, rows);
    const int32_t* numbers = pass.bitmap_numbers(pass.table(chunk.batch, chunk.head, x_.Hq));
    for (int64_t i = 0; i < s.tile.size; ++i) {
      const int64_t number = numbers[s.tile.entry[i]];
      if (number < 0) {
        continue;
      }
      const uint8_t* bits = pass.bits_of_query(number, s.tile.place[i]);
      for (int64_t j = 0; j < keys.count; ++j) {
        if (!(bits[j / 8] >> j % 8 & 1)) {
          std::fill_n(scores + j * rows + i * chunk.heads, chunk.heads, -kInf);
        }
      }
    }
  }

  // Computes P^T and dS^T as operands from scores and dP, and the sum of dS of each row.
  void weigh(Scratch& s, int64_t keys, int64_t padded, int64_t rows) const {
    constexpr int W = kPaired<T> ? 2 : 1;
    float *scores = s.scores.get(), *dscores = s.dscores.get();
    const Vec scale(x_.scale);
    for (int64_t c = 0; c < rows; c += W * kLanes) {
      Vec lse[W], delta[W], total[W];
      for (int w = 0; w < W; ++w) {
        lse[w] = Vec::loadu(s.lse.get() + c + w * kLanes).neg();
        delta[w] = Vec::loadu(s.delta.get() + c + w * kLanes);
        total[w] = Vec(0.f);
      }
      for (int64_t j = 0; j < padded; j += 2) {
        Vec p[2][W], ds[2][W];
        for (int row = 0; row < 2; ++row) {
          for (int w = 0; w < W; ++w) {
            const int64_t at = (j + row) * rows + c + w * kLanes;
            p[row][w] = ds[row][w] = Vec(0.f);
            if (j + row < keys) {
              // P is at most 1 but for the rounding of a large lse; the clamp avoids an overflow.
              const Vec x = at::vec::fmadd(Vec::loadu(scores + at), scale, lse[w]);
              p[row][w] = exp_of(at::vec::clamp_max(x, Vec(44.f)));
              ds[row][w] = p[row][w] * (Vec::loadu(dscores + at) - delta[w]);
              total[w] = total[w] + ds[row][w];
            }
          }
        }
        for (int row = 0; row < 2; ++row) {
          const int64_t at = (j + row) * rows + c;
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
            store_pair(s.ds_paired.get() + j * rows + 2 * (c + w * kLanes), ds[0][w], ds[1][w]);
          }
        }
      }
      for (int w = 0; w < W; ++w) {
        total[w].store(s.totals.get() + c + w * kLanes);
      }
    }
  }

  const Problem& x_;
  const Walk walk_;
  const Pairs<T>& pairs_;
  const int64_t number_;
  const Rows rows_;
  const int64_t width_, value_width_;
};

}  // namespace sparsering::cpu
