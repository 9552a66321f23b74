// Backward pass over lists of keys. A thread takes the queries of a kv head, or a piece of them,
// and has sums of its own for dK and dV of the head.

#pragma once

#include "../machine/threads.h"
#include "../results.h"
#include "call.h"

namespace sparsering::cpu::lists {

constexpr int64_t kMostPieces = 16;  // most pieces per kv head; it bounds the memory for sums

// Adds to `R` rows of `to` that a list names: row keys[j] gets the sum of factors[r * ld + j] *
// x[r].
template <int R>
void add_products(float* to, int64_t width, const int32_t* keys, const float* factors, int64_t ld,
                  const float* x, int64_t x_ld, int64_t queries) {
  constexpr int W = kLanes > 8 ? 4 : 2;
  float* rows[R];
  for (int j = 0; j < R; ++j) {
    rows[j] = to + keys[j] * width;
  }
  int64_t d = 0;
  for (; d + W * kLanes <= width; d += W * kLanes) {
    Vec sum[R][W];
    for (int i = 0; i < R * W; ++i) {
      sum[i / W][i % W] = Vec::loadu(rows[i / W] + d + i % W * kLanes);
    }
    for (int64_t r = 0; r < queries; ++r) {
      for (int w = 0; w < W; ++w) {
        const Vec part = Vec::loadu(x + r * x_ld + d + w * kLanes);
        for (int j = 0; j < R; ++j) {
          sum[j][w] = at::vec::fmadd(Vec(factors[r * ld + j]), part, sum[j][w]);
        }
      }
    }
    for (int i = 0; i < R * W; ++i) {
      sum[i / W][i % W].store(rows[i / W] + d + i % W * kLanes);
    }
  }
  for (int64_t r = 0; r < queries && d < width; ++r) {
    for (int j = 0; j < R; ++j) {
      for (int64_t i = d; i < width; ++i) {
        rows[j][i] += factors[r * ld + j] * x[r * x_ld + i];
      }
    }
  }
}

inline void add_products(float* to, int64_t width, const int32_t* keys, int64_t count,
                         const float* factors, const float* x, int64_t queries) {
  const int64_t x_ld = round_up(width, kLanes);
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    for (int64_t next = j + 4; next < std::min(j + 8, count); ++next) {
      prefetch<0>(to + keys[next] * width, width);
    }
    add_products<4>(to, width, keys + j, factors + j, kTile, x, x_ld, queries);
  }
  for (; j < count; ++j) {
    add_products<1>(to, width, keys + j, factors + j, kTile, x, x_ld, queries);
  }
}

struct BackwardScratch {
  explicit BackwardScratch(const Call& call)
      : list(call.slots, call.x.Nk, call.group, call.bias),
        queries(call.rows * call.width),
        douts(call.rows * call.width),
        scores(call.rows * kTile),
        weights(call.rows * kTile),
        sums(call.rows * call.x.D),
        biases(kTile),
        slopes(kTile),
        coordinates(call.x.extras.coordinates.rows() * kTile),
        coordinate_sums((call.x.extras.coordinates.dims + 2) * kTile),
        spare(few_spare(call.width)) {}
  Distinct list;
  Buffer<float> queries, douts, scores, weights, sums, biases, slopes;
  Buffer<float> coordinates, coordinate_sums, spare;
  Lanes lanes = {};  // the coordinates of a tile's keys
};

class Backward {
 public:
  // Where gradients are written. `dtable` is [B, Hq, pieces, 2R + 1], and the last two are those of
  // coordinates (see operators.h); nullptr stands for no such gradient.
  struct To {
    float *dq, *dk, *dv, *dbias;
    double* dtable;
    float *of_queries, *of_keys;
  };

  Backward(const Call& call, const Tensor& grad_out, const float* lse, const float* delta,
           const To& to)
      : call_(call),
        x_(call.x),
        dout_(grad_out),
        lse_(lse),
        delta_(delta),
        to_(to),
        merges_(!in_order() && (most_lists(call.group) == 1 || has_finite_keys())) {}

