// The key blocks that each query block sees: listed ones, or those that `RandomBlocks` draws for
// one kv head. patterns/blocks.py defines the draw, and ground/rows.py the hash and the
// permutation; this file computes the same, bit for bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "positions.h"

namespace sparsering::cpu::lower {

constexpr int64_t kMostBlocks = 1024;  // most block pairs that are looked up per tile pair

constexpr uint64_t kSplitMix[] = {0xBF58476D1CE4E5B9u, 0x94D049BB133111EBu};

// Shifts right as a signed number, so that the sign is kept.
inline uint64_t shifted_down(uint64_t x, int by) {
  return static_cast<uint64_t>(static_cast<int64_t>(x) >> by);
}

class BlockRows {
 public:
  BlockRows() = default;
  // For random blocks: each query block sees `count` of `blocks` key blocks.
  BlockRows(int64_t key, int64_t blocks, int64_t count)
      : key_(key), blocks_(blocks), count_(count), words_(blocks / 64 + 1) {
    SPARSERING_CHECK(count >= 0 && count <= blocks, "sparsering: malformed random blocks");
  }
  // For listed blocks: query block i sees key block j < blocks if i * blocks + j is in `listed`,
  // which ascends and is >= 0.
  BlockRows(Ints listed, int64_t blocks) : blocks_(blocks), words_((blocks + 63) / 64) {
    SPARSERING_CHECK(blocks > 0 && listed[0] >= 0, "sparsering: malformed list of blocks");
    bits_.resize((listed.back() / blocks + 1) * words_);
    for (const int64_t i : listed) {
      bits_[i / blocks * words_ + i % blocks / 64] |= uint64_t{1} << i % blocks % 64;
    }
  }

  // Returns how many key blocks from keys.first to keys.last a query block sees.
  int64_t count(int64_t query, const Side& keys) const {
    if (query < 0 || keys.first > keys.last) return 0;
    if (is_drawn()) {
      const uint64_t* row = row_of(query);
      return below(row, keys.last + 1) - below(row, keys.first);
    }
    if (query * words_ >= std::ssize(bits_)) return 0;  // past the last row with a block
    return ones(query, std::max<int64_t>(keys.first, 0), std::min(keys.last, blocks_ - 1));
  }

  // Returns the first key block >= `block` that a query block sees, or `none`.
  int64_t next(int64_t query, int64_t block, int64_t none) const {
    if (query < 0) return none;
    const uint64_t* row = row_of(query);
    block = std::max<int64_t>(block, 0);
    for (int64_t at = block / 64; at < words_; ++at) {
      const uint64_t past = at == block / 64 ? ~uint64_t{0} << block % 64 : ~uint64_t{0};
      if (const uint64_t bits = row[at] & past) return 64 * at + std::countr_zero(bits);
    }
    return none;
  }

  bool is_drawn() const {
    return count_ >= 0;
  }

 private:
  // Counts the bits from `first` to `last` of a row of `bits_`.
  int64_t ones(int64_t row, int64_t first, int64_t last) const {
    int64_t count = 0;
    const uint64_t* word = bits_.data() + row * words_;
    for (int64_t at = first / 64; first <= last && at <= last / 64; ++at) {
      uint64_t bits = word[at];
      if (at == first / 64) bits &= ~uint64_t{0} << first % 64;
      if (at == last / 64) bits &= ~uint64_t{0} >> (63 - last % 64);
      count += std::popcount(bits);
    }
    return count;
  }

  // Counts the key blocks before `block` in a drawn row.
  int64_t below(const uint64_t* row, int64_t block) const {
    block = std::clamp<int64_t>(block, 0, blocks_);
    const uint64_t bits = row[block / 64] & ((uint64_t{1} << block % 64) - 1);
    return static_cast<int64_t>(row[words_ + block / 64]) + std::popcount(bits);
  }

  // Returns a drawn row: `words_` words of bits, then the number of bits before each word.
  const uint64_t* row_of(int64_t query) const {
    if (query == latest_) return bits_.data() + place_;
    const auto [found, is_new] = places_.try_emplace(query, std::ssize(bits_));
    latest_ = query, place_ = found->second;
    if (!is_new) return bits_.data() + place_;
    bits_.resize(bits_.size() + 2 * words_);
    uint64_t* row = bits_.data() + place_;
    const bool diagonal = query < blocks_;
    const int64_t others = blocks_ - diagonal;
    const uint64_t key = hash(static_cast<uint64_t>(query));
    int half_bits = 1;
    while ((int64_t{1} << (2 * half_bits)) < others) ++half_bits;
    for (int64_t i = 0; i < count_ - diagonal; ++i) {
      int64_t image = permuted(i, others, half_bits, key);
      image += diagonal && image >= query;
      row[image / 64] |= uint64_t{1} << image % 64;
    }
    if (diagonal) row[query / 64] |= uint64_t{1} << query % 64;
    for (int64_t i = 1; i < words_; ++i) {
      row[words_ + i] = row[words_ + i - 1] + std::popcount(row[i - 1]);
    }
    return row;
  }

  uint64_t hash(uint64_t query) const {
    uint64_t state = 0;
    for (const uint64_t part :
         {static_cast<uint64_t>(key_), query, static_cast<uint64_t>(blocks_)}) {
      state = part + state * 31 + 0x9E3779B9u;
      state = (state ^ shifted_down(state, 30)) * kSplitMix[0];
      state = (state ^ shifted_down(state, 27)) * kSplitMix[1];
      state ^= shifted_down(state, 31);
    }
    return state & ((uint64_t{1} << 62) - 1);
  }

  // Permutes [0, size): a Feistel network permutes [0, 4^h), and is applied until the result is
  // below size. `half_bits` is h.
  static int64_t permuted(int64_t index, int64_t size, int half_bits, uint64_t key) {
    uint64_t value = static_cast<uint64_t>(index);
    do {
      value = network(value, half_bits, key);
    } while (value >= static_cast<uint64_t>(size));
    return static_cast<int64_t>(value);
  }

  static uint64_t network(uint64_t value, int half_bits, uint64_t key) {
    const uint64_t mask = (uint64_t{1} << half_bits) - 1;
    uint64_t left = value >> half_bits, right = value & mask;
    for (uint64_t number = 0; number < 4; ++number) {
      uint64_t state = (key ^ (number << 40)) * kSplitMix[1] + right * kSplitMix[0];
      for (const uint64_t multiplier : kSplitMix) {
        state = (state ^ shifted_down(state, 29)) * multiplier;
      }
      const uint64_t next = left ^ ((state ^ shifted_down(state, 32)) & mask);
      left = right, right = next;
    }
    return left << half_bits | right;
  }

  int64_t key_ = 0, blocks_ = 0;
  int64_t count_ = -1;  // number of key blocks of a row; -1 if they are listed
  int64_t words_ = 0;   // number of words with the bits of a row
  mutable std::vector<uint64_t> bits_;
  // where drawn rows begin in `bits_`, and the latest one; no pointers, so that threads have copies
  mutable std::unordered_map<int64_t, int64_t> places_;
  mutable int64_t latest_ = -1, place_ = 0;
};

}  // namespace sparsering::cpu::lower
