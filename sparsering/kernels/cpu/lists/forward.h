// Forward pass over lists of keys.

#pragma once

#include "../machine/threads.h"
#include "../results.h"
#include "call.h"

namespace sparsering::cpu::lists {

// In a forward pass, merging lists pays if they have at least so many slots. A backward pass, which
// also adds to the gradients of keys and values, gains from merging short lists, too.
constexpr int64_t kLeastSlots = 384;

struct ForwardScratch {
  explicit ForwardScratch(const Call& call)
      : list(call.slots, call.x.Nk, call.group, call.bias),
        queries(call.rows * call.width),
        scores(call.rows * kTile),
        sums(call.rows * call.x.Dv),
        biases(kTile),
        coordinates(call.x.extras.coordinates.rows() * kTile),
        highest(call.rows),
        total(call.rows),
        spare(few_spare(call.width)) {}
  Distinct list;
  Buffer<float> queries, scores, sums, biases, coordinates, highest, total, spare;
};

// Results [B, Hq, Nq, Dv] and [B, Hq, Nq]. If `fresh`, `out` is not yet written and counts as 0,
// and `lse` is -inf or the row's sink.
template <typename O>
struct Results {
  O* out;
  float* lse;
  bool fresh;

  // Merges a row with its lse into a row of the results.
  void put(int64_t row, float* part, float part_lse, int64_t width) const {
    O* to = out + row * width;
    if (part_lse == -kInf) {
      std::fill_n(to, fresh ? width : 0, O(0));
      return;
    }
    if (lse[row] != -kInf) {
      part_lse = fresh ? Output::shrink(part, part_lse, lse[row], width)
                       : Output::merge(part, part_lse, to, lse[row], width);
    }
    at::vec::convert(part, to, width);
    lse[row] = part_lse;
  }
};

// Computes the queries whose lists were read, for the heads of a unit. Returns false, without
// results, if a number is not finite, because 0 times it would spoil rows that do not list its key.
template <int W, typename S, typename O>
bool forward_queries(const Call& call, ForwardScratch& s, int64_t b, int64_t unit, int64_t query,
                     const Results<O>& results) {
  const Problem& x = call.x;
  const int64_t group = call.group, rows = s.list.size * group, width = round_up(x.D, kLanes);
  call.read_rows(x.q, b, unit, query, s.list.size, s.queries.get());
  std::fill_n(s.sums.get(), rows * x.Dv, 0.f);
  std::fill_n(s.highest.get(), rows, -kInf);
  std::fill_n(s.total.get(), rows, 0.f);
  const Units units(1.f);  // `adjust` scales the scores
  const FewQueries few{rows,           x.D,          x.Dv,         kTile, width, s.queries.get(),
                       s.scores.get(), s.sums.get(), s.spare.get()};
  for (int64_t from = 0; from < s.list.count; from += kTile) {
    const int64_t count = std::min(kTile, s.list.count - from), next = from + count;
    const auto keys = call.rows_of<S>(x.k, b, unit, s.list, from),
               values = call.rows_of<S>(x.v, b, unit, s.list, from);
    call.for_steps(s.list, from, count, [&](int64_t j, int64_t n, int64_t first) {
      score_keys<W>(few.without(first).from(j), keys.from(j), n, values.from(j));
    });
    const Lanes lanes = call.read_lanes(b, s.list, from, count, s.coordinates.get());
    for (int64_t r = call.first_row(s.list, from); r < rows; ++r) {
      float* scores = s.scores.get() + r * kTile;
      const int64_t i = r / group, head = unit * group + r % group;
      call.adjust(b, head, query + i, s.list, i, from, count, lanes, s.biases.get(), scores,
                  nullptr);
      weigh(few, r, count, units.scale, 0.f, s.highest.get()[r], s.total.get()[r]);
      if (x.extras.drops()) {
        call.for_kept(b, head, query + i, s.list, from, count,
                      [&](int64_t j, bool kept) { scores[j] = kept ? scores[j] : 0.f; });
      }
    }
    call.for_steps(s.list, from, count, [&](int64_t j, int64_t n, int64_t first) {
      add_values<W>(few.without(first).from(j), values.from(j), n, keys.from(count + j),
                    std::min(n, s.list.count - next - j));
    });
  }
  if (s.list.size > 1 &&
      !(all_finite(s.total.get(), rows) && all_finite(s.sums.get(), rows * x.Dv))) {
    return false;
  }
  for (int64_t r = 0; r < rows; ++r) {
    float factor, of_row, *sums = s.sums.get() + r * x.Dv;
    units.finish(s.highest.get()[r], s.total.get()[r], factor, of_row);
    for (int64_t d = 0; d < x.Dv; ++d) {
      sums[d] *= factor * x.extras.factor;
    }
    results.put(call.row(b, unit * group + r % group, query + r / group), sums, of_row, x.Dv);
  }
  return true;
}

// Computes all queries whose keys and values have type S.
template <typename S, typename O>
void forward(const Call& call, const Results<O>& results) {
  const Problem& x = call.x;
  const int64_t parts = (x.Nq + kQueries - 1) / kQueries;
  const bool merges =
      call.slots >= kLeastSlots && !in_order();  // merging changes where a row is cut, and its bits
  const auto make = [&] { return ForwardScratch(call); };
  with_width(x.D, x.Dv, [&](auto width) {
    share_out<ForwardScratch>(x.B * call.units * parts, 1, make, [&](ForwardScratch& s, int64_t i) {
      const int64_t b = i / parts / call.units, unit = i / parts % call.units,
                    first = i % parts * kQueries, stop = std::min(first + kQueries, x.Nq);
      for (int64_t query = first; query < stop; query += s.list.size) {
        call.read(s.list, b, unit, query, merges ? stop - query : 1);
        if (!forward_queries<width(), S>(call, s, b, unit, query, results)) {
          call.read(s.list, b, unit, query, 1);
          forward_queries<width(), S>(call, s, b, unit, query, results);
        }
      }
    });
  });
}

}  // namespace sparsering::cpu::lists
