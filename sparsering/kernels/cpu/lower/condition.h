// Conditions on a query and a key position, read from the program that layouts/lower.py writes.
//
// `Condition::status` decides for a pair of tiles whether no, some or all position pairs meet the
// condition. `signature` writes integers: pairs of tiles that vary and have equal integers have
// equal bitmaps. `row` finds the keys of a tile that one query sees. The first two compute exactly
// what the classes of layouts/leaves.py, joints.py and paths.py compute for tensors, so a change
// must be made in both places; tests compare the tables of the two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "blocks.h"
#include "grid.h"
#include "positions.h"

namespace sparsering::cpu::lower {

enum Kind : int64_t {
  kLinear,
  kInKeys,
  kCongruent,
  kOnGrid,
  kSameSegment,
  kSameDocument,
  kAllOf,
  kAnyOf,
  kNegated,
  kPerDocument,
  kOnPath,
  kInBlocks,
  kBlockRows,     // drawn by `RandomBlocks`
  kListedBlocks,  // becomes kBlockRows when it is read
  kNeighbourhood
};

class Condition {
 public:
  explicit Condition(Reader& in) : kind_(in.next()) {
    SPARSERING_CHECK(kind_ >= kLinear && kind_ <= kNeighbourhood, "sparsering: unknown condition");
    static constexpr int kNumbers[] = {3, 0, 1, 4, 1, 0, 0, 0, 0, 0, 0, 2, 5, 3, 0};
    for (int i = 0; i < kNumbers[kind_]; ++i) c_[i] = in.next();
    static constexpr int kTensors[] = {0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 4, 0, 0, 1, 0};
    for (int i = 0; i < kTensors[kind_]; ++i) held_.push_back(in.next_tensor());
    for (const Tensor& x : held_) {
      SPARSERING_CHECK((x.dtype() == kBool) == (kind_ == kInKeys),
                       "sparsering: a key mask is bool, and all else in a program int64");
      if (kind_ != kInKeys) data_.push_back(values_of<int64_t>(x));
    }
    if (kind_ == kInKeys) {
      const auto* valid = static_cast<const uint8_t*>(held_[0].const_data_ptr());
      allowed_ = std::make_shared<const AllowedKeys>(valid, held_[0].numel());
    }
    if (kind_ == kSameDocument || kind_ == kPerDocument || kind_ == kOnPath) index_ranges();
    if (kind_ == kOnPath) index_nodes();
    const bool joint = kind_ == kAllOf || kind_ == kAnyOf;
    if (kind_ == kBlockRows) rows_ = BlockRows(c_[2], c_[3], c_[4]);
    if (kind_ == kListedBlocks) {
      rows_ = BlockRows(Ints(data_[0], held_[0].numel()), c_[2]), kind_ = kBlockRows;
    }
    if (kind_ == kNeighbourhood) grid_ = GridWindows(in);
    const bool in_blocks = kind_ == kInBlocks || kind_ == kBlockRows;
    SPARSERING_CHECK(!in_blocks || std::min(c_[0], c_[1]) > 0, "sparsering: empty blocks");
    const int64_t parts = joint ? in.next() : kind_ >= kNegated && kind_ <= kInBlocks;
    for (int64_t i = 0; i < parts; ++i) {
      Condition part(in);
      if (kind_ == kAllOf && part.kind_ == kAllOf) {  // a joint of joints would ask each one twice
        std::ranges::move(part.parts_, std::back_inserter(parts_));
      } else {
        parts_.push_back(std::move(part));
      }
    }
  }

