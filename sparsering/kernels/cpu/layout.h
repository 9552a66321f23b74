// Input of a call: tensors and the passes of a block layout, with checks that every index is inside
// its tensor.

#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "machine/memory.h"

namespace sparsering::cpu {

using Vec = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Vec::size();
constexpr int64_t kMostScores = 1 << 15;  // scores of a softmax step that fit in a core's cache
constexpr int64_t kFewQueries = 8;  // for so few queries, packing keys costs more than it saves
constexpr float kInf = std::numeric_limits<float>::infinity();

template <typename T>
constexpr bool kPaired = std::is_same_v<T, BFloat16>;

inline int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// The most keys of a softmax step, for query tiles of `block` tokens; below, the most key tiles.
inline int64_t most_keys(int64_t block) {
  return std::max(block, kMostScores / round_up(block, 32));
}
constexpr int64_t kMostTiles = kMostScores / 32 / 16;

// Calls f with a value of the C++ type of the dtype `type`.
template <typename F>
void with_type(Dtype type, const F& f) {
  if (type == kFloat) {
    f(float());
  } else if (type == kBFloat16) {
    f(BFloat16());
  } else {
    f(Half());
  }
}

// A view of a tensor [B, H, N, width] that is contiguous in its last dimension. Its values are
// float, bfloat16 or half, or rows are stored in 8 bits with their scale at the end (stored.h).
struct Source {
  explicit Source(const Tensor& x)
      : data(static_cast<const char*>(x.const_data_ptr())),
        type(x.dtype()),
        width(x.size(3) - (is_stored(x.dtype()) ? sizeof(float) : 0)),
        item(x.element_size()),
        strides{x.stride(0), x.stride(1), x.stride(2)} {
    // An empty tensor may have any strides, because no row is read.
    const bool dense = width <= 1 || x.stride(3) == 1 || x.numel() == 0;
    SPARSERING_CHECK(dense, "sparsering cpu: the last dimension must be dense");
  }

  static bool is_stored(Dtype type) {
    return type == kChar || type == kByte;
  }
  bool is_stored() const {
    return is_stored(type);
  }

  const void* row(int64_t b, int64_t h, int64_t n) const {
    return data + (b * strides[0] + h * strides[1] + n * strides[2]) * item;
  }

  template <typename S>
  const S* rows(int64_t b, int64_t h, int64_t n) const {
    return static_cast<const S*>(row(b, h, n));
  }

  // True if a head's rows are contiguous, with `wide` values of type T each.
  template <typename T>
  bool lies_as(int64_t wide) const {
    return type == dtype_of<T>() && width == wide && strides[2] == wide;
  }

  const char* data;
  Dtype type;
  int64_t width, item, strides[3];
};

struct Tile {
  int64_t start, count;
};

// The positions that give distances: of each token of a tile, or of only the first one (`width` 1).
struct Depths {
  Depths() = default;
  explicit Depths(const Tensor& x) : data(values_of<int64_t>(x)) {
    SPARSERING_CHECK(x.dim() == 4, "sparsering cpu: malformed layout: places of tiles");
    batch = x.size(0) > 1 ? x.size(1) * x.size(2) * x.size(3) : 0;
    width = x.size(3);
  }

  int64_t of(int64_t b, int64_t tile, int64_t token, int64_t step) const {
    const int64_t* first = data + b * batch + tile * width;
    return width == 1 ? *first + token * step : first[token];
  }

  const int64_t* data = nullptr;
  int64_t batch = 0, width = 1;
};

// One pass of a layout: its tiles, and a table of the key tiles (entries) that each query tile
// visits. layouts/layout.py describes its tensors; the last four are `transposed_bitmaps`,
// `bitmaps` and the two of `segments`.
struct Pass {
  static constexpr int kTensors = 11, kPlaces = 5;
  static constexpr int64_t kGroup = 8, kNoSegment = std::numeric_limits<int32_t>::min();

