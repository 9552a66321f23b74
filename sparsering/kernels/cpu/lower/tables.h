// Compiles one condition and two lists of tiles to the table of a pass (layouts/compile.py).
//
// For each query tile, ranges of the key tiles of its residue class are halved until a range is
// empty, full, or a single tile. Pairs of tiles that vary and have equal signatures share a bitmap.
#pragma once

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_map>

#include "../machine/memory.h"
#include "../machine/threads.h"
#include "condition.h"

namespace sparsering::cpu::lower {

struct Tiles {
  Tiles(Tensors x, int64_t step) : step(step), count(x[0].numel()) {
    for (int i = 0; i < 3; ++i) {
      SPARSERING_CHECK(x[i].dtype() == kLong && x[i].numel() == count,
                       "sparsering: tiles need int64 vectors of one length");
      held[i] = contiguous(x[i]);
    }
    residue = values_of<int64_t>(held[0]);
    start = values_of<int64_t>(held[1]);
    last = values_of<int64_t>(held[2]);
  }

  int64_t longest_span() const {
    int64_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, last[i] - start[i] + 1);
    return most;
  }
  int64_t positions(int64_t i) const {
    return floor_div(last[i] - start[i], step) + 1;
  }

  int64_t step, count;
  Tensor held[3];
  const int64_t *residue, *start, *last;
};

// Transposes bitmaps of `size` x `size` bits, in squares of 8 x 8 bits.
inline void transpose_bits(const uint8_t* from, int64_t count, int64_t size, uint8_t* to) {
  const int64_t bytes = size / 8;
  for (int64_t i = 0; i < count * size * bytes; i += size * bytes) {
    for (int64_t row = 0; row < bytes; ++row) {
      for (int64_t column = 0; column < bytes; ++column) {
        uint64_t x = 0;
        for (int64_t j = 0; j < 8; ++j) {
          x |= uint64_t{from[i + (8 * row + j) * bytes + column]} << 8 * j;
        }
        // Swaps the bits above and below the diagonal, in squares of 2, then 4, then 8 bits.
        for (const auto& [shift, above] : {std::pair{7, uint64_t{0x00AA00AA00AA00AA}},
                                           {14, uint64_t{0x0000CCCC0000CCCC}},
                                           {28, uint64_t{0x00000000F0F0F0F0}}}) {
          const uint64_t changed = (x ^ x >> shift) & above;
          x ^= changed ^ changed << shift;
        }
        for (int64_t j = 0; j < 8; ++j) {
          to[i + (8 * column + j) * bytes + row] = static_cast<uint8_t>(x >> 8 * j);
        }
      }
    }
  }
}

struct Hash {
  size_t operator()(const std::vector<int64_t>& x) const {
    uint64_t h = x.size();
    for (int64_t v : x) h = (h ^ static_cast<uint64_t>(v)) * 0x9E3779B97F4A7C15u, h ^= h >> 29;
    return h;
  }
};

// The rule that cuts positions into tiles, as `Grid` in layouts/tiles.py.
struct Grid {
  int64_t step, segment, residues, block, offset;

  struct Segment {
    int64_t begin, end, least;
  };

  // Returns the segments of the sequence between two positions, or those of all documents.
  std::vector<Segment> segments(int64_t first, int64_t stop, Ints documents, Ints depths) const {
    std::vector<Segment> found;
    if (documents.empty()) {
      for (int64_t i = floor_div(first, segment); i * segment < stop; ++i) {
        found.push_back({i * segment, (i + 1) * segment, i * segment});
      }
    }
    int64_t begin = 0;  // the document's first position
    for (size_t i = 0; i < documents.size(); ++i) {
      const int64_t depth = depths.empty() ? 0 : depths[i], end = begin + documents[i];
      const int64_t zero = begin - depth;  // where position 0 of the document would be
      for (int64_t at = depth / segment; zero + at * segment < end && documents[i]; ++at) {
        const int64_t low = zero + at * segment;
        found.push_back({low, std::min(low + segment, end), std::max(low, begin)});
      }
      begin = end;
    }
    return found;
  }

