// Counts of a layout's tables, by which a plan sizes the buffers of a call.

#pragma once

#include <algorithm>
#include <cstdint>

namespace sparsering::cpu {

// Counts of a pass of a plan, means over heads, as in planning/work.py: entries, key tiles that a
// group visits, key tiles whose length is no multiple of 16, and pieces of cut rows and columns.
struct Counts {
  double entries, seen, ragged, pieces, pieces_by_key;

  // Key tiles of which a copy is packed, of `tiles`.
  double copied(double tiles, bool in_place) const {
    return in_place ? std::min(ragged, tiles) : tiles;
  }
};

}  // namespace sparsering::cpu
