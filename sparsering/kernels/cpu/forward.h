// The forward pass.

#pragma once

#include <vector>

#include "few.h"
#include "results.h"
#include "scores.h"
#include "softmax.h"
#include "threads.h"

namespace sparsering::cpu {

template <typename T>
class Forward {
 public:
  Forward(const Problem& problem, const std::vector<Pass>& passes)
      : x_(problem),
        width_(round_up(std::max<int64_t>(problem.D, 1), 2)),
        value_width_(problem.Dv) {
    int64_t columns = 0, rows = 0;
    for (const Pass& pass : passes) {
      bitmaps_.push_back(transposed_bitmaps(pass));
      few_.push_back(most_queries(pass) * x_.group <= kFewQueries);
      if (!few_.back()) {
        columns = std::max(columns, pass.columns);
        rows = std::max(rows, pass.rows * x_.group);
      }
    }
    const int64_t num_kv = x_.B * x_.Hkv, tokens = columns * x_.block;
    wave_ = columns ? wave_of(num_kv, rows, tokens * (width_ + value_width_) * sizeof(T)) : num_kv;
  }

  // `fresh`: the first pass writes all rows.
  void run(const std::vector<Pass>& passes, bool fresh, const Tensor& out, const Tensor& lse) {
    for (int64_t first = 0, num_kv = x_.B * x_.Hkv; first < num_kv; first += wave_) {
      const int64_t count = std::min(wave_, num_kv - first);
      Part part(out, first * x_.group, count * x_.group, passes.size() == 1);
      Output output(part, lse);
      for (size_t i = 0; i < passes.size(); ++i) {
        run_pass(passes[i], i, first, count, fresh && i == 0, output);
      }
      part.finish();
    }
  }

 private:
  void run_pass(const Pass& pass, int64_t number, int64_t first, int64_t count, bool fresh,
                Output& out) {
    const bool few = few_[number];
    const uint8_t* bitmaps = bitmaps_[number].get();
    if (!few) {
      pack_keys(pass, first, count);
    }
    std::vector<Item> items;
    std::vector<Split> splits;
    int64_t pieces = 0;
    for (int64_t kv = first; kv < first + count; ++kv) {
      const int64_t b = kv / x_.Hkv, head = kv % x_.Hkv * x_.group;
      const bool same = pass.table(b, head, x_.Hq) == pass.table(b, head + x_.group - 1, x_.Hq);
      const int64_t heads = few && same ? x_.group : 1;
      for (int64_t i = 0; i < x_.group; i += heads) {
        pieces = list_items(pass, b, head + i, heads, fresh, pieces, items, splits);
      }
    }
    Buffer<float> parts(pieces * x_.block * x_.Dv), part_lses(pieces * x_.block);
    share_out<Scratch>(
        items.size(), 1, [&] { return Scratch(*this, few); },
        [&](Scratch& s, int64_t i) {
          const Item& item = items[i];
          const int64_t local = item.batch * x_.Hkv + item.head / x_.group - first;
          const Tile tile = few ? few_queries(s, pass, item, number, bitmaps)
                                : many_queries(s, pass, item, number, bitmaps,
                                               operands_.data() + local * pass.columns);
          if (item.piece < 0) {
            put(pass, item, tile, s.rows.get(), s.lse.get(), fresh, out);
          } else {
            const int64_t rows = item.heads * tile.count;
            std::memcpy(parts.get() + item.piece * x_.block * x_.Dv, s.rows.get(),
                        rows * x_.Dv * sizeof(float));
            std::memcpy(part_lses.get() + item.piece * x_.block, s.lse.get(), rows * sizeof(float));
          }
        });
    share_out<int>(
        splits.size(), few ? 64 : 4, [] { return 0; },
        [&](int, int64_t i) {
          merge_pieces(pass, splits[i], parts.get(), part_lses.get(), fresh, out);
        });
  }

