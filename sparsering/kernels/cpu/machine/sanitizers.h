// Tells sanitizers what memory matrix products read and write. Products are compiled at
// run time, so sanitizers cannot see them.

#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_loadN(void* from, size_t bytes);
extern "C" void __asan_storeN(void* to, size_t bytes);
#elif defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(void* from, size_t bytes);
extern "C" void __tsan_write_range(void* to, size_t bytes);
#endif

namespace sparsering::cpu {

// Lets a sanitizer check a read of `count` values; does nothing in builds without one.
template <typename T>
void will_read(const T* from, size_t count) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_loadN(const_cast<T*>(from), count * sizeof(T));
#elif defined(__SANITIZE_THREAD__)
  __tsan_read_range(const_cast<T*>(from), count * sizeof(T));
#endif
}

// Lets a sanitizer check a write of `count` values.
template <typename T>
void will_write(T* to, size_t count) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_storeN(to, count * sizeof(T));
#elif defined(__SANITIZE_THREAD__)
  __tsan_write_range(to, count * sizeof(T));
#endif
}

}  // namespace sparsering::cpu
