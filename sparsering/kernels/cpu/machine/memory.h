// Memory: what a tensor holds, and buffers of our own.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

namespace sparsering::cpu {

// A tensor's numbers, which must be of the type. `const_data_ptr<T>` is no longer what torch's
// libraries call it where clang 18 or newer compiles this.
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
  // Forgets what it holds where that is too small.
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
