// Merges the lists of neighboring queries, so that each key is read once.

#pragma once

#include <bit>

#include "../few.h"

namespace sparsering::cpu::lists {

constexpr int64_t kTile = 128;      // keys of a softmax step; with their values they fit in a cache
constexpr int64_t kQueries = 16;    // neighboring queries that a thread takes at a time
constexpr int64_t kMostRows = 64;   // queries of all heads that share products with keys
constexpr int64_t kMostMerged = 4;  // most merged keys, as a multiple of the length of a list

// The most lists that are merged, for `heads` query heads that share a list.
inline int64_t most_lists(int64_t heads) {
  return std::clamp<int64_t>(kMostRows / std::max<int64_t>(heads, 1), 1, kQueries);
}

// Some lists, without repeats and without numbers that are no keys. Keys are sorted by the first
// list that has them, and ascend within it. So no earlier list has a key, and the order of a list's
// slots changes no sum.
class Distinct {
 public:
  Distinct(int64_t slots, int64_t num_keys, int64_t heads, bool has_bias)
      : slots_(slots),
        heads_(heads),
        most_((most_lists(heads) > 1 ? kMostMerged : 1) * slots),
        words_((most_ + 31) / 32 + kTile / 32),
        num_keys_(num_keys),
        keys_(most_),
        place_(has_bias ? most_lists(heads) * most_ : 0),
        bits_(most_lists(heads) > 1 ? most_lists(heads) * words_ : 0),
        marks_(Buffer<uint32_t>::zeros(num_keys)),
        is_long_(slots * kMuch > num_keys / 64),
        sorted_(is_long_ ? 0 : slots),
        seen_(Buffer<uint64_t>::zeros(is_long_ ? (num_keys + 63) / 64 : 0)) {}

  // Reads the list of the first query, and the next lists as long as sharing products is faster,
  // but at most `most`. The lists follow each other in memory; with a bias, so do their places in
  // it.
  void read(const int32_t* list, const int32_t* places, int64_t most) {
    begin();
    places_ = places;
    add_first(list);
    while (size < std::min(most, most_lists(heads_)) && is_near(list + size * slots_)) {
      add(list + size * slots_);
    }
  }

  const int32_t* keys() const {
    return keys_.get();
  }
  // Returns, for each key, its place in the bias of list i, if that list has the key.
  const int32_t* places(int64_t i) const {
    return place_.get() + i * most_;
  }
  bool has(int64_t i, int64_t place) const {
    return size == 1 || (bits_.get()[i * words_ + place / 32] >> place % 32 & 1);
  }
  // Returns the first list that has one of the keys from `place` on.
  int64_t first_list(int64_t place) const {
    int64_t i = size - 1;
    while (starts_[i] > place) {
      --i;
    }
    return i;
  }

  // Sets scores to -inf if list i does not have their key; the `count` keys begin at `place`.
  void hide_others(int64_t i, int64_t place, int64_t count, float* scores) const {
    using Ints = at::vec::Vectorized<int32_t>;
    if (size == 1) {
      return;
    }
    int32_t powers[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      powers[j] = int32_t{1} << j;
    }
    const Ints power = Ints::loadu(powers);
    for (int64_t j = 0; j < count; j += kLanes) {
      const int64_t n = std::min(kLanes, count - j), at = place + j;
      const uint32_t bits = bits_.get()[i * words_ + at / 32] >> at % 32;
      const Vec none = at::vec::cast<float>((Ints(static_cast<int32_t>(bits)) & power) == Ints(0));
      Vec::blendv(Vec::loadu(scores + j, n), Vec(-kInf), none).store(scores + j, n);
    }
  }

  int64_t size = 0;   // number of lists
  int64_t count = 0;  // number of keys

 private:
  void begin() {
    base_ += static_cast<uint32_t>(count);
    if (base_ > UINT32_MAX - static_cast<uint32_t>(most_)) {
      std::fill_n(marks_.get(), num_keys_, 0);
      base_ = 1;
    }
    size = count = 0;
  }

  // -1 is no key, and neither is a number past the last key.
  bool is_key(int32_t key) const {
    return key >= 0 && key < num_keys_;
  }
  bool is_new(int32_t key) const {
    return marks_.get()[key] < base_;
  }
  int64_t place(int32_t key) const {
    return marks_.get()[key] - base_;
  }
  void append(int32_t key) {
    marks_.get()[key] = base_ + static_cast<uint32_t>(count);
    keys_.get()[count++] = key;
  }