  // `places` has the positions of query tiles and of key tiles, the dropout streams of query tiles
  // (empty if all are 0), and positions of queries and keys that give distances [batches, axes,
  // tiles, tokens], where the last dim has each token of a tile or only the first. It is empty if
  // no extra needs them.
  Pass(Tensors tensors, Tensors places, int64_t step_, int64_t block_, int64_t branch_)
      : step(step_),
        block(block_),
        axes(tensors[0].size(0)),
        rows(tensors[0].size(1)),
        columns(tensors[2].size(1)),
        batches(tensors[4].size(0)),
        tables(tensors[4].size(1)),
        entries(tensors[5].size(2)),
        query_start(values_of<int64_t>(tensors[0])),
        query_stop(values_of<int64_t>(tensors[1])),
        key_start(values_of<int64_t>(tensors[2])),
        key_stop(values_of<int64_t>(tensors[3])),
        row_ptr_(values_of<int32_t>(tensors[4])),
        key_tile_(values_of<int32_t>(tensors[5])),
        bitmap_(values_of<int32_t>(tensors[6])),
        num_bitmaps(tensors[7].size(0)),
        bitmaps(values_of<uint8_t>(tensors[7])),
        rows_of_bits_(values_of<uint8_t>(tensors[8])),
        query_segments(tensors[9].numel()),
        key_segments(tensors[10].numel()),
        query_segment_(query_segments ? values_of<int32_t>(tensors[9]) : nullptr),
        key_segment_(key_segments ? values_of<int32_t>(tensors[10]) : nullptr),
        branch(branch_),
        query_origin_(places.empty() ? nullptr : values_of<int64_t>(places[0])),
        key_origin_(places.empty() ? nullptr : values_of<int64_t>(places[1])),
        stream_(places.empty() || !places[2].numel() ? nullptr : values_of<int64_t>(places[2])),
        query_depth_(places.empty() ? Depths() : Depths(places[3])),
        key_depth_(places.empty() ? Depths() : Depths(places[4])) {}

  // Makes a pass of a plan, which has sizes but no tables. `longest` is the queries of its longest
  // tile.
  Pass(int64_t step_, int64_t block_, int64_t rows_, int64_t columns_, int64_t tables_,
       int64_t longest_, bool walked_)
      : step(step_),
        block(block_),
        axes(1),
        rows(rows_),
        columns(columns_),
        batches(1),
        tables(tables_),
        longest(longest_),
        walked(walked_) {}

  Tile query_tile(int64_t axis, int64_t row) const {
    return tile(query_start[axis * rows + row], query_stop[axis * rows + row]);
  }
  Tile key_tile(int64_t axis, int64_t column) const {
    return tile(key_start[axis * columns + column], key_stop[axis * columns + column]);
  }
  // Absolute position of the first token of a query tile, or of a key tile.
  int64_t query_origin(int64_t axis, int64_t row) const {
    return query_origin_[axis * rows + row];
  }
  int64_t key_origin(int64_t axis, int64_t column) const {
    return key_origin_[axis * columns + column];
  }
  // True if distances in a pair of tiles depend only on the difference of the tokens' places in
  // them.
  bool has_even_depths() const {
    return query_depth_.width == 1 && key_depth_.width == 1;
  }
  // Distance from token i of a query tile to token j of a key tile.
  int64_t distance(int64_t b, int64_t axis, int64_t row, int64_t column, int64_t i = 0,
                   int64_t j = 0) const {
    return key_depth_.of(b, axis * columns + column, j, step) -
           query_depth_.of(b, axis * rows + row, i, step);
  }
  // Distance from the first query to the first key; 0 if depths are not even.
  int64_t even_distance(int64_t b, int64_t axis, int64_t row, int64_t column) const {
    return has_even_depths() ? distance(b, axis, row, column) : 0;
  }
  // The segment of the sequence in which a tile lies. Sums over keys or queries first run within a
  // segment; the segments are then added in order. So threads can share the keys of a query without
  // a change in any bit.
  int64_t query_segment(int64_t axis, int64_t row) const {
    return query_segment_ ? query_segment_[axis * rows + row] : 0;
  }
  int64_t key_segment(int64_t axis, int64_t column) const {
    return key_segment_ ? key_segment_[axis * columns + column] : 0;
  }
  int64_t key_group(int64_t axis, int64_t column) const {
    return key_segment(axis, column) / kGroup;
  }
  int64_t stream(int64_t axis, int64_t row) const {
    return stream_ ? stream_[axis * rows + row] : 0;
  }
  int64_t table(int64_t b, int64_t head, int64_t heads) const {
    return (batches > 1 ? b * tables : 0) + head * tables / heads;
  }
  const int32_t* row_ptr(int64_t table) const {
    return row_ptr_ + table * (rows + 1);
  }
  const int32_t* keys(int64_t table) const {
    return key_tile_ + table * entries;
  }
  const int32_t* bitmap_numbers(int64_t table) const {
    return bitmap_ + table * entries;
  }
  const uint8_t* bitmap(int64_t number) const {
    return bitmaps + number * (block * block / 8);
  }
  // Returns bitmap `number`'s row for query `i` of a tile: a bit per key.
  const uint8_t* bits_of_query(int64_t number, int64_t i) const {
    return rows_of_bits_ + (number * block + slot + i) * (block / 8);
  }