  // Returns residue class, start, stop and last position of each tile of the positions in `ranges`;
  // then how many positions all tiles have, and the largest tile.
  std::vector<Tensor> tiles(Ints ranges, Ints documents, Ints depths) const {
    struct Piece {
      int64_t start, least, end;
    };
    std::vector<Piece> pieces;
    const int64_t count = ranges.size() / 2, reach = step * block;
    const int64_t first = count ? ranges[0] : 0, stop = count ? ranges.back() : 0;
    int64_t longest = 0, nearest = 0;
    for (const Segment& x : segments(first, stop, documents, depths)) {
      const int64_t length = std::max<int64_t>(std::min(x.end, stop) - x.begin, 0);
      longest = std::max(longest, length);
      const int64_t skipped = std::max<int64_t>(std::max(x.least, first) - x.begin, 0) / reach;
      for (int64_t at = x.begin + skipped * reach; at < x.begin + length; at += reach) {
        const int64_t least = std::max(at, x.least), end = std::min(x.end, at + reach);
        while (nearest < count && ranges[2 * nearest + 1] <= least) ++nearest;
        for (int64_t i = nearest; i < count && ranges[2 * i] < end; ++i) {
          pieces.push_back({at, std::max(ranges[2 * i], least), std::min(end, ranges[2 * i + 1])});
        }
      }
    }
    const std::vector<int64_t> classes =
        classes_of(first, stop, longest, documents.empty() && count);
    const int64_t size = classes.size() * pieces.size();
    std::vector<Tensor> out;
    int64_t* columns[4];
    for (int64_t*& column : columns) {
      out.push_back(empty({size}, kLong));
      column = out.back().mutable_data_ptr<int64_t>();
    }
    int64_t total = 0, most = 0;
    for (const int64_t residue : classes) {
      for (const Piece& x : pieces) {
        int64_t start = x.start + residue + offset;
        start += (std::max<int64_t>(x.least - start, 0) + step - 1) / step * step;
        const int64_t steps = floor_div(std::max<int64_t>(x.end - 1 - start, -1), step);
        *columns[0]++ = residue;
        *columns[1]++ = start;
        *columns[2]++ = x.end;
        *columns[3]++ = start + steps * step;
        total += steps + 1;
        most = std::max(most, steps + 1);
      }
    }
    out.push_back(empty({2}, kLong));
    int64_t* tokens = out.back().mutable_data_ptr<int64_t>();
    tokens[0] = total, tokens[1] = most;
    return out;
  }

  std::vector<int64_t> classes_of(int64_t first, int64_t stop, int64_t longest,
                                  bool sequence) const {
    std::vector<int64_t> found;
    if (sequence && stop - first < residues) {
      for (int64_t i = first; i < stop; ++i) found.push_back(remainder(i, residues));
      std::sort(found.begin(), found.end());
    } else {
      for (int64_t i = 0; i < std::min(residues, std::max<int64_t>(1, longest)); ++i) {
        found.push_back(i);
      }
    }
    return found;
  }
};

class Compiler {
 public:
  Compiler(const Condition& rule, const Tiles& queries, const Tiles& keys, int64_t block,
           int64_t threads)
      : rule_(rule), queries_(queries), keys_(keys), block_(block), threads_(threads) {
    for (int64_t i = 0; i < keys.count; ++i) {
      if (keys.last[i] < keys.start[i]) continue;
      real_.push_back(static_cast<int32_t>(i));
      before_.push_back(before_.back() + keys.positions(i));
    }
    for (int64_t i = 0; i < queries.count; ++i) rows_.push_back(queries.positions(i));
    // The positions of one residue class may be on several grids, one for each segment.
    for (size_t i = 1; i < real_.size(); ++i) {
      const int64_t a = real_[i - 1], b = real_[i];
      regular_ &=
          keys.residue[a] != keys.residue[b] || (keys.start[b] - keys.start[a]) % keys.step == 0;
    }
    find();
  }

