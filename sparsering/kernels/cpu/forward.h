// Forward pass: packs key tiles, distributes items to threads, adds the sums of pieces.

#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "attend.h"
#include "machine/threads.h"
#include "plan/counts.h"
#include "results.h"
#include "walk/forward.h"

namespace sparsering::cpu {

template <typename T>
class Forward {
 public:
  Forward(const Problem& problem, const std::vector<Pass>& passes)
      : x_(problem),
        passes_(passes),
        attend_(problem),
        width_(round_up(std::max<int64_t>(problem.D, 1), 2)) {
    for (const Pass& pass : passes) {
      SPARSERING_CHECK(!pass.walked || !problem.k.is_stored(),
                       "sparsering cpu: rows in 8 bits are not walked by key tile");
      const int64_t queries = pass.walked ? kFewQueries + 1 : most_queries(pass);
      few_.push_back(kFewQueries / std::max<int64_t>(queries, 1));
      if (!few_.back() && !pass.walked) {
        columns_ = std::max(columns_, pass.columns);
        rows_ = std::max(rows_, pass.rows * x_.group);
        SPARSERING_CHECK(pass.slot == 0, "sparsering cpu: slots are for few queries");
      }
    }
  }

  // Computes all passes. `fresh` says that every query is in a tile of the first pass, so that its
  // rows can be written instead of merged.
  void run(bool fresh, const Tensor& out, const Tensor& lse) const {
    const int64_t num_kv = x_.B * x_.Hkv;
    if (alone()) {
      share_out<Wave>(
          num_kv, 1, [] { return Wave{true}; },
          [&](Wave& w, int64_t kv) { run_wave(w, kv, 1, fresh, out, lse); });
      return;
    }
    const int64_t most = wave();
    Wave w{false};
    for (int64_t first = 0; first < num_kv; first += most) {
      run_wave(w, first, std::min(most, num_kv - first), fresh, out, lse);
    }
  }

  // Returns the bytes of all buffers, for a plan. `out` has the result's shape and type.
  int64_t workspace(const std::vector<Counts>& counts, const Tensor& out) const {
    const int64_t threads = num_threads(), heads = alone() ? 1 : wave();
    int64_t items = 0, parts = 0, scratch = 0;
    Wave w{alone()};
    const int64_t of_wave = bytes_of([&] {
      Part(out, 0, heads * x_.group, passes_.size() == 1, w.sums);
      for (size_t i = 0; i < passes_.size(); ++i) {
        const Pass& pass = passes_[i];
        const auto number = [&](double of_head) {
          return static_cast<int64_t>(std::ceil(heads * of_head));
        };
        if (pass.walked) {
          scratch = std::max(scratch, bytes_of([&] {
                               const Walk walk(x_, pass);
                               typename WalkForward<T>::Scratch s(x_, walk);
                               s.reserve(x_, walk, walk.most_rows(counts[i].entries));
                             }));
          continue;
        }
        if (!few_[i]) {
          reserve_keys(w, number(counts[i].copied(counts[i].seen, in_place(pass))));
          reserve_values(w, number(counts[i].seen));
        }
        items = std::max<int64_t>(items, heads * pass.rows * x_.group * sizeof(Item) +
                                             heads * pass.columns * sizeof(Operands));
        const int64_t pieces = number(counts[i].pieces * x_.group);
        parts = std::max(parts, bytes_of([&] { Parts(x_, Parts::at_once(x_, pieces)); }));
        scratch = std::max(scratch, bytes_of([&] {
                             Scratch(attend_, w.alone || !few_[i], w.alone ? any_few() : few_[i],
                                     any_segments());
                           }));
      }
    });
    return (w.alone ? threads : 1) * (of_wave + items + parts) + threads * scratch;
  }

 private:
  using Operands = typename Attend<T>::Operands;
  using Scratch = typename Attend<T>::Scratch;

  // If the packed keys and values of a head have at most so many bytes, they stay in a core's
  // cache.
  static constexpr int64_t kNear = 1 << 19;

  struct Split {
    Item item;
    int64_t pieces;
  };
  struct Spare {
    Buffer<T> tile, pairs;
  };
  // Sums of the pieces into which query tiles with many key tiles are cut.
  struct Parts {
    Parts(const Problem& x, int64_t pieces)
        : rows(pieces * x.block * x.Dv), highest(pieces * x.block), total(pieces * x.block) {}

    static int64_t at_once(const Problem& x, int64_t pieces) {
      return pieces_at_once(pieces, x.block * (x.Dv + 2) * sizeof(float));
    }

