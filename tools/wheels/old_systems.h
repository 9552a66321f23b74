// Included before the kernel's source for wheels: avoids the symbols that a new compiler takes
// from a newer glibc and libstdc++ than torch's own wheels need (manylinux_2_28).

#pragma once

#if defined(__linux__)

#include <new>

#if defined(__x86_64__)
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver log2,log2@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver dlsym,dlsym@GLIBC_2.17");
__asm__(".symver log2,log2@GLIBC_2.17");
#endif

// std::__throw_bad_array_new_length of GCC 11
extern "C" [[noreturn, gnu::visibility("hidden"), gnu::used]] void sparsering_bad_length() __asm__(
    "_ZSt28__throw_bad_array_new_lengthv");
[[noreturn]] void sparsering_bad_length() {
  throw std::bad_array_new_length();
}

#endif
