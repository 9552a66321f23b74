// Forward pass over lists of keys.

#pragma once

#include "../machine/threads.h"
#include "../results.h"
#include "call.h"

namespace sparsering::cpu::lists {

constexpr int64_t kQueries = 8;  // neighbouring queries that a thread takes at a time

struct ForwardScratch {
  explicit ForwardScratch(const Call& call)
      : list(call.slots, call.x.Nk),
        queries(call.group * call.width),
        scores(call.group * kTile),
        sums(call.group * call.x.Dv),
        biases(kTile),
        highest(call.group),
        total(call.group),
        spare(2 * kLanes * call.width) {}
  Distinct list;
  Buffer<float> queries, scores, sums, biases, highest, total, spare;
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

// Computes one query of the heads of a unit.
template <int W, typename S, typename O>
void forward_query(const Call& call, ForwardScratch& s, int64_t b, int64_t unit, int64_t query,
                   const Results<O>& results) {
  const Problem& x = call.x;
  s.list.read(call.list(b, unit, query), call.slots);
  call.read_rows(x.q, b, unit, query, s.queries.get());
  const FewQueries few{
      call.group,     x.D,          x.Dv,         kTile, round_up(x.D, kLanes), s.queries.get(),
      s.scores.get(), s.sums.get(), s.spare.get()};
  std::fill_n(s.sums.get(), call.group * x.Dv, 0.f);
  std::fill_n(s.highest.get(), call.group, -kInf);
  std::fill_n(s.total.get(), call.group, 0.f);
  for (int64_t from = 0; from < s.list.count; from += kTile) {
    const int64_t count = std::min(kTile, s.list.count - from), next = from + count;
    const auto keys = call.rows<S>(x.k, b, unit, s.list, from),
               values = call.rows<S>(x.v, b, unit, s.list, from);
    score_keys<W>(few, keys, count, values);
    for (int64_t i = 0; i < call.group; ++i) {
      float* scores = s.scores.get() + i * kTile;
      const int64_t head = unit * call.group + i;
      call.adjust(b, head, query, s.list, from, count, s.biases.get(), scores, nullptr);
      weigh(few, i, count, s.highest.get()[i], s.total.get()[i]);
      if (x.extras.drops()) {
        call.for_kept(b, head, query, s.list, from, count,
                      [&](int64_t j, bool kept) { scores[j] = kept ? scores[j] : 0.f; });
      }
    }
    add_values<W>(few, values, count, keys.from(count), std::min(kTile, s.list.count - next));
  }
  for (int64_t i = 0; i < call.group; ++i) {
    float factor, of_row, *sums = s.sums.get() + i * x.Dv;
    finish(s.highest.get()[i], s.total.get()[i], factor, of_row);
    for (int64_t d = 0; d < x.Dv; ++d) {
      sums[d] *= factor * x.extras.factor;
    }
    results.put(call.row(b, unit * call.group + i, query), sums, of_row, x.Dv);
  }
}

// Computes all queries whose keys and values have type S.
template <typename S, typename O>
void forward(const Call& call, const Results<O>& results) {
  const Problem& x = call.x;
  const int64_t parts = (x.Nq + kQueries - 1) / kQueries;
  const auto make = [&] { return ForwardScratch(call); };
  with_width(x.D, x.Dv, [&](auto width) {
    share_out<ForwardScratch>(x.B * call.units * parts, 1, make, [&](ForwardScratch& s, int64_t i) {
      const int64_t b = i / parts / call.units, unit = i / parts % call.units,
                    first = i % parts * kQueries, stop = std::min(first + kQueries, x.Nq);
      for (int64_t query = first; query < stop; ++query) {
        forward_query<width(), S>(call, s, b, unit, query, results);
      }
    });
  });
}

}  // namespace sparsering::cpu::lists
