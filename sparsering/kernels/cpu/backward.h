// Backward pass. Each thread takes whole kv heads (run_heads), or threads share query tiles and
// then key tiles (run_tiles).

#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <vector>

#include "machine/threads.h"
#include "packed.h"
#include "plan/counts.h"
#include "results.h"
#include "segments.h"
#include "walk/backward.h"

namespace sparsering::cpu {

template <typename T>
class Backward {
 public:
  Backward(const Problem& problem, const std::vector<Pass>& passes, const Delta& delta_of,
           const Tensor& grad_out, const Tensor& lse, const Tensor& delta, const Tensor& dq,
           const Tensor& dk, const Tensor& dv, const Tensor& dbias, const Tensor& dtable,
           float* of_queries = nullptr, float* of_keys = nullptr)
      : x_(problem),
        passes_(passes),
        delta_of_(delta_of),
        dout_(grad_out),
        lse_(values_of<float>(lse)),
        delta_(delta.mutable_data_ptr<float>()),
        pairs_(problem, grad_out, lse_, delta_),
        dq_(dq),
        dk_(dk),
        dv_(dv),
        dbias_(problem.bias ? dbias.mutable_data_ptr<float>() : nullptr),
        dtable_(dtable.numel() ? dtable.mutable_data_ptr<double>() : nullptr),
        groups_(dtable.numel() ? dtable.size(2) : 0),
        of_queries_(of_queries),
        of_keys_(of_keys) {
    for (const Pass& pass : passes) {
      most_columns_ = std::max(most_columns_, pass.columns);
      if (!pass.walked) {
        columns_ = std::max(columns_, pass.columns);
        rows_ = std::max(rows_, pass.rows * x_.group);
      }
    }
  }

  // Computes five products per pair of tiles. Each thread takes whole kv heads, and sums dK and dV
  // in the same sweep as dQ.
  void run_heads() const {
    const int64_t rows = x_.group * x_.Nq;
    const auto make = [&] { return OfThread(*this); };
    share_out<OfThread>(x_.B * x_.Hkv, 1, make, [&](OfThread& mine, int64_t kv) {
      delta_of_.of_rows(kv * rows, (kv + 1) * rows, delta_);
      Gradients sums(x_, dq_, dk_, dv_, kv, 1, passes_.size() == 1, mine.sums);
      for (size_t i = 0; i < passes_.size(); ++i) {
        if (passes_[i].walked) {
          walked(passes_[i], i).run_head(kv, mine.dk.get(), mine.dv.get(), sums);
        } else {
          run_head(passes_[i], i, kv, mine, sums);
        }
      }
      sums.finish();
    });
  }

  // Computes seven products per pair of tiles, but is parallel over tiles: first dQ by query tile,
  // then dK and dV by key tile.
  void run_tiles(const std::vector<Transpose>& by_key) const {
    parallel_for(0, x_.B * x_.Hq * x_.Nq, 1024,
                 [&](int64_t begin, int64_t end) { delta_of_.of_rows(begin, end, delta_); });
    const int64_t num_kv = x_.B * x_.Hkv;
    const int64_t wave = this->wave();
    PackedKeys<T> keys(x_, pairs_);
    Gradients::Room room;
    for (int64_t first = 0; first < num_kv; first += wave) {
      const int64_t count = std::min(wave, num_kv - first);
      Gradients sums(x_, dq_, dk_, dv_, first, count, passes_.size() == 1, room);
      for (size_t i = 0; i < passes_.size(); ++i) {
        if (passes_[i].walked) {
          walked(passes_[i], i).run_wave(first, count, sums);
          continue;
        }
        pack_wave(passes_[i], first, count, keys);
        sweep_rows(passes_[i], i, first, count, keys, sums);
        sweep_columns(passes_[i], by_key[i], i, first, count, keys, sums);
      }
      sums.finish();
    }
  }

