// Threads that live for one call.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace grpo {

// Treats subnormal numbers as 0 during its lifetime. In a peaked distribution most probabilities,
// or their squares, are subnormal. Each costs about a hundred cycles, and subnormal gradients would
// slow down the following GEMMs. (Subnormals are only slow on x86.)
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

// The number of threads started so far, for tests.
inline std::atomic<int64_t> threads_started{0};

// The threads of one call. Starting one costs tens of microseconds, a tile milliseconds. There is
// no pool, which would spin next to torch's pool, or get lost in a fork.
class Team {
 public:
  // Each of `threads` calls work(team) once. If the system cannot start more threads, the running
  // ones do the work. If one throws std::bad_alloc, this rethrows it after all have ended.
  template <class Work>
  static void run(int64_t threads, const Work& work) {
    Team team(std::max<int64_t>(threads, 1));
    std::vector<std::thread> started;
    try {
      while (int64_t(started.size()) + 1 < threads) {
        started.emplace_back([&] { team.take_part(work); });
        ++threads_started;
      }
    } catch (const std::system_error&) {
    } catch (const std::bad_alloc&) {
    }
    team.leave(std::max<int64_t>(threads, 1) - 1 - int64_t(started.size()));
    team.take_part(work);
    for (std::thread& thread : started) thread.join();
    if (team.starved_) throw std::bad_alloc();
  }

  // The next of `items` since the last meeting, or `items` if none is left.
  int64_t next(int64_t items) {
    return std::min(taken_.fetch_add(1, std::memory_order_relaxed), items);
  }

  // Returns after every thread has called it. Throws std::bad_alloc if one of them did.
  void meet() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t meeting = meetings_;
    ++present_;
    end_meeting_if_complete();
    complete_.wait(lock, [&] { return meetings_ != meeting; });
    if (starved_) throw std::bad_alloc();
  }

 private:
  explicit Team(int64_t members) : members_(members) {}

  template <class Work>
  void take_part(const Work& work) {
    try {
      work(*this);
    } catch (const std::bad_alloc&) {
      starved_ = true;
      leave(1);
    }
  }

  // Meetings no longer wait for `count` of the members.
  void leave(int64_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    members_ -= count;
    end_meeting_if_complete();
  }

  void end_meeting_if_complete() {
    if (present_ < members_) return;
    present_ = 0;
    taken_ = 0;
    ++meetings_;
    complete_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable complete_;
  int64_t members_, present_ = 0, meetings_ = 0;
  std::atomic<int64_t> taken_{0};
  std::atomic<bool> starved_{false};
};

}  // namespace grpo