  int64_t step, block, axes, rows, columns, batches, tables, entries = 0;
  const int64_t *query_start = nullptr, *query_stop = nullptr, *key_start = nullptr,
                *key_stop = nullptr;
  const int32_t *row_ptr_ = nullptr, *key_tile_ = nullptr, *bitmap_ = nullptr;
  int64_t num_bitmaps = 0;
  const uint8_t* bitmaps = nullptr;                   // one row per key, whose bits are queries
  const uint8_t* rows_of_bits_ = nullptr;             // one row per query, whose bits are keys
  bool query_segments = false, key_segments = false;  // true if there are several
  const int32_t *query_segment_ = nullptr, *key_segment_ = nullptr;
  int64_t branch = 0;
  int64_t longest = -1;  // only in a plan: queries of its longest tile
  bool walked = false;   // true if the pass is computed in a loop over key tiles (walk/visits.h)
  int64_t slot = 0;      // bitmap row of a tile's first query
  const int64_t *query_origin_ = nullptr, *key_origin_ = nullptr, *stream_ = nullptr;
  Depths query_depth_, key_depth_;

 private:
  Tile tile(int64_t start, int64_t stop) const {
    const int64_t count = stop > start ? (stop - start + step - 1) / step : 0;
    return {start, std::min(count, block)};
  }
};

constexpr int64_t kLeastRowsCut = 64;  // `at_least` of most_entries in the forward pass

// Query tiles with more entries than this are cut into pieces, one for each group of segments of
// their keys. Key tiles with more entries are cut where the segment of their queries changes. The
// number is at least 16, else twice the mean over max(rows, at_least) tiles.
inline int64_t most_entries(int64_t entries, int64_t rows, int64_t at_least) {
  return std::max<int64_t>(16, 2 * entries / std::max<int64_t>(rows, at_least));
}

// The table of a pass by key tile: the query tiles that visit each key tile.
struct Transpose {
  static constexpr int kTensors = 3;

  explicit Transpose(Tensors tensors)
      : row_ptr(values_of<int32_t>(tensors[0])),
        query_tile(values_of<int32_t>(tensors[1])),
        entry(values_of<int32_t>(tensors[2])) {}

  const int32_t* rows_of(const Pass& pass, int64_t table) const {
    return row_ptr + table * (pass.columns + 1);
  }

