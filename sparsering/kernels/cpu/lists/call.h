// Attention of queries to keys that lists name, one by one: without tiles and layouts. The query
// heads of a unit share a kv head and a list.

#pragma once

#include "../few.h"
#include "../scores.h"

namespace sparsering::cpu::lists {

constexpr int64_t kTile = 128;  // keys of a softmax step: with their values they stay in a cache

// Rows of keys or values that a list names.
template <typename S>
struct Named {
  const S* operator[](int64_t j) const {
    return first + keys[j] * stride;
  }
  Named from(int64_t j) const {
    return {first, stride, keys + j};
  }
  const S* first;
  int64_t stride;
  const int32_t* keys;
};

// A list without its repeats and without numbers that are no key: its keys, and the slot of each.
class Distinct {
 public:
  Distinct(int64_t slots, int64_t num_keys)
      : keys_(slots), slots_(slots), turns_(Buffer<uint32_t>::zeros(num_keys)), size_(num_keys) {}

  void read(const int32_t* list, int64_t slots) {
    count = 0;
    if (++turn_ == 0) {
      std::fill_n(turns_.get(), size_, 0);
      turn_ = 1;
    }
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int32_t key = list[slot];
      if (key >= 0 && key < size_ && turns_.get()[key] != turn_) {
        turns_.get()[key] = turn_;
        keys_.get()[count] = key;
        slots_.get()[count++] = static_cast<int32_t>(slot);
      }
    }
  }
  const int32_t* keys() const {
    return keys_.get();
  }
  const int32_t* slots() const {
    return slots_.get();
  }

  int64_t count = 0;

 private:
  Buffer<int32_t> keys_, slots_;
  Buffer<uint32_t> turns_;  // of each key: the last turn in which a list named it
  int64_t size_;
  uint32_t turn_ = 0;
};

// Input of a call.
struct Call {
  // keys: int32 [B or 1, H, Nq, slots], where H divides the kv heads, or is a multiple of them that
  // divides the query heads. bias: [B, Hq, Nq, slots], added to the scores of a slot's key.
  Call(const Problem& problem, const Tensor& keys_, const std::optional<Tensor>& bias_,
       int64_t branch_, int64_t first_)
      : x(problem),
        lists(values_of<int32_t>(keys_)),
        batches(keys_.size(0)),
        tables(keys_.size(1)),
        slots(keys_.size(3)),
        units(std::max(tables, x.Hkv)),
        group(units ? x.Hq / units : 0),
        branch(branch_),
        first(first_),
        bias(bias_ ? values_of<float>(*bias_) : nullptr),
        width(round_up(std::max(x.D, x.Dv), kLanes)) {
    SPARSERING_CHECK(keys_.is_contiguous() && keys_.has_sizes({batches, tables, x.Nq, slots}) &&
                         (batches == 1 || batches == x.B) && tables > 0 && units % tables == 0 &&
                         (x.Hkv == 0 || units % x.Hkv == 0) && x.Hq == group * units,
                     "sparsering cpu: malformed lists of keys");
    SPARSERING_CHECK(
        !bias_ || (bias_->is_contiguous() && bias_->has_sizes({x.B, x.Hq, x.Nq, slots})),
        "sparsering cpu: a bias has a number for each slot of a list");
  }

  const int32_t* list(int64_t b, int64_t unit, int64_t query) const {
    const int64_t table = (batches > 1 ? b * tables : 0) + unit * tables / units;
    return lists + (table * x.Nq + query) * slots;
  }
  int64_t kv_head(int64_t unit) const {
    return unit * x.Hkv / units;
  }
  template <typename S>
  Named<S> rows(const Source& source, int64_t b, int64_t unit, const Distinct& list,
                int64_t from) const {
    return {source.rows<S>(b, kv_head(unit), 0), source.strides[2], list.keys() + from};
  }
  // Index of a head's row among all rows of the query.
  int64_t row(int64_t b, int64_t head, int64_t query) const {
    return (b * x.Hq + head) * x.Nq + query;
  }

  // Copies a query (or a gradient of its output) of each head of a unit, padded with zeros.
  void read_rows(const Source& source, int64_t b, int64_t unit, int64_t query, float* to) const {
    const int64_t padded = round_up(source.width, kLanes);
    for (int64_t i = 0; i < group; ++i) {
      read_tile(source, b, unit * group + i, Tile{query, 1}, 1, 1, padded, to + i * padded);
    }
  }

  // Turns products of a head's query with `count` keys of a list, from `from` on, into scores. Sets
  // `slope`, if it is not nullptr, to the derivative by the product.
  void adjust(int64_t b, int64_t head, int64_t query, const Distinct& list, int64_t from,
              int64_t count, float* biases, float* scores, float* slope) const {
    const float *table = x.extras.table(b, head),
                *of_slots = bias ? bias + row(b, head, query) * slots : nullptr;
    const float cap = x.extras.softcap;
    if (slope) {
      std::fill_n(slope, count, 1.f);
    }
    if (table || of_slots) {
      for (int64_t j = 0; j < count; ++j) {
        const float far = table ? table[distance(list.keys()[from + j], query)] : 0.f;
        biases[j] = far + (of_slots ? of_slots[list.slots()[from + j]] : 0.f);
      }
      cpu::adjust(scores, count, x.scale, cap, biases, slope);
    } else if (cap > 0.f) {
      cpu::adjust(scores, count, x.scale, cap, nullptr, slope);
    } else {
      for (int64_t j = 0; j < count; ++j) {
        scores[j] *= x.scale;
      }
    }
  }

  // Index of a pair in a distance table.
  int64_t distance(int64_t key, int64_t query) const {
    const int64_t radius = x.extras.radius;
    return radius + std::clamp(key - first - query, -radius, radius);
  }

  // Calls f(j, kept) for `count` keys of a list, from `from` on, with what dropout keeps.
  template <typename F>
  void for_kept(int64_t b, int64_t head, int64_t query, const Distinct& list, int64_t from,
                int64_t count, const F& f) const {
    uint32_t a, other;
    row_words(x.extras.seeds[b * x.extras.streams], head, branch, first + query, 1, 1, &a, &other);
    for (int64_t j = 0; j < count; ++j) {
      f(j, is_kept(key_word(list.keys()[from + j]), a, other, x.extras.threshold));
    }
  }

  const Problem& x;
  const int32_t* lists;
  int64_t batches, tables, slots, units, group, branch;
  int64_t first;  // position of the first query
  const float* bias;
  int64_t width;  // of a padded row
};

}  // namespace sparsering::cpu::lists
