#include "cpu/parallel.h"

#include <torch/csrc/stable/ops.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
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

// One phase, divided into a share for each of `threads` threads. A thread gets the same share of a weight at
// each call.
class Shares {
 public:
  Shares(const Phase& phase, int64_t threads)
      : phase_(phase), threads_(threads), parts_(std::min(phase.count, threads * kParts)), next_(threads) {}

  // Runs the thread's own share, then parts that other threads have not begun.
  void take_part(int64_t thread) {
    for (int64_t i = 0; i < threads_; ++i) run_share((thread + i) % threads_);
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  void run_share(int64_t thread) {
    const int64_t begin = parts_ * thread / threads_, end = parts_ * (thread + 1) / threads_;
    std::atomic<int64_t>& next = next_[thread].value;
    while (next.load(std::memory_order_relaxed) < end - begin) {
      const int64_t part = begin + next.fetch_add(1, std::memory_order_relaxed);
      if (part < end) phase_.run(phase_.count * part / parts_, phase_.count * (part + 1) / parts_);
    }
  }

  const Phase& phase_;
  const int64_t threads_, parts_;
  std::vector<Counter> next_;  // by thread
};

}  // namespace

int64_t num_threads() {
  static const int64_t processors = count_processors();
  return std::min<int64_t>(torch::stable::get_num_threads(), processors);
}

void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  const std::function<void(int64_t begin, int64_t end)>& body) {
  std::exception_ptr first;
  std::mutex mutex;
  const int64_t threads = num_threads();
  grain = std::max(grain, (end - begin + threads - 1) / threads);
  torch::stable::parallel_for(begin, end, grain, [&](int64_t from, int64_t to) {
    try {
      body(from, to);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
  });
  if (first) std::rethrow_exception(first);
}

void run_phases(const std::vector<Phase>& phases) {
  for (const Phase& p : phases) {
    if (p.count == 0) continue;
    const int64_t shares = (p.count + p.grain - 1) / p.grain;
    const int64_t threads = shares > 1 ? std::min<int64_t>(shares, num_threads()) : 1;
    if (threads == 1) {
      p.run(0, p.count);
      continue;
    }
    Shares all(p, threads);
    parallel_for(0, threads, 1, [&](int64_t begin, int64_t) { all.take_part(begin); });
  }
}

}  // namespace fp4::cpu
