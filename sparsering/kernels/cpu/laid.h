// A layout that Python hands over once, for calls without extras.

#pragma once

#include <mutex>
#include <unordered_set>
#include <vector>

#include "layout.h"
#include "machine/products.h"

namespace sparsering::cpu {

// The passes of a layout for calls without extras, read and checked once. Python keeps this struct
// as a tensor of one byte: the tensor's data points at the struct, and the tensor owns it.
struct Laid {
  std::vector<Tensor> tensors;
  std::vector<Pass> passes;
  Tensor first_entry;
  int64_t block, queries = 0, keys = 0;  // a call must have at least so many queries and keys
  std::vector<AtenTensorHandle>
      counted;           // tensors that have a version: inference tensors have none
  int64_t versions = 0;  // sum of their versions when the tensors were checked
  bool covers;
  double scale;

  void count_versions() {
    for (const Tensor& x : tensors) {
      try {
        versions += version_of(x.handle());
        counted.push_back(x.handle());
      } catch (const std::exception&) {
      }
    }
  }
  int64_t versions_now() const {
    int64_t sum = 0;
    for (const AtenTensorHandle x : counted) {
      sum += version_of(x);
    }
    return sum;
  }
  Tensor holder() {
    const int64_t one = 1;
    AtenTensorHandle result;
    checked(torch_from_blob(this, 1, &one, &one, 0, kByte, aoti_torch_device_type_cpu(), -1,
                            &result, aoti_torch_layout_strided(), nullptr, 0, drop, nullptr));
    const std::lock_guard<std::mutex> guard(lock());
    living().insert(this);
    return Tensor(result);
  }
  static const Laid& of(const Tensor& holder) {
    const void* laid = holder.const_data_ptr();
    const std::lock_guard<std::mutex> guard(lock());
    SPARSERING_CHECK(living().contains(laid), "sparsering cpu: no layout of this process");
    return *static_cast<const Laid*>(laid);
  }

 private:
  static void drop(void* laid, void*) {
    {
      const std::lock_guard<std::mutex> guard(lock());
      living().erase(laid);
    }
    delete static_cast<Laid*>(laid);
  }
  static std::mutex& lock() {
    static auto* const mutex = new std::mutex;  // never deleted: tensors may outlive static objects
    return *mutex;
  }
  static std::unordered_set<const void*>& living() {
    static auto* const set = new std::unordered_set<const void*>;
    return *set;
  }
};

}  // namespace sparsering::cpu
