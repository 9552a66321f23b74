// A walk is a loop over key tiles, for passes whose query tiles are short. It gathers all rows that
// visit a key tile into tiles that are large enough for a matrix product. So rows are multiplied
// only with key tiles that they visit, and short query tiles need no padding.
//
// A row is a query of a head. A chunk is some query tiles; their rows are sorted by token, then by
// head, because heads that share a table are gathered together. Chunks depend only on the layout.
// The entries (visited pairs of tiles) of a chunk are sorted by key tile, so that each row visits
// its key tiles in ascending order on any thread.
//
// Source: FSA (arXiv 2508.18224) and FlashMoBA (2511.11571) loop over key blocks of selections.

#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "../pack.h"

namespace sparsering::cpu {

constexpr int64_t kGathered = 64;  // rows per gathered tile, unless one token has more heads
// A chunk's size is chosen so that on average `kMuch` rows visit a key tile. But a chunk has at
// most `kNearRows` rows, which fit in a core's cache, unless fewer than `kEnough` rows would then
// visit a key tile.
constexpr int64_t kMuch = 256, kEnough = 64, kLeastRows = 1024, kNearRows = 4096;

// Query tiles `begin` to `end` of some heads that share a table.
struct Chunk {
  int64_t batch, head, heads, begin, end;
};

// A loop over the key tiles of a pass: the sizes of its gathered tiles, and its chunks.
struct Walk {
  Walk(const Problem& problem, const Pass& pass_) : x(problem), pass(pass_) {
    heads = std::gcd(x.group, x.Hq / pass.tables);  // heads of a group that share a table
    tokens = std::max<int64_t>(1, kGathered / heads);
    rows = round_up(tokens * heads, 32);
  }

  // Lists the chunks of some kv heads; `first_kv` is an index among those of all batch entries.
  std::vector<Chunk> chunks(int64_t first_kv, int64_t count) const {
    std::vector<Chunk> result;
    for (int64_t kv = first_kv; kv < first_kv + count; ++kv) {
      for (int64_t i = 0; i < x.group; i += heads) {
        const int64_t b = kv / x.Hkv, head = kv % x.Hkv * x.group + i;
        const int64_t most = chunk_tokens(pass.row_ptr(pass.table(b, head, x.Hq))[pass.rows]);
        for (int64_t begin = 0, end = 0; begin < pass.rows; begin = end) {
          for (int64_t size = 0; end < pass.rows; ++end) {
            size += pass.query_tile(axis(head), end).count;
            if (size > most && end > begin) {
              break;
            }
          }
          result.push_back({b, head, heads, begin, end});
        }
      }
    }
    return result;
  }

  int64_t axis(int64_t head) const {
    return head * pass.axes / x.Hq;
  }

  const Problem& x;
  const Pass& pass;
  int64_t heads, tokens, rows;  // sizes of a gathered tile: heads, most tokens, padded rows

  // Returns a kv head's number of chunks in a plan's pass; `most_rows` bounds the rows of a chunk.
  int64_t num_chunks(double entries) const {
    const int64_t most = most_rows(entries) / heads;
    return (pass.rows * pass.longest + most - 1) / most * (x.group / heads);
  }
  int64_t most_rows(double entries) const {
    const int64_t all = std::max<int64_t>(1, pass.rows * pass.longest);
    return heads * std::min(all, std::max(chunk_tokens(entries), pass.longest));
  }

 private:
  int64_t chunk_tokens(double entries) const {
    const double most = static_cast<double>(pass.columns) * pass.rows / std::max(1., entries);
    const auto rows_for = [&](int64_t visits) { return static_cast<int64_t>(visits * most); };
    const int64_t wanted = std::max(std::min(rows_for(kMuch), kNearRows), rows_for(kEnough));
    return std::max<int64_t>(1, std::max(wanted, kLeastRows) / heads);
  }
};

// A gathered tile. For each of its tokens, it has `token`, the index in the chunk; `entry`, the
// index of its entry in the table; and `place`, the index in its query tile (the bitmap row).
struct Gathered {
  explicit Gathered(const Walk& walk)
      : token(walk.tokens), entry(walk.tokens), place(walk.tokens) {}
  int64_t size = 0;  // number of tokens
  std::vector<int64_t> token, entry, place;