  // Returns the bytes of all buffers of run_heads (`by_head`) or run_tiles, for a plan.
  int64_t workspace(const std::vector<Counts>& counts, bool by_head) const {
    const int64_t threads = num_threads(), heads = by_head ? 1 : wave();
    int64_t items = 0, parts = 0, walks = 0;
    PackedKeys<T> keys(x_, pairs_);
    const int64_t of_heads = bytes_of([&] {
      Gradients::Room room;
      Part(dq_, 0, heads * x_.group, passes_.size() == 1, room.q);
      Part(dk_, 0, heads, passes_.size() == 1, room.k);
      Part(dv_, 0, heads, passes_.size() == 1, room.v);
      for (size_t i = 0; i < passes_.size(); ++i) {
        const Pass& pass = passes_[i];
        const auto number = [&](double of_head) {
          return static_cast<int64_t>(std::ceil(heads * of_head));
        };
        if (pass.walked) {
          walks = std::max(walks, walked(pass, i).scratch(counts[i].entries));
          parts = std::max(parts, walked(pass, i).workspace(heads, counts[i].entries));
          continue;
        }
        keys.reserve(heads * pass.columns,
                     number(counts[i].copied(pass.columns, pairs_.in_place(pass))));
        items =
            std::max<int64_t>(items, heads * (pass.rows * x_.group + pass.columns) * sizeof(Item));
        const auto of_pieces = [&](int64_t pieces, int64_t size) {
          return bytes_of([&] { Buffer<float>(pieces * size); });
        };
        const int64_t rows = number(counts[i].pieces * x_.group),
                      columns = number(counts[i].pieces_by_key);
        const int64_t rows_at_once =
            dtable_ ? rows : pieces_at_once(rows, row_size() * sizeof(float));
        const int64_t columns_at_once = pieces_at_once(columns, column_size() * sizeof(float));
        parts = std::max({parts, of_pieces(rows_at_once, row_size()),
                          of_pieces(columns_at_once, column_size())});
      }
    });
    if (by_head) {
      const int64_t own = bytes_of([&] { const OfThread mine(*this); });
      return std::min(threads, x_.B * x_.Hkv) * (own + of_heads + walks);
    }
    return of_heads + items + parts +
           threads * (bytes_of([&] { const Scratch s(pairs_); }) + walks);
  }

 private:
  using Keys = typename Pairs<T>::Keys;
  using Queries = typename Pairs<T>::Queries;
  using Pair = typename Pairs<T>::Pair;
  using Learned = typename Pairs<T>::Learned;
  using Scratch = typename Pairs<T>::Scratch;

  // Buffers of one thread in run_heads.
  struct OfThread {
    explicit OfThread(const Backward& f)
        : scratch(f.pairs_),
          keys(f.x_, f.pairs_),
          dk(f.most_columns_ * f.row_size()),
          dv(f.most_columns_ * (f.column_size() - f.row_size())) {
      if (f.has_column_segments()) {
        earlier_dk = Buffer<float>(f.most_columns_ * f.row_size());
        earlier_dv = Buffer<float>(f.most_columns_ * (f.column_size() - f.row_size()));
      }
    }
    Scratch scratch;
    PackedKeys<T> keys;
    Buffer<float> dk, dv, earlier_dk, earlier_dv;
    Gradients::Room sums;
  };

  // A work item: entries `begin` to `end` of a query tile, or of a key tile (which has the entries
  // of all heads of its group). A tile with many entries is cut into pieces (see most_entries),
  // whose sums are added in order. `piece` is the index of the piece, or -1 for a whole tile.
  struct Item {
    int64_t head, tile, begin, end, piece;
  };
  struct Split {
    Item item;
    int64_t pieces;
  };
  // Work items of kv heads that are computed together (a wave), and the tiles that were cut.
  struct Items {
    // Cuts a tile of more than `most` entries where `segment_of(entry)` changes.
    template <typename Segment>
    void add(int64_t head, int64_t tile, int64_t begin, int64_t end, int64_t most,
             const Segment& segment_of) {
      const int64_t first = pieces;
      const auto add_piece = [&](int64_t from, int64_t to) {
        all.push_back({head, tile, from, to, pieces++});
      };
      if (end - begin > most && for_runs_of(begin, end, segment_of, add_piece)) {
        splits.push_back({{head, tile, begin, end, first}, pieces - first});
      } else {
        all.push_back({head, tile, begin, end, -1});
      }
    }
    std::vector<Item> all;
    std::vector<Split> splits;
    int64_t pieces = 0;
  };

  WalkBackward<T> walked(const Pass& pass, int64_t number) const {
    return WalkBackward<T>(x_, pairs_, pass, number, {dout_, lse_, delta_, dbias_});
  }

