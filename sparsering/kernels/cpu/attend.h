// Computes one item of the forward pass: attention of a query tile over some of its key tiles.

#pragma once

#include "coordinates.h"
#include "few_pairs.h"
#include "segments.h"
#include "softmax.h"

namespace sparsering::cpu {

// A work item: entries (visited key tiles) `begin` to `end` of query tile `row`, for `heads` heads.
// A tile with many entries is cut into pieces, one for each group of segments, whose sums are added
// later. `piece` is the index of the piece, or -1 if the tile is not cut.
struct Item {
  int64_t batch, head, heads, row, begin, end, piece;
};

template <typename T>
class Attend {
 public:
  explicit Attend(const Problem& problem)
      : x_(problem),
        width_(round_up(std::max<int64_t>(problem.D, 1), 2)),
        units_(problem.rest_of_scale()) {}

  struct Operands {
    const T *k, *v;
  };

  // The sums of each row of a query tile: of its weights (`total`), and of its weighted values.
  struct Sums {
    Sums() = default;
    Sums(int64_t rows, int64_t width) : highest(rows), total(rows), values(rows * width) {}
    Buffer<float> highest, total, values;
  };

  // The buffers of a thread, for items of `many` queries, of `few` queries (few.h), or both.
  // `segments` is true if a pass has several segments of keys.
  struct Scratch {
    Scratch(const Attend& f, bool many, bool few, bool segments) {
      const auto& x = f.x_;
      const int64_t queries = round_up(x.block, 32), most_keys = cpu::most_keys(x.block);
      rows = Buffer<float>(queries * x.Dv);
      lse = Buffer<float>(queries);
      now = Sums(queries, x.Dv);
      factor = Buffer<float>(queries);
      scores = Buffer<float>(queries * (many ? most_keys : kFewQueries));
      highest = Buffer<float>(many ? queries : 0);
      totals = Buffer<float>(many ? queries * (segments ? most_keys / 16 : 1) : 0);
      for (Sums& of : earlier) {
        of = segments ? Sums(queries, x.Dv) : Sums();
      }
      biases = Buffer<float>(x.extras.adjusts() ? 2 * queries : 0);
      coordinates = Buffer<float>(x.extras.coordinates.rows() * queries);
      a = Buffer<uint32_t>(x.extras.drops() ? queries : 0);
      b = Buffer<uint32_t>(x.extras.drops() ? queries : 0);
      query = Buffer<float>(few ? kFewQueries * round_up(x.D, kLanes) : 0);
      keys = Buffer<float>(few ? few_spare(round_up(x.D, kLanes)) : 0);
      nothing = Buffer<BFloat16>::zeros(few && kPaired<T> ? round_up(x.Dv, 32) : 0);
      tile = Buffer<T>(many ? queries * f.width_ : 0);
      packed = Buffer<T>(many ? queries * f.width_ : 0);
      weights = Buffer<T>(many && kPaired<T> ? queries * most_keys : 0);
    }
    Sums now;         // the sums of the current segment of keys
    Sums earlier[2];  // those of earlier segments in its group, and those of earlier groups
    Buffer<float> rows, lse, factor, scores, biases, coordinates, query, keys;
    Buffer<float> highest, totals;  // maxima over all keys so far; totals per segment of a step
    Buffer<uint32_t> a, b;
    Buffer<T> tile, packed, weights;
    Buffer<BFloat16> nothing;  // a row of zeros
  };