  // Set `exact` for a single pair of tiles. Without it, as for ranges of tiles, kVaries may be
  // returned even if none or all position pairs meet the condition.
  int status(const Pair& x, bool exact = true) const {
    switch (kind_) {
      case kLinear: {
        const auto [a, b, c] = std::tuple(c_[0], c_[1], c_[2]);
        const int64_t q0 = a * x.q.first, q1 = a * x.q.last, k0 = b * x.k.first, k1 = b * x.k.last;
        const int64_t least = (q0 < q1 ? q0 : q1) + (k0 < k1 ? k0 : k1);
        return (least >= c) + (q0 + q1 + k0 + k1 - least >= c);
      }
      case kInKeys: {
        const int64_t count = allowed_->before(x.k.last + 1) - allowed_->before(x.k.first);
        return (count > 0) + (count == x.k.last - x.k.first + 1);
      }
      case kCongruent:
        if (x.q.stride() % c_[0] || x.k.stride() % c_[0]) return kVaries;
        return remainder(x.q.first - x.k.first, c_[0]) == 0 ? kFull : kEmpty;
      case kOnGrid: {
        const auto [first, inside] = place(x);
        const bool fixed = stride(x) % c_[2] == 0 && (inside || c_[1] % c_[2] == 0);
        return !fixed ? kVaries : first % c_[2] == c_[3] ? kFull : kEmpty;
      }
      case kSameSegment: {
        const int64_t n = c_[0];
        return overlap(floor_div(x.q.first, n), floor_div(x.q.last, n), floor_div(x.k.first, n),
                       floor_div(x.k.last, n));
      }
      case kSameDocument:
        return same_range(x);
      case kAllOf: {
        int status = kFull;
        for (const Condition& part : parts_) {
          if ((status = std::min(status, part.status(x, exact))) == kEmpty) break;
        }
        return status;
      }
      case kAnyOf: {
        int status = kEmpty;
        for (const Condition& part : parts_) {
          if ((status = std::max(status, part.status(x, exact))) == kFull) break;
        }
        return status;
      }
      case kNegated:
        return kFull - parts_[0].status(x, exact);
      case kPerDocument: {
        const int64_t number = common_range(x);
        return number < 0 ? same_range(x) : parts_[0].status(x.shifted(-starts()[number]), exact);
      }
      case kInBlocks:
      case kBlockRows:
        return status_of_blocks(x.q.blocks(c_[0]), x.k.blocks(c_[1]), exact);
      case kNeighbourhood:
        return grid_.status(x);
      default: {
        if (!latest_query_ || !(latest_query_->tokens == x.q)) latest_query_.emplace(*this, x.q);
        const Path& query = latest_query_->path;
        if (!query.touches) return kEmpty;
        const Path key(*this, x.k);
        if (!key.touches) return kEmpty;
        const auto [first, last] = latest_query_->enter;
        const auto [least, most] = key.bounds(enter_);
        const auto [soonest, latest] = key.bounds(leave_);
        if (least > last || latest <= first || !sees_any(query, key)) return kEmpty;
        const bool every = most <= first && last < soonest && query.inside && key.inside;
        const bool several = query.several || key.several;
        const int inner = parts_[0].status(depths(query, key, several), exact);
        return std::min<int>(every ? kFull : kVaries, inner);
      }
    }
  }

  // True if pairs of tiles that span so many positions have few block pairs (layouts/joints.py has
  // the same limit). It is false for blocks in a tree, where a tile may span more depths than it
  // has tokens.
  bool fits(int64_t queries, int64_t keys, bool in_tree = false) const {
    if (kind_ == kInBlocks || kind_ == kBlockRows) {
      return !in_tree && ((queries - 1) / c_[0] + 2) * ((keys - 1) / c_[1] + 2) <= kMostBlocks;
    }
    return std::ranges::all_of(parts_, [&](const Condition& part) {
      return part.fits(queries, keys, in_tree || kind_ == kOnPath);
    });
  }