  const int32_t *row_ptr, *query_tile, *entry;
};

inline void check_table(const int32_t* row_ptr, int64_t rows, int64_t entries, const char* name) {
  bool right = row_ptr[0] == 0 && row_ptr[rows] <= entries;
  for (int64_t i = 0; right && i < rows; ++i) {
    right = row_ptr[i] <= row_ptr[i + 1];
  }
  SPARSERING_CHECK(right, "sparsering cpu: malformed layout: ", name,
                   " must rise from 0 to at most ", entries);
}

inline void check_range(const int32_t* values, int64_t count, int64_t low, int64_t high,
                        const char* name) {
  int32_t least = static_cast<int32_t>(low), most = static_cast<int32_t>(low);
  for (int64_t i = 0; i < count; ++i) {
    least = std::min(least, values[i]);
    most = std::max(most, values[i]);
  }
  SPARSERING_CHECK(count == 0 || (least >= low && most < high),
                   "sparsering cpu: malformed layout: ", name, " must be in [", low, ", ", high,
                   "), got ", least, " to ", most);
}

inline void check_tiles(const int64_t* start, const int64_t* stop, int64_t count, int64_t length,
                        const char* name) {
  for (int64_t i = 0; i < count; ++i) {
    SPARSERING_CHECK(start[i] >= stop[i] || (start[i] >= 0 && stop[i] <= length),
                     "sparsering cpu: malformed layout: ", name, " tile ", i, " spans [", start[i],
                     ", ", stop[i], "), outside [0, ", length, ")");
  }
}

// Checks that every index that the kernel will follow is inside its tensor.
inline void check_pass(Tensors t, const Pass& p, int64_t q_len, int64_t kv_len, int64_t B,
                       int64_t Hq, int64_t Hkv) {
  for (int i = 0; i < Pass::kTensors; ++i) {
    SPARSERING_CHECK(t[i].is_contiguous(), "sparsering cpu: layout tensors must be contiguous");
  }
  const bool fits =
      p.step > 0 && (p.axes == 1 || p.axes == Hkv) && t[2].size(0) == p.axes &&
      t[1].has_sizes(t[0].sizes()) && t[3].has_sizes(t[2].sizes()) &&
      (p.batches == 1 || p.batches == B) && (Hq == 0 || (p.tables > 0 && Hq % p.tables == 0)) &&
      t[4].size(2) == p.rows + 1 && t[6].has_sizes(t[5].sizes()) && t[5].size(0) == p.batches &&
      t[5].size(1) == p.tables && t[7].size(1) == p.block * p.block / 8 &&
      t[8].has_sizes(t[7].sizes()) && (!p.query_segments || t[9].has_sizes({p.axes, p.rows})) &&
      (!p.key_segments || t[10].has_sizes({p.axes, p.columns}));
  SPARSERING_CHECK(fits,
                   "sparsering cpu: malformed layout: the shapes of a pass's tensors disagree");
  check_tiles(p.query_start, p.query_stop, p.axes * p.rows, q_len, "query");
  check_tiles(p.key_start, p.key_stop, p.axes * p.columns, kv_len, "key");
  for (int64_t i = 0; i < p.batches * p.tables; ++i) {
    check_table(p.row_ptr(i), p.rows, p.entries, "row_ptr");
    const int64_t used = p.row_ptr(i)[p.rows];
    check_range(p.keys(i), used, 0, p.columns, "key_tile");
    check_range(p.bitmap_numbers(i), used, -1, p.num_bitmaps, "bitmap");
  }
}

inline void check_places(Tensors t, const Pass& p, int64_t streams, int64_t B) {
  bool fits = t.size() == Pass::kPlaces;
  for (size_t i = 0; fits && i < t.size(); ++i) {
    const int64_t tiles = i == 1 || i == 4 ? p.columns : p.rows;
    fits = t[i].is_contiguous();
    if (i < 3) {
      fits &= t[i].numel() == p.axes * tiles || (i == 2 && t[i].numel() == 0);
    } else {
      fits &= t[i].dim() == 4 && (t[i].size(0) == 1 || t[i].size(0) == B) &&
              t[i].size(1) == p.axes && t[i].size(2) == tiles &&
              (t[i].size(3) == 1 || t[i].size(3) == p.block);
    }
  }
  SPARSERING_CHECK(fits, "sparsering cpu: malformed layout: places of tiles");
  for (int64_t i = 0; i < t[2].numel(); ++i) {
    const int64_t stream = values_of<int64_t>(t[2])[i];
    SPARSERING_CHECK(stream >= 0 && stream < streams, "sparsering cpu: malformed layout: stream ",
                     stream, " of ", streams);
  }
}

inline void check_transpose(Tensors t, const Pass& p) {
  const Transpose by_key(t);
  const bool fits = t[0].is_contiguous() && t[1].is_contiguous() && t[2].is_contiguous() &&
                    t[0].numel() == p.batches * p.tables * (p.columns + 1) &&
                    t[1].numel() == p.batches * p.tables * p.entries &&
                    t[2].numel() == t[1].numel();
  SPARSERING_CHECK(fits,
                   "sparsering cpu: malformed layout: the transposed table has the wrong size");
  for (int64_t i = 0; i < p.batches * p.tables; ++i) {
    const int32_t* row_ptr = by_key.row_ptr + i * (p.columns + 1);
    const int64_t used = p.row_ptr(i)[p.rows];
    check_table(row_ptr, p.columns, used, "transposed row_ptr");
    check_range(by_key.query_tile + i * p.entries, row_ptr[p.columns], 0, p.rows, "query_tile");
    check_range(by_key.entry + i * p.entries, row_ptr[p.columns], 0, used, "entry");
  }
}

// Where tokens stand in space. A product of query and key loses `slope(head)` times the distance
// of their tokens.
struct Coordinates {
  Coordinates() = default;
  // `tensors` is empty, or has the coordinates of queries and of keys, float [B or 1, parts, dims,
  // tokens], and the slopes of query heads over the scale of the scores. With two parts, a
  // coordinate is their sum, and the second is the smaller one.
  Coordinates(Tensors tensors, int64_t B, int64_t Hq, int64_t Nq, int64_t Nk) {
    if (tensors.empty()) {
      return;
    }
    bool fits = tensors.size() == 3 && tensors[0].dim() == 4 && tensors[1].dim() == 4;
    for (size_t i = 0; fits && i < 3; ++i) {
      fits = tensors[i].is_contiguous() && tensors[i].dtype() == kFloat;
    }
    fits = fits && tensors[2].has_sizes({Hq});
    for (int i = 0; fits && i < 2; ++i) {
      const Tensor& x = tensors[i];
      parts = x.size(1), dims = x.size(2);
      fits = (x.size(0) == 1 || x.size(0) == B) && (parts == 1 || parts == 2) && dims > 0 &&
             x.size(1) == tensors[0].size(1) && x.size(2) == tensors[0].size(2) &&
             x.size(3) == (i ? Nk : Nq);
      (i ? key : query) = {values_of<float>(x), x.size(3),
                           x.size(0) > 1 ? parts * dims * x.size(3) : 0};
    }
    SPARSERING_CHECK(fits, "sparsering cpu: malformed coordinates of tokens");
    slopes = values_of<float>(tensors[2]);
  }