  // Computes an item and returns its query tile. `s.rows` and `s.lse` get the results; for a piece,
  // `s.rows` gets sums, to which `s.now.highest` and `s.now.total` belong. `later` is an item of
  // the same head that this thread will probably compute next, or nullptr.
  Tile many_queries(Scratch& s, const Pass& pass, const Item& item, const Item* later,
                    int64_t number, const Operands* operands) const {
    const int64_t axis = item.head * pass.axes / x_.Hq, block = x_.block;
    const Tile tile = pass.query_tile(axis, item.row);
    const int64_t queries = round_up(tile.count, kQueryUnit<T>);
    const int32_t* numbers = pass.bitmap_numbers(pass.table(item.batch, item.head, x_.Hq));
    const T* q =
        tile_rows(x_.q, item.batch, item.head, tile, pass.step, queries, width_, s.tile.get());
    pack_transposed(q, queries, width_, s.packed.get());
    clear_sums(s, queries);
    std::fill_n(s.highest.get(), queries, -kInf);
    if (x_.extras.drops()) {
      row_words(x_, pass, item.batch, item.head, item.row, queries, s.a.get(), s.b.get());
    }
    const Coordinates& coordinates = x_.extras.coordinates;
    Lanes lanes = {};
    if (coordinates) {
      lanes = read_lanes(coordinates, coordinates.query, item.batch, tile, pass.step, queries,
                         s.coordinates.get());
    }
    float* scores = s.scores.get();
    T* weights;
    if constexpr (kPaired<T>) {
      weights = s.weights.get();
    } else {
      weights = scores;
    }
    bool any = false;
    Segments segments;
    const auto add = [&](Sums& to, const Sums& from) { add_columns(to, from, queries); };
    for (int64_t entry = item.begin; entry < item.end;) {
      const Stack tiles = stack(pass, item, number, entry);
      if (!tiles.size) {
        continue;
      }
      const auto begin = [&](int64_t segment) {
        if (segments.changes_to(segment)) {
          std::copy_n(s.highest.get(), queries, s.now.highest.get());
        }
        if (segments.begin(s.now, s.earlier, segment, add)) {
          std::fill_n(s.now.total.get(), queries, 0.f);
          std::fill_n(s.now.values.get(), queries * x_.Dv, 0.f);
        }
      };
      begin(tiles.parts[0].segment);
      float* at = scores;
      for (int64_t i = 0; i < tiles.size; ++i) {
        const auto& part = tiles.parts[i];
        const T* key = operands[part.column].k;
        const uint8_t* bits = apart<T>(pass, numbers[part.entry], tile.count);
        for_parts(bits, block, part.padded, queries,
                  [&](int64_t query, int64_t size, int64_t first, int64_t count) {
                    multiply(count, size, width_, key + first * width_, width_,
                             s.packed.get() + query, queries, at + first * queries + query, queries,
                             false);
                  });
        if (coordinates) {
          const int64_t first = pass.key_tile(axis, part.column).start;
          lower_by_distance(coordinates, lanes, coordinates.slopes[item.head],
                            coordinates.key.spots(item.batch, first, pass.step), part.rows, queries,
                            queries, at);
        }
        if (x_.extras.adjusts()) {
          adjust_tiles(pass, item, part, queries, s.biases.get(), at);
        }
        hide_unseen(x_.extras.key_mask(item.batch), pass.key_tile(axis, part.column), pass.step, at,
                    queries);
        if (numbers[part.entry] >= 0) {
          apply_mask(pass.bitmap(numbers[part.entry]), block, part.rows, tile.count, at, queries);
        }
        at += part.padded * queries;
      }
      Ahead ahead = far_tiles(pass, item, later, entry, tiles.size, operands);
      int64_t c = 0;
      for (constexpr int W = 4; c + W * kLanes <= queries; c += W * kLanes) {
        step<W>(s, tiles, scores, weights, queries, c, ahead);
      }
      for (constexpr int W = kPaired<T> ? 2 : 1; c < queries; c += W * kLanes) {
        step<W>(s, tiles, scores, weights, queries, c, ahead);
      }
      if (any) {
        multiply_sums(s, queries);
      }
      any = true;
      T* w = weights;
      const float* totals = s.totals.get();
      for (int64_t i = 0; i < tiles.size; ++i) {
        const auto& part = tiles.parts[i];
        if (i == 0 || part.segment != tiles.parts[i - 1].segment) {
          begin(part.segment);
          std::copy_n(totals, queries, s.now.total.get());
          totals += queries;
        }
        if (x_.extras.drops()) {
          drop(w, part.padded, queries, dropout(s, pass, axis, part.column));
        }
        const T* value = operands[part.column].v;
        const uint8_t* bits = apart<T>(pass, numbers[part.entry], tile.count);
        for_parts(bits, block, part.padded, queries,
                  [&](int64_t query, int64_t size, int64_t first, int64_t count) {
                    multiply(x_.Dv, size, count, value + first, part.padded,
                             w + first * queries + query, queries, s.now.values.get() + query,
                             queries, true);
                  });
        w += part.padded * queries;
      }
    }
    std::copy_n(s.highest.get(), queries, s.now.highest.get());
    segments.end(s.now, s.earlier, add);
    std::fill_n(s.factor.get(), queries, 1.f);
    if (item.piece < 0) {
      finish_rows(queries, s.now.highest.get(), s.now.total.get(), s.factor.get(), s.lse.get());
    }
    transpose_scaled(s.now.values.get(), x_.Dv, queries, s.rows.get(), s.factor.get());
    return tile;
  }

