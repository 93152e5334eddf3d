// Threads that live for one call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace grpo {

// Each thread calls work(next) once, where next() gives the next of `items`, or `items` when there
// is none left. Starting a thread takes tens of microseconds, a tile milliseconds; and there is no
// pool that would spin beside torch's, or be lost in a fork. Where the system starts no more of
// them, those that run do the work. Throws std::bad_alloc, once all have ended, if one of them did.
template <class Work>
void share(int64_t items, int64_t threads, const Work& work) {
  std::atomic<int64_t> taken{0};
  const auto next = [&] { return std::min(taken.fetch_add(1, std::memory_order_relaxed), items); };
  std::atomic<bool> starved{false};
  const auto run = [&] {
    try {
      work(next);
    } catch (const std::bad_alloc&) {
      starved = true;
    }
  };
  std::vector<std::thread> started;
  try {
    for (int64_t i = 1; i < std::min(threads, items); ++i) started.emplace_back(run);
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  run();
  for (std::thread& thread : started) thread.join();
  if (starved) throw std::bad_alloc();
}

}  // namespace grpo
