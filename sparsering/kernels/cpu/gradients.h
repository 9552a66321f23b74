// What the backward pass starts from and adds to.

#pragma once

#include <algorithm>

#include "pack.h"
#include "results.h"

namespace sparsering::cpu {

// Adds rows, scaled, to every `step`th row of a gradient from `first` on.
inline void add_rows(const Part& sums, int64_t first, int64_t step, int64_t count,
                     const float* rows, int64_t ld, float scale) {
  with_type(sums.type(), [&](auto value) {
    using S = decltype(value);
    const int64_t width = sums.width();
    for (int64_t i = 0; i < count; ++i) {
      S* __restrict to = sums.row<S>(first + i * step);
      const float* __restrict from = rows + i * ld;
      for (int64_t d = 0; d < width; ++d) {
        to[d] = static_cast<S>(static_cast<float>(to[d]) + scale * from[d]);
      }
    }
  });
}

// What delta = rowsum(dO * O) - dlse is made of.
struct Delta {
  Delta(const Problem& x, const Tensor& grad_out, const Tensor& out, const Tensor& grad_lse)
      : dout(grad_out), o(out), dlse(grad_lse.const_data_ptr<float>()), Hq(x.Hq), Nq(x.Nq) {}

  // Rows `begin` to `end`, counted through the batch.
  void of_rows(int64_t begin, int64_t end, float* to) const {
    with_type(o.type, [&](auto value) {
      using S = decltype(value);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t head = row / Nq, n = row % Nq;
        const S *a = o.rows<S>(head / Hq, head % Hq, n), *b = dout.rows<S>(head / Hq, head % Hq, n);
        float sum = 0.f;
        for (int64_t d = 0; d < o.width; d += kLanes) {
          const int64_t size = std::min(kLanes, o.width - d);
          sum += sum_of_lanes(lanes_of(a + d, size) * lanes_of(b + d, size));
        }
        to[row] = sum - dlse[row];
      }
    });
  }

 private:
  Source dout, o;
  const float* dlse;
  int64_t Hq, Nq;
};

// Gradients of some kv heads and of the query heads that they serve.
struct Gradients {
  Gradients(const Problem& x, const Tensor& dq, const Tensor& dk, const Tensor& dv, int64_t first,
            int64_t count, bool single_pass)
      : q(dq, first * x.group, count * x.group, single_pass),
        k(dk, first, count, single_pass),
        v(dv, first, count, single_pass) {
    q.clear();
    k.clear();
    v.clear();
  }

  void finish() {
    q.finish();
    k.finish();
    v.finish();
  }

  Part q, k, v;
};

// Adds dK and dV of a key tile to those of kv head `kv`.
inline void add_key_tile(const Problem& x, const Pass& pass, int64_t kv, int64_t column,
                         const float* dk, int64_t width, const float* dv, int64_t value_width,
                         const Gradients& sums) {
  const Tile tile = pass.key_tile(kv % x.Hkv * pass.axes / x.Hkv, column);
  const int64_t first = kv * x.Nk + tile.start;
  add_rows(sums.k, first, pass.step, tile.count, dk, width, x.scale);
  add_rows(sums.v, first, pass.step, tile.count, dv, value_width, 1.f);
}

}  // namespace sparsering::cpu
