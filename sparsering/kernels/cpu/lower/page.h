// Bitmaps of one tile of queries and tiles of keys in any order, for `page_over` in
// layouts/gathered_keys.py.
//
// The keys of a tile are cut into pieces. The positions of a piece ascend and lie on a grid of at
// most 256 positions. If only some pairs of the queries and this grid attend, each query's row is
// evaluated.
#pragma once

#include <cstring>
#include <numeric>

#include "condition.h"

namespace sparsering::cpu::lower {

class Page {
 public:
  Page(int64_t queries, int64_t block) : block_(block), tile_(queries) {}

  // Adds a row of keys (positions, -1 for none) and a tile of queries from position `first` on.
  void add_row(const Condition& rule, int64_t first, Ints keys) {
    const Queries queries{rule, first, rule.fits(tile_.size(), int64_t{1} << 40)};
    auto& [tiles, bitmaps] = rows_.emplace_back();
    for (size_t at = 0; at < keys.size(); at += block_) {
      find(queries, keys.subspan(at, std::min<size_t>(block_, keys.size() - at)));
      Bits any, all = Bits::range(0, block_);
      for (const Bits& row : tile_) any |= row, all &= row;
      if (any == Bits{}) continue;
      tiles.push_back(at / block_);
      bitmaps.push_back(all == Bits::range(0, block_) ? -1 : add_bitmap());
    }
  }

  // Returns row pointers, key tiles, bitmap indices and bitmaps.
  std::vector<Tensor> table() const {
    const int64_t rows = rows_.size(), bytes = block_ * block_ / 8;
    int64_t longest = 0;
    for (const auto& [tiles, _] : rows_) longest = std::max<int64_t>(longest, tiles.size());
    std::vector<Tensor> out{zeros({rows, 2}, kInt), zeros({rows, longest}, kInt),
                            zeros({rows, longest}, kInt),
                            empty({std::ssize(bitmaps_), bytes}, kByte)};
    for (int64_t row = 0; row < rows; ++row) {
      const auto& [tiles, bitmaps] = rows_[row];
      out[0].mutable_data_ptr<int32_t>()[2 * row + 1] = tiles.size();
      std::ranges::copy(tiles, out[1].mutable_data_ptr<int32_t>() + row * longest);
      std::ranges::copy(bitmaps, out[2].mutable_data_ptr<int32_t>() + row * longest);
    }
    uint8_t* to = out[3].mutable_data_ptr<uint8_t>();
    for (const auto& bitmap : bitmaps_) to = std::ranges::copy(bitmap, to).out;
    return out;
  }

 private:
  struct Queries {
    const Condition& rule;
    int64_t first;
    bool fits_all;  // `Condition::fits` for any keys
  };

  // Stores the bitmap of `tile_`, with keys along the bits; returns its index.
  int32_t add_bitmap() {
    const size_t bytes = block_ / 8;
    uint8_t* to = bitmaps_.emplace_back(block_ * bytes).data();
    for (const Bits& row : tile_) std::memcpy(to, row.words.data(), bytes), to += bytes;
    return bitmaps_.size() - 1;
  }

  // Finds the keys of a tile that each query sees.
  void find(const Queries& queries, Ints keys) {
    slots_.clear();
    for (size_t i = 0; i < keys.size(); ++i) {
      if (keys[i] >= 0) slots_.push_back(i);
    }
    std::ranges::fill(tile_, Bits{});
    for (size_t begin = 0; begin < slots_.size();) begin = add_piece(queries, keys, begin);
  }

  // Adds the longest piece that begins at an index of `slots_`; returns the index of the next.
  size_t add_piece(const Queries& queries, Ints keys, size_t begin) {
    const int64_t first = keys[slots_[begin]], count = std::ssize(tile_);
    Side grid{first, first, 1};
    Bits every;
    size_t end = begin;
    do {
      every.set(slots_[end++]);
      if (end == slots_.size()) break;
      const int64_t key = keys[slots_[end]], gap = key - grid.last;
      int64_t step = end == begin + 1 ? gap : grid.step;
      if (gap > 0 && gap % step != 0) step = std::gcd(step, gap);
      if (gap <= 0 || key - first >= 256 * step) break;
      if (!queries.fits_all && !queries.rule.fits(count, key - first + 1)) break;
      grid = {first, key, step};
    } while (true);
    places_.resize(slots_.size());
    for (size_t i = begin; i < end; ++i) places_[i] = (keys[slots_[i]] - first) / grid.step;
    const Pair all{{queries.first, queries.first + count - 1, 1}, grid};
    const int status = queries.rule.status(all);
    deciding_.clear();
    if (status == kVaries) queries.rule.deciding(all, deciding_);
    Bits seen, latest;  // of the last query that sees a key of the grid: its keys, and its row
    for (int64_t i = 0; i < count && status != kEmpty; ++i) {
      if (status == kVaries) {
        Bits row = Bits::all_or_none(true);
        for (const Condition* part : deciding_) row &= part->row_past(queries.first + i, grid);
        if (row == Bits{}) continue;
        if (!(row == latest)) seen = at_slots(row, begin, end);
        latest = row;
      }
      tile_[i] |= status == kFull ? every : seen;
    }
    return end;
  }

  // Moves the bits of a piece's grid to the slots of its keys.
  Bits at_slots(const Bits& row, size_t begin, size_t end) const {
    Bits seen;
    for (size_t i = begin; i < end; ++i) {
      const int64_t place = places_[i];
      seen.words[slots_[i] / 64] |= (row.words[place / 64] >> place % 64 & 1) << slots_[i] % 64;
    }
    return seen;
  }

  const int64_t block_;
  std::vector<int64_t> slots_;   // indices in the tile of its keys that are not -1
  std::vector<int64_t> places_;  // places of these keys on the grid of their piece
  std::vector<Bits> tile_;       // the keys that each query sees
  std::vector<const Condition*> deciding_;
  std::vector<std::pair<std::vector<int32_t>, std::vector<int32_t>>> rows_;  // tiles, bitmaps
  std::vector<std::vector<uint8_t>> bitmaps_;
};

}  // namespace sparsering::cpu::lower