  // Computes the factors that turn the sums of rows into results, and their lse.
  void finish_rows(int64_t rows, const float* highest, const float* total, float* factor,
                   float* lse) const {
    for (int64_t i = 0; i < rows; ++i) {
      units_.finish(highest[i], total[i], factor[i], lse[i]);
      factor[i] *= x_.extras.factor;
    }
  }

  // Computes attention of a few queries: one query tile of all heads that share keys. It reads each
  // key and value once, without packing.
  Tile few_queries(Scratch& s, const Pass& pass, const Item& item, int64_t number) const {
    return with_width(x_.D, x_.Dv,
                      [&](auto width) { return few_queries_of<width()>(s, pass, item, number); });
  }

 private:
  // True if keys and values stay in pairs of bfloat16, and products of pairs are added in order.
  static bool adds_pairs() {
    return kPaired<T> && has_pairs() && (in_order() || !has_tiles());
  }

  template <int W>
  Tile few_queries_of(Scratch& s, const Pass& pass, const Item& item, int64_t number) const {
    const int64_t axis = item.head * pass.axes / x_.Hq, kv_head = item.head / x_.group;
    const Tile tile = pass.query_tile(axis, item.row);
    const int64_t table = pass.table(item.batch, item.head, x_.Hq), rows = item.heads * tile.count;
    const bool* seen = x_.extras.key_mask(item.batch);
    // Pairs are transposed like floats, so their number must be a multiple of kLanes.
    const int64_t width = round_up(x_.D, adds_pairs() ? 2 * kLanes : kLanes);
    for (int64_t i = 0; i < item.heads; ++i) {
      const auto read = [&](auto* queries) {
        read_tile(x_.q, item.batch, item.head + i, tile, pass.step, tile.count, width,
                  queries + i * tile.count * width);
      };
      adds_pairs() ? read(reinterpret_cast<BFloat16*>(s.query.get())) : read(s.query.get());
      if (x_.extras.drops()) {
        row_words(x_, pass, item.batch, item.head + i, item.row, tile.count,
                  s.a.get() + i * tile.count, s.b.get() + i * tile.count);
      }
    }
    FewQueries few{rows,        x_.D,          x_.Dv,          x_.block,
                   width,       s.query.get(), s.scores.get(), s.now.values.get(),
                   s.keys.get()};
    clear_sums(s, rows);
    Segments segments;
    const auto add = [&](Sums& to, const Sums& from) { add_rows_of(to, from, rows); };
    for (int64_t entry = item.begin; entry < item.end; ++entry) {
      const int64_t column = pass.keys(table)[entry];
      const Tile keys = pass.key_tile(axis, column);
      const int64_t number_of_bitmap = pass.bitmap_numbers(table)[entry];
      if (keys.count == 0 || !x_.extras.sees(item.batch, keys, pass.step) ||
          (number_of_bitmap >= 0 && !visited(pass, number_of_bitmap, tile.count, keys.count))) {
        continue;
      }
      if (segments.begin(s.now, s.earlier, pass.key_segment(axis, column), add)) {
        clear_sums(s, rows);
        few.sums = s.now.values.get();
      }
      const auto visit = [&](const auto& rows_of) {
        const auto values = rows_of(x_.v, keys.start);
        constexpr bool may_pair = std::is_same_v<decltype(rows_of(x_.v, 0)), Strided<BFloat16>>;
        bool in_pairs = false;
        if constexpr (kPaired<T> && may_pair) {
          in_pairs = adds_pairs();
          if (in_pairs) {
            score_pairs<W>(few, rows_of(x_.k, keys.start), keys.count, values);
          }
        }
        if (!in_pairs) {
          score_keys<W>(few, rows_of(x_.k, keys.start), keys.count, values);
        }
        const Coordinates& coordinates = x_.extras.coordinates;
        Lanes lanes = {};
        if (coordinates) {
          lanes = read_lanes(coordinates, coordinates.key, item.batch, keys, pass.step,
                             round_up(keys.count, kLanes), s.coordinates.get());
        }
        for (int64_t r = 0; r < rows; ++r) {
          float* scores = s.scores.get() + r * x_.block;
          const int64_t i = r % tile.count, head = item.head + r / tile.count;
          const float bias = x_.bias_at(number, item.batch, head, entry);
          if (coordinates) {
            lower_by_distance(coordinates, lanes, coordinates.slopes[head],
                              coordinates.query.spots(item.batch, tile.start + i * pass.step, 1), 1,
                              keys.count, 0, scores);
          }
          if (x_.extras.adjusts()) {
            adjust_row(pass, item, head, i, column, keys.count, s.biases.get(), scores);
          }
          hide_unseen(seen, keys, pass.step, scores, 1);
          if (number_of_bitmap >= 0) {
            keep_bits(pass.bits_of_query(number_of_bitmap, i), keys.count, scores);
          }
          weigh(few, r, keys.count, units_.scale, bias, s.now.highest.get()[r],
                s.now.total.get()[r]);
          if (x_.extras.drops()) {
            Dropout of_row = dropout(s, pass, axis, column);
            of_row.a += r, of_row.b += r;
            drop(scores, keys.count, 1, of_row);
          }
        }
        const Tile next =
            entry + 1 < item.end ? pass.key_tile(axis, pass.keys(table)[entry + 1]) : Tile{0, 0};
        const auto next_keys = rows_of(x_.k, next.start);
        if constexpr (kPaired<T> && may_pair) {
          if (in_pairs) {
            const bool* of_tile = seen ? seen + keys.start : nullptr;
            pack_weights(few, keys.count);
            add_pairs<W>(few, {values, of_tile, pass.step, s.nothing.get()}, keys.count, next_keys,
                         next.count);
            return;
          }
        }
        for_runs(seen, keys, pass.step, [&](int64_t first, int64_t count) {
          add_values<W>(few.from(first), values.from(first), count, next_keys, next.count);
        });
      };
      if (!x_.k.is_stored()) {
        with_type(x_.k.type, [&](auto value) {
          using S = decltype(value);
          visit([&](const Source& source, int64_t first) {
            return Strided<S>{source.rows<S>(item.batch, kv_head, first),
                              source.strides[2] * pass.step};
          });
        });
      } else if constexpr (!kPaired<T>) {
        with_stored_type(x_.k.type, [&](auto number) {
          visit([&](const Source& source, int64_t first) {
            return stored_rows<decltype(number)>(source, item.batch, kv_head, first, pass.step);
          });
        });
      }
    }
    segments.end(s.now, s.earlier, add);
    std::fill_n(s.factor.get(), rows, 1.f);
    if (item.piece < 0) {
      finish_rows(rows, s.now.highest.get(), s.now.total.get(), s.factor.get(), s.lse.get());
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t d = 0; d < x_.Dv; ++d) {
        s.rows.get()[r * x_.Dv + d] = s.now.values.get()[r * x_.Dv + d] * s.factor.get()[r];
      }
    }
    return tile;
  }

