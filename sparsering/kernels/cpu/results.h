// Results that arrive in parts: sums over passes in float, outputs merged by their lse.

#pragma once

#include <algorithm>
#include <cmath>

#include "layout.h"

namespace sparsering::cpu {

// Some heads of a result [B, H, N, width], in float while several passes add to them.
class Part {
 public:
  Part(const Tensor& whole, int64_t first, int64_t heads, bool single_pass)
      : whole_(whole.flatten(0, 1).narrow(0, first, heads)),
        sums_(single_pass || whole.scalar_type() == at::kFloat
                  ? whole_
                  : at::zeros(whole_.sizes(), whole_.options().dtype(at::kFloat))),
        first_row_(first * whole.size(2)) {}

  at::ScalarType type() const {
    return sums_.scalar_type();
  }
  int64_t width() const {
    return sums_.size(2);
  }
  // `row` counts through all heads of the whole result.
  template <typename S>
  S* row(int64_t row) const {
    return static_cast<S*>(sums_.data_ptr()) + (row - first_row_) * width();
  }
  void finish() {
    if (!sums_.is_same(whole_)) {
      whole_.copy_(sums_);
    }
  }

 private:
  Tensor whole_, sums_;
  int64_t first_row_;
};

// Rows of an output [B, H, N, width] that arrive in parts, each with its lse.
struct Output {
  Output(const Part& part, const Tensor& lse_) : sums(part), lse(lse_.data_ptr<float>()) {}

  // Merges (part, part_lse) into what is there: where `fresh` that is 0, with an lse of -inf or of
  // the row's sink.
  void put(int64_t row, float* part, float part_lse, bool fresh) {
    const float old = lse[row];
    if (old == -kInf) {
      lse[row] = part_lse;
      write(row, part);
    } else if (part_lse != -kInf) {
      lse[row] = fresh ? shrink(part, part_lse, old, sums.width())
                       : merge(part, part_lse, sums.row<float>(row), old, sums.width());
      write(row, part);
    } else if (fresh) {
      write(row, part);
    }
  }

  // Merges (other, other_lse), which has keys, into part. Returns the merged lse.
  static float merge(float* part, float part_lse, const float* other, float other_lse,
                     int64_t width) {
    const float highest = part_lse == -kInf ? other_lse : std::max(part_lse, other_lse);
    const float a = std::exp(part_lse - highest), b = std::exp(other_lse - highest), total = a + b;
    for (int64_t d = 0; d < width; ++d) {
      part[d] = (a * part[d] + b * other[d]) / total;
    }
    return highest + std::log(total);
  }

  // Merges a sink, a key whose value is 0, into part. Returns the merged lse.
  static float shrink(float* part, float part_lse, float sink, int64_t width) {
    const float highest = std::max(part_lse, sink);
    const float a = std::exp(part_lse - highest), total = a + std::exp(sink - highest);
    for (int64_t d = 0; d < width; ++d) {
      part[d] *= a / total;
    }
    return highest + std::log(total);
  }

 private:
  void write(int64_t row, const float* part) {
    with_type(sums.type(), [&](auto value) {
      at::vec::convert(part, sums.row<decltype(value)>(row), sums.width());
    });
  }

  const Part& sums;
  float* lse;
};

}  // namespace sparsering::cpu
