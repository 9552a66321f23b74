// Registers functions as operators of torch. An operator takes its arguments off a stack of 64-bit
// values in torch's stable format, and puts its results there.

#pragma once

#include <array>
#include <tuple>

#include "torch.h"

namespace sparsering::cpu {

// The value that a parameter of type T owns while its operator runs.
template <typename T>
struct Argument {
  explicit Argument(StableIValue x) : value(from_stack<T>(x)) {}
  T get() const {
    return value;
  }
  T value;
};

template <>
struct Argument<Tensor> {
  explicit Argument(StableIValue x) : value(from_stack<AtenTensorHandle>(x)) {}
  const Tensor& get() const {
    return value;
  }
  Tensor value;
};

template <>
struct Argument<std::optional<Tensor>> {
  explicit Argument(StableIValue x) {
    if (auto* boxed = from_stack<StableIValue*>(x)) {
      value.emplace(from_stack<AtenTensorHandle>(*boxed));
      delete boxed;
    }
  }
  const std::optional<Tensor>& get() const {
    return value;
  }
  std::optional<Tensor> value;
};

template <typename T>
struct Argument<std::span<const T>> {
  explicit Argument(StableIValue x) {
    const auto list = from_stack<StableListHandle>(x);
    size_t size;
    checked(torch_list_size(list, &size));
    values.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue item;
      checked(torch_list_get_item(list, i, &item));
      values.push_back(Argument<T>(item).value);
    }
    checked(torch_delete_list(list));
  }
  std::span<const T> get() const {
    return values;
  }
  std::vector<T> values;
};

inline StableIValue result(Tensor x) {
  return on_stack(x.release());
}
inline StableIValue result(int64_t x) {
  return on_stack(x);
}
inline StableIValue result(bool x) {
  return on_stack(x);
}
inline StableIValue result(std::vector<Tensor> x) {
  StableListHandle list;
  checked(torch_new_list_reserve_size(x.size(), &list));
  for (Tensor& tensor : x) {
    checked(torch_list_push_back(list, result(std::move(tensor))));
  }
  return on_stack(list);
}

template <typename Function, Function* function>
struct Boxed;

template <typename Result, typename... Parameters, Result (*function)(Parameters...)>
struct Boxed<Result(Parameters...), function> {
  template <size_t... I>
  static void run(StableIValue* stack, std::index_sequence<I...>) {
    // Braces, because they guarantee that arguments are taken off in order.
    const std::tuple<Argument<std::remove_cvref_t<Parameters>>...> arguments{
        Argument<std::remove_cvref_t<Parameters>>(stack[I])...};
    if constexpr (requires { std::tuple_size<Result>::value; }) {
      std::apply(
          [&](auto... results) {
            StableIValue* to = stack;
            ((*to++ = result(std::move(results))), ...);
          },
          function(std::get<I>(arguments).get()...));
    } else if constexpr (std::is_void_v<Result>) {
      function(std::get<I>(arguments).get()...);
    } else {
      stack[0] = result(function(std::get<I>(arguments).get()...));
    }
  }
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    run(stack, std::index_sequence_for<Parameters...>());
  }
};

// Operators of one namespace: `define<function>(schema)` adds one.
class Operators {
 public:
  explicit Operators(const char* name) {
    checked(aoti_torch_library_init_def(name, __FILE__, __LINE__, &definitions_));
    // This implementation is for tensors on every device, like one without a dispatch key.
    checked(aoti_torch_library_init_impl(name, "CompositeImplicitAutograd", __FILE__, __LINE__,
                                         &implementations_));
  }
  template <auto function>
  void define(const char* schema) {
    checked(aoti_torch_library_def(definitions_, schema));
    const std::string name(schema, std::strchr(schema, '('));
    const auto boxed = Boxed<std::remove_pointer_t<decltype(function)>, function>::call;
    checked(torch_library_impl(implementations_, name.c_str(), boxed, kTorchVersion));
  }

 private:
  // Kept for the life of the process, because torch would call operators even of an unloaded
  // library.
  TorchLibraryHandle definitions_, implementations_;
};

}  // namespace sparsering::cpu
