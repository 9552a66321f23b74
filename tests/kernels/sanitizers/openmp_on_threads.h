// OpenMP's parallel regions on plain threads, included before the kernel where ThreadSanitizer
// checks it. It sees threads that are started and joined, but not how those of libgomp wait for
// each other, and would report every region. These names stay inside the kernel's library.

#pragma once

#include <omp.h>

#include <thread>
#include <vector>

namespace {
thread_local int of_region = 1, number_in_region = 0;
}

extern "C" {

[[gnu::visibility("hidden")]] int omp_get_num_threads() noexcept {
  return of_region;
}

[[gnu::visibility("hidden")]] int omp_get_thread_num() noexcept {
  return number_in_region;
}

[[gnu::visibility("hidden")]] void GOMP_parallel(void (*body)(void*), void* data, unsigned,
                                                 unsigned) {
  const int threads = omp_get_max_threads();
  const auto run = [&](int number) {
    of_region = threads, number_in_region = number;
    body(data);
    of_region = 1, number_in_region = 0;
  };
  std::vector<std::thread> others;
  for (int number = 1; number < threads; ++number) {
    others.emplace_back(run, number);
  }
  run(0);
  for (std::thread& other : others) {
    other.join();
  }
}

}  // extern "C"
