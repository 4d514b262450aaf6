#include "cpu/parallel.h"

#include <sched.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>

namespace fp4::cpu {
namespace {

// A thread that waits looks so often before it lets others have its processor, each time: some microseconds.
constexpr int kSpins = 256;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One call of run_phases. A phase has as many shares as threads may take part. Each thread takes its own
// share first, the same part of a weight at each call, and then those that nobody has begun. So no thread
// waits for one that has not started: it may be late, or there may be fewer than were asked for.
class Region {
 public:
  Region(const std::vector<Phase>& phases, int64_t threads)
      : phases_(phases),
        threads_(threads),
        state_(new State[phases.size()]),
        taken_(new std::atomic<bool>[phases.size() * threads]()) {}

  // What one thread does, from the first phase to the last.
  void take_part(int64_t thread) {
    for (size_t p = 0; p < phases_.size(); ++p) {
      const int64_t shares = shares_of(phases_[p]);
      for (int64_t i = 0; i < shares; ++i) {
        const int64_t share = (thread + i) % shares;
        std::atomic<bool>& taken = taken_[p * threads_ + share];
        if (taken.load(std::memory_order_relaxed) || taken.exchange(true, std::memory_order_relaxed))
          continue;
        run(phases_[p], share, shares);
        state_[p].done.fetch_add(1, std::memory_order_release);
      }
      if (p + 1 == phases_.size()) break;  // the region's own end waits for the last
      while (state_[p].done.load(std::memory_order_acquire) < shares) wait();
    }
  }

  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  struct alignas(64) State {
    std::atomic<int64_t> done{0};
  };

  int64_t shares_of(const Phase& phase) const {
    return std::min(threads_, (phase.count + phase.grain - 1) / phase.grain);
  }

  void run(const Phase& phase, int64_t share, int64_t shares) {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      phase.run(phase.count * share / shares, phase.count * (share + 1) / shares);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }

  static void wait() {
    for (int i = 0; i < kSpins; ++i) relax();
    sched_yield();
  }

  const std::vector<Phase>& phases_;
  const int64_t threads_;
  const std::unique_ptr<State[]> state_;
  const std::unique_ptr<std::atomic<bool>[]> taken_;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace

void run_phases(const std::vector<Phase>& phases) {
  int64_t threads = 1;
  for (const Phase& p : phases) threads = std::max(threads, (p.count + p.grain - 1) / p.grain);
  if (threads > 1) threads = std::min<int64_t>(threads, torch::stable::get_num_threads());
  if (threads == 1) {
    for (const Phase& p : phases)
      if (p.count > 0) p.run(0, p.count);
    return;
  }
  Region region(phases, threads);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) { region.take_part(begin); });
  region.rethrow();
}

}  // namespace fp4::cpu
