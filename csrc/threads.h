// Threads that live for one call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace grpo {

// Each thread calls work(next) once, where next() gives the next of `items`, or `items` when there
// is none left. Starting a thread takes tens of microseconds, a tile milliseconds; and there is no
// pool that would spin beside torch's, or be lost in a fork. Where the system starts no more of
// them, those that run do the work.
template <class Work>
void share(int64_t items, int64_t threads, const Work& work) {
  std::atomic<int64_t> taken{0};
  const auto next = [&] { return std::min(taken.fetch_add(1, std::memory_order_relaxed), items); };
  std::vector<std::thread> started;
  try {
    for (int64_t i = 1; i < std::min(threads, items); ++i) {
      started.emplace_back([&] { work(next); });
    }
  } catch (const std::system_error&) {
  }
  work(next);
  for (std::thread& thread : started) thread.join();
}

}  // namespace grpo