  // Returns into how many pieces a kv head's queries are cut, so that all threads work.
  static int64_t pieces(const Problem& x) {
    const int64_t heads = std::max<int64_t>(1, x.B * x.Hkv);
    return std::min({(num_threads() + heads - 1) / heads, kMostPieces, parts(x)});
  }

  void run() const {
    const int64_t pieces = Backward::pieces(x_), heads = x_.B * x_.Hkv,
                  keys = heads * x_.Nk;  // number of rows of dK, and of dV
    Buffer<float> more_k = Buffer<float>::zeros((pieces - 1) * keys * x_.D),
                  more_v = Buffer<float>::zeros((pieces - 1) * keys * x_.Dv);
    const auto part = [&](float* first, const Buffer<float>& more, int64_t piece, int64_t width) {
      return piece ? more.get() + (piece - 1) * keys * width : first;
    };
    with_width(x_.D, x_.Dv, [&](auto width) {
      with_type(x_.k.type, [&](auto value) {
        share_out<BackwardScratch>(
            heads * pieces, 1, [&] { return BackwardScratch(call_); },
            [&](BackwardScratch& s, int64_t i) {
              const int64_t kv = i / pieces, piece = i % pieces, b = kv / x_.Hkv,
                            units = call_.units / x_.Hkv;
              float *dk = part(to_.dk, more_k, piece, x_.D) + kv * x_.Nk * x_.D,
                    *dv = part(to_.dv, more_v, piece, x_.Dv) + kv * x_.Nk * x_.Dv;
              for (int64_t unit = kv % x_.Hkv * units; unit < (kv % x_.Hkv + 1) * units; ++unit) {
                for (int64_t n = parts(x_) * piece / pieces; n < parts(x_) * (piece + 1) / pieces;
                     ++n) {
                  const int64_t stop = std::min((n + 1) * kQueries, x_.Nq);
                  for (int64_t query = n * kQueries; query < stop; query += s.list.size) {
                    read_lists(s, b, unit, query, stop);
                    run_queries<width(), decltype(value)>(s, b, unit, query, piece, pieces, dk, dv);
                  }
                }
              }
            });
      });
    });
    for (int64_t piece = 1; piece < pieces; ++piece) {
      add(part(nullptr, more_k, piece, x_.D), keys * x_.D, to_.dk);
      add(part(nullptr, more_v, piece, x_.Dv), keys * x_.Dv, to_.dv);
    }
  }

 private:
  // Returns the number of runs of neighboring queries whose lists may be merged; it does not depend
  // on the threads.
  static int64_t parts(const Problem& x) {
    return std::max<int64_t>(1, (x.Nq + kQueries - 1) / kQueries);
  }