  explicit operator bool() const {
    return slopes;
  }
  // Numbers of a token.
  int64_t rows() const {
    return parts * dims;
  }

  // The numbers of a token, which are `stride` apart.
  struct Spot {
    const float* data;
    int64_t stride;
  };
  struct Of {
    const float* data = nullptr;
    int64_t tokens = 0, batch = 0;

    Spot at(int64_t b, int64_t token) const {
      return {data + b * batch + token, tokens};
    }
    // Returns a function of j that finds token j of a tile.
    auto spots(int64_t b, int64_t start, int64_t step) const {
      return [first = at(b, start), step](int64_t j) {
        return Spot{first.data + j * step, first.stride};
      };
    }
  };
  Of query, key;
  int64_t parts = 1, dims = 0;
  const float* slopes = nullptr;
};

// The extras of a call except block bias and sink, as in kernels/problem.py; 0 or null if not in
// use.
struct Extras {
  Extras() = default;
  Extras(double softcap_, const std::optional<Tensor>& distance_bias, double dropout_p,
         const std::optional<Tensor>& seeds_, const std::optional<Tensor>& key_mask,
         Tensors coordinates_, int64_t B, int64_t Hq, int64_t Nq, int64_t Nk)
      : softcap(static_cast<float>(softcap_)), coordinates(coordinates_, B, Hq, Nq, Nk) {
    if (distance_bias) {
      const Tensor& t = *distance_bias;
      SPARSERING_CHECK(t.dim() == 3 && t.size(0) == B && t.size(1) == Hq && t.size(2) % 2 == 1 &&
                           t.stride(2) == 1 && t.dtype() == kFloat,
                       "sparsering cpu: a distance bias must be float [B, Hq, 2R + 1]");
      table_ = values_of<float>(t);
      radius = t.size(2) / 2;
      table_strides_[0] = t.stride(0), table_strides_[1] = t.stride(1);
    }
    if (seeds_) {
      SPARSERING_CHECK(seeds_->dim() == 2 && seeds_->size(0) == B && seeds_->is_contiguous() &&
                           dropout_p > 0 && dropout_p < 1,
                       "sparsering cpu: dropout needs seeds [B, streams] and 0 < p < 1");
      seeds = values_of<int64_t>(*seeds_);
      streams = seeds_->size(1);
      factor = static_cast<float>(1 / (1 - dropout_p));
      const double dropped = std::min(std::nearbyint(dropout_p * 4294967296.0), 4294967295.0);
      threshold = static_cast<int32_t>(static_cast<int64_t>(dropped) - (int64_t{1} << 31));
    }
    if (key_mask) {
      SPARSERING_CHECK(key_mask->dim() == 2 && (key_mask->size(0) == 1 || key_mask->size(0) == B) &&
                           key_mask->size(1) == Nk && key_mask->is_contiguous() &&
                           key_mask->dtype() == kBool,
                       "sparsering cpu: a key mask must be bool [B or 1, Nk]");
      mask_ = values_of<bool>(*key_mask);
      mask_stride_ = key_mask->size(0) > 1 ? Nk : 0;
    }
  }

