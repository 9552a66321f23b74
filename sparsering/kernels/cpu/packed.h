// Packs the key tiles of some kv heads for the backward pass.

#pragma once

#include <vector>

#include "pairs.h"

namespace sparsering::cpu {

// Operands of key tiles: K^T, and copies of K and V if the tensor's rows cannot be used directly.
template <typename T>
class PackedKeys {
 public:
  PackedKeys(const Problem& problem, const Pairs<T>& pairs)
      : x_(problem),
        pairs_(pairs),
        key_size_(problem.block * pairs.width()),
        value_size_(problem.block * pairs.value_width()) {}

  // Makes room for `slots` tiles, of which `copied` also need copies of K and V.
  void reserve(int64_t slots, int64_t copied) {
    transposed_.at_least(slots * key_size_);
    copies_.at_least(copied * (key_size_ + value_size_));
  }
  // Makes room for the key tiles of `count` kv heads, from `first` on.
  void reserve(const Pass& pass, int64_t first, int64_t count) {
    int64_t copied = 0;
    copy_.clear();
    for (int64_t i = 0; i < count * pass.columns; ++i) {
      const int64_t kv = first + i / pass.columns;
      const bool copies = pairs_.is_copied(pass, kv / x_.Hkv, kv % x_.Hkv, i % pass.columns);
      copy_.push_back(copies ? copied++ : -1);
    }
    tiles.resize(copy_.size());
    reserve(copy_.size(), copied);
  }
  void pack(T* spare, const Pass& pass, int64_t kv, int64_t column, int64_t slot) {
    T* kt = transposed_.get() + slot * key_size_;
    T *k = nullptr, *v = nullptr;
    if (copy_[slot] >= 0) {
      k = copies_.get() + copy_[slot] * (key_size_ + value_size_);
      v = k + key_size_;
    }
    tiles[slot] = pairs_.pack_keys(spare, pass, kv / x_.Hkv, kv % x_.Hkv, column, k, kt, v);
  }

  std::vector<typename Pairs<T>::Keys> tiles;

 private:
  const Problem& x_;
  const Pairs<T>& pairs_;
  int64_t key_size_, value_size_;
  Buffer<T> transposed_, copies_;
  std::vector<int64_t> copy_;  // per tile: index of its copy of K and V, -1 for none
};

}  // namespace sparsering::cpu
