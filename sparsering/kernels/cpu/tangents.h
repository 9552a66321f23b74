// Forward-mode and second derivatives over tiles (docs/derivatives.md), in float.
//
// With P the weights, z' the tangents of the logits and X' that of X, transposed as elsewhere:
//
//   tangents     S^T = K Q^T        S'^T = K Q'^T + K' Q^T
//                U^T += V^T (P z')^T + V'^T P^T          lse' += sum P z'
//                out' = U - lse' out
//   gradients    dP^T = V dO^T      dP'^T = V' dO^T + V dO'^T
//                P' = P (z' - lse')                      dZ = P (dP - delta)
//                dZ' = P' (dP - delta) + P (dP' - delta')
//                dV' += P'^T dO + P^T dO'                dK' += dZ'^T Q + dZ^T Q'
//                dQ'^T += K^T dZ'^T + K'^T dZ^T
//
// If the call has one pass, a query tile runs both walks one after the other, and the second one
// finds P and z' of the first.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "machine/threads.h"
#include "results.h"
#include "scores.h"
#include "softmax.h"
#include "stored.h"

namespace sparsering::cpu {

// Tangents of a call's tensors; missing or nullptr for what stays.
struct Moves {
  std::optional<Source> q, k, v;
  const float* bias = nullptr;   // as Problem::bias
  const float* table = nullptr;  // of a distance bias, contiguous [B, Hq, 2R + 1]
};

// Numbers of query rows [B, Hq, Nq]. The walk that computes tangents adds to all but lse.
struct RowNumbers {
  const float* lse;
  float *lse_t, *delta, *delta_t;
};

// What the gradients' tangents are computed from, and where they go.
struct MovedGradients {
  Source dout;
  std::optional<Source> dout_t;
  Tensor dq, dk, dv;
  float* dbias;    // as Problem::bias, or nullptr
  double* dtable;  // [B, Hq, shares, 2R + 1], or nullptr
};

class SecondOrder {
 public:
  // `moved` [B, Hq, Nq, Dv] gets the sums U, or out' if `out` is given, unless it is nullptr. `to`
  // is nullptr if no gradients are asked for.
  SecondOrder(const Problem& problem, const std::vector<Pass>& passes, const Moves& moves,
              const RowNumbers& rows, const std::optional<Source>& out, float* moved,
              const MovedGradients* to)
      : x_(problem),
        passes_(passes),
        moves_(moves),
        rows_(rows),
        out_(out),
        moved_(moved),
        to_(to),
        width_(std::max<int64_t>(problem.D, 1)),
        value_width_(std::max<int64_t>(problem.Dv, 1)),
        plane_(round_up(problem.block, kQueryUnit<float>) * round_up(problem.block, 16)),
        planes_(2 + (problem.extras.softcap > 0.f ? 2 : 0) + (problem.extras.drops() ? 1 : 0)) {
    for (const Pass& pass : passes) {
      most_columns_ = std::max(most_columns_, pass.columns);
      for (int64_t i = 0; i < pass.batches * pass.tables * (pass.rows > 0); ++i) {
        const int32_t* row_ptr = pass.row_ptr(i);
        for (int64_t row = 0; row < pass.rows; ++row) {
          most_entries_ = std::max<int64_t>(most_entries_, row_ptr[row + 1] - row_ptr[row]);
        }
      }
    }
    if (moved_ && to_) {
      slots_ = std::clamp<int64_t>(kMostKept / (plane_ * planes_), 1,
                                   std::max<int64_t>(1, most_entries_));
    }
  }

  // Number of parts into which a kv head's query tiles are cut: each thread takes whole kv heads if
  // there are enough, else a part of each.
  static int64_t shares(int64_t num_kv) {
    return shares_evenly(num_kv) ? 1 : num_threads();
  }