  // Returns the position pairs in visited pairs of tiles; a tile's size is rounded up to 16.
  int64_t pairs_in_tiles() const {
    int64_t total = 0;
    for (const Run& run : runs_) {
      if (run.kind >= 0 && !holds_any(pair(run))) continue;
      int64_t columns = 0;
      for (int32_t i = run.low; i < run.high; ++i) columns += rounded(before_[i + 1] - before_[i]);
      total += rounded(rows_[run.query]) * columns;
    }
    return total;
  }

  // Returns row pointers, key tiles, bitmap indices and bitmaps; then the number of pairs, and the
  // most entries of a row and of a column.
  std::vector<Tensor> table() {
    choose_largest();
    const auto [bitmaps, number] = distinct_bitmaps();
    // index of each run's bitmap, -1 for none, kNothing if no pair of the run attends
    std::vector<int32_t> index(runs_.size(), -1);
    std::vector<int64_t> first(runs_.size() + 1);    // entry of each run
    std::vector<int64_t> change(real_.size() + 1);   // of the number of query tiles that visit
    std::vector<int64_t> whole(bitmaps.size(), -1);  // ones of each bitmap, if they were counted
    std::unordered_map<int64_t, int64_t> counted;    // ones of a bitmap's first rows and columns
    int64_t total = 0, longest = 0, widest = 0, visiting = 0;
    Tensor row_ptr = zeros_of<int32_t>(queries_.count + 1);
    int32_t* to_row = row_ptr.mutable_data_ptr<int32_t>();
    for (size_t i = 0; i < runs_.size(); ++i) {
      const Run& run = runs_[i];
      const int64_t rows = rows_[run.query];
      const int64_t columns = before_[run.high] - before_[run.low];
      int64_t count = rows * columns;
      if (run.kind >= 0) {
        const int64_t own = number[run.kind];
        int64_t* found = &whole[own];
        if (rows < block_ || columns < block_) {
          const int64_t place = (own * (block_ + 1) + rows) * (block_ + 1) + columns;
          found = &counted.try_emplace(place, -1).first->second;
        }
        if (*found < 0) *found = ones(bitmaps[own], rows, columns);
        index[i] = *found == count ? -1 : *found == 0 ? kNothing : static_cast<int32_t>(own);
        count = *found;
      }
      const int64_t entries = index[i] == kNothing ? 0 : run.high - run.low;
      first[i + 1] = first[i] + entries;
      to_row[run.query + 1] += entries;
      if (entries) ++change[run.low], --change[run.high];
      total += count;
    }
    for (int64_t i = 0; i < queries_.count; ++i) {
      longest = std::max<int64_t>(longest, to_row[i + 1]);
      to_row[i + 1] += to_row[i];
    }
    for (const int64_t x : change) widest = std::max(widest, visiting += x);
    const Tensor stored = store_used(bitmaps, index);
    Tensor key = empty({first.back()}, kInt), bitmap = empty({first.back()}, kInt);
    prefer_huge_pages(key), prefer_huge_pages(bitmap);
    int32_t* to_key = key.mutable_data_ptr<int32_t>();
    int32_t* to_bitmap = bitmap.mutable_data_ptr<int32_t>();
    const auto none = [] { return 0; };
    const int64_t runs = runs_.size(), parts = parts_of(first.back(), kManyEntries);
    share_for_now<int>(threads_, parts, none, [&](int, int64_t part) {
      for (int64_t i = part * runs / parts; i < (part + 1) * runs / parts; ++i) {
        const int64_t entries = first[i + 1] - first[i];
        std::copy_n(real_.begin() + runs_[i].low, entries, to_key + first[i]);
        std::fill_n(to_bitmap + first[i], entries, index[i]);
      }
    });
    Tensor sizes = zeros_of<int64_t>(3);
    std::ranges::copy(std::array{total, longest, widest}, sizes.mutable_data_ptr<int64_t>());
    return {row_ptr, key, bitmap, stored, sizes};
  }