  // Number of values in dQ of a query tile, and in dK and dV (or K and V) of a key tile.
  int64_t row_size() const {
    return x_.block * pairs_.width();
  }
  int64_t column_size() const {
    return x_.block * (pairs_.width() + pairs_.value_width());
  }
  int64_t wave() const {
    const int64_t bytes = columns_ * (row_size() + column_size()) * sizeof(T);
    return wave_of(x_.B * x_.Hkv, rows_, bytes);
  }

  void run_head(const Pass& pass, int64_t number, int64_t kv, OfThread& mine,
                const Gradients& sums) const {
    Scratch& s = mine.scratch;
    mine.keys.reserve(pass, kv, 1);
    for (int64_t column = 0; column < pass.columns; ++column) {
      mine.keys.pack(s.pairs.get(), pass, kv, column, column);
    }
    Columns columns{mine.dk.get(),
                    mine.dv.get(),
                    mine.earlier_dk.get(),
                    mine.earlier_dv.get(),
                    std::vector<int64_t>(pass.columns, Pass::kNoSegment),
                    std::vector<bool>(pass.columns)};
    for (int64_t head = kv * x_.group; head < (kv + 1) * x_.group; ++head) {
      const int32_t* row_ptr = pass.row_ptr(pass.table(head / x_.Hq, head % x_.Hq, x_.Hq));
      for (int64_t row = 0; row < pass.rows; ++row) {
        const Item item{head, row, row_ptr[row], row_ptr[row + 1], -1};
        if (const float* dq =
                sweep_row(s, pass, number, item, 0, mine.keys.tiles.data(), &columns)) {
          add_queries(pass, item, dq, sums);
        }
      }
    }
    for (int64_t column = 0; column < pass.columns; ++column) {
      if (columns.segment[column] != Pass::kNoSegment) {
        end_segment(columns, column);
        add_keys(pass, kv, column, columns.dk + column * row_size(),
                 columns.dv + column * (column_size() - row_size()), sums);
      }
    }
  }

  // dK and dV of a kv head's key tiles: sums over the current segment of queries, and over earlier
  // segments.
  struct Columns {
    float *dk, *dv, *earlier_dk, *earlier_dv;
    std::vector<int64_t> segment;
    std::vector<bool> any_earlier;
  };
  // Begins a segment of queries for a key tile, unless it is the current one.
  void begin_segment(Columns& x, int64_t column, int64_t segment) const {
    const int64_t dk_size = row_size(), dv_size = column_size() - dk_size;
    if (x.segment[column] == segment) {
      return;
    }
    if (x.segment[column] != Pass::kNoSegment) {
      end_segment(x, column);
      std::copy_n(x.dk + column * dk_size, dk_size, x.earlier_dk + column * dk_size);
      std::copy_n(x.dv + column * dv_size, dv_size, x.earlier_dv + column * dv_size);
      x.any_earlier[column] = true;
    }
    std::fill_n(x.dk + column * dk_size, dk_size, 0.f);
    std::fill_n(x.dv + column * dv_size, dv_size, 0.f);
    x.segment[column] = segment;
  }
  // Adds the sums of earlier segments to those of a key tile's latest segment.
  void end_segment(const Columns& x, int64_t column) const {
    const int64_t dk_size = row_size(), dv_size = column_size() - dk_size;
    if (x.any_earlier[column]) {
      add(x.earlier_dk + column * dk_size, dk_size, x.dk + column * dk_size);
      add(x.earlier_dv + column * dv_size, dv_size, x.dv + column * dv_size);
    }
  }
  static void add(const float* __restrict from, int64_t size, float* __restrict to) {
    for (int64_t d = 0; d < size; ++d) {
      to[d] += from[d];
    }
  }
  bool has_column_segments() const {
    return x_.group > 1 || std::any_of(passes_.begin(), passes_.end(),
                                       [](const Pass& pass) { return pass.query_segments; });
  }
  // Identifies a head and a segment of its queries; dK and dV are summed for each of these.
  int64_t column_segment(const Pass& pass, int64_t head, int64_t row) const {
    return (head << 32) + pass.query_segment(head * pass.axes / x_.Hq, row);
  }