  // True if `next` tells which keys a tile of queries does not see.
  bool skips() const {
    const auto is_narrow = [](const Condition& x) { return x.skips() || x.sides() == 3; };
    if (kind_ == kAllOf) return std::ranges::any_of(parts_, &Condition::skips);
    if (kind_ == kAnyOf) {
      return std::ranges::any_of(parts_, &Condition::skips) &&
             std::ranges::all_of(parts_, is_narrow);
    }
    return kind_ == kNeighbourhood || (kind_ == kBlockRows && rows_.is_drawn());
  }

  // A lower bound of the first key from `position` on that some query of a tile sees.
  int64_t next(const Side& q, int64_t position) const {
    if (kind_ == kNeighbourhood) return grid_.next(q, position);
    if (kind_ == kLinear) return next_of_linear(q, position);
    if (kind_ == kInBlocks || (kind_ == kBlockRows && rows_.is_drawn())) {
      const Side rows = q.blocks(c_[0]);
      const int64_t block = floor_div(position, c_[1]);
      int64_t found = kNoPosition;
      if (kind_ == kInBlocks) {
        found = parts_[0].next(rows, block);
      } else {
        for (int64_t i = rows.first; i <= rows.last; ++i) {
          found = std::min(found, rows_.next(i, block, kNoPosition));
        }
      }
      return found == kNoPosition ? found : std::max(position, found * c_[1]);
    }
    if (kind_ != kAllOf && kind_ != kAnyOf) return position;
    int64_t found = kind_ == kAllOf ? position : kNoPosition;
    for (const Condition& part : parts_) {
      const int64_t own = part.next(q, position);
      found = kind_ == kAllOf ? std::max(found, own) : std::min(found, own);
    }
    return found;
  }

  // True if `signature` may find more equal pairs of tiles with `contents` than without.
  bool has_contents() const {
    return kind_ == kInKeys || std::ranges::any_of(parts_, &Condition::has_contents);
  }

  // Appends the parts that decide which position pairs of `x` meet the condition; `x` varies.
  void deciding(const Pair& x, std::vector<const Condition*>& out) const {
    if (kind_ != kAllOf) out.push_back(this);
    for (const Condition& part : parts_) {
      if (kind_ == kAllOf && part.status(x) == kVaries) part.deciding(x, out);
    }
  }

  // The keys of a tile, at most 256, that the query at position p sees; bits past them are 0.
  Bits row(int64_t p, const Side& k) const {
    Bits bits = row_past(p, k);
    return bits &= Bits::range(0, (k.last - k.first) / k.step + 1);
  }

