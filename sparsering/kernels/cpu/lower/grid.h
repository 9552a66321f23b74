// Windows over the tokens of a grid, in the order of tiles: `Neighbourhood` and `GridTiles` of
// patterns/neighbourhood.py and patterns/grid.py. This file computes the same pairs, without a
// tensor of positions.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "positions.h"

namespace sparsering::cpu::lower {

constexpr int64_t kMostGridDims = 6;
constexpr int64_t kNoPosition = std::numeric_limits<int64_t>::max();

// One dim: its window, as `GridDim`, and the size of its tiles.
struct GridDim {
  int64_t size, window, dilation, stride, causal, tile;
  int64_t rest = 1;  // tokens in one coordinate of this dim

  int64_t members(int64_t residue) const {
    return floor_div(size - 1 - residue, dilation) + 1;
  }

  // First and last number that a query sees, in a class of `members` coordinates.
  std::pair<int64_t, int64_t> window_of(int64_t number, int64_t members) const {
    const int64_t middle = causal ? stride - 1 : stride / 2;
    const int64_t leader = std::min(number / stride * stride + middle, members - 1);
    if (causal) return {std::max<int64_t>(leader - window + 1, 0), number};
    const int64_t first = std::min(std::max<int64_t>(leader - window / 2, 0), members - window);
    return {first, first + window - 1};
  }

  // Bounds of the keys that some query coordinate from `first` to `last` sees.
  std::pair<int64_t, int64_t> reach(int64_t first, int64_t last) const {
    const int64_t low = window_of(first / dilation, members(dilation - 1)).first * dilation;
    if (causal) return {low, last};
    const int64_t high = (window_of(last / dilation, members(0)).second + 1) * dilation - 1;
    return {low, std::min(high, size - 1)};
  }

  // Whether every query coordinate from `first` to `last` sees every key from `low` to `high`.
  bool all(int64_t first, int64_t last, int64_t low, int64_t high) const {
    if (dilation > 1 && (first < last || low < high || (low - first) % dilation)) return false;
    const int64_t count = members(first % dilation);
    return low / dilation >= window_of(last / dilation, count).first &&
           high / dilation <= window_of(first / dilation, count).second;
  }

  // Whether no border moves the windows of queries from `first` to `last`.
  bool repeats(int64_t first, int64_t last) const {
    const int64_t few = members(dilation - 1);
    const int64_t low = first / dilation / stride * stride;
    const int64_t high = last / dilation / stride * stride;
    if (causal) return high + stride <= few;
    const int64_t middle = stride / 2, half = window / 2;
    return low + middle >= half && high + middle < few && high + middle - half + window <= few;
  }
};

class GridWindows {
 public:
  GridWindows() = default;

  template <typename Reader>
  explicit GridWindows(Reader& in) : count_(in.next()) {
    SPARSERING_CHECK(count_ > 0 && count_ <= kMostGridDims, "sparsering: malformed grid");
    for (int64_t d = 0; d < count_; ++d) {
      GridDim& x = dims_[d];
      for (int64_t* to : {&x.size, &x.window, &x.dilation, &x.stride, &x.causal, &x.tile}) {
        *to = in.next();
      }
      SPARSERING_CHECK(std::min({x.size, x.window, x.dilation, x.stride, x.tile}) > 0,
                       "sparsering: malformed grid");
    }
    for (int64_t d = count_; d-- > 0;) {
      dims_[d].rest = tokens_;
      tokens_ *= dims_[d].size;
    }
  }

  int status(const Pair& x) const {
    if (x.q.last < 0 || x.q.first >= tokens_) return kEmpty;
    see(x.q);
    look(x.k, keys_);
    const Box& keys = keys_.box;
    bool full = x.q.first >= 0 && x.q.last < tokens_ && x.k.last < tokens_;
    for (int64_t d = 0; d < count_; ++d) {
      if (keys.high[d] < reach_.low[d] || keys.low[d] > reach_.high[d]) return kEmpty;
      full = full &&
             dims_[d].all(queries_.box.low[d], queries_.box.high[d], keys.low[d], keys.high[d]);
    }
    return full ? kFull : kVaries;
  }