  void pack_wave(const Pass& pass, int64_t first, int64_t count, PackedKeys<T>& keys) const {
    keys.reserve(pass, first, count);
    const auto make = [&] { return Scratch(pairs_); };
    share_out<Scratch>(count * pass.columns, 4, make, [&](Scratch& s, int64_t i) {
      keys.pack(s.pairs.get(), pass, first + i / pass.columns, i % pass.columns, i);
    });
  }

  // Computes dQ by query tile for a wave, which is `count` kv heads from `first` on.
  void sweep_rows(const Pass& pass, int64_t number, int64_t first, int64_t count,
                  const PackedKeys<T>& keys, const Gradients& sums) const {
    const int64_t heads = count * x_.group, size = row_size();
    Items items;
    std::vector<int64_t> begins;  // first item of each head
    for (int64_t head = first * x_.group; head < (first + count) * x_.group; ++head) {
      begins.push_back(items.all.size());
      const int64_t axis = head % x_.Hq * pass.axes / x_.Hq,
                    table = pass.table(head / x_.Hq, head % x_.Hq, x_.Hq);
      const int32_t *row_ptr = pass.row_ptr(table), *visited = pass.keys(table);
      const int64_t most = most_of_item(row_ptr[pass.rows], pass.rows);
      for (int64_t row = 0; row < pass.rows; ++row) {
        items.add(head, row, row_ptr[row], row_ptr[row + 1], most,
                  [&](int64_t entry) { return pass.key_group(axis, visited[entry]); });
      }
    }
    begins.push_back(items.all.size());
    const auto sweep = [&](Scratch& s, const Item& item, int64_t group, float* part) {
      const Keys* of_head = keys.tiles.data() + (item.head / x_.group - first) * pass.columns;
      const float* dq = sweep_row(s, pass, number, item, group, of_head, nullptr);
      if (part) {
        dq ? std::copy_n(dq, size, part) : std::fill_n(part, size, 0.f);
      } else if (dq) {
        add_queries(pass, item, dq, sums);
      }
    };
    const auto put = [&](const Item& item, const float* dq) { add_queries(pass, item, dq, sums); };
    if (!dtable_) {
      run_items(
          items, size, [&](Scratch& s, const Item& item, float* part) { sweep(s, item, 0, part); },
          put);
      return;
    }
    // Items that add to the same gradient of a distance table run in one thread.
    Buffer<float> parts(items.pieces * size);
    const auto make = [&] { return Scratch(pairs_); };
    share_out<Scratch>(heads * groups_, 1, make, [&](Scratch& s, int64_t i) {
      const int64_t head = i / groups_, group = i % groups_;
      for (int64_t at = begins[head] + group; at < begins[head + 1]; at += groups_) {
        const Item& item = items.all[at];
        sweep(s, item, group, item.piece < 0 ? nullptr : parts.get() + item.piece * size);
      }
    });
    share_splits(items.splits.size(), [&](int64_t i) {
      const Split& split = items.splits[i];
      float* sum = parts.get() + split.item.piece * size;
      add_up(sum, split.pieces, size);
      put(split.item, sum);
    });
  }

  // Computes dK and dV by key tile for a wave, which is `count` kv heads from `first` on.
  void sweep_columns(const Pass& pass, const Transpose& by_key, int64_t number, int64_t first,
                     int64_t count, const PackedKeys<T>& keys, const Gradients& sums) const {
    const int64_t dk_size = row_size(), size = column_size();
    Items items;
    for (int64_t kv = first; kv < first + count; ++kv) {
      std::vector<int64_t> entries(pass.columns, 0);
      int64_t most = 0;
      for (int64_t head = kv * x_.group; head < (kv + 1) * x_.group; ++head) {
        const int32_t* row_ptr =
            by_key.rows_of(pass, pass.table(head / x_.Hq, head % x_.Hq, x_.Hq));
        most += most_of_item(row_ptr[pass.columns], pass.columns);
        for (int64_t column = 0; column < pass.columns; ++column) {
          entries[column] += row_ptr[column + 1] - row_ptr[column];
        }
      }
      for (int64_t column = 0; column < pass.columns; ++column) {
        std::vector<int64_t> segments;
        if (entries[column] > most) {
          for_visits(pass, by_key, {kv, column, 0, entries[column], -1},
                     [&](int64_t head, int64_t row, int64_t) {
                       segments.push_back(column_segment(pass, head, row));
                     });
        }
        items.add(kv, column, 0, entries[column], most,
                  [&](int64_t entry) { return segments.empty() ? 0 : segments[entry]; });
      }
    }
    const auto sweep = [&](Scratch& s, const Item& item, float* part) {
      const Keys& of_tile = keys.tiles[(item.head - first) * pass.columns + item.tile];
      sweep_column(s, pass, by_key, number, item, of_tile);
      if (!part) {
        add_keys(pass, item.head, item.tile, s.dk.get(), s.dv.get(), sums);
      } else {
        std::copy_n(s.dk.get(), dk_size, part);
        std::copy_n(s.dv.get(), size - dk_size, part + dk_size);
      }
    };
    run_items(items, size, sweep, [&](const Item& item, const float* sum) {
      add_keys(pass, item.head, item.tile, sum, sum + dk_size, sums);
    });
  }

