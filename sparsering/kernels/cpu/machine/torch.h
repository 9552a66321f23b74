// The part of torch that the kernel calls. It uses only C functions of torch's stable ABI, so that
// a library built with torch 2.11 loads in later versions, too.

#pragma once

// Limits the header to what torch 2.11 has. The macro is undefined again below, because at::vec's
// headers refuse it.
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#include <torch/csrc/stable/c/shim.h>
#undef TORCH_TARGET_VERSION

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace sparsering::cpu {

using BFloat16 = c10::BFloat16;
using Half = c10::Half;

constexpr uint64_t kTorchVersion = ((0ULL + 2) << 56) | ((0ULL + 11) << 48);

template <typename... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Parts&... parts) {
  const auto text = [](const auto& part) -> std::string {
    if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(part)>>) {
      return std::to_string(part);
    } else {
      return part;
    }
  };
  throw std::runtime_error((text(parts) + ...));
}

// Raises RuntimeError in Python. Python code checks the arguments of users; these checks are for
// malformed layouts. torch 2.15 turns every exception into a RuntimeError.
#define SPARSERING_CHECK(condition, ...)      \
  do {                                        \
    if (!(condition)) [[unlikely]] {          \
      ::sparsering::cpu::refuse(__VA_ARGS__); \
    }                                         \
  } while (false)

// Throws if a function of torch failed.
inline void checked(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) [[unlikely]] {
    throw std::runtime_error("sparsering cpu: a function of torch failed");
  }
}

// Dtypes are numbers, which torch's functions return.
using Dtype = int32_t;
inline const Dtype kFloat = aoti_torch_dtype_float32(), kDouble = aoti_torch_dtype_float64(),
                   kBFloat16 = aoti_torch_dtype_bfloat16(), kHalf = aoti_torch_dtype_float16(),
                   kLong = aoti_torch_dtype_int64(), kInt = aoti_torch_dtype_int32(),
                   kByte = aoti_torch_dtype_uint8(), kChar = aoti_torch_dtype_int8(),
                   kBool = aoti_torch_dtype_bool();

template <typename T>
Dtype dtype_of() {
  if constexpr (std::is_same_v<T, float>) {
    return kFloat;
  } else if constexpr (std::is_same_v<T, double>) {
    return kDouble;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return kBFloat16;
  } else if constexpr (std::is_same_v<T, Half>) {
    return kHalf;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return kLong;
  } else if constexpr (std::is_same_v<T, int32_t>) {
    return kInt;
  } else if constexpr (std::is_same_v<T, bool>) {
    return kBool;
  } else {
    static_assert(std::is_same_v<T, uint8_t>);
    return kByte;
  }
}

inline int64_t size_of(Dtype type) {
  return static_cast<int64_t>(aoti_torch_dtype_element_size(type));
}

inline const char* name_of(Dtype type) {
  const std::pair<Dtype, const char*> names[] = {
      {kFloat, "float32"}, {kDouble, "float64"}, {kBFloat16, "bfloat16"},
      {kHalf, "float16"},  {kLong, "int64"},     {kInt, "int32"},
      {kByte, "uint8"},    {kBool, "bool"},      {kChar, "int8"}};
  for (const auto& [dtype, name] : names) {
    if (dtype == type) {
      return name;
    }
  }
  return "another dtype";
}

using Ints = std::span<const int64_t>;
using Doubles = std::span<const double>;