  // Some entries of a query tile, for some heads; `piece` numbers what is to be merged with others,
  // else -1.
  struct Item {
    int64_t batch, head, heads, row, begin, end, piece;
  };
  struct Split {
    Item item;
    int64_t pieces;
  };
  struct Operands {
    const T *k, *v;
  };
  struct Scratch {
    Scratch(const Forward& f, bool few) {
      const auto& x = f.x_;
      const int64_t queries = round_up(x.block, 32), most_keys = std::max(kMostKeys, x.block);
      rows = Buffer<float>(queries * x.Dv);
      lse = Buffer<float>(queries);
      highest = Buffer<float>(queries);
      total = Buffer<float>(queries);
      factor = Buffer<float>(queries);
      scores = Buffer<float>(queries * most_keys);
      sums = Buffer<float>(queries * x.Dv);
      biases = Buffer<float>(x.extras.adjusts() ? 2 * queries : 0);
      a = Buffer<uint32_t>(x.extras.drops() ? queries : 0);
      b = Buffer<uint32_t>(x.extras.drops() ? queries : 0);
      if (few) {
        query = Buffer<float>(kFewQueries * x.D);
        keys = Buffer<float>(2 * kLanes * x.D);
      } else {
        tile = Buffer<T>(queries * f.width_);
        packed = Buffer<T>(queries * f.width_);
        weights = Buffer<T>(kPaired<T> ? queries * most_keys : 0);
      }
    }
    Buffer<float> rows, lse, highest, total, factor, scores, sums, biases, query, keys;
    Buffer<uint32_t> a, b;
    Buffer<T> tile, packed, weights;
  };

  int64_t most_queries(const Pass& pass) const {
    int64_t most = 0;
    for (int64_t axis = 0; axis < pass.axes; ++axis) {
      for (int64_t row = 0; row < pass.rows && most * x_.group <= kFewQueries; ++row) {
        most = std::max(most, pass.query_tile(axis, row).count);
      }
    }
    return most;
  }

  // Rows with far more entries than the others are cut into pieces. Depends on the table alone.
  int64_t list_items(const Pass& pass, int64_t b, int64_t head, int64_t heads, bool fresh,
                     int64_t pieces, std::vector<Item>& items, std::vector<Split>& splits) const {
    const int64_t axis = head * pass.axes / x_.Hq;
    const int32_t* row_ptr = pass.row_ptr(pass.table(b, head, x_.Hq));
    const int64_t longest =
        std::max<int64_t>(16, int64_t{2} * row_ptr[pass.rows] / std::max<int64_t>(pass.rows, 64));
    for (int64_t row = 0; row < pass.rows; ++row) {
      const int64_t begin = row_ptr[row], end = row_ptr[row + 1];
      if ((begin == end && !fresh) || pass.query_tile(axis, row).count == 0) {
        continue;
      }
      if (end - begin <= longest) {
        items.push_back({b, head, heads, row, begin, end, -1});
        continue;
      }
      const int64_t count = (end - begin + longest - 1) / longest;
      splits.push_back({{b, head, heads, row, begin, end, pieces}, count});
      for (int64_t i = 0; i < count; ++i) {
        const int64_t from = begin + i * longest;
        items.push_back({b, head, heads, row, from, std::min(end, from + longest), pieces++});
      }
    }
    return pieces;
  }

  void put(const Pass& pass, const Item& item, Tile tile, float* rows, const float* lse, bool fresh,
           Output& out) {
    for (int64_t i = 0; i < item.heads * tile.count; ++i) {
      const int64_t head = item.head + i / tile.count, n = tile.start + i % tile.count * pass.step;
      out.put((item.batch * x_.Hq + head) * x_.Nq + n, rows + i * x_.Dv, lse[i], fresh);
    }
  }

  void merge_pieces(const Pass& pass, const Split& split, float* parts, float* lses, bool fresh,
                    Output& out) {
    float* rows = parts + split.item.piece * x_.block * x_.Dv;
    float* lse = lses + split.item.piece * x_.block;
    const Tile tile = pass.query_tile(split.item.head * pass.axes / x_.Hq, split.item.row);
    for (int64_t piece = 1; piece < split.pieces; ++piece) {
      for (int64_t i = 0; i < split.item.heads * tile.count; ++i) {
        const float other = lse[piece * x_.block + i];
        if (other != -kInf) {
          lse[i] = Output::merge(rows + i * x_.Dv, lse[i], rows + (piece * x_.block + i) * x_.Dv,
                                 other, x_.Dv);
        }
      }
    }
    put(pass, split.item, tile, rows, lse, fresh, out);
  }

