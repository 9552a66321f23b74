// Combines the results of several passes or pieces: merges outputs by their lse, and sums gradients
// in float.

#pragma once

#include <algorithm>
#include <cmath>

#include "pack.h"

namespace sparsering::cpu {

// Some heads of a dense result [B, H, N, width]. If several passes add to them, sums are float
// values in `room` until `finish` converts them. The next heads reuse the room.
class Part {
 public:
  Part(const Tensor& whole, int64_t first, int64_t heads, bool single_pass, Buffer<float>& room)
      : type_(single_pass ? whole.dtype() : kFloat),
        whole_type_(whole.dtype()),
        width_(whole.size(3)),
        first_row_(first * whole.size(2)),
        rows_(heads * whole.size(2)),
        whole_(static_cast<char*>(whole.mutable_data_ptr()) +
               first_row_ * width_ * whole.element_size()),
        sums_(is_apart() ? room.at_least(rows_ * width_) : nullptr),
        data_(is_apart() ? reinterpret_cast<char*>(sums_) : whole_) {}

  // True if sums are in `room` (which is not zeroed) instead of in the result itself.
  bool is_apart() const {
    return type_ != whole_type_;
  }
  Dtype type() const {
    return type_;
  }
  int64_t width() const {
    return width_;
  }
  // `row` is an index into the rows of all heads of the whole result.
  template <typename S>
  S* row(int64_t row) const {
    return reinterpret_cast<S*>(data_) + (row - first_row_) * width_;
  }
  void clear() const {
    const int64_t bytes = width_ * size_of(type_);
    parallel_for(0, rows_, kMuch / std::max<int64_t>(bytes, 1), [&](int64_t begin, int64_t end) {
      std::fill(data_ + begin * bytes, data_ + end * bytes, 0);
    });
  }
  void finish() const {
    if (!is_apart()) {
      return;
    }
    with_type(whole_type_, [&](auto value) {
      using S = decltype(value);
      S* to = reinterpret_cast<S*>(whole_);
      parallel_for(
          0, rows_, kMuch / std::max<int64_t>(4 * width_, 1), [&](int64_t begin, int64_t end) {
            at::vec::convert(sums_ + begin * width_, to + begin * width_, (end - begin) * width_);
          });
    });
  }

 private:
  static constexpr int64_t kMuch = 1 << 20;  // with fewer bytes, another thread is not worth it

  Dtype type_, whole_type_;
  int64_t width_, first_row_, rows_;
  char* whole_;
  float* sums_;
  char* data_;
};

// Rows of an output [B, H, N, width] into which partial results are merged by their lse.
struct Output {
  Output(const Part& part, const Tensor& lse_) : sums(part), lse(lse_.mutable_data_ptr<float>()) {}

  // Merges rows, each with its lse, into the output rows from `first` on, which are `step` apart.
  // If `fresh`, the output counts as 0 there, and its lse is -inf or the row's sink.
  void put(int64_t first, int64_t step, int64_t count, float* rows, const float* lses, bool fresh) {
    const int64_t width = sums.width();
    with_type(sums.type(), [&](auto value) {
      using S = decltype(value);
      if (step == 1 &&
          std::all_of(lse + first, lse + first + count, [](float old) { return old == -kInf; })) {
        std::copy_n(lses, count, lse + first);
        at::vec::convert(rows, sums.row<S>(first), count * width);
        return;
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = first + i * step;
        float *part = rows + i * width, &of_row = lse[row];
        const float old = of_row;
        if (old == -kInf) {
          of_row = lses[i];
        } else if (lses[i] != -kInf) {
          of_row = fresh ? shrink(part, lses[i], old, width)
                         : merge(part, lses[i], sums.row<S>(row), old, width);
        } else if (!fresh) {
          continue;
        }
        at::vec::convert(part, sums.row<S>(row), width);
      }
    });
  }

  // Merges the row `other` with its lse (not -inf) into the row `part`. Returns the merged lse.
  template <typename S>
  static float merge(float* part, float part_lse, const S* other, float other_lse, int64_t width) {
    const float highest = part_lse == -kInf ? other_lse : std::max(part_lse, other_lse);
    const float a = std::exp(part_lse - highest), b = std::exp(other_lse - highest), total = a + b;
    for (int64_t d = 0; d < width; ++d) {
      part[d] = (a * part[d] + b * static_cast<float>(other[d])) / total;
    }
    return highest + std::log(total);
  }

  // Merges a sink, a key whose value is 0, into the row `part`. Returns the merged lse.
  static float shrink(float* part, float part_lse, float sink, int64_t width) {
    const float highest = std::max(part_lse, sink);
    const float a = std::exp(part_lse - highest), total = a + std::exp(sink - highest);
    for (int64_t d = 0; d < width; ++d) {
      part[d] = a * part[d] / total;  // what `merge` computes with a row of zeros
    }
    return highest + std::log(total);
  }

 private:
  const Part& sums;
  float* lse;
};

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

// Computes delta = rowsum(dO * O) - dlse.
struct Delta {
  Delta(const Problem& x, const Tensor& grad_out, const Tensor& out, const Tensor& grad_lse)
      : dout(grad_out), o(out), dlse(values_of<float>(grad_lse)), Hq(x.Hq), Nq(x.Nq) {}

  // Computes rows `begin` to `end`, counted over all batch entries and heads.
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

// The gradients of some kv heads and of the query heads of their groups.
struct Gradients {
  struct Room {
    Buffer<float> q, k, v;
  };

  Gradients(const Problem& x, const Tensor& dq, const Tensor& dk, const Tensor& dv, int64_t first,
            int64_t count, bool single_pass, Room& room)
      : q(dq, first * x.group, count * x.group, single_pass, room.q),
        k(dk, first, count, single_pass, room.k),
        v(dv, first, count, single_pass, room.v) {
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
