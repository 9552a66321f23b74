// Parallel loops on plain threads, included before the kernel where ThreadSanitizer checks it. It
// sees threads that are started and joined, but not how those of libgomp, in which torch runs
// loops, wait for each other, and would report every loop.

#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

inline bool& in_plain_threads() {
  static thread_local bool inside = false;
  return inside;
}

inline void plain_threads(int64_t begin, int64_t end, int64_t grain,
                          void (*body)(int64_t, int64_t, void*), void* data) {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  const int64_t parts =
      (end - begin + std::max<int64_t>(grain, 1) - 1) / std::max<int64_t>(grain, 1);
  const int64_t count = in_plain_threads() ? 1 : std::clamp<int64_t>(parts, 1, threads);
  const int64_t size = (end - begin + count - 1) / count;
  const auto run = [&](int64_t number) {
    const int64_t first = begin + number * size;
    if (first < end) {
      const bool outer = in_plain_threads();
      in_plain_threads() = true;
      body(first, std::min(end, first + size), data);
      in_plain_threads() = outer;
    }
  };
  std::vector<std::thread> others;
  for (int64_t number = 1; number < count; ++number) {
    others.emplace_back(run, number);
  }
  run(0);
  for (std::thread& other : others) {
    other.join();
  }
}

#define SPARSERING_PARALLEL_FOR plain_threads