  // K in rows and V^T of the key tiles that some head of each group visits. Where keys lie in rows
  // as they should, they stay there.
  void pack_keys(const Pass& pass, int64_t first, int64_t count) {
    const int64_t columns = pass.columns, block = x_.block;
    const bool in_place = pass.step == 1 && x_.k.type == c10::CppTypeToScalarType<T>::value &&
                          x_.D == width_ && x_.k.strides[2] == x_.D;
    std::vector<int64_t> key_slot(count * columns, -1), value_slot(count * columns, -1);
    int64_t num_keys = 0, num_values = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t b = (first + i) / x_.Hkv, head = (first + i) % x_.Hkv * x_.group;
      const int64_t last = pass.table(b, head + x_.group - 1, x_.Hq);
      for (int64_t table = pass.table(b, head, x_.Hq); table <= last; ++table) {
        for (int64_t e = 0; e < pass.row_ptr(table)[pass.rows]; ++e) {
          const int64_t column = pass.keys(table)[e], at = i * columns + column;
          if (value_slot[at] < 0) {
            value_slot[at] = num_values++;
            const int64_t size = pass.key_tile(head * pass.axes / x_.Hq, column).count;
            key_slot[at] = in_place && size % 16 == 0 ? -1 : num_keys++;
          }
        }
      }
    }
    T* keys = keys_.at_least(num_keys * block * width_);
    T* values = values_.at_least(num_values * block * value_width_);
    operands_.resize(count * columns);
    struct Spare {
      Buffer<T> tile;
      Buffer<float> floats;
    };
    const auto make = [&] {
      return Spare{Buffer<T>(block * value_width_), Buffer<float>(2 * block * value_width_)};
    };
    share_out<Spare>(count * columns, 4, make, [&](Spare& s, int64_t i) {
      if (value_slot[i] < 0) {
        return;
      }
      const int64_t b = (first + i / columns) / x_.Hkv, head = (first + i / columns) % x_.Hkv;
      const Tile tile = pass.key_tile(head * pass.axes / x_.Hkv, i % columns);
      const int64_t rows = round_up(tile.count, 16);
      T* v = values + value_slot[i] * block * value_width_;
      read_tile(x_.v, b, head, tile, pass.step, rows, value_width_, s.tile.get());
      clear_unseen(x_.extras.key_mask(b), tile, pass.step, value_width_, s.tile.get());
      transpose(s.tile.get(), rows, value_width_, v, s.floats.get());
      if (key_slot[i] < 0) {
        operands_[i] = {x_.k.template rows<T>(b, head, tile.start), v};
      } else {
        T* k = keys + key_slot[i] * block * width_;
        read_tile(x_.k, b, head, tile, pass.step, rows, width_, k);
        operands_[i] = {k, v};
      }
    });
  }

  // The next tiles of an item, as many as fit.
  Stack stack(const Pass& pass, const Item& item, int64_t number, int64_t& entry) const {
    Stack result;
    const int64_t table = pass.table(item.batch, item.head, x_.Hq),
                  axis = item.head * pass.axes / x_.Hq;
    const float* bias = x_.bias ? x_.bias + x_.bias_of(number, item.batch, item.head) : nullptr;
    for (; entry < item.end; ++entry) {
      const int64_t column = pass.keys(table)[entry];
      const Tile tile = pass.key_tile(axis, column);
      const int64_t count = tile.count, padded = round_up(count, 16);
      if (result.size && result.padded + padded > kMostKeys) {
        break;
      }
      if (count && x_.extras.sees(item.batch, tile, pass.step)) {
        result.parts[result.size++] = {column, entry, count, padded, bias ? bias[entry] : 0.f};
        result.padded += padded;
      }
    }
    return result;
  }