  void run() const {
    const int64_t num_kv = x_.B * x_.Hkv, parts = shares(num_kv);
    const auto make = [&] { return OfThread(*this); };
    if (parts == 1) {
      share_out<OfThread>(num_kv, 1, make, [&](OfThread& mine, int64_t kv) {
        mine.keys.resize(*this);
        auto sums = gradients_of(kv, mine.room);
        for (size_t i = 0; i < passes_.size(); ++i) {
          mine.keys.reserve(*this, passes_[i], kv);
          for (int64_t column = 0; column < passes_[i].columns; ++column) {
            mine.keys.pack(*this, passes_[i], kv, column);
          }
          mine.sums.clear(*this, passes_[i]);
          sweep_rows(mine, mine.keys, passes_[i], i, kv, 0, 1, sums);
          for (int64_t column = 0; to_ && column < passes_[i].columns; ++column) {
            add_keys(passes_[i], kv, column, mine.sums, *sums);
          }
        }
        if (sums) {
          sums->finish();
        }
      });
      return;
    }
    Packed keys;
    keys.resize(*this);
    Gradients::Room room;
    std::vector<ColumnSums> of_part(parts);
    for (int64_t kv = 0; kv < num_kv; ++kv) {
      auto sums = gradients_of(kv, room);
      for (size_t i = 0; i < passes_.size(); ++i) {
        const Pass& pass = passes_[i];
        keys.reserve(*this, pass, kv);
        parallel_for(0, pass.columns, 4, [&](int64_t begin, int64_t end) {
          for (int64_t column = begin; column < end; ++column) {
            keys.pack(*this, pass, kv, column);
          }
        });
        share_out<OfThread>(parts, 1, make, [&](OfThread& mine, int64_t part) {
          std::swap(mine.sums, of_part[part]);
          mine.sums.clear(*this, pass);
          sweep_rows(mine, keys, pass, i, kv, part, parts, sums);
          std::swap(mine.sums, of_part[part]);
        });
        parallel_for(0, to_ ? pass.columns : 0, 4, [&](int64_t begin, int64_t end) {
          for (int64_t column = begin; column < end; ++column) {
            for (int64_t part = 1; part < parts; ++part) {
              of_part[0].add(*this, of_part[part], column);
            }
            add_keys(pass, kv, column, of_part[0], *sums);
          }
        });
      }
      if (sums) {
        sums->finish();
      }
    }
  }

 private:
  // 8 MiB of P and z' of a query tile are kept for its second walk; the rest is computed again.
  static constexpr int64_t kMostKept = 1 << 21;

  // Rows of a key tile and of its tangents, and their transposes; nullptr for what is not needed.
  struct Keys {
    const float *k, *k_t, *v, *v_t;
    const float *kt, *kt_t, *vt, *vt_t;
  };

  // Operands of the key tiles of one kv head.
  struct Packed {
    void resize(const SecondOrder& f) {
      tiles.resize(f.most_columns_);
      first_copy.resize(f.most_columns_);
    }
    void reserve(const SecondOrder& f, const Pass& pass, int64_t kv) {
      int64_t size = 0;
      for (int64_t column = 0; column < pass.columns; ++column) {
        first_copy[column] = size;
        size += f.copied(pass, kv, column, nullptr, nullptr);
      }
      copies.at_least(size);
      transposed.at_least(pass.columns * f.transposed_size());
    }
    void pack(const SecondOrder& f, const Pass& pass, int64_t kv, int64_t column) {
      Keys& of = tiles[column] = {};
      f.copied(pass, kv, column, copies.get() + first_copy[column], &of);
      const int64_t rows = round_up(pass.key_tile(f.axis_of(pass, kv), column).count, 16);
      float* to = transposed.get() + column * f.transposed_size();
      const auto turn = [&](const float* from, int64_t width, const float*& turned) {
        if (from && rows) {
          transpose(from, rows, width, to);
          turned = to;
          to += f.x_.block * width;
        }
      };
      if (f.moved_) {
        turn(of.v, f.value_width_, of.vt);
        turn(of.v_t, f.value_width_, of.vt_t);
      }
      if (f.to_) {
        turn(of.k, f.width_, of.kt);
        turn(of.k_t, f.width_, of.kt_t);
      }
    }
    std::vector<Keys> tiles;
    std::vector<int64_t> first_copy;
    Buffer<float> copies, transposed;
  };

  // dK' and dV' of the key tiles of one kv head.
  struct ColumnSums {
    void clear(const SecondOrder& f, const Pass& pass) {
      if (f.to_) {
        const int64_t keys = pass.columns * f.x_.block;
        std::fill_n(dk.at_least(f.most_columns_ * f.x_.block * f.width_), keys * f.width_, 0.f);
        std::fill_n(dv.at_least(f.most_columns_ * f.x_.block * f.value_width_),
                    keys * f.value_width_, 0.f);
      }
    }
    void add(const SecondOrder& f, const ColumnSums& other, int64_t column) {
      const auto add_to = [&](float* to, const float* from, int64_t size) {
        for (int64_t i = column * size; i < (column + 1) * size; ++i) {
          to[i] += from[i];
        }
      };
      add_to(dk.get(), other.dk.get(), f.x_.block * f.width_);
      add_to(dv.get(), other.dv.get(), f.x_.block * f.value_width_);
    }
    Buffer<float> dk, dv;
  };