  // Appends the integers. `number` is unique to this pair of tiles, for conditions that cannot
  // compare pairs. With `contents`, which takes longer, tiles of a key mask with equal bits get
  // equal integers, too.
  void signature(const Pair& x, int64_t number, std::vector<int64_t>& out,
                 bool contents = false) const {
    switch (kind_) {
      case kLinear:
        out.push_back(c_[0] * x.q.first + c_[1] * x.k.first);
        break;
      case kInKeys:
        if (contents) {
          const Bits bits = row(x.q.first, x.k);
          for (const uint64_t word : bits.words) out.push_back(static_cast<int64_t>(word));
        } else {
          out.push_back(x.k.first);
        }
        break;
      case kCongruent:
        out.push_back(remainder(x.q.first - x.k.first, c_[0]));
        break;
      case kOnGrid: {
        const auto [first, inside] = place(x);
        out.insert(out.end(), {inside ? first % c_[2] : first, inside});
        break;
      }
      case kSameSegment: {
        const int64_t n = c_[0];
        out.insert(out.end(), {remainder(x.q.first, n), remainder(x.k.first, n),
                               floor_div(x.q.first, n) - floor_div(x.k.first, n)});
        break;
      }
      case kSameDocument: {  // where in both tiles their one common document begins and ends
        const int64_t low = std::max(range_of(x.q.first), range_of(x.k.first));
        const int64_t high = std::min(range_of(x.q.last), range_of(x.k.last));
        if (high > low) {
          out.push_back(1 + number);
          break;
        }
        out.push_back(0);
        const int64_t begin = starts()[std::max<int64_t>(low, 0)];
        const int64_t end = starts()[std::min(low + 1, ranges())];
        for (const Side& tile : {x.q, x.k}) {
          for (int64_t edge : {begin, std::min(end, tile.last + tile.step)}) {
            out.push_back((std::max<int64_t>(edge - tile.first, 0) + tile.step - 1) / tile.step);
          }
        }
        break;
      }
      case kAllOf:
      case kAnyOf:
        for (const Condition& part : parts_) {
          const bool varies = part.status(x) == kVaries;
          out.push_back(varies);
          if (varies) part.signature(x, number, out, contents);
        }
        break;
      case kNegated:
        parts_[0].signature(x, number, out, contents);
        break;
      case kPerDocument: {
        const int64_t common = common_range(x);
        out.push_back(common < 0 ? 1 + number : 0);
        if (common >= 0) {
          parts_[0].signature(x.shifted(-starts()[common]), number, out, contents);
        }
        break;
      }
      case kInBlocks:
      case kBlockRows: {  // where blocks begin in both tiles, and which pairs of them attend
        const Side q = x.q.blocks(c_[0]), k = x.k.blocks(c_[1]);
        out.insert(out.end(), {remainder(x.q.first, c_[0]), remainder(x.k.first, c_[1])});
        for (int64_t i = q.first; i <= q.last; ++i) {
          for (int64_t j = k.first; j <= k.last; ++j) {
            if (blocks_hold(i, j)) out.push_back((i - q.first) * kMostBlocks + j - k.first);
          }
        }
        out.push_back(-1);
        break;
      }
      case kNeighbourhood:
        grid_.signature(x, number, out);
        break;
      default: {
        const Path query(*this, x.q), key(*this, x.k);
        const bool alone = query.several || key.several || !query.inside || !key.inside;
        out.push_back(alone ? 1 + number : 0);
        if (!alone) parts_[0].signature(depths(query, key, false), number, out, contents);
      }
    }
  }

  // Returns `row`, but bits past the last key may have any value.
  Bits row_past(int64_t p, const Side& k) const {
    switch (kind_) {
      case kLinear: {
        const int64_t rest = c_[2] - c_[0] * p;  // b * k >= rest
        if (c_[1] == 0) return Bits::all_or_none(rest <= 0);
        if (c_[1] > 0) return keys_from(k, -floor_div(-rest, c_[1]), k.last + 1);
        return keys_from(k, k.first, floor_div(-rest, -c_[1]) + 1);
      }
      case kInKeys: {
        if (k.step == 1) return allowed_->from(k.first);
        return same_keys(k, [&](int64_t x) { return allowed_->allows(x); });
      }
      case kCongruent:
        if (k.step % c_[0] == 0) return Bits::all_or_none((p - k.first) % c_[0] == 0);
        return keys_where(k, [&](int64_t x) { return (p - x) % c_[0] == 0; });
      case kOnGrid: {
        const auto holds = [&](int64_t x) { return remainder(x, c_[1]) % c_[2] == c_[3]; };
        return c_[0] ? Bits::all_or_none(holds(p)) : same_keys(k, holds);
      }
      case kSameSegment: {
        const int64_t begin = p - remainder(p, c_[0]);
        return keys_from(k, begin, begin + c_[0]);
      }
      case kSameDocument:
      case kPerDocument: {
        const int64_t number = range_of(p);
        if (number < 0 || number >= ranges()) return {};
        const int64_t begin = starts()[number];
        Bits bits = keys_from(k, begin, starts()[number + 1]);
        if (kind_ == kPerDocument) bits &= parts_[0].row_past(p - begin, k.shifted(-begin));
        return bits;
      }
      case kAllOf: {
        Bits bits = Bits::all_or_none(true);
        for (const Condition& part : parts_) bits &= part.row_past(p, k);
        return bits;
      }
      case kAnyOf: {
        Bits bits;
        for (const Condition& part : parts_) bits |= part.row_past(p, k);
        return bits;
      }
      case kNegated:
        return ~parts_[0].row_past(p, k);
      case kInBlocks:
      case kBlockRows: {
        Bits bits;
        const Side blocks = k.blocks(c_[1]);
        for (int64_t j = blocks.first; j <= blocks.last; ++j) {
          if (!blocks_hold(floor_div(p, c_[0]), j)) continue;
          bits |= keys_from(k, j * c_[1], (j + 1) * c_[1]);
        }
        return bits;
      }
      case kNeighbourhood:
        return grid_.row(p, k);
      default: {
        Bits bits;
        const int64_t own = range_of(p);
        if (own < 0 || own >= ranges()) return bits;
        const int64_t* depth = data_[1];
        const int64_t first = std::max<int64_t>(range_of(k.first), 0);
        const int64_t last = std::min(range_of(k.last), ranges() - 1);
        for (int64_t node = nearest(own, last); node >= first; node = parent_[node]) {
          const int64_t shift = depth[node] - starts()[node];
          Bits part = keys_from(k, starts()[node], starts()[node + 1]);
          part &= parts_[0].row_past(p + depth[own] - starts()[own], k.shifted(shift));
          bits |= part;
        }
        return bits;
      }
    }
  }

