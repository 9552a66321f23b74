// Buffers, and a meter of the bytes that they would take.

#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "torch.h"

namespace sparsering::cpu {

// Counts the bytes of buffers. While a Meter exists, buffers of its thread only add their size to
// it and get no memory. So a plan learns from the allocating code itself how much it would
// allocate.
class Meter {
 public:
  Meter() : outer_(current()) {
    current() = this;
  }
  ~Meter() {
    current() = outer_;
  }
  Meter(const Meter&) = delete;
  static Meter*& current() {
    static thread_local Meter* meter = nullptr;
    return meter;
  }
  int64_t bytes = 0;

 private:
  Meter* outer_;
};

// Returns the bytes of the buffers that f() allocates.
template <typename F>
int64_t bytes_of(const F& f) {
  Meter meter;
  f();
  return meter.bytes;
}

// Buffers with fewer bytes are not tensors. Tests that measure memory set this to 0 through ctypes.
extern "C" [[gnu::visibility("default")]] inline int64_t sparsering_least_tensor = int64_t{1} << 16;

// Uninitialized memory. Large buffers are tensors, so that torch's profilers see them. Small ones
// are not, because a tensor costs a microsecond, which slows calls of a few tokens.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size = 0) {
    if (size > 0) {
      size_ = size;
      const int64_t bytes = size * static_cast<int64_t>(sizeof(T));
      if (Meter* meter = Meter::current()) {
        meter->bytes += bytes;
      } else if (bytes < sparsering_least_tensor) {
        small_.reset(static_cast<T*>(::operator new(bytes, kLine)));
        data_ = small_.get();
      } else {
        large_ = empty({bytes}, kByte);
        data_ = static_cast<T*>(large_.mutable_data_ptr());
      }
    }
  }
  static Buffer zeros(int64_t size) {
    Buffer result(size);
    std::fill_n(result.get(), result.get() ? size : 0, T(0));
    return result;
  }
  T* get() const {
    return data_;
  }
  // Returns memory for `size` values; if it has to grow, the old values are lost.
  T* at_least(int64_t size) {
    if (size > size_) {
      if (Meter* meter = Meter::current()) {
        meter->bytes -= size_ * static_cast<int64_t>(sizeof(T));
      }
      *this = Buffer();
      *this = Buffer(size);
    }
    return get();
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(T* data) const {
      ::operator delete(data, kLine);
    }
  };
  std::unique_ptr<T, Free> small_;
  Tensor large_;
  T* data_ = nullptr;
  int64_t size_ = 0;
};

// Asks the system to back a large tensor that will be filled by huge pages, since its first write
// to each small page costs more than the write. The system may ignore it.
inline void prefer_huge_pages(const Tensor& x) {
#ifdef __linux__
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const auto begin = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t stop = (begin + x.numel() * x.element_size()) / kPage * kPage;
  if (first < stop) madvise(reinterpret_cast<void*>(first), stop - first, MADV_HUGEPAGE);
#else
  static_cast<void>(x);
#endif
}

}  // namespace sparsering::cpu
