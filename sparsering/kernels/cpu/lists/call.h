// Attention of queries to single keys that lists name, without tiles and layouts. A unit is the
// query heads that share a kv head and a list.

#pragma once

#include "../coordinates.h"
#include "distinct.h"

namespace sparsering::cpu::lists {

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

inline bool all_finite(const float* x, int64_t size) {
  Vec sum(0.f);
  for (int64_t i = 0; i < size; i += kLanes) {
    sum = at::vec::fmadd(Vec::loadu(x + i, std::min(kLanes, size - i)), Vec(0.f), sum);
  }
  return sum_of_lanes(sum) == 0.f;
}

// The positions of queries and keys: their index (queries from `first` on), or what tensors say.
struct Stand {
  Stand(int64_t first_, const std::optional<Tensor>& of_queries,
        const std::optional<Tensor>& of_keys, const Problem& x)
      : first(first_) {
    SPARSERING_CHECK(of_queries.has_value() == of_keys.has_value(),
                     "sparsering cpu: positions are of queries and of keys");
    if (!of_queries) {
      return;
    }
    SPARSERING_CHECK(of_queries->dim() == 3 && of_keys->dim() == 4,
                     "sparsering cpu: malformed positions of a call's tokens");
    const int64_t batches = of_queries->size(0);
    heads = of_keys->size(2), keys_in_head = x.Nk;
    SPARSERING_CHECK(
        of_queries->is_contiguous() && of_queries->has_sizes({batches, 3, x.Nq}) &&
            of_keys->is_contiguous() && of_keys->has_sizes({batches, 2, heads, x.Nk}) &&
            (batches == 1 || batches == x.B) && heads > 0 && (x.Hkv == 0 || x.Hkv % heads == 0),
        "sparsering cpu: malformed positions of a call's tokens");
    const int64_t *query = values_of<int64_t>(*of_queries), *key = values_of<int64_t>(*of_keys);
    positions = query, depths = query + x.Nq, streams = query + 2 * x.Nq;
    key_positions = key, key_depths = key + heads * x.Nk;
    if (batches > 1) {
      query_batch = 3 * x.Nq, key_batch = 2 * heads * x.Nk;
    }
    for (int64_t i = 0; x.extras.drops() && i < x.Nq; ++i) {
      SPARSERING_CHECK(streams[i] >= 0 && streams[i] < x.extras.streams,
                       "sparsering cpu: a query needs one of dropout's seeds");
    }
  }

  int64_t query(int64_t i) const {
    return positions ? positions[i] : first + i;
  }
  int64_t stream(int64_t i) const {
    return streams ? streams[i] : 0;
  }
  // Returns the positions of a kv head's keys; nullptr if positions are indices.
  const int64_t* of_head(const int64_t* rows, int64_t kv_head, int64_t kv_heads) const {
    return rows ? rows + kv_head * heads / std::max<int64_t>(1, kv_heads) * keys_in_head : nullptr;
  }

  int64_t first, heads = 1, keys_in_head = 0;
  int64_t query_batch = 0, key_batch = 0;  // strides between batch entries; 0 if they share depths
  const int64_t *positions = nullptr, *depths = nullptr, *streams = nullptr,
                *key_positions = nullptr, *key_depths = nullptr;
};

// Input of a call.
struct Call {
  // `keys` is int32 [B or 1, H, Nq, slots], where H divides the kv heads, or is a multiple of them
  // that divides the query heads. `bias` [B, Hq, Nq, slots] is added to the scores of a slot's key.
  // `places`, like keys, says where in the bias each slot has its number.
  Call(const Problem& problem, const Tensor& keys_, const std::optional<Tensor>& places_,
       const std::optional<Tensor>& bias_, int64_t branch_, const Stand& stand_)
      : x(problem),
        lists(values_of<int32_t>(keys_)),
        batches(keys_.size(0)),
        tables(keys_.size(1)),
        slots(keys_.size(3)),
        units(std::max(tables, x.Hkv)),
        group(units ? x.Hq / units : 0),
        rows(group * most_lists(group)),
        branch(branch_),
        stand(stand_),
        places(bias_ && places_ ? values_of<int32_t>(*places_) : nullptr),
        bias(bias_ ? values_of<float>(*bias_) : nullptr),
        width(round_up(std::max(x.D, x.Dv), kLanes)) {
    SPARSERING_CHECK(keys_.is_contiguous() && keys_.has_sizes({batches, tables, x.Nq, slots}) &&
                         (batches == 1 || batches == x.B) && tables > 0 && units % tables == 0 &&
                         (x.Hkv == 0 || units % x.Hkv == 0) && x.Hq == group * units,
                     "sparsering cpu: malformed lists of keys");
    SPARSERING_CHECK(
        !bias_ || (bias_->is_contiguous() && bias_->has_sizes({x.B, x.Hq, x.Nq, slots})),
        "sparsering cpu: a bias has a number for each slot of a list");
    SPARSERING_CHECK(!bias_ || (places_ && places_->is_contiguous() &&
                                places_->has_sizes({batches, tables, x.Nq, slots})),
                     "sparsering cpu: a bias needs a place for each slot of a list");
  }