 private:
  // Returns 1 if the first keys that a query sees move with it, 2 if the last ones do, 3 for both.
  int sides() const {
    if (kind_ == kLinear) return c_[0] && c_[1] ? (c_[1] > 0 ? 1 : 2) : 0;
    if (kind_ == kInBlocks) return parts_[0].sides();
    int found = kind_ == kAnyOf && !parts_.empty() ? 3 : 0;
    for (const Condition& part : parts_) {
      if (kind_ == kAnyOf) found &= part.sides();
      if (kind_ == kAllOf) found |= part.sides();
    }
    return found;
  }

  // `next` for a q + b k >= c.
  int64_t next_of_linear(const Side& q, int64_t position) const {
    const int64_t least = c_[2] - std::max(c_[0] * q.first, c_[0] * q.last);  // of b k
    if (c_[1] > 0) return std::max(position, -floor_div(-least, c_[1]));
    return c_[1] * position >= least ? position : kNoPosition;
  }

  bool blocks_hold(int64_t query, int64_t key) const {
    return kind_ == kBlockRows ? rows_.count(query, {key, key, 1}) > 0
                               : parts_[0].status({{query, query, 1}, {key, key, 1}}) == kFull;
  }

  // Returns the status of ranges of blocks. If `exact`, it looks up each block pair, unless there
  // are too many.
  int status_of_blocks(const Side& q, const Side& k, bool exact) const {
    const int64_t width = k.last - k.first + 1, most = (q.last - q.first + 1) * width;
    int64_t seen = 0;
    if (kind_ == kBlockRows) {
      for (int64_t i = q.first; i <= q.last; ++i) seen += rows_.count(i, k);
      return (seen > 0) + (seen == most);
    }
    const int status = parts_[0].status({q, k});
    if (status != kVaries || most > kMostBlocks || !exact) return status;
    for (int64_t i = 0; i < most; ++i) {
      seen += blocks_hold(q.first + i / width, k.first + i % width);
      if (seen > 0 && seen <= i) return kVaries;
    }
    return seen ? kFull : kEmpty;
  }

  // Returns `keys_where` for a rule that does not depend on the query, and keeps the latest tile's
  // bits.
  template <typename Holds>
  Bits same_keys(const Side& k, Holds holds) const {
    if (!(k == latest_tile_)) latest_bits_ = keys_where(k, holds);
    latest_tile_ = k;
    return latest_bits_;
  }

