// Sums over the keys of a query tile, segment by segment; `Pass::query_segment` says why.

#pragma once

#include <utility>

#include "layout.h"

namespace sparsering::cpu {

// Adds up the sums of segments in order: first within a group of segments, then over groups. `now`
// has the sums of the current segment; `earlier` has those of earlier segments in its group, and
// those of earlier groups. add(to, from) adds sums.
class Segments {
 public:
  bool changes_to(int64_t next) const {
    return segment_ != Pass::kNoSegment && next != segment_;
  }
  // Begins a segment. Returns true if another one came before: its sums have been moved out of
  // `now`, which the caller must clear.
  template <typename Sums, typename Add>
  bool begin(Sums& now, Sums (&earlier)[2], int64_t next, const Add& add) {
    const bool another = changes_to(next);
    if (another) {
      put(now, earlier[0], any_in_group_, add);
      if (next / Pass::kGroup != segment_ / Pass::kGroup) {
        put(earlier[0], earlier[1], any_groups_, add);
        any_in_group_ = false;
      }
    }
    segment_ = next;
    return another;
  }
  // Leaves the sums of all segments in `now`. Returns false if there was none.
  template <typename Sums, typename Add>
  bool end(Sums& now, Sums (&earlier)[2], const Add& add) {
    if (any_in_group_) {
      put(now, earlier[0], any_in_group_, add);
      std::swap(now, earlier[0]);
    }
    if (any_groups_) {
      put(now, earlier[1], any_groups_, add);
      std::swap(now, earlier[1]);
    }
    return segment_ != Pass::kNoSegment;
  }

 private:
  template <typename Sums, typename Add>
  static void put(Sums& from, Sums& to, bool& any, const Add& add) {
    any ? add(to, from) : std::swap(from, to);
    any = true;
  }

  int64_t segment_ = Pass::kNoSegment;
  bool any_in_group_ = false, any_groups_ = false;
};

// Calls f(from, to) for each run of entries in [begin, end) with equal `segment_of(entry)`, if
// there are several runs. Segments ascend. Returns false if there is at most one run.
template <typename Segment, typename F>
bool for_runs_of(int64_t begin, int64_t end, const Segment& segment_of, const F& f) {
  if (begin == end || segment_of(begin) == segment_of(end - 1)) {
    return false;
  }
  for (int64_t from = begin, to = begin; from < end; from = to) {
    while (to < end && segment_of(to) == segment_of(from)) {
      ++to;
    }
    f(from, to);
  }
  return true;
}

}  // namespace sparsering::cpu