  bool adjusts() const {
    return softcap > 0.f || table_;
  }
  bool drops() const {
    return seeds;
  }
  // Distance table of a head, or nullptr.
  const float* table(int64_t b, int64_t head) const {
    return table_ ? table_ + b * table_strides_[0] + head * table_strides_[1] : nullptr;
  }
  // Bias at a distance, which is clamped to the radius.
  float bias_at(const float* table, int64_t distance) const {
    return table[radius + std::clamp(distance, -radius, radius)];
  }
  // Key mask of a batch entry, true for keys that are seen; nullptr if all are.
  const bool* key_mask(int64_t b) const {
    return mask_ ? mask_ + b * mask_stride_ : nullptr;
  }
  bool sees(int64_t b, Tile tile, int64_t step) const {
    const bool* mask = key_mask(b);
    bool any = !mask;
    for (int64_t j = 0; j < tile.count && !any; ++j) {
      any = mask[tile.start + j * step];
    }
    return any;
  }

  float softcap = 0.f, factor = 1.f;
  int64_t radius = 0;
  // without seeds, any stream index is valid
  int64_t streams = std::numeric_limits<int64_t>::max();
  int32_t threshold = 0;
  const int64_t* seeds = nullptr;
  Coordinates coordinates;

 private:
  const float* table_ = nullptr;
  int64_t table_strides_[2] = {0, 0}, mask_stride_ = 0;
  const bool* mask_ = nullptr;
};

// Input of a call. In loops, `kv` is the index of a kv head among those of all batch entries.
struct Problem {
  Problem(const Tensor& query, const Tensor& key, const Tensor& value,
          const std::optional<Tensor>& bias_, const Extras& extras_, const Tensor& first_entry_,
          int64_t passes, int64_t block_, double scale_)
      : q(query),
        k(key),
        v(value),
        B(query.size(0)),
        Hq(query.size(1)),
        Hkv(key.size(1)),
        Nq(query.size(2)),
        Nk(key.size(2)),
        D(query.size(3)),
        Dv(v.width),
        group(Hkv ? Hq / Hkv : 1),
        block(block_),
        scale(static_cast<float>(scale_)),
        extras(extras_),
        bias(bias_ ? values_of<float>(*bias_) : nullptr),
        blocks(bias_ ? bias_->size(2) : 0),
        first_entry(values_of<int64_t>(first_entry_)),
        first_batches(first_entry_.size(1)),
        first_heads(first_entry_.size(2)) {
    SPARSERING_CHECK(block % 16 == 0 && block > 0 && block <= 256,
                     "sparsering cpu: block size must be a multiple of 16 up to 256, got ", block);
    SPARSERING_CHECK(key.size(0) == B && value.size(0) == B && value.size(1) == Hkv &&
                         value.size(2) == Nk && k.width == D && Hq == group * Hkv,
                     "sparsering cpu: shapes of query, key and value disagree");
    SPARSERING_CHECK((k.is_stored() || key.dtype() == query.dtype()) && !q.is_stored() &&
                         value.dtype() == key.dtype(),
                     "sparsering cpu: dtypes of query, key and value disagree");
    SPARSERING_CHECK(first_entry_.is_contiguous() && first_entry_.size(0) == passes &&
                         (first_batches == 1 || first_batches == B) && first_heads > 0,
                     "sparsering cpu: malformed layout: first_entry");
    SPARSERING_CHECK(
        !bias_ || (bias_->is_contiguous() && bias_->size(0) == B && bias_->size(1) == Hq),
        "sparsering cpu: a bias must be contiguous, of each batch entry and head");
  }