  // The tokens of a tile in a tree: its nodes `first` to `last`, and bounds of depths.
  struct Path {
    Path(const Condition& tree, const Side& tokens) : step(tokens.step) {
      const int64_t most = tree.starts()[tree.ranges()] - 1;
      inside = tokens.first >= 0 && tokens.last <= most;
      touches = tokens.last >= 0 && tokens.first <= most;
      const int64_t begin = std::clamp<int64_t>(tokens.first, 0, most);
      const int64_t end = std::clamp<int64_t>(tokens.last, 0, most);
      first = tree.range_of(begin), last = tree.range_of(end);
      const int64_t* depth = tree.data_[1];
      low = begin + depth[first] - tree.starts()[first];
      high = end + depth[last] - tree.starts()[last];
      several = last > first;
      if (several) {
        low = std::min(low, -tree.depth_.of(first + 1, last));
        high = std::max(high, tree.end_.of(first, last - 1) - 1);
      }
    }

    // Returns the minimum and maximum over the tile's nodes; of[0] holds the negated numbers.
    std::pair<int64_t, int64_t> bounds(const RangeMax (&of)[2]) const {
      return {-of[0].of(first, last), of[1].of(first, last)};
    }

    int64_t first, last, low, high, step;
    bool inside, touches, several;
  };

  // The path of the latest tile of queries, whose keys are visited one after another.
  struct PathOfQueries {
    PathOfQueries(const Condition& tree, const Side& tokens)
        : tokens(tokens), path(tree, tokens), enter(path.bounds(tree.enter_)) {}

    Side tokens;
    Path path;
    std::pair<int64_t, int64_t> enter;
  };

  // Returns the nearest of a node and its ancestors whose index is at most `most`, or -1.
  int64_t nearest(int64_t node, int64_t most) const {
    while (node > most) node = jump_[node] > most ? jump_[node] : parent_[node];
    return node;
  }

  // True if some key's node is the node of a query or one of its ancestors. Bounds of depth-first
  // numbers cannot decide that if nodes are not in depth-first order.
  bool sees_any(const Path& query, const Path& key) const {
    for (int64_t node = query.first; node <= query.last; ++node) {
      if (nearest(node, key.last) >= key.first) return true;
    }
    return false;
  }

  static Pair depths(const Path& query, const Path& key, bool loose) {
    return {{query.low, query.high, loose ? 1 : query.step},
            {key.low, key.high, loose ? 1 : key.step}};
  }

  const Side& side(const Pair& x) const {
    return c_[0] ? x.q : x.k;
  }
  int64_t stride(const Pair& x) const {
    return side(x).stride();
  }

  // Returns where a tile's first position lies in its segment, and whether the tile ends in it.
  std::pair<int64_t, bool> place(const Pair& x) const {
    const int64_t first = remainder(side(x).first, c_[1]);
    return {first, first + side(x).last - side(x).first < c_[1]};
  }

  const int64_t* starts() const {
    return data_[0];
  }
  int64_t ranges() const {
    return ranges_;
  }

  // Returns the index of the document or node that has a position; -1 before the first one,
  // `ranges()` past the last.
  int64_t range_of(int64_t position) const {
    if (position < starts()[0]) return -1;
    if (position >= starts()[ranges()]) return ranges();
    const int64_t block = (position - starts()[0]) >> shift_;
    const int64_t *least = starts() + number_of_[block], *most = starts() + number_of_[block + 1];
    return std::upper_bound(least + 1, most + 1, position) - starts() - 1;
  }

  int64_t common_range(const Pair& x) const {
    const int64_t number = range_of(std::min(x.q.first, x.k.first));
    const bool one = number == range_of(std::max(x.q.last, x.k.last));
    return one && number < ranges() ? number : -1;
  }

  int same_range(const Pair& x) const {
    const int64_t first = range_of(x.q.first);
    const int status = overlap(first, range_of(x.q.last), range_of(x.k.first), range_of(x.k.last));
    return status == kFull && (first < 0 || first >= ranges()) ? kVaries : status;
  }