// A reference to one of torch's tensors.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}  // takes ownership of the handle
  Tensor(const Tensor& other) {
    if (other.handle_) {
      checked(aoti_torch_new_tensor_handle(other.handle_, &handle_));
    }
  }
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) {
      aoti_torch_delete_tensor_object(handle_);
    }
  }

  AtenTensorHandle handle() const {
    return handle_;
  }
  AtenTensorHandle release() {
    return std::exchange(handle_, nullptr);
  }
  int64_t dim() const {
    return number(aoti_torch_get_dim);
  }
  int64_t numel() const {
    return number(aoti_torch_get_numel);
  }
  Ints sizes() const {
    int64_t* result;
    checked(aoti_torch_get_sizes(handle_, &result));
    return {result, static_cast<size_t>(dim())};
  }
  int64_t size(int64_t i) const {
    int64_t result;
    checked(aoti_torch_get_size(handle_, i, &result));
    return result;
  }
  int64_t stride(int64_t i) const {
    int64_t result;
    checked(aoti_torch_get_stride(handle_, i, &result));
    return result;
  }
  Dtype dtype() const {
    Dtype result;
    checked(aoti_torch_get_dtype(handle_, &result));
    return result;
  }
  int64_t element_size() const {
    return size_of(dtype());
  }
  bool is_contiguous() const {
    bool result;
    checked(aoti_torch_is_contiguous(handle_, &result));
    return result;
  }
  bool is_cpu() const {
    int32_t device;
    checked(aoti_torch_get_device_type(handle_, &device));
    return device == aoti_torch_device_type_cpu();
  }
  bool has_sizes(Ints wanted) const {
    return std::ranges::equal(sizes(), wanted);
  }
  bool has_sizes(std::initializer_list<int64_t> wanted) const {
    return std::ranges::equal(sizes(), wanted);
  }
  const void* const_data_ptr() const {
    const void* result;
    checked(torch_get_const_data_ptr(handle_, &result));
    return result;
  }
  void* mutable_data_ptr() const {
    void* result;
    checked(torch_get_mutable_data_ptr(handle_, &result));
    return result;
  }
  // For tensors that the kernel made itself, so that it knows their dtype.
  template <typename T>
  T* mutable_data_ptr() const {
    return static_cast<T*>(mutable_data_ptr());
  }

 private:
  int64_t number(AOTITorchError (*of)(AtenTensorHandle, int64_t*)) const {
    int64_t result;
    checked(of(handle_, &result));
    return result;
  }

  AtenTensorHandle handle_ = nullptr;
};

using Tensors = std::span<const Tensor>;

// Returns a tensor's values, and checks that they have type T.
template <typename T>
const T* values_of(const Tensor& x) {
  SPARSERING_CHECK(x.dtype() == dtype_of<T>(), "sparsering cpu: expected a tensor of ",
                   name_of(dtype_of<T>()), ", got one of ", name_of(x.dtype()));
  return static_cast<const T*>(x.const_data_ptr());
}

// Returns an uninitialized contiguous tensor on the CPU.
inline Tensor empty(Ints sizes, Dtype type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  AtenTensorHandle result;
  const AOTITorchError error =
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               type, aoti_torch_device_type_cpu(), 0, &result);
  SPARSERING_CHECK(error == AOTI_TORCH_SUCCESS,
                   "sparsering cpu: not enough memory for a tensor of ", stride * size_of(type),
                   " bytes");
  return Tensor(result);
}
inline Tensor empty(std::initializer_list<int64_t> sizes, Dtype type) {
  return empty(Ints(sizes.begin(), sizes.size()), type);
}
inline void clear(const Tensor& x) {
  if (const int64_t bytes = x.numel() * x.element_size()) {
    std::memset(x.mutable_data_ptr(), 0, static_cast<size_t>(bytes));
  }
}
inline Tensor zeros(Ints sizes, Dtype type) {
  Tensor result = empty(sizes, type);
  clear(result);
  return result;
}
inline Tensor zeros(std::initializer_list<int64_t> sizes, Dtype type) {
  return zeros(Ints(sizes.begin(), sizes.size()), type);
}

// Calls an operator of torch: it takes its arguments off `stack`, and puts its results there.
inline void call(const char* name, const char* overload, StableIValue* stack) {
  checked(torch_call_dispatcher(name, overload, stack, kTorchVersion));
}
template <typename T>
StableIValue on_stack(T x) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(StableIValue));
  StableIValue result = 0;
  std::memcpy(&result, &x, sizeof(x));
  return result;
}
template <typename T>
T from_stack(StableIValue x) {
  T result;
  std::memcpy(&result, &x, sizeof(result));
  return result;
}

inline Tensor contiguous(const Tensor& x) {
  if (x.is_contiguous()) {
    return x;
  }
  StableIValue stack[] = {on_stack(Tensor(x).release()),
                          on_stack(aoti_torch_memory_format_contiguous_format())};
  call("aten::contiguous", "", stack);
  return Tensor(from_stack<AtenTensorHandle>(stack[0]));
}
// Copies `from` into `to`, with broadcasting and conversion.
inline void copy(const Tensor& to, const Tensor& from) {
  StableIValue stack[] = {on_stack(Tensor(to).release()), on_stack(Tensor(from).release()),
                          on_stack(false)};
  call("aten::copy_", "", stack);
  Tensor(from_stack<AtenTensorHandle>(stack[0]));
}

// Sets `function` to a function of torch outside the stable ABI, or to nullptr if torch has no
// function of that name. tools/audit_binary.py lists the names.
template <typename F>
void look_up(F& function, const char* name) {
  function = nullptr;
#if !defined(_WIN32) && !defined(SPARSERING_STABLE_ALONE)
  function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
#endif
}

}  // namespace sparsering::cpu
