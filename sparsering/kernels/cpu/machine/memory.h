// Memory: access to a tensor's values, and buffers.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

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

// Uninitialised memory from torch's allocator, which aligns it and lets profilers see it.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size = 0) {
    if (size > 0) {
      data_ = c10::GetCPUAllocator()->allocate(size * sizeof(T));
      size_ = size;
    }
  }
  T* get() const {
    return static_cast<T*>(data_.get());
  }
  // Returns room for `size` values; if it must grow, the old values are lost.
  T* at_least(int64_t size) {
    if (size > size_) {
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
