// The operators that build tables of layouts.
#pragma once

#include <cmath>

#include "page.h"
#include "tables.h"

namespace sparsering::cpu::lower {

// Cuts ranges of positions into tiles: returns residue class, start, stop and last position of
// each.
inline std::vector<Tensor> tiles(int64_t step, int64_t segment, int64_t residues, int64_t block,
                                 int64_t offset, Ints ranges, Ints documents, Ints depths) {
  SPARSERING_CHECK(step > 0 && segment > 0 && residues > 0 && block > 0 && ranges.size() % 2 == 0 &&
                       (depths.empty() || depths.size() == documents.size()),
                   "sparsering cpu: malformed grid");
  return Grid{step, segment, residues, block, offset}.tiles(ranges, documents, depths);
}

// Compiles the table of a pass: `native_table` in layouts/lower.py lists the results. With `count`,
// returns only the number of pairs in its tiles. Returns nothing if a pair of tiles may have too
// many block pairs. At most `threads` threads work.
inline std::vector<Tensor> table(Ints program, Tensors constants, Tensors queries, Tensors keys,
                                 int64_t step, int64_t block, bool count, int64_t threads) {
  Reader in{program, constants};
  const Condition rule(in);
  SPARSERING_CHECK(queries.size() == 3 && keys.size() == 3 && step > 0 && block > 0 &&
                       block % 8 == 0 && block <= 256,
                   "sparsering cpu: malformed tiles");
  const Tiles rows(queries, step), columns(keys, step);
  if (!rule.fits(rows.longest_span(), columns.longest_span())) {
    return {};
  }
  Compiler compiler(rule, rows, columns, block, threads);
  if (count) {
    Tensor pairs = empty({1}, kLong);
    *pairs.mutable_data_ptr<int64_t>() = compiler.pairs_in_tiles();
    return {pairs};
  }
  return compiler.table();
}

// Compiles the table of a tile of queries and rows of keys (positions, -1 for none), as
// `native_page` in layouts/lower.py says. Row i has rule i modulo the number of rules. Returns
// nothing if a rule needs too many block pairs.
inline std::vector<Tensor> page(Ints programs, Tensors constants, const Tensor& first,
                                const Tensor& keys, int64_t queries, int64_t block) {
  SPARSERING_CHECK(first.dtype() == kLong && keys.dtype() == kLong && keys.dim() == 2 &&
                       first.numel() == keys.size(0) && queries > 0 && queries <= block &&
                       block % 8 == 0 && block <= 256,
                   "sparsering cpu: malformed page");
  Reader in{programs, constants};
  std::vector<Condition> rules;
  while (in.number < programs.size()) {
    if (!rules.emplace_back(in).fits(queries, 1)) {
      return {};
    }
  }
  const Tensor starts = contiguous(first), positions = contiguous(keys);
  const int64_t rows = keys.size(0), width = keys.size(1);
  SPARSERING_CHECK(rows == 0 || (!rules.empty() && rows % std::ssize(rules) == 0),
                   "sparsering cpu: the rules of a page need equally many rows");
  Page page(queries, block);
  for (int64_t row = 0; row < rows; ++row) {
    page.add_row(rules[row % rules.size()], values_of<int64_t>(starts)[row],
                 Ints(values_of<int64_t>(positions) + row * width, width));
  }
  return page.table();
}

// Transposes bitmaps, as `transposed` in layouts/bitmaps.py.
inline Tensor transposed(const Tensor& bitmaps) {
  const Tensor rows = contiguous(bitmaps);
  const int64_t bytes = rows.dim() == 2 ? rows.size(1) : 0;
  const auto size = static_cast<int64_t>(std::lround(std::sqrt(8. * bytes)));
  SPARSERING_CHECK(rows.dtype() == kByte && bytes > 0 && size % 8 == 0 && size * size == 8 * bytes,
                   "sparsering cpu: malformed bitmaps");
  Tensor out = empty({rows.size(0), bytes}, kByte);
  transpose_bits(values_of<uint8_t>(rows), rows.size(0), size, out.mutable_data_ptr<uint8_t>());
  return out;
}

}  // namespace sparsering::cpu::lower