  // A query tile and a key tile that it visits.
  struct Pair {
    int64_t b, head, row, column, entry, bitmap;
    float bias, bias_t;
    Tile tile;  // of keys
    int64_t padded;
    const Keys* keys;
    const uint8_t* seen;  // result of `apart` (pack.h): the bitmap, or nullptr
  };

  // P [keys, queries] and z', and with a softcap its slope and its bend times the product's
  // tangent, and with dropout the factors.
  struct Planes {
    float *p, *z_t, *slope, *bent, *kept;
  };

  struct OfThread {
    explicit OfThread(const SecondOrder& f) {
      const int64_t queries = round_up(f.x_.block, kQueryUnit<float>);
      const int64_t size = queries * f.width_, value_size = queries * f.value_width_;
      planes = Buffer<float>(f.slots_ * f.planes_ * f.plane_);
      for (Buffer<float>* x : {&q, &q_t, &qt, &qt_t, &dq}) {
        *x = Buffer<float>(size);
      }
      for (Buffer<float>* x : {&dout, &dout_t, &turned_dout, &turned_dout_t, &moved, &out}) {
        *x = Buffer<float>(value_size);
      }
      for (Buffer<float>* x : {&lse, &lse_t, &delta, &delta_t, &of_pair}) {
        *x = Buffer<float>(queries);
      }
      spare = Buffer<float>(std::max(size, value_size));
      first = Buffer<float>(f.plane_), second = Buffer<float>(f.plane_);
      const auto& extras = f.x_.extras;
      raw = Buffer<float>(f.to_ && f.to_->dtable ? f.plane_ : 0);
      biases = Buffer<float>(extras.adjusts() ? 2 * queries + f.x_.block : 0);
      biases_t = Buffer<float>(extras.adjusts() ? 2 * queries + f.x_.block : 0);
      a = Buffer<uint32_t>(extras.drops() ? queries : 0);
      b = Buffer<uint32_t>(extras.drops() ? queries : 0);
    }
    Packed keys;
    ColumnSums sums;
    Gradients::Room room;
    Buffer<float> planes, first, second, raw, spare, biases, biases_t;
    Buffer<float> q, q_t, qt, qt_t, dout, dout_t, turned_dout, turned_dout_t, dq, moved, out;
    Buffer<float> lse, lse_t, delta, delta_t, of_pair;
    Buffer<uint32_t> a, b;
    std::vector<Pair> pairs;
  };

  // Rows of a padded query tile and their transposes; nullptr for what stays.
  struct Queries {
    int64_t count;
    const float *q, *q_t, *qt, *qt_t, *dout, *dout_t, *turned_dout, *turned_dout_t;
  };

  int64_t axis_of(const Pass& pass, int64_t kv) const {
    return kv % x_.Hkv * pass.axes / x_.Hkv;
  }
  int64_t transposed_size() const {
    const int64_t values = moved_ ? 1 + moves_.v.has_value() : 0,
                  keys = to_ ? 1 + moves_.k.has_value() : 0;
    return x_.block * (values * value_width_ + keys * width_);
  }

  // Finds the rows of a key tile and of its tangents, which are copied to `to` if they do not lie
  // as products need them. Returns how many values are copied; without `keys` it copies nothing.
  int64_t copied(const Pass& pass, int64_t kv, int64_t column, float* to, Keys* keys) const {
    const int64_t b = kv / x_.Hkv, head = kv % x_.Hkv;
    const Tile tile = pass.key_tile(axis_of(pass, kv), column);
    const int64_t rows = round_up(tile.count, 16);
    const bool* seen = x_.extras.key_mask(b);
    int64_t size = 0;
    const auto find = [&](const Source& x, int64_t width) {
      if (!seen && pass.step == 1 && tile.count == rows && x.lies_as<float>(width)) {
        return x.rows<float>(b, head, tile.start);
      }
      float* copy = to + size;
      if (keys) {
        read_tile(x, b, head, tile, pass.step, rows, width, copy);
        clear_unseen(seen, tile, pass.step, width, copy);
      }
      size += rows * width;
      return static_cast<const float*>(copy);
    };
    Keys found = {};
    found.k = find(x_.k, width_);
    found.v = find(x_.v, value_width_);
    found.k_t = moves_.k ? find(*moves_.k, width_) : nullptr;
    found.v_t = moves_.v ? find(*moves_.v, value_width_) : nullptr;
    if (keys) {
      *keys = found;
    }
    return size;
  }

