// Threads that live for one call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace grpo {

// Takes numbers too small for fp32's normal range as 0, for as long as it lives. Of a peaked
// distribution most probabilities or their squares are such, each costs some hundred cycles, and
// those of a gradient would slow down the GEMMs that follow. (Elsewhere than on x86 they are fast.)
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushResults | kTakeAsZero); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlushResults = 0x8000, kTakeAsZero = 0x0040;
  unsigned before_;
#else
  FlushSubnormals() {}
  ~FlushSubnormals() {}
#endif
};

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
    const FlushSubnormals flushed;
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