  static void add(const float* from, int64_t size, float* to) {
    parallel_for(0, size, 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        to[i] += from[i];
      }
    });
  }

  // False if a key is not finite. That must be checked here, because a key of -inf leaves lse and
  // delta finite.
  bool has_finite_keys() const {
    std::atomic<bool> finite{true};
    const int64_t heads = x_.B * x_.Hkv, padded = round_up(x_.D, kLanes);
    parallel_for(0, heads * x_.Nk, 1 << 10, [&](int64_t begin, int64_t end) {
      Buffer<float> key(padded);
      for (int64_t i = begin; i < end && finite; ++i) {
        const int64_t head = i / x_.Nk;
        read_tile(x_.k, head / x_.Hkv, head % x_.Hkv, Tile{i % x_.Nk, 1}, 1, 1, padded, key.get());
        if (!all_finite(key.get(), padded)) {
          finite = false;
        }
      }
    });
    return finite;
  }

  // Reads the lists of some queries, to be merged. It reads a single one if a number is not finite,
  // because 0 times it would spoil the gradients of queries and keys that do not see each other.
  void read_lists(BackwardScratch& s, int64_t b, int64_t unit, int64_t query, int64_t stop) const {
    call_.read(s.list, b, unit, query, merges_ ? stop - query : 1);
    bool finite = true;
    for (int64_t i = 0; i < call_.group && s.list.size > 1; ++i) {
      const int64_t row = call_.row(b, unit * call_.group + i, query);
      for (int64_t j = row; j < row + s.list.size; ++j) {
        finite = finite && std::isfinite(delta_[j]) && lse_[j] < kInf;
      }
    }
    if (!finite) {
      call_.read(s.list, b, unit, query, 1);
    }
  }

  template <int W, typename S>
  void run_queries(BackwardScratch& s, int64_t b, int64_t unit, int64_t query, int64_t piece,
                   int64_t pieces, float* dk, float* dv) const {
    const int64_t group = call_.group, rows = s.list.size * group, width = round_up(x_.D, kLanes),
                  value_width = round_up(x_.Dv, kLanes);
    std::fill_n(s.sums.get(), rows * x_.D, 0.f);
    if (s.list.count) {
      call_.read_rows(x_.q, b, unit, query, s.list.size, s.queries.get());
      call_.read_rows(dout_, b, unit, query, s.list.size, s.douts.get());
    }
    const FewQueries few{rows,           x_.D,    x_.Dv,        kTile, width, s.queries.get(),
                         s.scores.get(), nullptr, s.spare.get()};
    const FewQueries by_value{rows,          x_.Dv,           x_.D,    kTile,        value_width,
                              s.douts.get(), s.weights.get(), nullptr, s.spare.get()};
    FewQueries by_key = few;
    by_key.value_width = x_.D, by_key.sums = s.sums.get();
    for (int64_t from = 0; from < s.list.count; from += kTile) {
      const int64_t count = std::min(kTile, s.list.count - from), next = from + count;
      const auto keys = call_.rows_of<S>(x_.k, b, unit, s.list, from),
                 values = call_.rows_of<S>(x_.v, b, unit, s.list, from);
      call_.for_steps(s.list, from, count, [&](int64_t j, int64_t n, int64_t first) {
        score_keys<W>(few.without(first).from(j), keys.from(j), n, values.from(j));
        score_keys<W>(by_value.without(first).from(j), values.from(j), n, keys.from(j));
      });
      s.lanes = call_.read_lanes(b, s.list, from, count, s.coordinates.get());
      for (int64_t r = call_.first_row(s.list, from); r < rows; ++r) {
        run_row(s, b, unit * group + r % group, query, r / group, from, count, piece, pieces, r);
      }
      call_.for_steps(s.list, from, count, [&](int64_t j, int64_t n, int64_t first) {
        const FewQueries scores = by_key.without(first).from(j),
                         weights = by_value.without(first).from(j);
        const int32_t* of_step = s.list.keys() + from + j;
        add_values<W>(scores, keys.from(j), n, keys.from(count + j),
                      std::min(n, s.list.count - next - j));
        add_products(dv, x_.Dv, of_step, n, weights.scores, weights.queries, weights.count);
        add_products(dk, x_.D, of_step, n, scores.scores, scores.queries, scores.count);
      });
    }
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(s.sums.get() + r * x_.D, x_.D,
                  to_.dq + call_.row(b, unit * group + r % group, query + r / group) * x_.D);
    }
  }

  // Replaces a head's products with keys by their gradients dS, and its products with values by the
  // weights of the values. Its list is number `i` of those that were read.
  void run_row(BackwardScratch& s, int64_t b, int64_t head, int64_t first_query, int64_t i,
               int64_t from, int64_t count, int64_t piece, int64_t pieces, int64_t r) const {
    float *scores = s.scores.get() + r * kTile, *weights = s.weights.get() + r * kTile,
          *slopes = s.slopes.get();
    const int64_t query = first_query + i, row = call_.row(b, head, query);
    const bool capped = x_.extras.softcap > 0.f;
    call_.adjust(b, head, query, s.list, i, from, count, s.lanes, s.biases.get(), scores,
                 capped ? slopes : nullptr);
    if (x_.extras.drops()) {  // turns the products with values into gradients of the weights
      call_.for_kept(b, head, query, s.list, from, count, [&](int64_t j, bool kept) {
        weights[j] = kept ? weights[j] * x_.extras.factor : 0.f;
      });
    }
    const float lse = lse_[row] == -kInf ? kInf : lse_[row], delta = delta_[row];
    for (int64_t j = 0; j < count; j += kLanes) {
      const int64_t n = std::min(kLanes, count - j);
      const Vec weight = exp_of(Vec::loadu(scores + j, n) - Vec(lse));
      (weight * (Vec::loadu(weights + j, n) - Vec(delta))).store(scores + j, n);
      weight.store(weights + j, n);
    }
    if (x_.extras.drops()) {
      call_.for_kept(b, head, query, s.list, from, count, [&](int64_t j, bool kept) {
        weights[j] = kept ? weights[j] * x_.extras.factor : 0.f;
      });
    }
    if (to_.dbias) {
      for (int64_t j = 0; j < count; ++j) {
        if (s.list.has(i, from + j)) {
          to_.dbias[row * call_.slots + s.list.places(i)[from + j]] = scores[j];
        }
      }
    }
    if (to_.dtable) {
      const int64_t width = 2 * x_.extras.radius + 1;
      double* table = to_.dtable + ((b * x_.Hq + head) * pieces + piece) * width;
      const int64_t* depths = call_.depths_of(b, head);
      for (int64_t j = 0; j < count; ++j) {
        if (s.list.has(i, from + j)) {
          table[call_.distance(b, s.list.keys()[from + j], query, depths)] += scores[j];
        }
      }
    }
    if (to_.of_queries) {
      float* ds = s.biases.get();
      for (int64_t j = 0; j < count; ++j) {
        ds[j] = scores[j] * (capped ? slopes[j] : 1.f);
      }
      add_coordinates(s, b, head, query, from, count, piece, ds);
    }
    for (int64_t j = 0; j < count; ++j) {
      scores[j] *= x_.scale * (capped ? slopes[j] : 1.f);
    }
  }

  // Adds the gradients of coordinates and slopes for the pairs of a query with keys of a list, from
  // dS by scaled scores.
  void add_coordinates(BackwardScratch& s, int64_t b, int64_t head, int64_t query, int64_t from,
                       int64_t count, int64_t piece, const float* ds) const {
    const Coordinates& of = x_.extras.coordinates;
    const int64_t dims = of.dims;
    float *sums = s.coordinate_sums.get(),
          *to = to_.of_queries + call_.row(b, head, query) * (dims + 1);
    std::fill_n(sums, (dims + 1) * kTile, 0.f);
    add_coordinate_gradients(of, s.lanes, of.slopes[head] * x_.scale, of.query.spots(b, query, 1),
                             1, count, 0, ds, {sums, sums + (dims + 1) * kTile},
                             [&](int64_t) { return to; });
    float* of_head =
        to_.of_keys + ((piece * x_.B + b) * x_.Hkv + head * x_.Hkv / x_.Hq) * x_.Nk * dims;
    for (int64_t j = 0; j < count; ++j) {
      to[dims] += sums[dims * kTile + j];
      for (int64_t d = 0; d < dims; ++d) {
        of_head[s.list.keys()[from + j] * dims + d] += sums[d * kTile + j];
      }
    }
  }

  const Call& call_;
  const Problem& x_;
  const Source dout_;
  const float *lse_, *delta_;
  const To to_;
  const bool merges_;  // false if bits must not depend on merging, or if a key is not finite
};

}  // namespace sparsering::cpu::lists
