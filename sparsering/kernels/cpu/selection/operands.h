// Operands of the products in shares.h: queries, summaries of blocks, and keys.

#pragma once

#include "../pack.h"

namespace sparsering::cpu {

// Kinds of query features, as in selection/estimates.py. kMean is the query itself; the others have
// 2 D numbers.
enum class Features { kMean, kGauss, kBounds };

// Inputs of block scores: queries [B, Hq, Nq, D]; features [entries, slots, blocks, F] of key
// blocks, each cut into `slots` parts; keys [entries, own blocks, block, D] of own blocks (those
// that contain the queries), from block `first_own` on. An entry is a kv head of a batch entry.
// `scale` multiplies the keys and, for kMean, the features, too.
struct Operands {
  Operands(const Tensor& query_, const Tensor& feature_, const Tensor& key_, int64_t kind_,
           float scale_, int64_t first_own_, int64_t first_query_)
      : query(checked(query_, false)),
        feature(checked(feature_, true)),
        key(checked(key_, true)),
        kind(static_cast<Features>(kind_)),
        scale(scale_),
        entries(feature_.size(0)),
        Hkv(entries / std::max<int64_t>(query_.size(0), 1)),
        group(query_.size(1) / std::max<int64_t>(Hkv, 1)),
        D(query_.size(3)),
        F(feature_.size(3)),
        Nq(query_.size(2)),
        slots(feature_.size(1)),
        blocks(feature_.size(2)),
        own_blocks(key_.size(1)),
        block(key_.size(2)),
        first_own(first_own_),
        first_query(first_query_) {
    SPARSERING_CHECK(kind_ >= 0 && kind_ <= 2 && Hkv > 0 && group > 0 && slots > 0 && block > 0 &&
                         entries == query_.size(0) * Hkv && query_.size(1) == Hkv * group &&
                         key_.size(0) == entries && key_.size(3) == D &&
                         F == (kind == Features::kMean ? D : 2 * D),
                     "sparsering cpu: shares got summaries of other queries or keys");
  }

  Source query, feature, key;
  Features kind;
  float scale;
  int64_t entries, Hkv, group, D, F, Nq, slots, blocks, own_blocks, block, first_own, first_query;

 private:
  static Source checked(const Tensor& x, bool summary) {
    const auto type = x.dtype();
    SPARSERING_CHECK(x.is_cpu() && x.dim() == 4 &&
                         (type == kFloat || (!summary && (type == kBFloat16 || type == kHalf))),
                     "sparsering cpu: shares takes four dims on the CPU, summaries in float");
    return Source(x);
  }
};

// Transposes rows [count, width], which are `stride` apart, and multiplies by a factor. The result
// has `width` rows that are `ld` apart; their `count` values are padded with zeros to a multiple of
// 16.
inline void turn(const float* from, int64_t stride, int64_t count, int64_t width, float factor,
                 float* to, int64_t ld) {
  const int64_t whole = width / kLanes * kLanes, padded = round_up(count, 16);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t j = 0; j < whole; j += kLanes) {
      transpose_square<true>(from + i * stride + j, stride, to + j * ld + i, ld, Vec(factor));
    }
  }
  for (int64_t k = 0; k < padded; ++k) {
    for (int64_t j = k < i ? whole : 0; j < width; ++j) {
      to[j * ld + k] = k < count ? from[k * stride + j] * factor : 0.f;
    }
  }
}

// The features of the first `blocks` blocks, packed as right operands. A panel [F, columns] has the
// features of one part (`slot`) of `columns` blocks for one kv head (`entry`).
class Panels {
 public:
  static constexpr int64_t kColumns = 128;

  Panels(const Operands& x, int64_t blocks)
      : columns_(std::min(kColumns, round_up(std::max<int64_t>(blocks, 1), 16))),
        count_((blocks + columns_ - 1) / columns_),
        slots_(x.slots),
        size_(x.F * columns_),
        data_(x.entries * x.slots * count_ * size_) {
    const float factor = x.kind == Features::kMean ? x.scale : 1.f;
    parallel_for(0, x.entries * x.slots * count_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % count_ * columns_, slot = i / count_ % slots_;
        turn(x.feature.rows<float>(i / count_ / slots_, slot, first), x.feature.strides[2],
             std::min(columns_, blocks - first), x.F, factor, data_.get() + i * size_, columns_);
      }
    });
  }

  int64_t columns() const {
    return columns_;
  }

  // Returns the panel whose first block is `first`, a multiple of `columns`.
  const float* of(int64_t entry, int64_t slot, int64_t first) const {
    return data_.get() + ((entry * slots_ + slot) * count_ + first / columns_) * size_;
  }

 private:
  int64_t columns_, count_, slots_, size_;
  Buffer<float> data_;
};

// Copies queries of kv head `entry` from `first` on to rows [count, D], sorted by token, then by
// head.
inline void read_queries(const Operands& x, int64_t entry, int64_t first, int64_t count,
                         float* to) {
  with_type(x.query.type, [&](auto value) {
    using S = decltype(value);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = (first + i) / x.group, head = (first + i) % x.group;
      const S* from =
          x.query.rows<S>(entry / x.Hkv, entry % x.Hkv * x.group + head, x.first_query + place);
      copy_lanes(from, to + i * x.D, x.D);
    }
  });
}

// Writes features [count, 2 D] of queries [count, D], for kinds other than kMean.
inline void write_features(const Operands& x, const float* query, int64_t count, float* to) {
  const float half = static_cast<float>(double(x.scale) * x.scale / 2);
  for (int64_t i = 0; i < count; ++i, query += x.D, to += x.F) {
    for (int64_t d = 0; d < x.D; ++d) {
      const float q = query[d];
      const bool gauss = x.kind == Features::kGauss;
      to[d] = gauss ? q * x.scale : (q < 0.f ? 0.f : q) * x.scale;
      to[x.D + d] = gauss ? q * q * half : (q > 0.f ? 0.f : q) * x.scale;
    }
  }
}

// Packs the keys of block `own` of kv head `entry` as a right operand [D, ld].
inline void turn_keys(const Operands& x, int64_t entry, int64_t own, int64_t count, float* to,
                      int64_t ld) {
  turn(x.key.rows<float>(entry, own - x.first_own, 0), x.key.strides[2], count, x.D, x.scale, to,
       ld);
}

}  // namespace sparsering::cpu
