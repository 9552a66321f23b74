// Computes one item of the forward pass: attention of a query tile over some of its key tiles.

#pragma once

#include "few.h"
#include "scores.h"
#include "softmax.h"

namespace sparsering::cpu {

// Work item: entries (visited key tiles) `begin` to `end` of query tile `row`, for `heads` heads.
// If a tile has many entries, it is cut into pieces, whose results are merged later: `piece` is
// the index of the piece, -1 if the tile is not cut.
struct Item {
  int64_t batch, head, heads, row, begin, end, piece;
};

template <typename T>
class Attend {
 public:
  explicit Attend(const Problem& problem)
      : x_(problem), width_(round_up(std::max<int64_t>(problem.D, 1), 2)) {}

  struct Operands {
    const T *k, *v;
  };

  // Buffers of a thread, for items of `many` queries, of `few` queries (few.h), or both.
  struct Scratch {
    Scratch(const Attend& f, bool many, bool few) {
      const auto& x = f.x_;
      const int64_t queries = round_up(x.block, 32), most_keys = cpu::most_keys(x.block);
      rows = Buffer<float>(queries * x.Dv);
      lse = Buffer<float>(queries);
      highest = Buffer<float>(queries);
      total = Buffer<float>(queries);
      factor = Buffer<float>(queries);
      scores = Buffer<float>(queries * (many ? most_keys : kFewQueries));
      sums = Buffer<float>(queries * x.Dv);
      biases = Buffer<float>(x.extras.adjusts() ? 2 * queries : 0);
      a = Buffer<uint32_t>(x.extras.drops() ? queries : 0);
      b = Buffer<uint32_t>(x.extras.drops() ? queries : 0);
      query = Buffer<float>(few ? kFewQueries * round_up(x.D, kLanes) : 0);
      keys = Buffer<float>(few ? 2 * kLanes * round_up(x.D, kLanes) : 0);
      tile = Buffer<T>(many ? queries * f.width_ : 0);
      packed = Buffer<T>(many ? queries * f.width_ : 0);
      weights = Buffer<T>(many && kPaired<T> ? queries * most_keys : 0);
    }
    Buffer<float> rows, lse, highest, total, factor, scores, sums, biases, query, keys;
    Buffer<uint32_t> a, b;
    Buffer<T> tile, packed, weights;
  };

  // `later`: an item of the same head that this thread will probably compute next, or nullptr.
  Tile many_queries(Scratch& s, const Pass& pass, const Item& item, const Item* later,
                    int64_t number, const Operands* operands) const {
    const int64_t axis = item.head * pass.axes / x_.Hq, block = x_.block;
    const Tile tile = pass.query_tile(axis, item.row);
    const int64_t queries = round_up(tile.count, kQueryUnit<T>);
    const int32_t* numbers = pass.bitmap_numbers(pass.table(item.batch, item.head, x_.Hq));
    const T* q =
        tile_rows(x_.q, item.batch, item.head, tile, pass.step, queries, width_, s.tile.get());
    pack_transposed(q, queries, width_, s.packed.get());
    std::fill_n(s.highest.get(), queries, -kInf);
    std::fill_n(s.total.get(), queries, 0.f);
    std::fill_n(s.sums.get(), queries * x_.Dv, 0.f);
    if (x_.extras.drops()) {
      row_words(x_, pass, item.batch, item.head, item.row, queries, s.a.get(), s.b.get());
    }
    float* scores = s.scores.get();
    T* weights;
    if constexpr (kPaired<T>) {
      weights = s.weights.get();
    } else {
      weights = scores;
    }
    bool any = false;
    for (int64_t entry = item.begin; entry < item.end;) {
      const Stack tiles = stack(pass, item, number, entry);
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
      for (int64_t i = 0; i < tiles.size; ++i) {
        const auto& part = tiles.parts[i];
        if (x_.extras.drops()) {
          drop(w, part.padded, queries, dropout(s, pass, axis, part.column));
        }
        const T* value = operands[part.column].v;
        const uint8_t* bits = apart<T>(pass, numbers[part.entry], tile.count);
        for_parts(bits, block, part.padded, queries,
                  [&](int64_t query, int64_t size, int64_t first, int64_t count) {
                    multiply(x_.Dv, size, count, value + first, part.padded,
                             w + first * queries + query, queries, s.sums.get() + query, queries,
                             true);
                  });
        w += part.padded * queries;
      }
    }
    for (int64_t i = 0; i < queries; ++i) {
      finish(s.highest.get()[i], s.total.get()[i], s.factor.get()[i], s.lse.get()[i]);
      s.factor.get()[i] *= x_.extras.factor;
    }
    transpose_scaled(s.sums.get(), x_.Dv, queries, s.rows.get(), s.factor.get());
    return tile;
  }

  // Computes attention of few queries: one query tile of all heads that share keys. Reads each key
  // and value once, without packing.
  Tile few_queries(Scratch& s, const Pass& pass, const Item& item, int64_t number) const {
    return with_width(x_.D, x_.Dv,
                      [&](auto width) { return few_queries_of<width()>(s, pass, item, number); });
  }

