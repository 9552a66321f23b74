// Counts of a layout's tables, from which a plan computes the size of a call's buffers.

#pragma once

#include <algorithm>
#include <cstdint>

namespace sparsering::cpu {

// Counts of one pass, averaged over heads, which planning/counts.py fills in: entries; key tiles
// that a group of heads visits (`seen`); key tiles whose length is no multiple of 16 (`ragged`);
// and the pieces into which query tiles (`pieces`) and key tiles (`pieces_by_key`) with many
// entries are cut.
struct Counts {
  double entries, seen, ragged, pieces, pieces_by_key;

  // Returns how many of `tiles` key tiles are copied; if `in_place`, only ragged tiles are.
  double copied(double tiles, bool in_place) const {
    return in_place ? std::min(ragged, tiles) : tiles;
  }
};

}  // namespace sparsering::cpu