  // Returns the first position >= `position` of a key in the box around the windows of `q`.
  int64_t next(const Side& q, int64_t position) const {
    if (q.last < 0 || q.first >= tokens_ || position >= tokens_) return kNoPosition;
    see(q);
    const Digits at = digits(std::max<int64_t>(position, 0));
    // The coordinates, dim by dim the tile and then the place in it, are digits of a position. The
    // first digit out of its bounds is raised to the least, with those behind it; if it is too
    // large, the last digit before it that can grow is raised by one.
    Point corner = at.corner, inside = at.inside;
    const auto least_corner = [&](int64_t d) {
      return reach_.low[d] / dims_[d].tile * dims_[d].tile;
    };
    const auto least_inside = [&](int64_t d) {
      return std::max<int64_t>(reach_.low[d] - corner[d], 0);
    };
    const auto most_inside = [&](int64_t d) {
      return std::min(reach_.high[d] - corner[d], dims_[d].tile - 1);
    };
    int64_t digit = 0, raised = -1;  // digits 0 to count_ - 1 are tiles
    for (; digit < 2 * count_; ++digit) {
      const int64_t d = digit % count_;
      const bool of_tile = digit < count_;
      const int64_t value = of_tile ? corner[d] : inside[d];
      const int64_t low = of_tile ? least_corner(d) : least_inside(d);
      const int64_t high = of_tile ? reach_.high[d] : most_inside(d);
      if (value < low) {
        (of_tile ? corner : inside)[d] = low;
        break;
      }
      if (value > high) {
        if (raised < 0) return kNoPosition;
        digit = raised;
        const int64_t e = digit % count_;
        digit < count_ ? corner[e] += dims_[e].tile : ++inside[e];
        break;
      }
      const int64_t unit = of_tile ? dims_[d].tile : 1;
      if (value + unit <= high) raised = digit;
    }
    for (++digit; digit < 2 * count_; ++digit) {
      const int64_t d = digit % count_;
      (digit < count_ ? corner[d] = least_corner(d) : inside[d] = least_inside(d));
    }
    return position_of(corner, inside);
  }

  // Appends integers; tiles that vary and have equal ones have equal pairs.
  void signature(const Pair& x, int64_t number, std::vector<int64_t>& out) const {
    const bool inside = x.q.first >= 0 && x.q.last < tokens_ && x.k.last < tokens_;
    out.push_back(inside ? 0 : 1 + number);
    if (!inside) return;
    see(x.q);
    look(x.k, keys_);
    const Digits &q = queries_.first, &k = keys_.first;
    form(queries_, number, out);
    form(keys_, number, out);
    for (int64_t d = 0; d < count_; ++d) {
      const int64_t place = q.corner[d] + q.inside[d], period = dims_[d].dilation * dims_[d].stride;
      const bool repeats = dims_[d].repeats(queries_.box.low[d], queries_.box.high[d]);
      out.push_back(repeats ? place % period - period : place);
      out.push_back(k.corner[d] + k.inside[d] - place);
    }
  }

  // The keys of a tile that the query at position p sees; bits past the last key may have any
  // value.
  Bits row(int64_t p, const Side& k) const {
    Bits bits;
    if (p < 0 || p >= tokens_) return bits;
    const Digits query = digits(p);
    Point residue, first, last;
    for (int64_t d = 0; d < count_; ++d) {
      const int64_t place = query.corner[d] + query.inside[d], n = dims_[d].dilation;
      residue[d] = place % n;
      const auto seen = dims_[d].window_of(place / n, dims_[d].members(place % n));
      first[d] = seen.first * n + residue[d], last[d] = seen.second * n + residue[d];
    }
    const auto holds = [&](int64_t d, int64_t key) {
      return key >= first[d] && key <= last[d] && (key - residue[d]) % dims_[d].dilation == 0;
    };
    const int64_t end = std::min(k.last, tokens_ - 1), fastest = count_ - 1;
    for (int64_t at = k.first; at <= end;) {  // a tile of the grid in each turn
      Digits key = digits(at);
      bool in_tile = true;
      while (in_tile && at <= end) {  // a line of the tile
        const int64_t begin = key.corner[fastest] + key.inside[fastest];
        const int64_t line = std::min(key.height[fastest] - key.inside[fastest], end - at + 1);
        const int64_t steps = (line - 1) / k.step + 1, bit = (at - k.first) / k.step;
        bool seen = true;
        for (int64_t d = 0; d < fastest && seen; ++d) {
          seen = holds(d, key.corner[d] + key.inside[d]);
        }
        if (seen && k.step == 1 && dims_[fastest].dilation == 1) {
          const int64_t low = std::max<int64_t>(first[fastest] - begin, 0);
          const int64_t high = std::min(last[fastest] - begin + 1, line);
          if (low < high) bits |= Bits::range(bit + low, bit + high);
        } else if (seen) {
          for (int64_t i = 0; i < steps; ++i) {
            if (holds(fastest, begin + i * k.step)) bits.set(bit + i);
          }
        }
        at += steps * k.step;
        in_tile = k.step == 1 && next_line(key);
      }
    }
    return bits;
  }

 private:
  using Point = std::array<int64_t, kMostGridDims>;
  struct Box {
    Point low, high;
  };
  // The first coordinate of a position's tile, its place in the tile, and the tile's size.
  struct Digits {
    Point corner, inside, height;
  };

  // Moves to the next line of a tile; false at its end.
  bool next_line(Digits& x) const {
    x.inside[count_ - 1] = 0;
    for (int64_t d = count_ - 1; d-- > 0;) {
      if (++x.inside[d] < x.height[d]) return true;
      x.inside[d] = 0;
    }
    return false;
  }

  // 32 bits divide several times faster than 64.
  static int64_t quotient(int64_t a, int64_t b) {
    if ((a | b) >> 32) return a / b;
    return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  }