 private:
  static int64_t rounded(int64_t n) {
    return (n + 15) / 16 * 16;
  }

  template <typename T>
  static Tensor zeros_of(int64_t size) {
    Tensor out = empty({size}, dtype_of<T>());
    std::fill_n(out.mutable_data_ptr<T>(), size, T{0});
    return out;
  }

  // A query tile with the key tiles real_[low] to real_[high - 1]. Either all their pairs attend,
  // or it is a single key tile whose bitmap has kind `kind`.
  struct Run {
    int32_t query, low, high, kind = -1;
  };

  Pair pair(const Run& run) const {
    return {{queries_.start[run.query], queries_.last[run.query], queries_.step},
            {keys_.start[real_[run.low]], keys_.last[real_[run.high - 1]], keys_.step}};
  }

  std::pair<int64_t, int64_t> size(const Run& run) const {
    return {rows_[run.query], before_[run.low + 1] - before_[run.low]};
  }

  using Signature = std::vector<int64_t>;
  using Numbers = std::unordered_map<Signature, int64_t, Hash>;

  // Lists the pairs of tiles that may attend, for some neighboring query tiles.
  struct Finder {
    Finder(const Compiler& own, const Condition& rule, int64_t part)
        : own(own), rule(rule), part(part), has_contents(rule.has_contents()) {
      if (has_contents) above.resize(own.real_.size());
    }

    void find(int64_t begin, int64_t end) {
      const auto& [real, keys, queries] = std::tie(own.real_, own.keys_, own.queries_);
      const auto before = [&](int64_t i, int64_t residue) { return keys.residue[i] < residue; };
      const auto after = [&](int64_t residue, int64_t i) { return residue < keys.residue[i]; };
      size_t low = 0, high = 0;
      for (int64_t q = begin; q < end; ++q) {
        if (queries.last[q] < queries.start[q]) continue;
        const int64_t residue = queries.residue[q];
        if (low == high || keys.residue[real[low]] != residue) {
          low = std::lower_bound(real.begin(), real.end(), residue, before) - real.begin();
          high = std::upper_bound(real.begin() + low, real.end(), residue, after) - real.begin();
        }
        if (low < high && rule.skips()) {
          walk(q, low, high);
        } else if (low < high) {
          visit(q, low, high);
        }
      }
    }

    // Visits the key tiles that the rule does not skip, one by one.
    void walk(int64_t q, size_t low, size_t high) {
      const auto& [real, keys, queries] = std::tie(own.real_, own.keys_, own.queries_);
      const Side tile{queries.start[q], queries.last[q], queries.step};
      const auto ends_before = [&](int64_t i, int64_t position) { return keys.last[i] < position; };
      while (low < high) {
        const int64_t position = rule.next(tile, keys.start[real[low]]);
        if (keys.last[real[low]] < position) {
          size_t span = 1;  // doubles until it holds the tile with this position
          while (low + span < high && keys.last[real[low + span]] < position) span *= 2;
          const auto begin = real.begin() + low + span / 2, end = real.begin() + high;
          low =
              std::lower_bound(begin, std::min(begin + span / 2 + 1, end), position, ends_before) -
              real.begin();
          continue;
        }
        spans.clear();
        halve(q, low, low + 1);
        ++low;
      }
    }

    // Neighboring key tiles that had one status for a query tile; if they vary, each one does.
    struct Span {
      size_t low, high;
      int status;
    };

