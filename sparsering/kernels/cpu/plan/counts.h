// Counts of a layout's tables, by which a plan sizes the buffers of a call.

#pragma once

#include <algorithm>
#include <cstdint>

namespace sparsering::cpu {

// Per pass, averaged over heads (planning/counts.py fills it): entries; key tiles that a group of
// heads visits (`seen`); key tiles whose length is no multiple of 16 (`ragged`); `pieces`, the
// parts of query tiles and of key tiles that visit far more blocks than others.
struct Counts {
  double entries, seen, ragged, pieces, pieces_by_key;

  // Returns how many of `tiles` key tiles are copied; `in_place`: whole tiles need no copy.
  double copied(double tiles, bool in_place) const {
    return in_place ? std::min(ragged, tiles) : tiles;
  }
};

}  // namespace sparsering::cpu