  std::optional<Gradients> gradients_of(int64_t kv, Gradients::Room& room) const {
    std::optional<Gradients> result;
    if (to_) {
      result.emplace(x_, to_->dq, to_->dk, to_->dv, kv, 1, passes_.size() == 1, room);
    }
    return result;
  }

  void add_keys(const Pass& pass, int64_t kv, int64_t column, const ColumnSums& from,
                const Gradients& sums) const {
    add_key_tile(x_, pass, kv, column, from.dk.get() + column * x_.block * width_, width_,
                 from.dv.get() + column * x_.block * value_width_, value_width_, sums);
  }

  // Walks the query tiles of a kv head's group, or part `part` of `parts` of them, which have about
  // equally many entries.
  void sweep_rows(OfThread& s, const Packed& keys, const Pass& pass, int64_t number, int64_t kv,
                  int64_t part, int64_t parts, const std::optional<Gradients>& sums) const {
    const int64_t first = kv * x_.group;
    const auto table_of = [&](int64_t head) {
      return pass.row_ptr(pass.table(head / x_.Hq, head % x_.Hq, x_.Hq));
    };
    int64_t all = 0, before = 0;
    for (int64_t head = first; head < first + x_.group; ++head) {
      all += table_of(head)[pass.rows];
    }
    for (int64_t head = first; head < first + x_.group; ++head) {
      const int32_t* row_ptr = table_of(head);
      for (int64_t row = 0; row < pass.rows; ++row) {
        if ((before + row_ptr[row]) * parts / std::max<int64_t>(all, 1) == part) {
          sweep_row(s, keys, pass, number, head, row, part, parts, sums);
        }
      }
      before += row_ptr[pass.rows];
    }
  }

  void sweep_row(OfThread& s, const Packed& keys, const Pass& pass, int64_t number, int64_t of_head,
                 int64_t row, int64_t part, int64_t parts,
                 const std::optional<Gradients>& sums) const {
    const int64_t b = of_head / x_.Hq, head = of_head % x_.Hq;
    const int64_t axis = head * pass.axes / x_.Hq, table = pass.table(b, head, x_.Hq);
    const Tile tile = pass.query_tile(axis, row);
    const int32_t* row_ptr = pass.row_ptr(table);
    s.pairs.clear();
    for (int64_t entry = row_ptr[row]; entry < row_ptr[row + 1] && tile.count; ++entry) {
      const int64_t column = pass.keys(table)[entry], bitmap = pass.bitmap_numbers(table)[entry];
      const Tile key_tile = pass.key_tile(axis, column);
      if (key_tile.count && x_.extras.sees(b, key_tile, pass.step)) {
        const float bias_t = moves_.bias ? moves_.bias[x_.bias_of(number, b, head) + entry] : 0.f;
        s.pairs.push_back({b, head, row, column, entry, bitmap, x_.bias_at(number, b, head, entry),
                           bias_t, key_tile, round_up(key_tile.count, 16), &keys.tiles[column],
                           apart<float>(pass, bitmap, tile.count)});
      }
    }
    if (s.pairs.empty()) {
      return;
    }
    const Queries queries = pack_queries(s, pass, b, head, tile);
    const int64_t num_pairs = std::ssize(s.pairs), count = queries.count;
    if (moved_) {
      std::fill_n(s.moved.get(), value_width_ * count, 0.f);
      for (int64_t i = 0; i < num_pairs; ++i) {
        weigh<true>(s, pass, queries, s.pairs[i], planes_of(s, std::min(i, slots_ - 1)));
        add_to_moved(s, queries, s.pairs[i], planes_of(s, std::min(i, slots_ - 1)));
      }
      put_moved(s, pass, queries, b, head, tile);
    }
    if (!to_) {
      return;
    }
    std::fill_n(s.dq.get(), width_ * count, 0.f);
    double* dtable =
        to_->dtable ? to_->dtable + (of_head * parts + part) * (2 * x_.extras.radius + 1) : nullptr;
    for (int64_t i = 0; i < num_pairs; ++i) {
      const Pair& pair = s.pairs[i];
      const Planes planes = planes_of(s, std::min(i, slots_ - 1));
      if (!moved_ || (num_pairs > slots_ && i >= slots_ - 1)) {
        weigh<false>(s, pass, queries, pair, planes);
      }
      const float sum = differentiate(s, pass, queries, pair, planes, dtable, tile.count);
      if (to_->dbias) {
        to_->dbias[x_.bias_of(number, b, head) + pair.entry] = sum;
      }
      add_gradients(s, queries, pair, planes, s.sums);
    }
    transpose(s.dq.get(), width_, count, s.spare.get());
    add_rows(sums->q, of_head * x_.Nq + tile.start, pass.step, tile.count, s.spare.get(), width_,
             x_.scale);
  }

