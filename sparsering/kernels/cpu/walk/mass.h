// Computes the softmax mass of each entry (visited pair of tiles): the sum over its queries i and
// keys j of weight_i * exp(s_ij - lse_i). It takes one matrix product per gathered tile.

#pragma once

#include "forward.h"

namespace sparsering::cpu {

template <typename T>
class Mass {
 public:
  // If `weight` is nullptr, weights are 1. The caller fills `mass` [B, Hq, blocks] with zeros.
  Mass(const Problem& problem, const float* lse, const float* weight, float* mass)
      : x_(problem), lse_(lse), weight_(weight), mass_(mass) {}

  void run(const Pass& pass, int64_t number) const {
    const Walk walk(x_, pass);
    const std::vector<Chunk> chunks = walk.chunks(0, x_.B * x_.Hkv);
    share_out<Scratch>(
        chunks.size(), 1, [&] { return Scratch(x_, walk); },
        [&](Scratch& s, int64_t i) { add_chunk(s, walk, chunks[i], number); });
  }

 private:
  using Scratch = typename WalkForward<T>::Scratch;

  void add_chunk(Scratch& s, const Walk& walk, const Chunk& chunk, int64_t number) const {
    const Pass& pass = walk.pass;
    const int64_t kv_head = chunk.head / x_.group, width = s.keys.width(), heads = chunk.heads;
    s.visits.sort(walk, chunk);
    const int64_t rows = s.visits.tokens() * heads;
    T* q = s.q.at_least((rows + walk.rows) * width);
    read_chunk(walk, chunk, s.visits, x_.q, width, q);
    std::fill_n(q + rows * width, walk.rows * width, T(0));
    read_rows(s, walk, chunk);
    for (int64_t column = 0; column < pass.columns; ++column) {
      if (s.visits.any(column) && s.keys.read_keys(pass, chunk.batch, kv_head, column)) {
        s.visits.for_tiles(column, s.tile, [&] { add_tile(s, walk, chunk, number); });
      }
    }
  }

  // Copies lse and weights of a chunk's rows.
  void read_rows(Scratch& s, const Walk& walk, const Chunk& chunk) const {
    const int64_t heads = chunk.heads, rows = s.visits.tokens() * heads;
    float *lse = s.highest.at_least(rows), *weight = s.total.at_least(rows);
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      const Tile tile = walk.pass.query_tile(walk.axis(chunk.head), row);
      for (int64_t r = 0; r < tile.count * heads; ++r) {
        const int64_t head = chunk.batch * x_.Hq + chunk.head + r % heads;
        const int64_t from = head * x_.Nq + tile.start + r / heads * walk.pass.step;
        const int64_t to = s.visits.first_token(row - chunk.begin) * heads + r;
        lse[to] = lse_[from] == -kInf ? kInf : lse_[from];
        weight[to] = weight_ ? weight_[from] : 1.f;
      }
    }
  }

  void add_tile(Scratch& s, const Walk& walk, const Chunk& chunk, int64_t number) const {
    const int64_t heads = chunk.heads, count = s.tile.size * heads, padded = s.keys.padded;
    const T* q = gather(s.tile, s.q.get(), heads * s.keys.width(), s.gathered.get());
    s.keys.score(walk, chunk, s.tile, q, s.scores.get());
    read_biases(x_, chunk, s.tile, number, s.bias.get());
    const Vec scale(x_.scale);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t i = r / heads, h = r % heads, at = s.tile.token[i] * heads + h;
      const Vec shift(s.bias.get()[r] - s.highest.get()[at]);
      const float* row = s.scores.get() + r * padded;
      Vec sum(0.f);
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Vec x = at::vec::fmadd(Vec::loadu(row + j), scale, shift);
        sum = sum + exp_of(at::vec::clamp_max(x, Vec(44.f)));
      }
      mass_[x_.bias_of(number, chunk.batch, chunk.head + h) + s.tile.entry[i]] +=
          s.total.get()[at] * sum_of_lanes(sum);
    }
  }

  const Problem& x_;
  const float *lse_, *weight_;
  float* mass_;
};

}  // namespace sparsering::cpu