  bool lies_together() const {
    return token[size - 1] - token[0] == size - 1;
  }
};

// The entries of a chunk, sorted by key tile.
class Visits {
 public:
  void sort(const Walk& walk, const Chunk& chunk) {
    const Pass& pass = walk.pass;
    const int64_t table = pass.table(chunk.batch, chunk.head, walk.x.Hq);
    const int32_t *row_ptr = pass.row_ptr(table), *keys = pass.keys(table);
    first_token_.assign(1, 0);
    begin_.assign(pass.columns + 1, 0);
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      const int64_t count = pass.query_tile(walk.axis(chunk.head), row).count;
      first_token_.push_back(first_token_.back() + count);
    }
    for (int64_t e = row_ptr[chunk.begin]; e < row_ptr[chunk.end]; ++e) {
      ++begin_[keys[e] + 1];
    }
    for (int64_t column = 0; column < pass.columns; ++column) {
      begin_[column + 1] += begin_[column];
    }
    next_.assign(begin_.begin(), begin_.end() - 1);
    of_tile_.resize(begin_.back());
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      for (int64_t e = row_ptr[row]; e < row_ptr[row + 1]; ++e) {
        of_tile_[next_[keys[e]]++] = {e, row - chunk.begin};
      }
    }
  }

  int64_t tokens() const {
    return first_token_.back();
  }
  // Index in the chunk of the first token of query tile `i`.
  int64_t first_token(int64_t i) const {
    return first_token_[i];
  }
  bool any(int64_t column) const {
    return begin_[column] < begin_[column + 1];
  }

  // Gathers the tokens that visit a key tile into `tile`. It calls f() each time the tile is full,
  // and once for the remaining tokens.
  template <typename F>
  void for_tiles(int64_t column, Gathered& tile, const F& f) const {
    const int64_t most = tile.token.size();
    tile.size = 0;
    for (int64_t i = begin_[column]; i < begin_[column + 1]; ++i) {
      const auto [entry, row] = of_tile_[i];
      const int64_t first = first_token_[row], count = first_token_[row + 1] - first;
      for (int64_t place = 0; place < count; ++place) {
        tile.token[tile.size] = first + place;
        tile.entry[tile.size] = entry;
        tile.place[tile.size] = place;
        if (++tile.size == most) {
          f();
          tile.size = 0;
        }
      }
    }
    if (tile.size) {
      f();
      tile.size = 0;
    }
  }

 private:
  struct Visit {
    int64_t entry, row;
  };
  std::vector<int64_t> begin_, next_, first_token_;
  std::vector<Visit> of_tile_;
};

// Copies the rows of a chunk to `to`, sorted by token, then by head, with `width` values each.
template <typename T>
void read_chunk(const Walk& walk, const Chunk& chunk, const Visits& visits, const Source& from,
                int64_t width, T* to) {
  const auto read = [&](auto value) {
    using S = decltype(value);
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      const Tile tile = walk.pass.query_tile(walk.axis(chunk.head), row);
      T* of_tile = to + visits.first_token(row - chunk.begin) * chunk.heads * width;
      for (int64_t h = 0; h < chunk.heads; ++h) {
        const S* rows = from.rows<S>(chunk.batch, chunk.head + h, tile.start);
        for (int64_t i = 0; i < tile.count; ++i) {
          T* of_row = of_tile + (i * chunk.heads + h) * width;
          convert_row(rows + i * walk.pass.step * from.strides[2], of_row, from.width);
          std::fill(of_row + from.width, of_row + width, T(0));
        }
      }
    }
  };
  if constexpr (kPaired<T>) {
    read(T());
  } else {
    with_type(from.type, read);
  }
}

// Returns the rows of a gathered tile: in place if they are adjacent, else a copy in `to`. Rows of
// padding are undefined.
template <typename T>
const T* gather(const Gathered& tile, const T* rows, int64_t width, T* to) {
  if (tile.lies_together()) {
    return rows + tile.token[0] * width;
  }
  for (int64_t i = 0; i < tile.size; ++i) {
    std::copy_n(rows + tile.token[i] * width, width, to + i * width);
  }
  return to;
}

// Returns a vector whose lane i is the largest lane of x[i].
inline Vec highest_of_lanes(Vec (&x)[kLanes]) {
#pragma GCC unroll 4
  for (int64_t n = kLanes / 2; n > 0; n /= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < n; ++i) {
      const auto [low, high] = at::vec::interleave2(x[i], x[i + n]);
      x[i] = at::vec::maximum(low, high);
    }
  }
  return x[0];
}

}  // namespace sparsering::cpu