  // Throws for rows in 8 bits, which only forward passes over tiles can read.
  void check_is_whole() const {
    SPARSERING_CHECK(!k.is_stored(), "sparsering cpu: expected keys in the dtype of the query");
  }

  // Checks that every entry of a pass has an index below `blocks`.
  void check_entries(const Pass& pass, int64_t number) const {
    for (int64_t i = 0; i < B * Hq; ++i) {
      const int64_t first = bias_of(number, i / Hq, i % Hq) - i * blocks;
      const int64_t entries = pass.row_ptr(pass.table(i / Hq, i % Hq, Hq))[pass.rows];
      SPARSERING_CHECK(first >= 0 && first + entries <= blocks,
                       "sparsering cpu: malformed layout: entries ", first, " to ", first + entries,
                       " of ", blocks, " blocks");
    }
  }

  // Index of the first block bias (or its gradient) of a head in a pass.
  int64_t bias_of(int64_t pass, int64_t b, int64_t head) const {
    const int64_t row = pass * first_batches + (first_batches > 1 ? b : 0);
    return (b * Hq + head) * blocks + first_entry[row * first_heads + head * first_heads / Hq];
  }

  float bias_at(int64_t pass, int64_t b, int64_t head, int64_t entry) const {
    return bias ? bias[bias_of(pass, b, head) + entry] : 0.f;
  }

  // Throws for coordinates, which only forward and backward passes over query tiles know.
  void check_has_no_coordinates() const {
    SPARSERING_CHECK(!extras.coordinates, "sparsering cpu: expected no coordinates here");
  }

  // The factor that scores still need; 1 if extras are in use, because `adjust` scales scores.
  float rest_of_scale() const {
    return extras.adjusts() ? 1.f : scale;
  }

  Source q, k, v;
  int64_t B, Hq, Hkv, Nq, Nk, D, Dv, group, block;
  float scale;
  Extras extras;
  const float* bias;
  int64_t blocks;
  const int64_t* first_entry;
  int64_t first_batches, first_heads;
};

}  // namespace sparsering::cpu