  // Computes items on all threads. It calls sweep(scratch, item, part), where part has room for the
  // `size` sums of a piece and is nullptr for a whole tile. It adds the pieces of each cut tile in
  // order, and calls put(tile, its sum).
  template <typename Sweep, typename Put>
  void run_items(const Items& items, int64_t size, const Sweep& sweep, const Put& put) const {
    const int64_t at_once = pieces_at_once(items.pieces, size * sizeof(float));
    Buffer<float> parts(at_once * size);
    const auto part_of = [&](int64_t slot) { return parts.get() + slot * size; };
    in_runs(
        items.all, items.splits, at_once,
        [&](int64_t begin, int64_t end, int64_t first) {
          const auto make = [&] { return Scratch(pairs_); };
          share_out<Scratch>(end - begin, 1, make, [&](Scratch& s, int64_t i) {
            const Item& item = items.all[begin + i];
            sweep(s, item, item.piece < 0 ? nullptr : part_of(item.piece - first));
          });
        },
        [&](const Split&, int64_t slot, int64_t count) { add_up(part_of(slot), count, size); },
        [](int64_t count, const auto& body) { share_splits(count, body); },
        [&](const Split& split, int64_t slot) { put(split.item, part_of(slot)); },
        [&](int64_t slot) { std::copy_n(part_of(slot), size, part_of(0)); });
  }

  // Adds `count` sums of `size` numbers in order, to the first of them.
  static void add_up(float* sums, int64_t count, int64_t size) {
    for (int64_t piece = 1; piece < count; ++piece) {
      add(sums + piece * size, size, sums);
    }
  }
  template <typename Body>
  static void share_splits(int64_t count, const Body& body) {
    share_out<int>(count, 4, [] { return 0; }, [&](int, int64_t i) { body(i); });
  }