  Planes planes_of(const OfThread& s, int64_t slot) const {
    float* first = s.planes.get() + slot * planes_ * plane_;
    const bool capped = x_.extras.softcap > 0.f;
    return {first, first + plane_, first + 2 * plane_, first + 3 * plane_,
            first + (capped ? 4 : 2) * plane_};
  }

  Queries pack_queries(OfThread& s, const Pass& pass, int64_t b, int64_t head, Tile tile) const {
    const int64_t count = round_up(tile.count, kQueryUnit<float>);
    const auto rows_of = [&](const Source& x, int64_t width, const Buffer<float>& to,
                             const Buffer<float>& turned) {
      const float* rows = tile_rows(x, b, head, tile, pass.step, count, width, to.get());
      transpose(rows, count, width, turned.get());
      return rows;
    };
    Queries result = {count, nullptr, s.qt.get(), nullptr, nullptr, nullptr, nullptr, nullptr};
    result.q = rows_of(x_.q, width_, s.q, s.qt);
    result.qt = s.qt.get();
    if (moves_.q) {
      result.q_t = rows_of(*moves_.q, width_, s.q_t, s.qt_t);
      result.qt_t = s.qt_t.get();
    }
    if (to_) {
      result.dout = rows_of(to_->dout, value_width_, s.dout, s.turned_dout);
      result.turned_dout = s.turned_dout.get();
      if (to_->dout_t) {
        result.dout_t = rows_of(*to_->dout_t, value_width_, s.dout_t, s.turned_dout_t);
        result.turned_dout_t = s.turned_dout_t.get();
      }
    }
    const int64_t first = (b * x_.Hq + head) * x_.Nq + tile.start;
    const auto read = [&](const float* from, const Buffer<float>& to, float padding) {
      for (int64_t i = 0; i < count; ++i) {
        to.get()[i] = i < tile.count ? from[first + i * pass.step] : padding;
      }
    };
    read(rows_.lse, s.lse, kInf);
    for (int64_t i = 0; i < count; ++i) {  // so that rows without keys have weights of 0
      s.lse.get()[i] = s.lse.get()[i] == -kInf ? kInf : s.lse.get()[i];
    }
    read(rows_.lse_t, s.lse_t, 0.f);
    if (to_) {
      read(rows_.delta, s.delta, 0.f);
      read(rows_.delta_t, s.delta_t, 0.f);
    }
    return result;
  }

  // Computes C = A B, or C + A B, for A [keys, width] and B [width, queries].
  void keys_by_queries(const Queries& q, const Pair& x, const float* keys, int64_t width,
                       const float* queries, float* to, bool add) const {
    if (x.seen && !add) {  // zeros, because what is not multiplied is read, too
      std::fill_n(to, x.padded * q.count, 0.f);
    }
    for_parts(x.seen, x_.block, x.padded, q.count,
              [&](int64_t i, int64_t size, int64_t first, int64_t count) {
                multiply(count, size, width, keys + first * width, width, queries + i, q.count,
                         to + first * q.count + i, q.count, add);
              });
  }
  // Adds A B for A^T [keys, width] in `turned` and B [keys, queries].
  void add_by_keys(const Queries& q, const Pair& x, const float* turned, int64_t width,
                   const float* weights, float* to) const {
    for_parts(x.seen, x_.block, x.padded, q.count,
              [&](int64_t i, int64_t size, int64_t first, int64_t count) {
                multiply(width, size, count, turned + first, x.padded,
                         weights + first * q.count + i, q.count, to + i, q.count, true);
              });
  }
  // Adds A B for A [keys, queries] and B [queries, width].
  void add_by_queries(const Queries& q, const Pair& x, const float* weights, const float* rows,
                      int64_t width, float* to) const {
    for_parts(x.seen, x_.block, x.padded, q.count,
              [&](int64_t i, int64_t size, int64_t first, int64_t count) {
                multiply(count, width, size, weights + first * q.count + i, q.count,
                         rows + i * width, width, to + first * width, width, true);
              });
  }