 private:
  template <int W>
  Tile few_queries_of(Scratch& s, const Pass& pass, const Item& item, int64_t number) const {
    const int64_t axis = item.head * pass.axes / x_.Hq, kv_head = item.head / x_.group;
    const Tile tile = pass.query_tile(axis, item.row);
    const int64_t table = pass.table(item.batch, item.head, x_.Hq), rows = item.heads * tile.count;
    const bool* seen = x_.extras.key_mask(item.batch);
    const int64_t width = round_up(x_.D, kLanes);
    for (int64_t i = 0; i < item.heads; ++i) {
      float* queries = s.query.get() + i * tile.count * width;
      read_tile(x_.q, item.batch, item.head + i, tile, pass.step, tile.count, width, queries);
      if (x_.extras.drops()) {
        row_words(x_, pass, item.batch, item.head + i, item.row, tile.count,
                  s.a.get() + i * tile.count, s.b.get() + i * tile.count);
      }
    }
    const FewQueries few{rows,          x_.D,           x_.Dv,        x_.block,    width,
                         s.query.get(), s.scores.get(), s.sums.get(), s.keys.get()};
    std::fill_n(s.sums.get(), rows * x_.Dv, 0.f);
    std::fill_n(s.highest.get(), rows, -kInf);
    std::fill_n(s.total.get(), rows, 0.f);
    for (int64_t entry = item.begin; entry < item.end; ++entry) {
      const int64_t column = pass.keys(table)[entry];
      const Tile keys = pass.key_tile(axis, column);
      const int64_t number_of_bitmap = pass.bitmap_numbers(table)[entry];
      if (keys.count == 0 || !x_.extras.sees(item.batch, keys, pass.step) ||
          (number_of_bitmap >= 0 && !visited(pass, number_of_bitmap, tile.count, keys.count))) {
        continue;
      }
      const auto visit = [&](auto type) {
        using S = decltype(type);
        const auto rows_of = [&](const Source& source, int64_t first) {
          return Strided<S>{source.rows<S>(item.batch, kv_head, first),
                            source.strides[2] * pass.step};
        };
        const Strided<S> values = rows_of(x_.v, keys.start);
        score_keys<W>(few, rows_of(x_.k, keys.start), keys.count, values);
        for (int64_t r = 0; r < rows; ++r) {
          float* scores = s.scores.get() + r * x_.block;
          const int64_t i = r % tile.count, head = item.head + r / tile.count;
          const float bias = x_.bias_at(number, item.batch, head, entry),
                      scale = x_.rest_of_scale();
          if (x_.extras.adjusts()) {
            adjust_row(pass, item, head, i, column, keys.count, s.biases.get(), scores);
          }
          for (int64_t j = 0; j < keys.count; ++j) {
            scores[j] = scores[j] * scale + bias;
          }
          hide_unseen(seen, keys, pass.step, scores, 1);
          if (number_of_bitmap >= 0) {
            keep_bits(pass.bits_of_query(number_of_bitmap, i), keys.count, scores);
          }
          weigh(few, r, keys.count, s.highest.get()[r], s.total.get()[r]);
          if (x_.extras.drops()) {
            Dropout of_row = dropout(s, pass, axis, column);
            of_row.a += r, of_row.b += r;
            drop(scores, keys.count, 1, of_row);
          }
        }
        const Tile next =
            entry + 1 < item.end ? pass.key_tile(axis, pass.keys(table)[entry + 1]) : Tile{0, 0};
        for_runs(seen, keys, pass.step, [&](int64_t first, int64_t count) {
          add_values<W>(few.from(first), values.from(first), count, rows_of(x_.k, next.start),
                        next.count);
        });
      };
      with_type(x_.k.type, visit);
    }
    for (int64_t r = 0; r < rows; ++r) {
      float factor;
      finish(s.highest.get()[r], s.total.get()[r], factor, s.lse.get()[r]);
      factor *= x_.extras.factor;
      for (int64_t d = 0; d < x_.Dv; ++d) {
        s.rows.get()[r * x_.Dv + d] = s.sums.get()[r * x_.Dv + d] * factor;
      }
    }
    return tile;
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
        result.parts[result.size++] = {column, entry, count, padded, bias ? bias[entry] : 0.f};
        result.padded += padded;
      }
    }
    return result;
  }

  // Finds the keys and values of up to `most` entries from `entry` on that do not lie behind those
  // of the entry before; at the end of an item, those of `later`. Smaller tiles, and tiles of half
  // precision, gained nothing by it.
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
  // for a range of queries, of which a call has a few: an entry may have no pair with these few.
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
    softmax_step<T, W>(tiles, scores + c, weights + (kPaired<T> ? 2 : 1) * c, ld,
                       x_.rest_of_scale(), s.highest.get() + c, s.total.get() + c,
                       s.factor.get() + c, ahead);
  }

  // Multiplies the sums O^T [Dv, queries] by a factor of each query.
  void multiply_sums(Scratch& s, int64_t queries) const {
    for (int64_t d = 0; d < x_.Dv; ++d) {
      float* sum = s.sums.get() + d * queries;
      for (int64_t i = 0; i < queries; i += kLanes) {
        (Vec::loadu(sum + i) * Vec::loadu(s.factor.get() + i)).store(sum + i);
      }
    }
  }

  // Applies extras to the scores of one query, with index `i` in its tile, and a tile of keys.
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
};

}  // namespace sparsering::cpu