    // Finds the runs of a query tile among some key tiles. The spans of the query tile before it
    // are tried first, each apart from its first key tile, since neighbors differ at the ends of
    // spans. Where most spans have changed, the next query tile begins with all key tiles again.
    void visit(int64_t q, size_t low, size_t high) {
      spans.swap(guesses);
      spans.clear();
      if (guesses.empty() || guesses[0].low != low || guesses.back().high != high || !guess) {
        guesses.assign(1, {low, high, kEmpty});
      }
      int64_t tried = 0, changed = 0;
      for (const Span& x : guesses) {
        size_t at = x.low;
        if (at > low) changed += halve(q, at, at + 1) != x.status, ++tried, ++at;
        for (; at < x.high && x.status == kVaries; ++at, ++tried) {
          changed += halve(q, at, at + 1) != kVaries;
        }
        if (at < x.high) changed += halve(q, at, x.high) != x.status, ++tried;
      }
      guess = 2 * changed <= tried + kFewGuesses;
    }

    // Returns the status of the whole range.
    int halve(int64_t q, size_t low, size_t high) {
      const auto number = [](auto i) { return static_cast<int32_t>(i); };
      Run run{number(q), number(low), number(high)};
      Pair x = own.pair(run);
      if (high - low > 1 && !own.regular_) x.k.step = 1;
      const int status = rule.status(x, high - low == 1);
      if (status == kVaries && high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        halve(q, low, middle);
        halve(q, middle, high);
        return status;
      }
      const bool longer = !spans.empty() && spans.back().high == low;
      if (longer && spans.back().status == status) {
        spans.back().high = high;
        if (status == kFull) {
          runs.back().high = run.high;
          return status;
        }
      } else {
        spans.push_back({low, high, status});
      }
      if (status == kVaries) run.kind = number(kind_of(x, low));
      if (status != kEmpty) runs.push_back(run);
      return status;
    }

    // Returns the kind of a pair of tiles that varies; pairs with equal signatures have one kind.
    int64_t kind_of(const Pair& x, size_t column) {
      const int64_t number = part << 40 | static_cast<int64_t>(runs.size());
      signature.clear();
      rule.signature(x, number, signature);
      if (!has_contents) return number_of(x, number);
      // A key mask tells key tiles apart, so the latest pair above is the likeliest equal one.
      Latest& latest = above[column];
      if (latest.size == signature.size() &&
          std::equal(signature.begin(), signature.end(), latest.signature.begin())) {
        return latest.kind;
      }
      latest.size = signature.size() <= latest.signature.size() ? signature.size() : 0;
      std::copy_n(signature.begin(), latest.size, latest.signature.begin());
      return latest.kind = number_of(x, number);
    }

    // Returns the kind of a pair of tiles with the signature in `signature`.
    int64_t number_of(const Pair& x, int64_t number) {
      const auto [found, is_new] = numbers.try_emplace(signature, kinds.size());
      if (is_new && has_contents) {
        signature.clear();
        rule.signature(x, number, signature, true);
        found->second = contents.try_emplace(signature, kinds.size()).first->second;
      }
      if (found->second == std::ssize(kinds)) kinds.push_back(signature);
      return found->second;
    }

    const Compiler& own;
    const Condition& rule;  // used only by this thread
    const int64_t part;
    const bool has_contents;
    std::vector<Run> runs;
    std::vector<Signature> kinds;
    Numbers numbers, contents;  // kinds by signature, without and with contents
    Signature signature;
    std::vector<Span> spans, guesses;  // of this query tile and of the one before
    bool guess = true;
    struct Latest {
      std::array<int64_t, 6> signature;
      size_t size = 0;  // 0 if there is none, or a longer one
      int64_t kind = -1;
    };
    std::vector<Latest> above;  // of each key tile, the latest pair that varies, for a key mask
  };