  // Computes the planes of a pair. If kSums, also adds P z' of each query to `lse_t`, and writes it
  // after dropout to `first`, and P after dropout to `second`.
  template <bool kSums>
  void weigh(OfThread& s, const Pass& pass, const Queries& q, const Pair& x,
             const Planes& to) const {
    constexpr int W = kQueryUnit<float> / kLanes;
    keys_by_queries(q, x, x.keys->k, width_, q.qt, to.p, false);
    if (q.qt_t) {
      keys_by_queries(q, x, x.keys->k, width_, q.qt_t, to.z_t, false);
    }
    if (x.keys->k_t) {
      keys_by_queries(q, x, x.keys->k_t, width_, q.qt, to.z_t, q.qt_t != nullptr);
    } else if (!q.qt_t) {
      std::fill_n(to.z_t, x.padded * q.count, 0.f);
    }
    const int64_t axis = x.head * pass.axes / x_.Hq, keys = x.tile.count;
    const bool drops = x_.extras.drops();
    if (x_.extras.adjusts()) {
      adjust_pair(s, pass, q, x, axis, to);
    }
    if (drops) {
      row_words(x_, pass, x.b, x.head, x.row, q.count, s.a.get(), s.b.get());
      keep_factors(
          to.kept, keys, q.count,
          {s.a.get(), s.b.get(), pass.key_origin(axis, x.column), pass.step, x_.extras.threshold},
          x_.extras.factor);
    }
    hide_unseen(x_.extras.key_mask(x.b), x.tile, pass.step, to.p, q.count);
    if (x.bitmap >= 0) {
      apply_mask(pass.bitmap(x.bitmap), x_.block, keys, pass.query_tile(axis, x.row).count, to.p,
                 q.count);
    }
    // The sums of a pair are added to those of its row at once, which rounds less.
    std::fill_n(s.of_pair.get(), q.count, 0.f);
    const Vec scale(x_.rest_of_scale()), bias(x.bias), bias_t(x.bias_t);
    for (int64_t j = 0; j < x.padded; j += 2) {
      for (int64_t c = 0; c < q.count; c += W * kLanes) {
        Vec p[2 * W];
#pragma GCC unroll 8
        for (int n = 0; n < 2 * W; ++n) {
          const int64_t i = c + n % W * kLanes, at = (j + n / W) * q.count + i;
          // P is at most 1 but for the rounding of a large lse; the clamp avoids an overflow.
          const Vec score =
              at::vec::fmadd(Vec::loadu(to.p + at), scale, bias - Vec::loadu(s.lse.get() + i));
          p[n] = at::vec::clamp_max(score, Vec(44.f));
        }
        exponentiate(p);
#pragma GCC unroll 8
        for (int n = 0; n < 2 * W; ++n) {
          const int64_t key = j + n / W, i = c + n % W * kLanes, at = key * q.count + i;
          Vec z_t(0.f), kept(1.f);
          if (key < keys) {
            z_t = at::vec::fmadd(Vec::loadu(to.z_t + at), scale, bias_t);
            kept = drops ? Vec::loadu(to.kept + at) : kept;
          } else {
            p[n] = Vec(0.f);
          }
          p[n].store(to.p + at);
          z_t.store(to.z_t + at);
          if constexpr (kSums) {
            const Vec weight_t = p[n] * z_t;
            (Vec::loadu(s.of_pair.get() + i) + weight_t).store(s.of_pair.get() + i);
            (drops ? weight_t * kept : weight_t).store(s.first.get() + at);
            if (drops) {
              (p[n] * kept).store(s.second.get() + at);
            }
          }
        }
      }
    }
    for (int64_t i = 0; kSums && i < q.count; ++i) {
      s.lse_t.get()[i] += s.of_pair.get()[i];
    }
  }