  Tile many_queries(Scratch& s, const Pass& pass, const Item& item, int64_t number,
                    const uint8_t* bitmaps, const Operands* operands) const {
    const int64_t axis = item.head * pass.axes / x_.Hq, block = x_.block;
    const Tile tile = pass.query_tile(axis, item.row);
    const int64_t queries = round_up(tile.count, kQueryUnit<T>);
    const int32_t* numbers = pass.bitmap_numbers(pass.table(item.batch, item.head, x_.Hq));
    read_tile(x_.q, item.batch, item.head, tile, pass.step, queries, width_, s.tile.get());
    pack_transposed(s.tile.get(), queries, width_, s.packed.get());
    std::fill_n(s.highest.get(), queries, -kInf);
    std::fill_n(s.total.get(), queries, 0.f);
    if (x_.extras.drops()) {
      row_words(pass, item.batch, item.head, item.row, queries, s.a.get(), s.b.get());
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
        multiply(part.padded, queries, width_, operands[part.column].k, width_, s.packed.get(), at,
                 false);
        if (x_.extras.adjusts()) {
          adjust_tiles(pass, item, part, queries, s.biases.get(), at);
        }
        hide_unseen(x_.extras.key_mask(item.batch), pass.key_tile(axis, part.column), pass.step, at,
                    queries);
        if (numbers[part.entry] >= 0) {
          const uint8_t* bitmap = bitmaps + numbers[part.entry] * (block * block / 8);
          apply_mask(bitmap, block, part.rows, tile.count, at, queries);
        }
        at += part.padded * queries;
      }
      int64_t c = 0;
      for (constexpr int W = 4; c + W * kLanes <= queries; c += W * kLanes) {
        step<W>(s, tiles, scores, weights, queries, c);
      }
      for (constexpr int W = kPaired<T> ? 2 : 1; c < queries; c += W * kLanes) {
        step<W>(s, tiles, scores, weights, queries, c);
      }
      if (any) {
        multiply_sums(s, queries);
      }
      T* w = weights;
      for (int64_t i = 0; i < tiles.size; ++i) {
        const auto& part = tiles.parts[i];
        if (x_.extras.drops()) {
          drop(w, part.padded, queries, dropout(s, pass, axis, part.column));
        }
        const T* value = operands[part.column].v;
        multiply(x_.Dv, queries, part.padded, value, part.padded, w, s.sums.get(), any);
        any = true;
        w += part.padded * queries;
      }
    }
    if (!any) {
      std::fill_n(s.sums.get(), queries * x_.Dv, 0.f);
    }
    for (int64_t i = 0; i < queries; ++i) {
      finish(s.highest.get()[i], s.total.get()[i], s.factor.get()[i], s.lse.get()[i]);
      s.factor.get()[i] *= x_.extras.factor;
    }
    multiply_sums(s, queries);
    transpose(s.sums.get(), x_.Dv, queries, s.rows.get());
    return tile;
  }

  // The words of a tile's rows; those of no query are some others.
  void row_words(const Pass& pass, int64_t b, int64_t head, int64_t row, int64_t count, uint32_t* a,
                 uint32_t* to_b) const {
    const int64_t axis = head * pass.axes / x_.Hq;
    const int64_t seed = x_.extras.seeds[b * x_.extras.streams + pass.stream(axis, row)];
    cpu::row_words(seed, head, pass.branch, pass.query_origin(axis, row), pass.step, count, a,
                   to_b);
  }

  Dropout dropout(const Scratch& s, const Pass& pass, int64_t axis, int64_t column) const {
    return {s.a.get(), s.b.get(), pass.key_origin(axis, column), pass.step, x_.extras.threshold};
  }

  void adjust_tiles(const Pass& pass, const Item& item, const Stack::Part& part, int64_t queries,
                    float* biases, float* scores) const {
    const float* table = x_.extras.table(item.batch, item.head);
    if (table) {
      const int64_t axis = item.head * pass.axes / x_.Hq;
      const int64_t distance =
          pass.key_origin(axis, part.column) - pass.query_origin(axis, item.row);
      read_distances(table, x_.extras.radius, distance + (part.rows - 1) * pass.step, -pass.step,
                     part.rows - 1 + queries, biases);
    }
    for (int64_t j = 0; j < part.rows; ++j) {
      adjust(scores + j * queries, queries, x_.scale, x_.extras.softcap,
             table ? biases + part.rows - 1 - j : nullptr, nullptr);
    }
  }

  template <int W>
  void step(Scratch& s, const Stack& tiles, float* scores, T* weights, int64_t ld,
            int64_t c) const {
    softmax_step<T, W>(tiles, scores + c, weights + (kPaired<T> ? 2 : 1) * c, ld,
                       x_.rest_of_scale(), s.highest.get() + c, s.total.get() + c,
                       s.factor.get() + c);
  }

  // O^T [Dv, queries] times each query's factor.
  void multiply_sums(Scratch& s, int64_t queries) const {
    for (int64_t d = 0; d < x_.Dv; ++d) {
      float* sum = s.sums.get() + d * queries;
      for (int64_t i = 0; i < queries; i += kLanes) {
        (Vec::loadu(sum + i) * Vec::loadu(s.factor.get() + i)).store(sum + i);
      }
    }
  }

  // What sums are to be multiplied with, and lse. A row without keys gives 0 and -inf.
  static void finish(float highest, float total, float& factor, float& lse) {
    const bool empty = highest == -kInf && total == 0.f;
    factor = empty ? 0.f : 1.f / (total + (highest - highest));  // NaN where a score was
    lse = empty ? -kInf : highest + std::log(total);
  }

  // A few rows of scores at a time, of queries of one tile and of heads that share their keys: each
  // key and value is read once, where it lies.
  Tile few_queries(Scratch& s, const Pass& pass, const Item& item, int64_t number,
                   const uint8_t* bitmaps) const {
    const int64_t axis = item.head * pass.axes / x_.Hq, kv_head = item.head / x_.group;
    const Tile tile = pass.query_tile(axis, item.row);
    const int64_t table = pass.table(item.batch, item.head, x_.Hq), rows = item.heads * tile.count;
    const bool* seen = x_.extras.key_mask(item.batch);
    for (int64_t i = 0; i < item.heads; ++i) {
      float* queries = s.query.get() + i * tile.count * x_.D;
      read_tile(x_.q, item.batch, item.head + i, tile, pass.step, tile.count, x_.D, queries);
      if (x_.extras.drops()) {
        row_words(pass, item.batch, item.head + i, item.row, tile.count, s.a.get() + i * tile.count,
                  s.b.get() + i * tile.count);
      }
    }
    const FewQueries few{rows,          x_.D,           x_.Dv,        x_.block,
                         s.query.get(), s.scores.get(), s.sums.get(), s.keys.get()};
    std::fill_n(s.sums.get(), rows * x_.Dv, 0.f);
    std::fill_n(s.highest.get(), rows, -kInf);
    std::fill_n(s.total.get(), rows, 0.f);
    for (int64_t entry = item.begin; entry < item.end; ++entry) {
      const int64_t column = pass.keys(table)[entry];
      const Tile keys = pass.key_tile(axis, column);
      const int64_t number_of_bitmap = pass.bitmap_numbers(table)[entry];
      if (keys.count == 0 || !x_.extras.sees(item.batch, keys, pass.step)) {
        continue;
      }
      const auto visit = [&](auto type) {
        using S = decltype(type);
        const S* values = x_.v.rows<S>(item.batch, kv_head, keys.start);
        const int64_t value_stride = x_.v.strides[2] * pass.step;
        score_keys<S>(few, x_.k.rows<S>(item.batch, kv_head, keys.start),
                      x_.k.strides[2] * pass.step, keys.count, values, value_stride);
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
            const uint8_t* bits = bitmaps + number_of_bitmap * (x_.block * x_.block / 8) + i / 8;
            for (int64_t j = 0; j < keys.count; ++j) {
              scores[j] = bits[j * (x_.block / 8)] >> (i % 8) & 1 ? scores[j] : -kInf;
            }
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
          add_values<S>(few.from(first), values + first * value_stride, value_stride, count,
                        x_.k.rows<S>(item.batch, kv_head, next.start), x_.k.strides[2] * pass.step,
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

  // The scores of one query, number `i` of its tile, with the keys of a tile.
  void adjust_row(const Pass& pass, const Item& item, int64_t head, int64_t i, int64_t column,
                  int64_t count, float* biases, float* scores) const {
    const float* table = x_.extras.table(item.batch, head);
    if (table) {
      const int64_t axis = head * pass.axes / x_.Hq;
      const int64_t position = pass.query_origin(axis, item.row) + i * pass.step;
      read_distances(table, x_.extras.radius, pass.key_origin(axis, column) - position, pass.step,
                     count, biases);
    }
    adjust(scores, count, x_.scale, x_.extras.softcap, table ? biases : nullptr, nullptr);
  }

  const Problem& x_;
  int64_t width_, value_width_;
  std::vector<Buffer<uint8_t>> bitmaps_;  // of each pass
  std::vector<bool> few_;                 // passes whose keys are read where they lie
  int64_t wave_;                          // kv heads that are packed at a time
  std::vector<Operands> operands_;        // of each of their key tiles
  Buffer<T> keys_, values_;
};

}  // namespace sparsering::cpu