    void move_to_first(int64_t slot, int64_t block, int64_t width) const {
      std::copy_n(rows.get() + slot * block * width, block * width, rows.get());
      std::copy_n(highest.get() + slot * block, block, highest.get());
      std::copy_n(total.get() + slot * block, block, total.get());
    }

    Buffer<float> rows, highest, total;
  };
  // The buffers and items of kv heads that are computed together, by one thread (`alone`) or by
  // all.
  struct Wave {
    bool alone;
    int64_t first = 0, count = 0;
    std::vector<int64_t> key_slot = {}, value_slot = {};  // per key tile: packed index or -1
    std::vector<Operands> operands = {};
    Buffer<T> keys = Buffer<T>(), values = Buffer<T>();
    Buffer<float> sums = Buffer<float>();
    std::vector<Item> items = {};
    std::vector<Split> splits = {};
    std::optional<Spare> spare = {};
    std::optional<Scratch> scratch = {};
  };

  int64_t bytes_of_head() const {
    return columns_ * x_.block * (width_ + x_.Dv) * sizeof(T);
  }
  // True if each thread computes whole kv heads by itself.
  bool alone() const {
    return columns_ && bytes_of_head() <= kNear && shares_evenly(x_.B * x_.Hkv);
  }
  int64_t wave() const {
    const int64_t num_kv = x_.B * x_.Hkv;
    return columns_ ? wave_of(num_kv, rows_, bytes_of_head()) : num_kv;
  }

  T* reserve_keys(Wave& w, int64_t tiles) const {
    return w.keys.at_least(tiles * x_.block * width_);
  }
  T* reserve_values(Wave& w, int64_t tiles) const {
    return w.values.at_least(tiles * x_.block * x_.Dv);
  }
  // True if whole key tiles can be read from the tensor, without packing.
  bool in_place(const Pass& pass) const {
    return pass.step == 1 && x_.k.template lies_as<T>(width_);
  }

  void run_wave(Wave& w, int64_t first, int64_t count, bool fresh, const Tensor& out,
                const Tensor& lse) const {
    w.first = first, w.count = count;
    Part part(out, first * x_.group, count * x_.group, passes_.size() == 1, w.sums);
    if (part.is_apart()) {
      part.clear();
    }
    Output output(part, lse);
    for (size_t i = 0; i < passes_.size(); ++i) {
      run_pass(w, passes_[i], i, fresh && i == 0, output);
    }
    part.finish();
  }

  void run_pass(Wave& w, const Pass& pass, int64_t number, bool fresh, Output& out) const {
    const bool few = few_[number] > 0;
    if (pass.walked) {
      walk_pass(w, pass, number, fresh, out);
      return;
    }
    if (!few) {
      pack_keys(w, pass);
    }
    w.items.clear();
    w.splits.clear();
    int64_t pieces = 0;
    for (int64_t kv = w.first; kv < w.first + w.count; ++kv) {
      const int64_t b = kv / x_.Hkv, head = kv % x_.Hkv * x_.group;
      const bool same = pass.table(b, head, x_.Hq) == pass.table(b, head + x_.group - 1, x_.Hq);
      const int64_t heads = few && same ? few_[number] : 1;
      for (int64_t i = 0; i < x_.group; i += heads) {
        pieces = list_items(pass, b, head + i, std::min(heads, x_.group - i), fresh, pieces,
                            w.items, w.splits);
      }
    }
    const int64_t at_once = Parts::at_once(x_, pieces);
    const Parts parts(x_, at_once);
    // A thread that works alone uses one scratch for all passes.
    const auto make = [&] {
      return Scratch(attend_, w.alone || !few, w.alone ? any_few() : few, any_segments());
    };
    const auto run = [&](int64_t begin, int64_t end, int64_t first) {
      share_out(w.alone ? &w.scratch : nullptr, end - begin, 1, make, [&](Scratch& s, int64_t i) {
        const Item& item = w.items[begin + i];
        const int64_t local = item.batch * x_.Hkv + item.head / x_.group - w.first;
        const Tile tile = few ? attend_.few_queries(s, pass, item, number)
                              : attend_.many_queries(s, pass, item, later(w, begin + i), number,
                                                     w.operands.data() + local * pass.columns);
        if (item.piece < 0) {
          put(pass, item, tile, s.rows.get(), s.lse.get(), fresh, out);
        } else {
          const int64_t rows = item.heads * tile.count, at = (item.piece - first) * x_.block;
          std::copy_n(s.rows.get(), rows * x_.Dv, parts.rows.get() + at * x_.Dv);
          std::copy_n(s.now.highest.get(), rows, parts.highest.get() + at);
          std::copy_n(s.now.total.get(), rows, parts.total.get() + at);
        }
      });
    };
    const auto share = [&](int64_t count, const auto& body) {
      std::optional<int> nothing;
      share_out(
          w.alone ? &nothing : nullptr, count, few ? 64 : 4, [] { return 0; },
          [&](int, int64_t i) { body(i); });
    };
    in_runs(
        w.items, w.splits, at_once, run,
        [&](const Split& split, int64_t slot, int64_t count) {
          add_pieces(parts, slot, count, rows_of(pass, split));
        },
        share,
        [&](const Split& split, int64_t slot) { put_sums(pass, split, parts, slot, fresh, out); },
        [&](int64_t slot) { parts.move_to_first(slot, x_.block, x_.Dv); });
  }