  // Lists the pairs of tiles that may attend, ordered by query tile, then key tile. Each thread has
  // a condition of its own, because conditions remember what they looked up.
  void find() {
    const int64_t count = queries_.count, parts = parts_of(count, kManyTiles);
    std::vector<std::optional<Finder>> found(parts);
    const auto copied = [&] { return rule_; };
    share_for_now<Condition>(threads_, parts, copied, [&](const Condition& rule, int64_t i) {
      found[i].emplace(*this, rule, i).find(i * count / parts, (i + 1) * count / parts);
    });
    if (parts == 1) {
      runs_ = std::move(found[0]->runs);
      num_kinds_ = found[0]->kinds.size();
      return;
    }
    Numbers kinds;
    for (const auto& part : found) {
      std::vector<int32_t> number;
      for (const Signature& x : part->kinds) {
        const int64_t kind = kinds.try_emplace(x, kinds.size()).first->second;
        number.push_back(static_cast<int32_t>(kind));
      }
      for (Run run : part->runs) {
        if (run.kind >= 0) run.kind = number[run.kind];
        runs_.push_back(run);
      }
    }
    num_kinds_ = kinds.size();
  }

  // Finds the last largest pair of tiles of each kind. If no pair has both the most queries and the
  // most keys, the kind is split by these numbers.
  void choose_largest() {
    std::vector<int64_t> most_q(num_kinds_), most_k(num_kinds_);
    for (const Run& run : runs_) {
      if (run.kind < 0) continue;
      const auto [q, k] = size(run);
      most_q[run.kind] = std::max(most_q[run.kind], q);
      most_k[run.kind] = std::max(most_k[run.kind], k);
    }
    sample_.assign(num_kinds_, -1);
    for (size_t i = 0; i < runs_.size(); ++i) {
      const int64_t kind = runs_[i].kind;
      if (kind >= 0 && size(runs_[i]) == std::pair(most_q[kind], most_k[kind])) sample_[kind] = i;
    }
    std::unordered_map<std::vector<int64_t>, int64_t, Hash> parts;
    const std::vector<int64_t> whole = sample_;
    for (size_t i = 0; i < runs_.size(); ++i) {
      int32_t& kind = runs_[i].kind;
      if (kind < 0 || whole[kind] >= 0) continue;
      const auto [q, k] = size(runs_[i]);
      const auto [found, is_new] = parts.try_emplace({kind, q, k}, sample_.size());
      if (is_new) sample_.push_back(-1);
      kind = static_cast<int32_t>(found->second);
      sample_[kind] = i;
    }
  }

  // Returns the distinct bitmaps of all kinds, and the index of each kind's bitmap.
  std::pair<std::vector<std::string>, std::vector<int64_t>> distinct_bitmaps() const {
    std::vector<std::string> each(sample_.size()), bitmaps;
    const auto copied = [&] { return rule_; };
    const int64_t kinds = each.size(), parts = parts_of(kinds, kManyBitmaps);
    share_for_now<Condition>(threads_, parts, copied, [&](const Condition& rule, int64_t part) {
      for (int64_t i = part * kinds / parts; i < (part + 1) * kinds / parts; ++i) {
        if (sample_[i] >= 0) each[i] = bitmap_of(rule, sample_[i]);  // else a kind that was split
      }
    });
    std::vector<int64_t> number(sample_.size());
    std::unordered_map<std::string, int64_t> known;
    for (size_t i = 0; i < each.size(); ++i) {
      if (sample_[i] < 0) continue;
      const auto [found, is_new] = known.try_emplace(std::move(each[i]), bitmaps.size());
      number[i] = found->second;
      if (is_new) bitmaps.push_back(found->first);
    }
    return {std::move(bitmaps), std::move(number)};
  }

  std::string bitmap_of(const Condition& rule, int64_t i) const {
    std::string bits(block_ * block_ / 8, '\0');
    const Pair x = pair(runs_[i]);
    for (int64_t p = x.q.first, at = 0; p <= x.q.last; p += x.q.step, at += block_ / 8) {
      std::memcpy(bits.data() + at, rule.row(p, x.k).words.data(), block_ / 8);
    }
    return bits;
  }