  // Returns dQ of some entries of a query tile in rows, or nullptr without entries. It sums by
  // segments and groups, as the forward pass does. It also writes the gradient of the block bias,
  // and adds dK and dV to `columns` unless that is nullptr. `keys` are the packed keys of the kv
  // head.
  const float* sweep_row(Scratch& s, const Pass& pass, int64_t number, const Item& item,
                         int64_t group, const Keys* keys, Columns* columns) const {
    const int64_t b = item.head / x_.Hq, head = item.head % x_.Hq, block = x_.block;
    const int64_t axis = head * pass.axes / x_.Hq, table = pass.table(b, head, x_.Hq);
    const Tile tile = pass.query_tile(axis, item.tile);
    if (item.begin == item.end || tile.count == 0) {
      return nullptr;
    }
    const Queries queries = pairs_.pack_queries(s, pass, b, head, tile);
    double* dtable =
        !dtable_ ? nullptr : dtable_ + (item.head * groups_ + group) * (2 * x_.extras.radius + 1);
    const Learned learned =
        learns() ? learned_of(s, queries.count, columns ? item.head / x_.group : -1) : Learned();
    const int64_t values = queries.count * pairs_.width();
    const int64_t of_queries = column_segment(pass, head, item.tile);
    const auto add_sums = [&](Buffer<float>& to, const Buffer<float>& from) {
      add(from.get(), values, to.get());
    };
    Segments segments;
    std::fill_n(s.dq.get(), values, 0.f);
    Pair room[kMostTiles];
    for (int64_t entry = item.begin; entry < item.end;) {
      int64_t size = 0, rows = 0;
      for (; entry < item.end; ++entry) {
        const int64_t column = pass.keys(table)[entry];
        const Tile key_tile = pass.key_tile(axis, column);
        const int64_t padded = round_up(key_tile.count, 16);
        if (size && rows + padded > most_keys(block)) {
          break;
        }
        if (key_tile.count && x_.extras.sees(b, key_tile, pass.step)) {
          const int64_t bitmap = pass.bitmap_numbers(table)[entry];
          const float bias = x_.bias_at(number, b, head, entry);
          room[size++] = {
              b,    head,   item.tile,    column, entry, bitmap,
              bias, dtable, keys[column], padded, rows,  apart<T>(pass, bitmap, tile.count)};
          rows += padded;
        }
      }
      if (!size) {
        continue;
      }
      const std::span<const Pair> pairs(room, size);
      for (const Pair& pair : pairs) {
        if (columns) {
          begin_segment(*columns, pair.column, of_queries);
        }
      }
      float *dk = columns ? columns->dk : nullptr, *dv = columns ? columns->dv : nullptr;
      pairs_.multiply_keys(s, queries, pairs);
      Ahead ahead = pairs_.later_operands(pairs, dk, dv);
      for (const Pair& pair : pairs) {
        const float sum = pairs_.differentiate(s, pass, queries, tile, pair, ahead,
                                               learns() ? &learned : nullptr);
        if (dbias_) {
          dbias_[x_.bias_of(number, b, head) + pair.entry] = sum;
        }
      }
      for (const Pair& pair : pairs) {
        if (segments.begin(s.dq, s.earlier, pass.key_segment(axis, pair.column), add_sums)) {
          std::fill_n(s.dq.get(), values, 0.f);
        }
        pairs_.add_to_queries(s, queries, pair, s.dq.get());
      }
      for (int64_t i = 0; dv && i < size; ++i) {
        pairs_.add_to_values(s, queries, pairs[i],
                             dv + pairs[i].column * block * pairs_.value_width());
      }
      for (int64_t i = 0; dk && i < size; ++i) {
        pairs_.add_to_keys(s, queries, pairs[i], dk + pairs[i].column * block * pairs_.width());
      }
    }
    if (learns()) {
      add_coordinates(pass, item.head, tile, queries.count, learned.queries.lanes);
    }
    if (!segments.end(s.dq, s.earlier, add_sums)) {
      return nullptr;
    }
    transpose(s.dq.get(), pairs_.width(), queries.count, s.floats.get());
    return s.floats.get();
  }

  // True if coordinates or slopes get gradients.
  bool learns() const {
    return of_queries_;
  }
  // Most entries of an item that is not cut. With gradients of coordinates none is, because an item
  // adds to them without others.
  int64_t most_of_item(int64_t entries, int64_t rows) const {
    return learns() ? entries : most_entries(entries, rows, 1);
  }
  // Clears the sums of a query tile, and returns them with the gradients of the keys of a kv head,
  // unless that is -1.
  Learned learned_of(Scratch& s, int64_t queries, int64_t kv) const {
    const int64_t dims = x_.extras.coordinates.dims;
    float* sums = s.coordinate_sums.get();
    std::fill_n(sums, (dims + 1) * queries, 0.f);
    return {{sums, sums + (dims + 1) * queries}, kv < 0 ? nullptr : of_keys_ + kv * x_.Nk * dims};
  }
  // Adds the sums of a query tile, lines of `ld` numbers, to those of its queries, which stand in
  // rows.
  void add_coordinates(const Pass& pass, int64_t head, Tile tile, int64_t ld,
                       const float* sums) const {
    const int64_t width = x_.extras.coordinates.dims + 1;
    float* to = of_queries_ + (head * x_.Nq + tile.start) * width;
    for (int64_t i = 0; i < tile.count; ++i) {
      for (int64_t d = 0; d < width; ++d) {
        to[i * pass.step * width + d] += sums[d * ld + i];
      }
    }
  }

  int64_t axis_of(const Pass& pass, int64_t kv) const {
    return kv % x_.Hkv * pass.axes / x_.Hkv;
  }