  void walk_pass(Wave& w, const Pass& pass, int64_t number, bool fresh, Output& out) const {
    const Walk walk(x_, pass);
    const std::vector<Chunk> chunks = walk.chunks(w.first, w.count);
    const WalkForward<T> forward(x_, walk, number);
    std::optional<typename WalkForward<T>::Scratch> mine;
    share_out(
        w.alone ? &mine : nullptr, chunks.size(), 1,
        [&] { return typename WalkForward<T>::Scratch(x_, walk); },
        [&](auto& s, int64_t i) { forward.run(s, chunks[i], fresh, out); });
  }

  // Returns the item that a thread will probably compute after item i; nullptr if it is of another
  // head.
  const Item* later(const Wave& w, int64_t i) const {
    const size_t next = i + (w.alone ? 1 : num_threads());
    if (kLanes > 8 || next >= w.items.size()) {  // prefetching was not measured with AVX-512
      return nullptr;
    }
    const Item &item = w.items[i], &found = w.items[next];
    return found.batch == item.batch && found.head == item.head ? &found : nullptr;
  }

  bool any_segments() const {
    return std::any_of(passes_.begin(), passes_.end(),
                       [](const Pass& pass) { return pass.key_segments; });
  }
  // True if few.h computes any pass.
  bool any_few() const {
    return std::any_of(few_.begin(), few_.end(), [](int64_t heads) { return heads > 0; });
  }

  int64_t most_queries(const Pass& pass) const {
    if (pass.longest >= 0) {
      return pass.longest;
    }
    int64_t most = 0;
    for (int64_t axis = 0; axis < pass.axes; ++axis) {
      for (int64_t row = 0; row < pass.rows && most <= kFewQueries; ++row) {
        most = std::max(most, pass.query_tile(axis, row).count);
      }
    }
    return most;
  }

  // Lists the work items of a head, and cuts query tiles with more entries than most_entries.
  int64_t list_items(const Pass& pass, int64_t b, int64_t head, int64_t heads, bool fresh,
                     int64_t pieces, std::vector<Item>& items, std::vector<Split>& splits) const {
    const int64_t axis = head * pass.axes / x_.Hq, table = pass.table(b, head, x_.Hq);
    const int32_t *row_ptr = pass.row_ptr(table), *keys = pass.keys(table);
    const int64_t most = most_entries(row_ptr[pass.rows], pass.rows, kLeastRowsCut);
    for (int64_t row = 0; row < pass.rows; ++row) {
      const int64_t begin = row_ptr[row], end = row_ptr[row + 1];
      if ((begin == end && !fresh) || pass.query_tile(axis, row).count == 0) {
        continue;
      }
      const int64_t first = pieces;
      const bool cut =
          end - begin > most &&
          for_runs_of(
              begin, end, [&](int64_t entry) { return pass.key_group(axis, keys[entry]); },
              [&](int64_t from, int64_t to) {
                items.push_back({b, head, heads, row, from, to, pieces++});
              });
      if (cut) {
        splits.push_back({{b, head, heads, row, begin, end, first}, pieces - first});
      } else {
        items.push_back({b, head, heads, row, begin, end, -1});
      }
    }
    return pieces;
  }

  void put(const Pass& pass, const Item& item, Tile tile, float* rows, const float* lse, bool fresh,
           Output& out) const {
    for (int64_t i = 0; i < item.heads; ++i) {
      const int64_t first = (item.batch * x_.Hq + item.head + i) * x_.Nq + tile.start;
      out.put(first, pass.step, tile.count, rows + i * tile.count * x_.Dv, lse + i * tile.count,
              fresh);
    }
  }

  // Number of rows of a cut tile, over all heads of its items.
  int64_t rows_of(const Pass& pass, const Split& split) const {
    const int64_t axis = split.item.head * pass.axes / x_.Hq;
    return split.item.heads * pass.query_tile(axis, split.item.row).count;
  }

