// Distributes work among threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "products.h"

namespace sparsering::cpu {

inline int64_t num_threads() {
  uint32_t result;
  checked(torch_get_num_threads(&result));
  return result;
}

// Keeps the first exception that one of several threads threw, for the thread that waits.
class Caught {
 public:
  template <typename Body>
  void run(const Body& body) {
    try {
      body();
    } catch (const std::bad_alloc&) {
      if (!failed_.exchange(true)) {
        out_of_memory_ = true;
      }
    } catch (const std::exception& error) {
      if (!failed_.exchange(true)) {
        std::strncpy(what_, error.what(), sizeof(what_) - 1);
      }
    }
  }
  void rethrow() const {
    if (out_of_memory_) {
      throw std::bad_alloc();
    }
    if (failed_) {
      throw std::runtime_error(what_);
    }
  }

 private:
  std::atomic<bool> failed_ = false;
  bool out_of_memory_ = false;
  char what_[256] = "";  // no std::exception_ptr, because older C++ libraries lack parts of it
};

// Calls body(begin, end) in torch's threads, for parts of a range of at least `grain` each. The
// first exception is thrown again here, because torch would not say what failed. The threads get
// this thread's `in_order`.
template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  struct Call {
    const Body& body;
    const bool in_order = cpu::in_order();
    Caught caught;
  } call{body};
  const auto run = [](int64_t first, int64_t stop, void* of) {
    Call& call = *static_cast<Call*>(of);
    const Order order(call.in_order);
    call.caught.run([&] { call.body(first, stop); });
  };
#if defined(SPARSERING_PARALLEL_FOR)  // tests/kernels/sanitizers/plain_threads.h
  SPARSERING_PARALLEL_FOR(begin, end, grain, run, &call);
#else
  checked(torch_parallel_for(begin, end, grain, run, &call));
#endif
  call.caught.rethrow();
}

// Runs body(scratch, i) for every i < count, in this thread and in others that end with the call;
// at most `threads` work. Layouts are built like this, because a process may fork meanwhile, and
// its child would wait forever for threads that torch keeps.
template <typename Scratch, typename Make, typename Body>
void share_for_now(int64_t threads, int64_t count, const Make& make, const Body& body) {
  std::atomic<int64_t> next{0};
  Caught caught;
  const auto work = [&] {
    caught.run([&] {
      Scratch scratch = make();
      for (int64_t part = next++; part < count; part = next++) {
        body(scratch, part);
      }
    });
  };
  std::vector<std::thread> others;
  try {
    while (std::ssize(others) + 1 < std::min(threads, count)) {
      others.emplace_back(work);
    }
  } catch (const std::system_error&) {  // the system cannot start another thread
  }
  work();
  for (std::thread& other : others) {
    other.join();
  }
  caught.rethrow();
}

// Runs body(scratch, i) for every i < count; a thread that is free takes the next i. It uses at
// most one thread per `least` items.
template <typename Scratch, typename Make, typename Body>
void share_out(int64_t count, int64_t least, const Make& make, const Body& body) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(num_threads(), (count + least - 1) / least);
  parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      Scratch scratch = make();
      for (int64_t i = next++; i < count; i = next++) {
        body(scratch, i);
      }
      release_products();
    }
  });
}

// Runs body(scratch, i) on only this thread, with its buffers `mine`; on all threads if `mine` is
// nullptr.
template <typename Scratch, typename Make, typename Body>
void share_out(std::optional<Scratch>* mine, int64_t count, int64_t least, const Make& make,
               const Body& body) {
  if (!mine) {
    share_out<Scratch>(count, least, make, body);
    return;
  }
  if (!*mine && count) {
    mine->emplace(make());
  }
  for (int64_t i = 0; i < count; ++i) {
    body(**mine, i);
  }
}

// True if threads can share kv heads nearly evenly, so that each computes whole heads by itself.
inline bool shares_evenly(int64_t num_kv) {
  const int64_t threads = num_threads(), most = (num_kv + threads - 1) / threads;
  return num_kv >= threads && 10 * most * threads <= 11 * num_kv;
}

// Returns how many kv heads are packed at a time. They give each thread about 64 items (a head has
// `rows`), but are at most half of the heads; more if their packed keys (`bytes` per head) fit in 4
// MiB.
inline int64_t wave_of(int64_t num_kv, int64_t rows, int64_t bytes) {
  const int64_t busy = 64 * num_threads() / std::max<int64_t>(rows, 1) + 1;
  const int64_t small = (int64_t{4} << 20) / std::max<int64_t>(bytes, 1);
  return std::max<int64_t>(1, std::min(num_kv, std::max(std::min(busy, (num_kv + 1) / 2), small)));
}

}  // namespace sparsering::cpu