  Digits digits(int64_t position) const {
    Digits x;
    int64_t held = 1;
    for (int64_t d = 0; d < count_; ++d) {
      const GridDim& dim = dims_[d];
      if (dim.tile >= dim.size) {
        x.corner[d] = 0, x.height[d] = dim.size;
      } else {
        const int64_t slab = held * dim.tile * dim.rest, number = quotient(position, slab);
        position -= number * slab;
        x.corner[d] = number * dim.tile;
        x.height[d] = std::min(dim.size - x.corner[d], dim.tile);
      }
      held *= x.height[d];
    }
    for (int64_t d = count_; d-- > 1;) {
      const int64_t whole = quotient(position, x.height[d]);
      x.inside[d] = position - whole * x.height[d];
      position = whole;
    }
    x.inside[0] = position;
    return x;
  }

  int64_t position_of(const Point& corner, const Point& inside) const {
    int64_t held = 1, begin = 0, within = 0;
    for (int64_t d = 0; d < count_; ++d) {
      begin += held * corner[d] * dims_[d].rest;
      const int64_t height = std::min(dims_[d].size - corner[d], dims_[d].tile);
      within = within * height + inside[d];
      held *= height;
    }
    return begin + within;
  }

  // A tile of queries or keys: its first and last position, and the box around all.
  struct Seen {
    Side tile{0, -1, 0};
    Digits first, last;
    Box box;
  };

  // Finds the box around a tile, unless it is the latest one.
  void look(const Side& tile, Seen& x) const {
    if (tile == x.tile) return;
    x.tile = tile;
    x.first = digits(std::max<int64_t>(tile.first, 0));
    x.last = digits(std::min(tile.last, tokens_ - 1));
    // Digits before the first one that differs are fixed; those after it take every value.
    bool equal = true;
    for (int64_t d = 0; d < count_; ++d) {
      x.box.low[d] = equal ? x.first.corner[d] : 0;
      x.box.high[d] =
          equal ? x.last.corner[d] : (dims_[d].size - 1) / dims_[d].tile * dims_[d].tile;
      equal = equal && x.first.corner[d] == x.last.corner[d];
    }
    for (int64_t d = 0; d < count_; ++d) {
      const int64_t most = std::min(dims_[d].size - x.box.high[d], dims_[d].tile) - 1;
      if (equal) x.box.low[d] += x.first.inside[d];
      x.box.high[d] += equal ? x.last.inside[d] : most;
      equal = equal && x.first.inside[d] == x.last.inside[d];
    }
  }

  // Finds the box around a tile of queries, and the one around their windows.
  void see(const Side& tile) const {
    if (tile == queries_.tile) return;
    look(tile, queries_);
    const Box& box = queries_.box;
    for (int64_t d = 0; d < count_; ++d) {
      std::tie(reach_.low[d], reach_.high[d]) = dims_[d].reach(box.low[d], box.high[d]);
    }
  }

  // Appends integers; tiles with equal ones are translations of one another.
  void form(const Seen& seen, int64_t number, std::vector<int64_t>& out) const {
    const auto& [x, first, last, _] = seen;
    out.push_back((x.last - x.first) / x.step + 1);
    out.push_back(x.step);
    if (all_equal(first.corner, last.corner)) {
      int64_t d = 0;  // the first dim in which places differ
      if (x.step == 1) {
        while (d < count_ - 1 && first.inside[d] == last.inside[d]) ++d;
      }
      bool whole = x.step == 1;  // a box: from the first to the last place in the later dims
      for (int64_t e = d + 1; e < count_; ++e) {
        whole = whole && first.inside[e] == 0 && last.inside[e] == first.height[e] - 1;
      }
      out.push_back(whole ? -1 - d : d);
      for (int64_t e = d; e < count_; ++e) {
        if (!whole) out.push_back(first.inside[e]);
        if (!whole || e > d) out.push_back(first.height[e]);
      }
      return;
    }
    out.push_back(kMostGridDims + (x.step > 1 ? 1 + number : 0));
    for (int64_t at = x.first; x.step == 1 && at <= x.last;) {  // the tiles of the grid, in turn
      const Digits tile = digits(at);
      int64_t held = 1, before = 0;
      for (int64_t d = 0; d < count_; ++d) {
        out.push_back(tile.corner[d] - first.corner[d]);
        out.push_back(tile.height[d]);
        if (at == x.first) out.push_back(tile.inside[d]);
        held *= tile.height[d], before = before * tile.height[d] + tile.inside[d];
      }
      at += held - before;
    }
  }

  bool all_equal(const Point& a, const Point& b) const {
    return std::equal(a.begin(), a.begin() + count_, b.begin());
  }

  int64_t count_ = 0, tokens_ = 1;
  std::array<GridDim, kMostGridDims> dims_;
  mutable Seen queries_, keys_;  // the latest tiles
  mutable Box reach_;            // around the windows of `queries_`
};

}  // namespace sparsering::cpu::lower