  // Scales the scores and their tangents, and applies the softcap and the distance bias.
  void adjust_pair(OfThread& s, const Pass& pass, const Queries& q, const Pair& x, int64_t axis,
                   const Planes& to) const {
    const int64_t keys = x.tile.count, count = q.count;
    const float* table = x_.extras.table(x.b, x.head);
    const int64_t of_head = (x.b * x_.Hq + x.head) * (2 * x_.extras.radius + 1);
    const float* table_t = table && moves_.table ? moves_.table + of_head : nullptr;
    const bool even = pass.has_even_depths();
    const TilesOfPass tiles{x.b, axis, x.row, x.column};
    const int64_t queries = pass.query_tile(axis, x.row).count;
    const auto read = [&](const float* from, const Buffer<float>& all, int64_t j) -> const float* {
      if (!from) {
        return nullptr;
      }
      if (!even) {  // the lanes of padding keep any number, because their weights are 0
        std::fill_n(all.get(), count, 0.f);
        read_distances_of_key(x_.extras, from, pass, tiles, j, queries, all.get());
        return all.get();
      }
      if (j == 0) {
        const int64_t distance = pass.distance(x.b, axis, x.row, x.column) + (keys - 1) * pass.step;
        read_distances(from, x_.extras.radius, distance, -pass.step, keys - 1 + count, all.get());
      }
      return all.get() + keys - 1 - j;
    };
    const float cap = x_.extras.softcap;
    const Vec scale(x_.scale), of_cap(cap > 0.f ? x_.scale / cap : 0.f);
    for (int64_t j = 0; j < keys; ++j) {
      const float *bias = read(table, s.biases, j), *bias_t = read(table_t, s.biases_t, j);
      for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t at = j * count + i;
        Vec score = Vec::loadu(to.p + at), product_t = Vec::loadu(to.z_t + at) * scale;
        if (cap > 0.f) {
          const Vec t = tanh_of(score * of_cap), slope = Vec(1.f) - t * t;
          slope.store(to.slope + at);
          (Vec(-2.f / cap) * t * slope * product_t).store(to.bent + at);
          score = t * Vec(cap);
          product_t = product_t * slope;
        } else {
          score = score * scale;
        }
        (bias ? score + Vec::loadu(bias + i) : score).store(to.p + at);
        (bias_t ? product_t + Vec::loadu(bias_t + i) : product_t).store(to.z_t + at);
      }
    }
  }

  // Adds a pair's part of U^T, from what `weigh` has written.
  void add_to_moved(OfThread& s, const Queries& q, const Pair& x, const Planes& planes) const {
    add_by_keys(q, x, x.keys->vt, value_width_, s.first.get(), s.moved.get());
    if (x.keys->vt_t) {
      const float* weights = x_.extras.drops() ? s.second.get() : planes.p;
      add_by_keys(q, x, x.keys->vt_t, value_width_, weights, s.moved.get());
    }
  }

  // Writes U, or out' with its part of delta' if `out` is given, and lse' of a query tile.
  void put_moved(OfThread& s, const Pass& pass, const Queries& q, int64_t b, int64_t head,
                 Tile tile) const {
    const int64_t count = q.count, row = (b * x_.Hq + head) * x_.Nq + tile.start;
    if (out_) {
      const float* rows =
          tile_rows(*out_, b, head, tile, pass.step, count, value_width_, s.spare.get());
      transpose(rows, count, value_width_, s.out.get());
      for (int64_t d = 0; d < value_width_; ++d) {
        for (int64_t i = 0; i < count; i += kLanes) {
          const int64_t at = d * count + i;
          const Vec out = Vec::loadu(s.out.get() + at);
          const Vec out_t = Vec::loadu(s.moved.get() + at) - Vec::loadu(s.lse_t.get() + i) * out;
          out_t.store(s.moved.get() + at);
          if (to_) {
            const Vec dout = Vec::loadu(q.turned_dout + at);
            Vec delta_t = at::vec::fmadd(dout, out_t, Vec::loadu(s.delta_t.get() + i));
            if (q.turned_dout_t) {
              delta_t = at::vec::fmadd(Vec::loadu(q.turned_dout_t + at), out, delta_t);
            }
            delta_t.store(s.delta_t.get() + i);
            at::vec::fmadd(dout, out, Vec::loadu(s.delta.get() + i)).store(s.delta.get() + i);
          }
        }
      }
    }
    transpose(s.moved.get(), value_width_, count, s.spare.get());
    for (int64_t i = 0; i < tile.count; ++i) {
      const int64_t at = row + i * pass.step;
      rows_.lse_t[at] = s.lse_t.get()[i];
      if (to_) {
        rows_.delta[at] = s.delta.get()[i];
        rows_.delta_t[at] = s.delta_t.get()[i];
      }
      for (int64_t d = 0; d < x_.Dv; ++d) {
        moved_[at * x_.Dv + d] += s.spare.get()[i * value_width_ + d];
      }
    }
  }