  // Whether any position pair of two tiles meets the rule.
  bool holds_any(const Pair& x) const {
    for (int64_t p = x.q.first; p <= x.q.last; p += x.q.step) {
      if (rule_.row(p, x.k).count()) return true;
    }
    return false;
  }

  int64_t ones(const std::string& bits, int64_t rows, int64_t columns) const {
    const Bits real = Bits::range(0, columns);
    int64_t count = 0;
    for (int64_t row = 0; row < rows; ++row) {
      Bits line;
      std::memcpy(line.words.data(), bits.data() + row * block_ / 8, block_ / 8);
      line &= real;
      count += line.count();
    }
    return count;
  }

  // Stores the bitmaps in use, ordered by digest, and renumbers indices (rows.py has the digest).
  Tensor store_used(const std::vector<std::string>& bitmaps, std::vector<int32_t>& index) const {
    std::vector<int64_t> order, place(bitmaps.size(), -1);
    for (const int32_t i : index) {
      if (i >= 0 && place[i] < 0) place[i] = 0, order.push_back(i);
    }
    std::vector<int64_t> digest(bitmaps.size());
    for (int64_t i : order) digest[i] = digest_of(bitmaps[i]);
    std::sort(order.begin(), order.end(),
              [&](int64_t a, int64_t b) { return digest[a] < digest[b]; });
    const int64_t size = block_ * block_ / 8;
    Tensor out = empty({static_cast<int64_t>(order.size()), size}, kByte);
    for (size_t i = 0; i < order.size(); ++i) {
      place[order[i]] = i;
      std::memcpy(out.mutable_data_ptr<uint8_t>() + i * size, bitmaps[order[i]].data(), size);
    }
    for (int32_t& i : index) i = i < 0 ? i : static_cast<int32_t>(place[i]);
    return out;
  }

  static int64_t digest_of(const std::string& bits) {
    uint64_t sum = 0;
    for (size_t i = 0; i < bits.size() / 8; ++i) {
      uint64_t word;
      std::memcpy(&word, bits.data() + 8 * i, 8);
      word *= 0xBF58476D1CE4E5B9u;
      word ^= static_cast<uint64_t>(static_cast<int64_t>(word) >> 31);
      sum += word * mixed(i);
    }
    return static_cast<int64_t>(sum);
  }

  static uint64_t mixed(uint64_t number) {
    int64_t state = static_cast<int64_t>(number + 0x9E3779B9u);
    for (const auto [multiplier, shift] :
         {std::pair{uint64_t{0xBF58476D1CE4E5B9u}, 30}, {uint64_t{0x94D049BB133111EBu}, 27}}) {
      state = static_cast<int64_t>(static_cast<uint64_t>(state ^ (state >> shift)) * multiplier);
    }
    state ^= state >> 31;
    return static_cast<uint64_t>(state) & ((uint64_t{1} << 62) - 1);
  }

  // Returns into how many parts some work is cut, so that threads end at about the same time.
  int64_t parts_of(int64_t work, int64_t least) const {
    return threads_ > 1 ? std::clamp<int64_t>(work / least, 1, 8 * threads_) : 1;
  }

  static constexpr int32_t kNothing = -2;
  static constexpr int64_t kFewGuesses = 4;  // a query tile may change so many, however few it has
  // For less work than this, starting other threads would take longer than the work.
  static constexpr int64_t kManyTiles = 256, kManyBitmaps = 128, kManyEntries = 1 << 18;

  const Condition& rule_;
  const Tiles &queries_, &keys_;
  const int64_t block_, threads_;
  bool regular_ = true;
  std::vector<int64_t> before_{0};  // positions in all earlier tiles of `real_`
  std::vector<int32_t> real_;       // key tiles with positions
  std::vector<int64_t> rows_;       // positions of each query tile
  std::vector<Run> runs_;
  size_t num_kinds_ = 0;
  std::vector<int64_t> sample_;  // for each kind, the run whose bitmap it has; -1 if it was split
};

}  // namespace sparsering::cpu::lower
