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

// Most bytes of the sums of pieces that `in_runs` keeps; more would not make threads busier. Tests
// lower it.
extern "C" [[gnu::visibility("default")]] inline int64_t sparsering_bytes_of_pieces = int64_t{32}
                                                                                      << 20;

// Returns how many of `pieces` are summed at a time, if the sums of each take `bytes`.
inline int64_t pieces_at_once(int64_t pieces, int64_t bytes) {
  return std::min(pieces,
                  std::max<int64_t>(2, sparsering_bytes_of_pieces / std::max<int64_t>(bytes, 1)));
}

// Computes items in runs of consecutive ones, so that the sums of at most `most` pieces are in
// memory. The sums of a cut tile (a split) are added in order, whatever the runs are.
//
// Piece p of a run has slot p - first. run(begin, end, first) computes the items [begin, end). add
// (split, slot, count) adds the sums of `count` slots of a tile to the first of them; the caller
// passes several splits to share(count, body), for threads. put(split, slot) writes a whole sum,
// and keep(slot) moves one to slot 0 for the next run.
template <typename Item, typename Split, typename Run, typename Add, typename Share, typename Put,
          typename Keep>
void in_runs(const std::vector<Item>& items, const std::vector<Split>& splits, int64_t most,
             const Run& run, const Add& add, const Share& share, const Put& put, const Keep& keep) {
  int64_t first = 0, done = 0, split = 0;  // done: pieces that are computed
  for (size_t begin = 0, end = 0; begin < items.size(); begin = end) {
    for (; end < items.size() && items[end].piece - first < most; ++end) {
      done = std::max(done, items[end].piece + 1);
    }
    run(begin, end, first);
    const auto end_of = [&](int64_t i) { return splits[i].item.piece + splits[i].pieces; };
    const auto slot_of = [&](int64_t i) {
      return std::max(splits[i].item.piece - first, int64_t{0});
    };
    const int64_t from = split, count = splits.size();
    while (split < count && end_of(split) <= done) {
      ++split;
    }
    share(split - from, [&](int64_t i) {
      const int64_t slot = slot_of(from + i);
      add(splits[from + i], slot, end_of(from + i) - first - slot);
      put(splits[from + i], slot);
    });
    if (split < count && splits[split].item.piece < done) {  // the run ends inside of a tile
      const int64_t slot = slot_of(split);
      add(splits[split], slot, done - first - slot);
      keep(slot);
      first = done - 1;
    } else {
      first = done;
    }
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