  // Replaces P by its weights after dropout, z' by P' after dropout, and writes dZ to `first` and
  // dZ' to `second`, both before the softcap. Returns the sum of dZ' after the softcap.
  float differentiate(OfThread& s, const Pass& pass, const Queries& q, const Pair& x,
                      const Planes& of, double* dtable, int64_t queries) const {
    float *dz = s.first.get(), *dz_t = s.second.get();
    keys_by_queries(q, x, x.keys->v, value_width_, q.turned_dout, dz, false);
    if (q.turned_dout_t) {
      keys_by_queries(q, x, x.keys->v, value_width_, q.turned_dout_t, dz_t, false);
    }
    if (x.keys->v_t) {
      keys_by_queries(q, x, x.keys->v_t, value_width_, q.turned_dout, dz_t,
                      q.turned_dout_t != nullptr);
    } else if (!q.turned_dout_t) {
      std::fill_n(dz_t, x.padded * q.count, 0.f);
    }
    const bool drops = x_.extras.drops(), capped = x_.extras.softcap > 0.f;
    Vec total(0.f);
    for (int64_t j = 0; j < x.tile.count; ++j) {
      for (int64_t i = 0; i < q.count; i += kLanes) {
        const int64_t at = j * q.count + i;
        const Vec p = Vec::loadu(of.p + at), kept = drops ? Vec::loadu(of.kept + at) : Vec(1.f);
        const Vec p_t = p * (Vec::loadu(of.z_t + at) - Vec::loadu(s.lse_t.get() + i));
        Vec dp = Vec::loadu(dz + at), dp_t = Vec::loadu(dz_t + at);
        if (drops) {
          dp = dp * kept, dp_t = dp_t * kept;
        }
        const Vec centred = dp - Vec::loadu(s.delta.get() + i);
        Vec d = p * centred;
        Vec d_t = at::vec::fmadd(p_t, centred, p * (dp_t - Vec::loadu(s.delta_t.get() + i)));
        total = total + d_t;
        if (dtable) {
          d_t.store(s.raw.get() + at);
        }
        if (capped) {
          const Vec slope = Vec::loadu(of.slope + at);
          d_t = at::vec::fmadd(d, Vec::loadu(of.bent + at), d_t * slope);
          d = d * slope;
        }
        d.store(dz + at);
        d_t.store(dz_t + at);
        (drops ? p_t * kept : p_t).store(of.z_t + at);
        if (drops) {
          (p * kept).store(of.p + at);
        }
      }
    }
    const int64_t rest = (x.padded - x.tile.count) * q.count, from = x.tile.count * q.count;
    for (float* plane : {dz, dz_t}) {
      std::fill_n(plane + from, rest, 0.f);
    }
    if (dtable) {
      const int64_t axis = x.head * pass.axes / x_.Hq;
      add_distances_of_pairs(dtable, x_.extras.radius, pass, {x.b, axis, x.row, x.column},
                             x.tile.count, queries, q.count, s.raw.get());
    }
    return sum_of_lanes(total);
  }

  // Adds a differentiated pair's parts of dQ'^T, dK' and dV'.
  void add_gradients(OfThread& s, const Queries& q, const Pair& x, const Planes& of,
                     const ColumnSums& to) const {
    const float *dz = s.first.get(), *dz_t = s.second.get();
    float* dk = to.dk.get() + x.column * x_.block * width_;
    float* dv = to.dv.get() + x.column * x_.block * value_width_;
    add_by_keys(q, x, x.keys->kt, width_, dz_t, s.dq.get());
    if (x.keys->kt_t) {
      add_by_keys(q, x, x.keys->kt_t, width_, dz, s.dq.get());
    }
    add_by_queries(q, x, of.z_t, q.dout, value_width_, dv);
    if (q.dout_t) {
      add_by_queries(q, x, of.p, q.dout_t, value_width_, dv);
    }
    add_by_queries(q, x, dz_t, q.q, width_, dk);
    if (q.q_t) {
      add_by_queries(q, x, dz, q.q_t, width_, dk);
    }
  }

  const Problem& x_;
  const std::vector<Pass>& passes_;
  const Moves moves_;
  const RowNumbers rows_;
  const std::optional<Source> out_;
  float* const moved_;
  const MovedGradients* const to_;
  const int64_t width_, value_width_;
  const int64_t plane_, planes_;  // values of a plane, and planes of a pair
  int64_t most_columns_ = 0, most_entries_ = 0;
  int64_t slots_ = 1;  // pairs whose planes are kept
};

}  // namespace sparsering::cpu