  void clear_sums(const Scratch& s, int64_t rows) const {
    std::fill_n(s.now.highest.get(), rows, -kInf);
    std::fill_n(s.now.total.get(), rows, 0.f);
    std::fill_n(s.now.values.get(), rows * x_.Dv, 0.f);
  }
  // Adds the sums `from` to `to`; their values are transposed, [Dv, queries].
  void add_columns(Sums& to, const Sums& from, int64_t queries) const {
    for (int64_t i = 0; i < queries; i += kLanes) {
      float *highest = to.highest.get() + i, *total = to.total.get() + i;
      const Vec one = Vec::loadu(highest), two = Vec::loadu(from.highest.get() + i),
                top = at::vec::maximum(one, two),
                least = Vec::blendv(top, Vec(0.f), top == Vec(-kInf)),
                a = power_of_two(one - least), b = power_of_two(two - least);
      const auto add = [&](float* sum, const float* other) {
        (Vec::loadu(sum) * a + Vec::loadu(other) * b).store(sum);
      };
      top.store(highest);
      add(total, from.total.get() + i);
      for (int64_t d = 0; d < x_.Dv; ++d) {
        add(to.values.get() + d * queries + i, from.values.get() + d * queries + i);
      }
    }
  }
  void add_rows_of(Sums& to, const Sums& from, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      add_segment(to.highest.get()[r], to.total.get()[r], to.values.get() + r * x_.Dv,
                  from.highest.get()[r], from.total.get()[r], from.values.get() + r * x_.Dv, x_.Dv);
    }
  }

  // Returns the key tiles of an item for the next softmax step, and moves `entry` past them.
  Stack stack(const Pass& pass, const Item& item, int64_t number, int64_t& entry) const {
    Stack result;
    const int64_t table = pass.table(item.batch, item.head, x_.Hq),
                  axis = item.head * pass.axes / x_.Hq;
    const float* bias = x_.bias ? x_.bias + x_.bias_of(number, item.batch, item.head) : nullptr;
    for (; entry < item.end; ++entry) {
      const int64_t column = pass.keys(table)[entry];
      const Tile tile = pass.key_tile(axis, column);
      const int64_t count = tile.count, padded = round_up(count, 16);
      if (result.size && result.padded + padded > most_keys(x_.block)) {
        break;
      }
      if (count && x_.extras.sees(item.batch, tile, pass.step)) {
        result.parts[result.size++] = {
            column, entry, count, padded, pass.key_segment(axis, column), bias ? bias[entry] : 0.f};
        result.padded += padded;
      }
    }
    return result;
  }

  // Returns memory to prefetch: the keys and values of up to `most` entries from `entry` on that do
  // not directly follow those of the entry before. At the end of an item it takes those of `later`.
  // For smaller tiles and for half precision, prefetching gained nothing.
  Ahead far_tiles(const Pass& pass, const Item& item, const Item* later, int64_t entry,
                  int64_t most, const Operands* operands) const {
    Ahead ahead;
    if (kPaired<T> || x_.block < (kLanes <= 8 ? 32 : 128)) {
      return ahead;
    }
    int64_t end = item.end;
    if (entry == end && later) {
      entry = later->begin, end = later->end;
    }
    const auto* keys = pass.keys(pass.table(item.batch, item.head, x_.Hq));
    for (const int64_t stop = std::min(end, entry + most); entry < stop; ++entry) {
      if (const int64_t column = keys[entry]; column != keys[entry - 1] + 1) {
        ahead.add(operands[column].k, x_.block * width_ * sizeof(T));
        ahead.add(operands[column].v, x_.block * x_.Dv * sizeof(T));
      }
    }
    return ahead;
  }

  // True if bitmap `number` has a pair with one of the call's queries. Decoding builds one layout
  // for a range of queries, and a call has only a few of them, so an entry may have no pair with
  // these.
  bool visited(const Pass& pass, int64_t number, int64_t queries, int64_t keys) const {
    int any = 0;
    for (int64_t i = 0; i < queries; ++i) {
      const uint8_t* bits = pass.bits_of_query(number, i);
      for (int64_t j = 0; j < keys / 8; ++j) {
        any |= bits[j];
      }
      any |= keys % 8 ? bits[keys / 8] & ((1 << keys % 8) - 1) : 0;
    }
    return any;
  }

  Dropout dropout(const Scratch& s, const Pass& pass, int64_t axis, int64_t column) const {
    return {s.a.get(), s.b.get(), pass.key_origin(axis, column), pass.step, x_.extras.threshold};
  }

  void adjust_tiles(const Pass& pass, const Item& item, const Stack::Part& part, int64_t queries,
                    float* biases, float* scores) const {
    const float* table = x_.extras.table(item.batch, item.head);
    if (table) {
      const int64_t axis = item.head * pass.axes / x_.Hq;
      if (!pass.has_even_depths()) {
        for (int64_t j = 0; j < part.rows; ++j) {
          read_distances_of_key(x_.extras, table, pass, {item.batch, axis, item.row, part.column},
                                j, queries, biases);
          adjust(scores + j * queries, queries, x_.scale, x_.extras.softcap, biases, nullptr);
        }
        return;
      }
      const int64_t distance = pass.distance(item.batch, axis, item.row, part.column);
      read_distances(table, x_.extras.radius, distance + (part.rows - 1) * pass.step, -pass.step,
                     part.rows - 1 + queries, biases);
    }
    for (int64_t j = 0; j < part.rows; ++j) {
      adjust(scores + j * queries, queries, x_.scale, x_.extras.softcap,
             table ? biases + part.rows - 1 - j : nullptr, nullptr);
    }
  }

  template <int W>
  void step(Scratch& s, const Stack& tiles, float* scores, T* weights, int64_t ld, int64_t c,
            Ahead& ahead) const {
    softmax_step<T, W>(tiles, scores + c, weights + (kPaired<T> ? 2 : 1) * c, ld, units_.scale,
                       s.highest.get() + c, s.now.total.get() + c, s.totals.get() + c,
                       s.factor.get() + c, ahead);
  }

  // Multiplies the sums O^T [Dv, queries] by a factor per query.
  void multiply_sums(Scratch& s, int64_t queries) const {
    for (int64_t d = 0; d < x_.Dv; ++d) {
      float* sum = s.now.values.get() + d * queries;
      for (int64_t i = 0; i < queries; i += kLanes) {
        (Vec::loadu(sum + i) * Vec::loadu(s.factor.get() + i)).store(sum + i);
      }
    }
  }

  // Applies extras to the scores of one query, which has index `i` in its tile, with a key tile.
  void adjust_row(const Pass& pass, const Item& item, int64_t head, int64_t i, int64_t column,
                  int64_t count, float* biases, float* scores) const {
    const float* table = x_.extras.table(item.batch, head);
    if (table) {
      const int64_t axis = head * pass.axes / x_.Hq;
      for (int64_t j = 0; j < count; ++j) {
        const int64_t distance = pass.distance(item.batch, axis, item.row, column, i, j);
        biases[j] = x_.extras.bias_at(table, distance);
      }
    }
    adjust(scores, count, x_.scale, x_.extras.softcap, table ? biases : nullptr, nullptr);
  }

  const Problem& x_;
  const int64_t width_;
  const Units units_;
};

}  // namespace sparsering::cpu