  // Calls f(query head, query tile, entry) for an item's entries, which are the visits of all heads
  // of the group to a key tile, head after head.
  template <typename F>
  void for_visits(const Pass& pass, const Transpose& by_key, const Item& item, const F& f) const {
    const int64_t b = item.head / x_.Hkv, kv_head = item.head % x_.Hkv;
    int64_t first = 0;  // index of the head's first entry among the entries of all heads
    for (int64_t head = kv_head * x_.group; head < (kv_head + 1) * x_.group; ++head) {
      const int64_t table = pass.table(b, head, x_.Hq);
      const int32_t* row_ptr = by_key.rows_of(pass, table) + item.tile;
      const int64_t begin = std::max<int64_t>(row_ptr[0], row_ptr[0] + item.begin - first);
      const int64_t end = std::min<int64_t>(row_ptr[1], row_ptr[0] + item.end - first);
      first += row_ptr[1] - row_ptr[0];
      for (int64_t i = begin; i < end; ++i) {
        const int64_t at = table * pass.entries + i;
        f(head, by_key.query_tile[at], by_key.entry[at]);
      }
    }
  }

  // Computes dK and dV of some entries of a key tile, and stores them in `s`.
  void sweep_column(Scratch& s, const Pass& pass, const Transpose& by_key, int64_t number,
                    const Item& item, const Keys& keys) const {
    const int64_t b = item.head / x_.Hkv, column = item.tile, axis = axis_of(pass, item.head);
    const Tile keys_of = pass.key_tile(axis, column);
    const int64_t padded = round_up(keys_of.count, 16);
    Columns sums{s.dk.get(),         s.dv.get(),         s.earlier_dk.get(),
                 s.earlier_dv.get(), {Pass::kNoSegment}, {false}};
    const bool seen = keys_of.count && x_.extras.sees(b, keys_of, pass.step);
    for_visits(pass, by_key, item, [&](int64_t head, int64_t row, int64_t entry) {
      const Tile tile = pass.query_tile(axis, row);
      if (tile.count == 0 || !seen) {
        return;
      }
      begin_segment(sums, 0, column_segment(pass, head, row));
      const Queries queries = pairs_.pack_queries(s, pass, b, head, tile);
      const int64_t bitmap = pass.bitmap_numbers(pass.table(b, head, x_.Hq))[entry];
      const float bias = x_.bias_at(number, b, head, entry);
      const Pair pair{b,    head,    row,  column, entry, bitmap,
                      bias, nullptr, keys, padded, 0,     apart<T>(pass, bitmap, tile.count)};
      pairs_.multiply_keys(s, queries, {&pair, 1});
      Ahead none;
      const Learned learned = learns() ? learned_of(s, queries.count, item.head) : Learned();
      pairs_.differentiate(s, pass, queries, tile, pair, none, learns() ? &learned : nullptr);
      pairs_.add_to_values(s, queries, pair, s.dv.get());
      pairs_.add_to_keys(s, queries, pair, s.dk.get());
    });
    if (sums.segment[0] == Pass::kNoSegment) {
      begin_segment(sums, 0, 0);
    }
    end_segment(sums, 0);
  }

  void add_queries(const Pass& pass, const Item& item, const float* dq,
                   const Gradients& sums) const {
    const Tile tile = pass.query_tile(item.head % x_.Hq * pass.axes / x_.Hq, item.tile);
    add_rows(sums.q, item.head * x_.Nq + tile.start, pass.step, tile.count, dq, pairs_.width(),
             x_.scale);
  }

  void add_keys(const Pass& pass, int64_t kv, int64_t column, const float* dk, const float* dv,
                const Gradients& sums) const {
    add_key_tile(x_, pass, kv, column, dk, pairs_.width(), dv, pairs_.value_width(), sums);
  }

  const Problem& x_;
  const std::vector<Pass>& passes_;
  const Delta delta_of_;
  const Source dout_;
  const float* lse_;
  float* delta_;
  const Pairs<T> pairs_;
  const Tensor dq_, dk_, dv_;
  float* dbias_;
  double* dtable_;  // [B, Hq, groups, 2R + 1]
  int64_t groups_;
  // Gradients of coordinates: [B, Hq, Nq, dims + 1], of which the last number is for the slope, and
  // [B, Hkv, Nk, dims]; nullptr if they are not wanted.
  float *of_queries_, *of_keys_;
  // The largest numbers in one pass: of key tiles in any pass (`most_columns_`); in passes without
  // a loop over key tiles, of key tiles (`columns_`) and of query tiles of a group's heads
  // (`rows_`).
  int64_t most_columns_ = 0, columns_ = 0, rows_ = 0;
};

}  // namespace sparsering::cpu