  // Adds the sums of `count` pieces, each of so many rows, to those of the first of them.
  void add_pieces(const Parts& parts, int64_t slot, int64_t count, int64_t rows) const {
    for (int64_t piece = slot + 1; piece < slot + count; ++piece) {
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t to = slot * x_.block + i, from = piece * x_.block + i;
        add_segment(parts.highest.get()[to], parts.total.get()[to], parts.rows.get() + to * x_.Dv,
                    parts.highest.get()[from], parts.total.get()[from],
                    parts.rows.get() + from * x_.Dv, x_.Dv);
      }
    }
  }

  // Divides the sums of a cut tile by their totals, and writes them.
  void put_sums(const Pass& pass, const Split& split, const Parts& parts, int64_t slot, bool fresh,
                Output& out) const {
    const int64_t first = slot * x_.block, count = rows_of(pass, split);
    float *rows = parts.rows.get() + first * x_.Dv, *highest = parts.highest.get() + first,
          *total = parts.total.get() + first;
    for (int64_t i = 0; i < count; ++i) {
      float factor, lse;
      attend_.finish_rows(1, highest + i, total + i, &factor, &lse);
      total[i] = lse;
      for (int64_t d = 0; d < x_.Dv; ++d) {
        rows[i * x_.Dv + d] *= factor;
      }
    }
    const int64_t axis = split.item.head * pass.axes / x_.Hq;
    put(pass, split.item, pass.query_tile(axis, split.item.row), rows, total, fresh, out);
  }

  // Packs K (in rows) and V^T of the key tiles that some head of the group visits. It does not copy
  // keys that can be read in place.
  void pack_keys(Wave& w, const Pass& pass) const {
    const int64_t first = w.first, count = w.count;
    const int64_t columns = pass.columns, block = x_.block;
    w.key_slot.assign(count * columns, -1);
    w.value_slot.assign(count * columns, -1);
    int64_t num_keys = 0, num_values = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t b = (first + i) / x_.Hkv, head = (first + i) % x_.Hkv * x_.group;
      const int64_t last = pass.table(b, head + x_.group - 1, x_.Hq);
      for (int64_t table = pass.table(b, head, x_.Hq); table <= last; ++table) {
        for (int64_t e = 0; e < pass.row_ptr(table)[pass.rows]; ++e) {
          const int64_t column = pass.keys(table)[e], at = i * columns + column;
          if (w.value_slot[at] < 0) {
            w.value_slot[at] = num_values++;
            const int64_t size = pass.key_tile(head * pass.axes / x_.Hq, column).count;
            w.key_slot[at] = in_place(pass) && size % 16 == 0 ? -1 : num_keys++;
          }
        }
      }
    }
    T* keys = reserve_keys(w, num_keys);
    T* values = reserve_values(w, num_values);
    w.operands.resize(count * columns);
    const auto make = [&] {
      return Spare{Buffer<T>(block * x_.Dv), Buffer<T>(kPaired<T> ? block * x_.Dv : 0)};
    };
    share_out(w.alone ? &w.spare : nullptr, count * columns, 4, make, [&](Spare& s, int64_t i) {
      if (w.value_slot[i] < 0) {
        return;
      }
      const int64_t b = (first + i / columns) / x_.Hkv, head = (first + i / columns) % x_.Hkv;
      const Tile tile = pass.key_tile(head * pass.axes / x_.Hkv, i % columns);
      const int64_t rows = round_up(tile.count, 16);
      T* vt = values + w.value_slot[i] * block * x_.Dv;
      const T* v;
      if (const bool* seen = x_.extras.key_mask(b)) {
        read_tile(x_.v, b, head, tile, pass.step, rows, x_.Dv, s.tile.get());
        clear_unseen(seen, tile, pass.step, x_.Dv, s.tile.get());
        v = s.tile.get();
      } else {
        v = tile_rows(x_.v, b, head, tile, pass.step, rows, x_.Dv, s.tile.get());
      }
      transpose(v, rows, x_.Dv, vt, s.pairs.get());
      if (w.key_slot[i] < 0) {
        w.operands[i] = {x_.k.template rows<T>(b, head, tile.start), vt};
      } else {
        T* k = keys + w.key_slot[i] * block * width_;
        read_tile(x_.k, b, head, tile, pass.step, rows, width_, k);
        w.operands[i] = {k, vt};
      }
    });
  }

  const Problem& x_;
  const std::vector<Pass>& passes_;
  const Attend<T> attend_;
  const int64_t width_;
  // For each pass, how many heads few.h computes at once; 0 if it does not compute the pass.
  std::vector<int64_t> few_;
  // largest numbers of key and query tiles in a pass that is packed
  int64_t columns_ = 0, rows_ = 0;
};

}  // namespace sparsering::cpu
