// Compiles one condition and two lists of tiles to the table of a pass (layouts/compile.py).
//
// For each query tile, the key tiles of its residue class are halved until a range of them is
// empty, full, or a single tile. Varying pairs of tiles with one signature share one bitmap.
#pragma once

#include <cstring>
#include <string>
#include <unordered_map>

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
        // swaps bits above and below the diagonal of squares of 2, 4 and 8 bits
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

// Rule that cuts positions into tiles: `Grid` in layouts/tiles.py.
struct Grid {
  int64_t step, segment, residues, block, offset;

  struct Segment {
    int64_t begin, end, least;
  };

  // Segments of the sequence between two positions, or of all documents.
  std::vector<Segment> segments(int64_t first, int64_t stop, Ints documents, Ints depths) const {
    std::vector<Segment> found;
    if (documents.empty()) {
      for (int64_t i = floor_div(first, segment); i * segment < stop; ++i) {
        found.push_back({i * segment, (i + 1) * segment, i * segment});
      }
    }
    int64_t begin = 0;  // of the document
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

  // Residue class, start, stop and last position of each tile of the positions in `ranges`; then
  // how many positions all tiles have, and one at most.
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
  Compiler(const Condition& rule, const Tiles& queries, const Tiles& keys, int64_t block)
      : rule_(rule), queries_(queries), keys_(keys), block_(block) {
    for (int64_t i = 0; i < keys.count; ++i) {
      if (keys.last[i] < keys.start[i]) continue;
      real_.push_back(i);
      before_.push_back(before_.back() + keys.positions(i));
    }
    // The positions of one class may lie on several grids, one for each segment.
    for (size_t i = 1; i < real_.size(); ++i) {
      const int64_t a = real_[i - 1], b = real_[i];
      regular_ &=
          keys.residue[a] != keys.residue[b] || (keys.start[b] - keys.start[a]) % keys.step == 0;
    }
    find();
  }

  // Position pairs in visited pairs of tiles; a tile counts as a multiple of 16 positions.
  int64_t pairs_in_tiles() const {
    int64_t total = 0;
    for (const Run& run : runs_) {
      if (run.kind >= 0 && !holds_any(pair(run))) continue;
      int64_t columns = 0;
      for (size_t i = run.low; i < run.high; ++i) columns += rounded(keys_.positions(real_[i]));
      total += rounded(queries_.positions(run.query)) * columns;
    }
    return total;
  }

  // Row pointers, key tiles, bitmap indices, bitmaps; then pairs, longest row, longest column.
  std::vector<Tensor> table() {
    choose_largest();
    std::vector<int64_t> number(sample_.size());
    std::vector<std::string> bitmaps;
    std::unordered_map<std::string, int64_t> known;
    for (size_t i = 0; i < sample_.size(); ++i) {
      if (sample_[i] < 0) continue;  // a kind that was split
      std::string bits = bitmap_of(sample_[i]);
      number[i] = known.try_emplace(bits, bitmaps.size()).first->second;
      if (number[i] == static_cast<int64_t>(bitmaps.size())) bitmaps.push_back(std::move(bits));
    }
    size_t most = 0;
    for (const Run& run : runs_) most += run.high - run.low;
    std::vector<int32_t> row_ptr(queries_.count + 1), key, bitmap;
    key.reserve(most), bitmap.reserve(most);
    std::vector<int64_t> change(real_.size() + 1);  // of the number of query tiles that visit
    std::unordered_map<int64_t, int64_t> counted;
    int64_t total = 0, longest = 0;
    for (const Run& run : runs_) {
      const int64_t rows = queries_.positions(run.query);
      int64_t count = rows * (before_[run.high] - before_[run.low]);
      int32_t index = -1;
      if (run.kind >= 0) {
        index = number[run.kind];
        const int64_t columns = before_[run.high] - before_[run.low];
        const int64_t place = (index * (block_ + 1) + rows) * (block_ + 1) + columns;
        const auto [found, is_new] = counted.try_emplace(place, 0);
        if (is_new) found->second = ones(bitmaps[index], rows, columns);
        if (found->second == count) index = -1;
        if ((count = found->second) == 0) continue;
      }
      total += count;
      row_ptr[run.query + 1] += run.high - run.low;
      ++change[run.low], --change[run.high];
      key.insert(key.end(), real_.begin() + run.low, real_.begin() + run.high);
      bitmap.insert(bitmap.end(), run.high - run.low, index);
    }
    for (int64_t i = 0; i < queries_.count; ++i) {
      longest = std::max<int64_t>(longest, row_ptr[i + 1]);
      row_ptr[i + 1] += row_ptr[i];
    }
    int64_t widest = 0, visiting = 0;
    for (const int64_t x : change) widest = std::max(widest, visiting += x);
    const Tensor stored = store_used(bitmaps, bitmap);
    return {tensor_of(row_ptr), tensor_of(key), tensor_of(bitmap), stored,
            tensor_of(std::vector<int64_t>{total, longest, widest})};
  }

 private:
  static int64_t rounded(int64_t n) {
    return (n + 15) / 16 * 16;
  }

  template <typename T>
  static Tensor tensor_of(const std::vector<T>& x) {
    Tensor out = empty({static_cast<int64_t>(x.size())}, dtype_of<T>());
    std::copy(x.begin(), x.end(), out.mutable_data_ptr<T>());
    return out;
  }

  // A query tile and the key tiles real_[low] to real_[high - 1], of which all positions attend, or
  // one, of kind `kind`.
  struct Run {
    int64_t query;
    size_t low, high;
    int64_t kind = -1;
  };

  Pair pair(const Run& run) const {
    return {{queries_.start[run.query], queries_.last[run.query], queries_.step},
            {keys_.start[real_[run.low]], keys_.last[real_[run.high - 1]], keys_.step}};
  }

  std::pair<int64_t, int64_t> size(const Run& run) const {
    return {queries_.positions(run.query), keys_.positions(real_[run.low])};
  }

  // Lists the pairs of tiles that may attend, ordered by query tile, then key tile.
  void find() {
    const auto before = [this](int64_t i, int64_t residue) { return keys_.residue[i] < residue; };
    const auto after = [this](int64_t residue, int64_t i) { return residue < keys_.residue[i]; };
    size_t low = 0, high = 0;
    for (int64_t q = 0; q < queries_.count; ++q) {
      if (queries_.last[q] < queries_.start[q]) continue;
      const int64_t residue = queries_.residue[q];
      if (low == high || keys_.residue[real_[low]] != residue) {
        low = std::lower_bound(real_.begin(), real_.end(), residue, before) - real_.begin();
        high = std::upper_bound(real_.begin() + low, real_.end(), residue, after) - real_.begin();
      }
      if (low < high) halve(q, low, high);
    }
  }

  void halve(int64_t q, size_t low, size_t high) {
    Run run{q, low, high};
    Pair x = pair(run);
    if (high - low > 1 && !regular_) x.k.step = 1;
    const int status = rule_.status(x, high - low == 1);
    if (status == kEmpty) return;
    if (status == kVaries && high - low > 1) {
      const size_t middle = low + (high - low) / 2;
      halve(q, low, middle);
      halve(q, middle, high);
      return;
    }
    if (status == kVaries) run.kind = kind_of(x);
    runs_.push_back(run);
  }

  // Number of the kind of a varying pair of tiles: those with equal signatures.
  int64_t kind_of(const Pair& x) {
    signature_.clear();
    rule_.signature(x, runs_.size(), signature_);
    return kinds_.try_emplace(signature_, kinds_.size()).first->second;
  }

  // Finds for each kind the last pair of tiles that is its largest. A kind without one that has
  // both the most queries and the most keys is split by these.
  void choose_largest() {
    std::vector<int64_t> most_q(kinds_.size()), most_k(kinds_.size());
    for (const Run& run : runs_) {
      if (run.kind < 0) continue;
      const auto [q, k] = size(run);
      most_q[run.kind] = std::max(most_q[run.kind], q);
      most_k[run.kind] = std::max(most_k[run.kind], k);
    }
    sample_.assign(kinds_.size(), -1);
    for (size_t i = 0; i < runs_.size(); ++i) {
      const int64_t kind = runs_[i].kind;
      if (kind >= 0 && size(runs_[i]) == std::pair(most_q[kind], most_k[kind])) sample_[kind] = i;
    }
    std::unordered_map<std::vector<int64_t>, int64_t, Hash> parts;
    const std::vector<int64_t> whole = sample_;
    for (size_t i = 0; i < runs_.size(); ++i) {
      int64_t& kind = runs_[i].kind;
      if (kind < 0 || whole[kind] >= 0) continue;
      const auto [q, k] = size(runs_[i]);
      const auto [found, is_new] = parts.try_emplace({kind, q, k}, sample_.size());
      if (is_new) sample_.push_back(-1);
      kind = found->second;
      sample_[kind] = i;
    }
  }

  std::string bitmap_of(int64_t i) const {
    std::string bits(block_ * block_ / 8, '\0');
    const Pair x = pair(runs_[i]);
    for (int64_t p = x.q.first, at = 0; p <= x.q.last; p += x.q.step, at += block_ / 8) {
      std::memcpy(bits.data() + at, rule_.row(p, x.k).words.data(), block_ / 8);
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

  // Stores the bitmaps in use, ordered by digest, and renumbers the table (rows.py has the digest).
  Tensor store_used(const std::vector<std::string>& bitmaps, std::vector<int32_t>& table) const {
    std::vector<int64_t> order, place(bitmaps.size(), -1);
    for (int32_t i : table) {
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
    for (int32_t& i : table) i = i < 0 ? -1 : static_cast<int32_t>(place[i]);
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

  const Condition& rule_;
  const Tiles &queries_, &keys_;
  const int64_t block_;
  bool regular_ = true;
  std::vector<int64_t> before_{0};  // positions in all earlier tiles of `real_`
  std::vector<int64_t> real_;       // key tiles with positions
  std::vector<Run> runs_;
  std::vector<int64_t> signature_;
  std::unordered_map<std::vector<int64_t>, int64_t, Hash> kinds_;
  std::vector<int64_t> sample_;  // of each kind, the run whose bitmap it has; -1 if it was split
};

}  // namespace sparsering::cpu::lower
