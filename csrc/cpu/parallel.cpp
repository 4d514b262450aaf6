#include "cpu/parallel.h"

#include <torch/csrc/stable/ops.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>

#include "cpu_constants.h"

namespace fp4::cpu {
namespace {

// A thread's share of a phase has this number of parts, so that other threads can take parts of a slow
// thread. Processors of a virtual machine may run at half the speed of others for a while.
constexpr int64_t kParts = fitted::threads::parts_of_share;

// The processor time that the container may use, in processors, or 0 without a limit. Tries cgroup v2, then
// v1.
double quota() {
  std::string most;
  double period = 0;
  if (std::ifstream("/sys/fs/cgroup/cpu.max") >> most >> period)
    return most == "max" || period <= 0 ? 0 : std::atof(most.c_str()) / period;
  double used = 0;
  std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> used;
  std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  return used > 0 && period > 0 ? used / period : 0;
}

// The number of processors that this process may use, at the time of the call.
int64_t count_processors() {
  int64_t count = std::max(1u, std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) count = CPU_COUNT(&set);
#endif
  const double limit = quota();
  return limit > 0 ? std::min<int64_t>(count, std::max<int64_t>(1, std::llround(limit))) : count;
}

// Tells the processor that this thread waits for another one.
void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A waiting thread pauses this number of times, for about a millisecond, before it offers its processor to
// others. With 1000, a tenth of the calls of two threads took three times as long.
constexpr int kPauses = 20000;

// One phase, divided into a share for each of `threads` threads. A thread gets the same share of a weight at
// each call.
class Shares {
 public:
  Shares(const Phase& phase, int64_t threads)
      : phase_(phase), threads_(threads), parts_(std::min(phase.count, threads * kParts)), next_(threads) {}

  // Runs the thread's own share, then parts that other threads have not begun. Calls failed() in the handler
  // of a part that throws.
  template <typename F>
  void take_part(int64_t thread, const F& failed) {
    int64_t ran = 0;
    for (int64_t i = 0; i < threads_; ++i) ran += run_share((thread + i) % threads_, failed);
    ended_.value.fetch_add(ran, std::memory_order_release);
  }

  // Waits until all parts have ended. It waits for parts, not for threads, and each part has begun. So it
  // ends with any number of threads, and with threads that come late.
  void wait() const {
    for (int paused = 0; ended_.value.load(std::memory_order_acquire) < parts_;)
      if (paused < kPauses)
        pause(), ++paused;
      else
        std::this_thread::yield();
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  // Returns the number of parts that it ran.
  template <typename F>
  int64_t run_share(int64_t thread, const F& failed) {
    const int64_t begin = parts_ * thread / threads_, end = parts_ * (thread + 1) / threads_;
    std::atomic<int64_t>& next = next_[thread].value;
    int64_t ran = 0;
    while (next.load(std::memory_order_relaxed) < end - begin) {
      const int64_t part = begin + next.fetch_add(1, std::memory_order_relaxed);
      if (part >= end) break;
      ++ran;
      try {
        phase_.run(phase_.count * part / parts_, phase_.count * (part + 1) / parts_);
      } catch (...) {
        failed();
      }
    }
    return ran;
  }

  const Phase& phase_;
  const int64_t threads_, parts_;
  std::vector<Counter> next_;  // by thread
  Counter ended_;
};

// The first exception of several threads.
class FirstException {
 public:
  // Called in a handler.
  void keep() {
    const std::lock_guard lock(mutex_);
    if (!first_) first_ = std::current_exception();
    any_.store(true, std::memory_order_relaxed);
  }
  bool any() const { return any_.load(std::memory_order_relaxed); }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
  std::atomic<bool> any_{false};
};

// The number of threads that are worth waking for a phase.
int64_t threads_of(const Phase& p) {
  const int64_t shares = (p.count + p.grain - 1) / p.grain;
  return shares > 1 ? std::min(shares, num_threads()) : 1;
}

}  // namespace

int64_t num_threads() {
  static const int64_t processors = count_processors();
  return std::min<int64_t>(torch::stable::get_num_threads(), processors);
}

void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  const std::function<void(int64_t begin, int64_t end)>& body) {
  FirstException exception;
  const int64_t threads = num_threads();
  grain = std::max(grain, (end - begin + threads - 1) / threads);
  torch::stable::parallel_for(begin, end, grain, [&](int64_t from, int64_t to) {
    try {
      body(from, to);
    } catch (...) {
      exception.keep();
    }
  });
  exception.rethrow();
}

void run_phases(const std::vector<Phase>& phases) {
  int64_t most = 1;
  for (const Phase& p : phases) most = std::max(most, threads_of(p));
  if (most == 1) {
    for (const Phase& p : phases)
      if (p.count > 0) p.run(0, p.count);
    return;
  }
  std::deque<Shares> all;
  for (const Phase& p : phases)
    if (p.count > 0) all.emplace_back(p, threads_of(p));
  // One region for all phases: to begin and end one takes 4 us with 16 threads, to wait for a phase takes
  // less than 1.
  FirstException exception;
  torch::stable::parallel_for(0, most, 1, [&](int64_t thread, int64_t) {
    for (Shares& shares : all) {
      shares.take_part(thread, [&] { exception.keep(); });
      if (&shares == &all.back()) return;
      shares.wait();
      if (exception.any()) return;
    }
  });
  exception.rethrow();
}

}  // namespace fp4::cpu