  // Reads the lists of at most `most` queries, see `Distinct`.
  void read(Distinct& to, int64_t b, int64_t unit, int64_t query, int64_t most) const {
    const int64_t table = (batches > 1 ? b * tables : 0) + unit * tables / units,
                  at = (table * x.Nq + query) * slots;
    to.read(lists + at, places ? places + at : nullptr, most);
  }
  int64_t kv_head(int64_t unit) const {
    return unit * x.Hkv / units;
  }
  template <typename S>
  Named<S> rows_of(const Source& source, int64_t b, int64_t unit, const Distinct& list,
                   int64_t from) const {
    return {source.rows<S>(b, kv_head(unit), 0), source.strides[2], list.keys() + from};
  }
  // Returns the first of the rows (queries of a unit's heads) that may list keys from `from` on. It
  // includes some earlier rows, so that their number is a multiple of 4, as products need.
  int64_t first_row(const Distinct& list, int64_t from) const {
    const int64_t all = list.size * group, listing = all - list.first_list(from) * group;
    return std::max<int64_t>(0, all - round_up(listing, 4));
  }
  // Calls f(j, n, first) for steps of n keys from key j of a tile on; `first` is the first row that
  // may list one of them. In merged lists, only the last rows list the last keys.
  template <typename F>
  void for_steps(const Distinct& list, int64_t from, int64_t count, const F& f) const {
    const int64_t step = list.size > 1 ? kLanes : count;
    for (int64_t j = 0; j < count; j += step) {
      f(j, std::min(step, count - j), first_row(list, from + j));
    }
  }
  // Index of a head's row among all rows of the query.
  int64_t row(int64_t b, int64_t head, int64_t query) const {
    return (b * x.Hq + head) * x.Nq + query;
  }

  // Copies queries (or gradients of their outputs) of all heads of a unit, padded with zeros.
  void read_rows(const Source& source, int64_t b, int64_t unit, int64_t query, int64_t queries,
                 float* to) const {
    const int64_t padded = round_up(source.width, kLanes);
    for (int64_t r = 0; r < queries * group; ++r) {
      const Tile tile{query + r / group, 1};
      read_tile(source, b, unit * group + r % group, tile, 1, 1, padded, to + r * padded);
    }
  }

  // Copies the coordinates of `count` keys of a list, from `from` on.
  Lanes read_lanes(int64_t b, const Distinct& list, int64_t from, int64_t count, float* to) const {
    const Coordinates& of = x.extras.coordinates;
    const float* first = of.key.at(b, 0).data;
    std::fill_n(to, of.rows() * kTile, 0.f);
    for (int64_t row = 0; row < of.rows(); ++row) {
      for (int64_t j = 0; j < count; ++j) {
        to[row * kTile + j] = first[row * of.key.tokens + list.keys()[from + j]];
      }
    }
    return {to, kTile};
  }

  // Turns products of a head's query with `count` keys, from `from` on, into scores. The query's
  // list is number `i` of `list`. `slope` gets the derivative by the product, unless it is nullptr.
  // `lanes` has the coordinates of the keys, if the call has any.
  void adjust(int64_t b, int64_t head, int64_t query, const Distinct& list, int64_t i, int64_t from,
              int64_t count, const Lanes& lanes, float* biases, float* scores, float* slope) const {
    if (const Coordinates& of = x.extras.coordinates) {
      lower_by_distance(of, lanes, of.slopes[head], of.query.spots(b, query, 1), 1, count, 0,
                        scores);
    }
    const float *table = x.extras.table(b, head),
                *of_slots = bias ? bias + row(b, head, query) * slots : nullptr;
    const int64_t* depths = depths_of(b, head);
    const float cap = x.extras.softcap;
    if (slope) {
      std::fill_n(slope, count, 1.f);
    }
    if (table || of_slots) {
      for (int64_t j = 0; j < count; ++j) {
        const float far = table ? table[distance(b, list.keys()[from + j], query, depths)] : 0.f;
        const bool listed = of_slots && list.has(i, from + j);
        biases[j] = far + (listed ? of_slots[list.places(i)[from + j]] : 0.f);
      }
      cpu::adjust(scores, count, x.scale, cap, biases, slope);
    } else if (cap > 0.f) {
      cpu::adjust(scores, count, x.scale, cap, nullptr, slope);
    } else {
      for (int64_t j = 0; j < count; ++j) {
        scores[j] *= x.scale;
      }
    }
    list.hide_others(i, from, count, scores);
  }

  // Depths of the keys that a query head sees, or nullptr, see `Stand`.
  const int64_t* depths_of(int64_t b, int64_t head) const {
    const int64_t* depths = stand.of_head(stand.key_depths, head * x.Hkv / x.Hq, x.Hkv);
    return depths ? depths + b * stand.key_batch : nullptr;
  }
  // Index of a pair in a distance table; `depths` are those of the head's keys.
  int64_t distance(int64_t b, int64_t key, int64_t query, const int64_t* depths) const {
    const int64_t radius = x.extras.radius,
                  far = depths ? depths[key] - stand.depths[b * stand.query_batch + query]
                               : key - stand.first - query;
    return radius + std::clamp(far, -radius, radius);
  }

  // Calls f(j, kept) for `count` keys of a list, from `from` on; `kept` is false if dropout drops
  // the pair.
  template <typename F>
  void for_kept(int64_t b, int64_t head, int64_t query, const Distinct& list, int64_t from,
                int64_t count, const F& f) const {
    uint32_t a, other;
    row_words(x.extras.seeds[b * x.extras.streams + stand.stream(query)], head, branch,
              stand.query(query), 1, 1, &a, &other);
    const int64_t* positions = stand.of_head(stand.key_positions, head * x.Hkv / x.Hq, x.Hkv);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t key = list.keys()[from + j];
      f(j, is_kept(key_word(positions ? positions[key] : key), a, other, x.extras.threshold));
    }
  }

  const Problem& x;
  const int32_t* lists;
  int64_t batches, tables, slots, units, group;
  int64_t rows;  // the most queries of all heads of a unit at a time
  int64_t branch;
  const Stand stand;
  const int32_t* places;
  const float* bias;
  int64_t width;  // padded number of values in a row
};

}  // namespace sparsering::cpu::lists
