// Positions of tiles, bits of a tile's keys, and maxima over ranges; `Condition` uses them.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace sparsering::cpu::lower {

enum Status : int { kEmpty = 0, kVaries = 1, kFull = 2 };

// Returns kFull if the ranges [q0, q1] and [k0, k1] are the same single number, kEmpty if they do
// not meet, else kVaries.
inline int overlap(int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
  if (q0 > k1 || k0 > q1) return kEmpty;
  return q0 == q1 && k0 == k1 ? kFull : kVaries;
}

// Floor division and its remainder, as Python has them; `b` > 0.
inline int64_t floor_div(int64_t a, int64_t b) {
  return a / b - (a % b < 0);
}
inline int64_t remainder(int64_t a, int64_t b) {
  return a - floor_div(a, b) * b;
}

// Positions first, first + step, ..., last of a tile; or bounds of the positions of several tiles.
struct Side {
  int64_t first, last, step;

  bool operator==(const Side&) const = default;
  Side shifted(int64_t by) const {
    return {first + by, last + by, step};
  }
  // The blocks of `size` positions from that of the first position to that of the last.
  Side blocks(int64_t size) const {
    return {floor_div(first, size), floor_div(last, size), 1};
  }
  // Distance between neighbors; 0 for a single position, because 0 is a multiple of everything.
  int64_t stride() const {
    return first == last ? 0 : step;
  }
};

// One bit for each key of a tile, the first 256 of them.
struct Bits {
  std::array<uint64_t, 4> words{};

  // The bits from `first` up to `stop`, exclusive; both may lie outside.
  static Bits range(int64_t first, int64_t stop) {
    Bits x = kPrefix[std::clamp<int64_t>(stop, 0, 256)];
    return x &= ~kPrefix[std::clamp<int64_t>(first, 0, 256)];
  }
  static Bits all_or_none(bool all) {
    return kPrefix[all ? 256 : 0];
  }

  void set(int64_t i) {
    words[i / 64] |= uint64_t{1} << i % 64;
  }
  Bits& operator&=(const Bits& x) {
    for (int i = 0; i < 4; ++i) words[i] &= x.words[i];
    return *this;
  }
  Bits& operator|=(const Bits& x) {
    for (int i = 0; i < 4; ++i) words[i] |= x.words[i];
    return *this;
  }
  Bits operator~() const {
    return {{~words[0], ~words[1], ~words[2], ~words[3]}};
  }
  bool operator==(const Bits&) const = default;
  int64_t count() const {
    int64_t sum = 0;
    for (const uint64_t x : words) sum += std::popcount(x);
    return sum;
  }

  static const std::array<Bits, 257> kPrefix;  // kPrefix[n] has the first n bits
};

inline const std::array<Bits, 257> Bits::kPrefix = [] {
  std::array<Bits, 257> x{};
  for (int n = 1; n <= 256; ++n) {
    x[n] = x[n - 1];
    x[n].set(n - 1);
  }
  return x;
}();

// The keys of a tile at positions from `begin` up to `end`, exclusive.
inline Bits keys_from(const Side& k, int64_t begin, int64_t end) {
  return Bits::range(-floor_div(k.first - begin, k.step), -floor_div(k.first - end, k.step));
}

// The keys of a tile at positions of which `holds` is true.
template <typename Holds>
Bits keys_where(const Side& k, Holds holds) {
  Bits bits;
  for (int64_t i = 0, x = k.first; x <= k.last; ++i, x += k.step) {
    if (holds(x)) bits.set(i);
  }
  return bits;
}

// The keys that a key mask allows, as bits, with their number before each word of 64 bits.
class AllowedKeys {
 public:
  AllowedKeys(const uint8_t* valid, int64_t count)
      : count_(count), words_(count / 64 + 1), before_(count / 64 + 2) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      uint64_t x;
      std::memcpy(&x, valid + i, 8);
      // Any byte but 0 is true, so its lowest bit becomes the bitwise or of all its bits.
      x |= x >> 4 & 0x0F0F0F0F0F0F0F0Fu;
      x |= x >> 2 & 0x0303030303030303u;
      x |= x >> 1 & 0x0101010101010101u;
      x &= 0x0101010101010101u;
      // The product moves the lowest bits of the 8 bytes to its highest byte, in their order.
      words_[i / 64] |= x * 0x0102040810204080u >> 56 << i % 64;
    }
    for (; i < count; ++i) words_[i / 64] |= uint64_t{valid[i] != 0} << i % 64;
    for (size_t j = 0; j < words_.size(); ++j)
      before_[j + 1] = before_[j] + std::popcount(words_[j]);
  }

  // Returns how many of the allowed keys are among the first `stop` ones.
  int64_t before(int64_t stop) const {
    stop = std::clamp<int64_t>(stop, 0, count_);
    const uint64_t below = (uint64_t{1} << stop % 64) - 1;
    return before_[stop / 64] + std::popcount(words_[stop / 64] & below);
  }
  bool allows(int64_t key) const {
    return key >= 0 && key < count_ && (words_[key / 64] >> key % 64 & 1);
  }
  // Returns the bits of 256 neighboring keys.
  Bits from(int64_t first) const {
    Bits bits;
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t word = floor_div(first, 64) + i, shift = remainder(first, 64);
      bits.words[i] = word_at(word) >> shift;
      if (shift) bits.words[i] |= word_at(word + 1) << (64 - shift);
    }
    return bits;
  }

 private:
  uint64_t word_at(int64_t i) const {
    return i >= 0 && i < std::ssize(words_) ? words_[i] : 0;
  }

  int64_t count_;
  std::vector<uint64_t> words_;
  std::vector<int64_t> before_;
};

struct Pair {
  Side q, k;

  Pair shifted(int64_t by) const {
    return {q.shifted(by), k.shifted(by)};
  }
};

// Finds the maximum of any range of a list of integers in constant time.
class RangeMax {
 public:
  RangeMax() = default;

  template <typename Value>
  RangeMax(int64_t count, Value value) {
    levels_.emplace_back(count);
    for (int64_t i = 0; i < count; ++i) levels_[0][i] = value(i);
    for (int64_t half = 1; 2 * half <= count; half *= 2) {
      const std::vector<int64_t>& below = levels_.back();
      std::vector<int64_t> level(count - 2 * half + 1);
      for (size_t i = 0; i < level.size(); ++i) level[i] = std::max(below[i], below[i + half]);
      levels_.push_back(std::move(level));
    }
  }

  int64_t of(int64_t first, int64_t last) const {
    const int level = std::bit_width(static_cast<uint64_t>(last - first + 1)) - 1;
    return std::max(levels_[level][first], levels_[level][last + 1 - (int64_t{1} << level)]);
  }

 private:
  std::vector<std::vector<int64_t>> levels_;
};

// Reads a program: its numbers in order, and the tensors that some conditions look up.
struct Reader {
  Ints numbers;
  Tensors tensors;
  size_t number = 0, tensor = 0;

  int64_t next() {
    SPARSERING_CHECK(number < numbers.size(), "sparsering: a layout's program ends too early");
    return numbers[number++];
  }
  Tensor next_tensor() {
    SPARSERING_CHECK(tensor < tensors.size(), "sparsering: a layout's program lacks a tensor");
    const Tensor& x = tensors[tensor++];
    SPARSERING_CHECK(x.dim() == 1 && (x.dtype() == kBool || (x.dtype() == kLong && x.numel() > 0)),
                     "sparsering: a layout's program needs int64 vectors, or bool of a key mask");
    return contiguous(x);
  }
};

}  // namespace sparsering::cpu::lower
