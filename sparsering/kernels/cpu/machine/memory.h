// Memory: access to a tensor's values, buffers, and the bytes that buffers would take.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>

namespace sparsering::cpu {

// Returns a tensor's values, and checks that they have type T. `const_data_ptr<T>` would not link:
// clang 18 and newer mangle its name differently from torch's libraries.
template <typename T>
const T* values_of(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.scalar_type() == c10::CppTypeToScalarType<T>::value,
                    "sparsering cpu: expected a tensor of ", c10::CppTypeToScalarType<T>::value,
                    ", got one of ", x.scalar_type());
  return static_cast<const T*>(x.const_data_ptr());
}

// Counts the bytes of buffers: while a Meter exists, buffers of its thread only add their size to
// it, and get no memory. So the code that allocates also tells a plan how much it would allocate.
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

// Uninitialised memory from torch's allocator, which aligns it and lets profilers see it.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size = 0) {
    if (size > 0) {
      size_ = size;
      if (Meter* meter = Meter::current()) {
        meter->bytes += size * static_cast<int64_t>(sizeof(T));
      } else {
        data_ = c10::GetCPUAllocator()->allocate(size * sizeof(T));
      }
    }
  }
  static Buffer zeros(int64_t size) {
    Buffer result(size);
    std::fill_n(result.get(), result.get() ? size : 0, T(0));
    return result;
  }
  T* get() const {
    return static_cast<T*>(data_.get());
  }
  // Returns memory for `size` values; if it must grow, the old values are lost.
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
  c10::DataPtr data_;
  int64_t size_ = 0;
};

}  // namespace sparsering::cpu