  // Calls f(key) for the keys of a list, in ascending order.
  template <typename F>
  void for_keys(const int32_t* list, const F& f) {
    int64_t n = 0, first = num_keys_, last = -1;
    bool rising = true;
    for (int64_t slot = 0; slot < slots_; ++slot) {
      if (is_key(list[slot])) {
        rising = rising && list[slot] > last;
        last = list[slot];
      }
    }
    if (rising) {
      for (int64_t slot = 0; slot < slots_; ++slot) {
        if (is_key(list[slot])) {
          f(list[slot]);
        }
      }
      return;
    }
    for (int64_t slot = 0; slot < slots_; ++slot) {
      const int32_t key = list[slot];
      if (!is_key(key)) {
        continue;
      }
      if (is_long_) {
        first = std::min<int64_t>(first, key), last = std::max<int64_t>(last, key);
        seen_.get()[key / 64] |= uint64_t{1} << key % 64;
      } else {
        sorted_.get()[n++] = key;
      }
    }
    std::sort(sorted_.get(), sorted_.get() + n);
    for (int64_t i = 0; i < n; ++i) {
      if (i == 0 || sorted_.get()[i] != sorted_.get()[i - 1]) {
        f(sorted_.get()[i]);
      }
    }
    for (int64_t word = first / 64; is_long_ && word <= last / 64 && last >= 0; ++word) {
      for (uint64_t rest = seen_.get()[word]; rest; rest &= rest - 1) {
        f(static_cast<int32_t>(word * 64 + std::countr_zero(rest)));
      }
      seen_.get()[word] = 0;
    }
  }

  void add_first(const int32_t* list) {
    for_keys(list, [&](int32_t key) { append(key); });
    finish(list, 0);
  }

  void add(const int32_t* list) {
    if (size == 1) {  // a single list needs no bits
      std::fill_n(bits_.get(), words_, 0);
      for (int64_t place = 0; place < count; ++place) {
        set_bit(0, place);
      }
    }
    const int64_t start = count;
    std::fill_n(bits_.get() + size * words_, words_, 0);
    for_keys(list, [&](int32_t key) {
      if (is_new(key)) {
        append(key);
      }
      set_bit(size, place(key));
    });
    finish(list, start);
  }
  void set_bit(int64_t i, int64_t place) {
    bits_.get()[i * words_ + place / 32] |= uint32_t{1} << place % 32;
  }

  void finish(const int32_t* list, int64_t start) {
    const int32_t* places = places_ ? places_ + size * slots_ : nullptr;
    for (int64_t slot = slots_; places && slot-- > 0;) {  // from the end: a key's first slot wins
      if (is_key(list[slot])) {
        place_.get()[size * most_ + place(list[slot])] = places[slot];
      }
    }
    starts_[size++] = start;
  }

  // True if the next list shares so many keys with the lists before that merging it takes less
  // time. A sample of the list decides. The unit of time is the product of a key and a row: packing
  // a key takes 3 units, and reading an unpacked key takes 2. `python -m benchmarks bench --only
  // lists` measures what the choice gains.
  bool is_near(const int32_t* list) const {
    constexpr int64_t kSamples = 16, kPacking = 3, kReading = 2;
    if (count + slots_ > most_) {
      return false;
    }
    const int64_t step = (slots_ + kSamples - 1) / kSamples;
    int64_t keys = 0, fresh = 0;
    for (int64_t slot = 0; slot < slots_; slot += step) {
      if (is_key(list[slot])) {
        keys += step;
        fresh += is_new(list[slot]) ? step : 0;
      }
    }
    const int64_t apart = (heads_ + (heads_ < 4 ? kReading : kPacking)) * keys;
    return heads_ * (count + fresh) + kPacking * fresh <= apart;
  }

  int64_t slots_, heads_, most_, words_, num_keys_;
  Buffer<int32_t> keys_, place_;
  const int32_t* places_ = nullptr;  // place in the bias of each slot of the lists
  Buffer<uint32_t> bits_;            // for each list, a bit for each key
  Buffer<uint32_t> marks_;           // for each key, base_ + its place; less if no list has it
  // A long list is sorted by setting a bit for each key, because skipping empty words takes less
  // time than a sort.
  static constexpr int64_t kMuch = 32;
  const bool is_long_;
  Buffer<int32_t> sorted_;
  Buffer<uint64_t> seen_;
  uint32_t base_ = 1;
  int64_t starts_[kQueries];  // place of the first key that each list has first
};

}  // namespace sparsering::cpu::lists