  void index_ranges() {
    ranges_ = held_[0].numel() - 1;
    const int64_t first = starts()[0], stop = starts()[ranges()];
    int32_t number = 0;
    while (stop - first >> shift_ > kMostIndexed) ++shift_;
    for (int64_t at = first; at < stop; at += int64_t{1} << shift_) {
      while (number + 1 < ranges() && starts()[number + 1] <= at) ++number;
      number_of_.push_back(number);
    }
    number_of_.push_back(static_cast<int32_t>(std::max<int64_t>(ranges() - 1, 0)));
  }

  void index_nodes() {
    const int64_t* depth = data_[1];
    depth_ = RangeMax(ranges(), [&](int64_t i) { return -depth[i]; });
    end_ = RangeMax(ranges(), [&](int64_t i) { return depth[i] + starts()[i + 1] - starts()[i]; });
    for (int sign : {-1, 1}) {
      const int64_t* enter = data_[2];
      const int64_t* leave = data_[3];
      enter_[sign > 0] = RangeMax(ranges(), [&](int64_t i) { return sign * enter[i]; });
      leave_[sign > 0] = RangeMax(ranges(), [&](int64_t i) { return sign * leave[i]; });
    }
    index_ancestors();
  }

  // Finds each node's parent, which comes before it, and an ancestor to jump to, so that any
  // ancestor is O(log nodes) parents and jumps away.
  void index_ancestors() {
    const int64_t nodes = ranges(), *enter = data_[2], *leave = data_[3];
    std::vector<int64_t> in_order(nodes), level(nodes);
    for (int64_t i = 0; i < nodes; ++i) {
      SPARSERING_CHECK(enter[i] >= 0 && enter[i] < nodes, "sparsering: malformed tree");
      in_order[enter[i]] = i;
    }
    parent_.assign(nodes, -1), jump_.assign(nodes, -1);
    const auto level_of = [&](int64_t i) { return i < 0 ? -1 : level[i]; };
    const auto jump_of = [&](int64_t i) { return i < 0 ? -1 : jump_[i]; };
    std::vector<int64_t> path;  // from the root to the latest node
    for (const int64_t i : in_order) {
      while (!path.empty() && leave[path.back()] <= enter[i]) path.pop_back();
      const int64_t up = path.empty() ? -1 : path.back();
      const int64_t far = jump_of(up), farther = jump_of(far);
      const bool equal = level_of(up) - level_of(far) == level_of(far) - level_of(farther);
      parent_[i] = up, jump_[i] = equal ? farther : up, level[i] = level_of(up) + 1;
      path.push_back(i);
    }
  }

  static constexpr int64_t kMostIndexed = 1 << 20;  // most numbers in `number_of_`

  int64_t kind_;
  int64_t c_[5] = {};
  BlockRows rows_;
  GridWindows grid_;
  std::vector<Tensor> held_;
  std::vector<const int64_t*> data_;  // data of the tensors in `held_`
  std::vector<Condition> parts_;
  mutable Side latest_tile_{0, -1, 1};  // the latest tile of `same_keys`, and its bits
  mutable Bits latest_bits_;
  mutable std::optional<PathOfQueries> latest_query_;  // of `status`
  std::shared_ptr<const AllowedKeys> allowed_;         // only of a key mask
  int64_t ranges_ = 0;                                 // documents or nodes
  int shift_ = 7;                       // 1 << shift_ positions share a number in `number_of_`
  std::vector<int32_t> number_of_;      // document or node of the first of them, then the last one
  RangeMax depth_, end_;                // maxima over nodes of -depth, and of the depth of the end
  std::vector<int64_t> parent_, jump_;  // each node's parent and a farther ancestor; -1 for none
  RangeMax enter_[2], leave_[2];        // maxima over nodes of the negated number, and the number
};

}  // namespace sparsering::cpu::lower
