#include "cpu/parallel.h"

#include <sched.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <exception>

namespace fp4::cpu {
namespace {

// A thread's work comes in so many parts, so that others can take some from one that is late.
constexpr int64_t kParts = 4;

// A thread that waits looks so often before it helps those that are late, and then before it lets others have
// its processor, each time: some microseconds.
constexpr int kPatience = 1024, kSpins = 256;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The threads for which a phase has work.
int64_t owners(const Phase& phase, int64_t threads) {
  return std::min(threads, (phase.count + phase.grain - 1) / phase.grain);
}

// One call of run_phases. A thread does the parts that are its own, the same of a weight at each call. When
// it has waited for the others a little while it takes what nobody has begun. So no thread waits for one that
// has not started: it may be late, or there may be fewer than were asked for.
class Region {
 public:
  Region(const Phase* phases, size_t count, int64_t threads)
      : phases_(phases),
        count_(count),
        threads_(threads),
        done_(count),
        ended_(count),
        next_(count * threads) {}

  // What one thread does, from the first phase to the last, in place of the threads [begin, end).
  void take_part(int64_t begin, int64_t end) {
    for (size_t p = 0; p < count_; ++p) {
      if (p > 0) wait_for(p - 1, begin);
      for (int64_t owner = begin; owner < std::min(end, owners_of(p)); ++owner) run_parts_of(p, owner);
    }
    if (begin == 0) wait_for(count_ - 1, 0);
  }

  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  int64_t owners_of(size_t p) const { return owners(phases_[p], threads_); }
  int64_t parts_of(size_t p) const { return std::min(phases_[p].count, owners_of(p) * kParts); }

  // Those of an owner's parts that nobody has begun.
  void run_parts_of(size_t p, int64_t owner) {
    const Phase& phase = phases_[p];
    const int64_t owners = owners_of(p), parts = parts_of(p);
    const int64_t begin = parts * owner / owners, end = parts * (owner + 1) / owners;
    std::atomic<int64_t>& next = next_[p * threads_ + owner].value;
    int64_t done = 0;
    while (next.load(std::memory_order_relaxed) < end - begin) {
      const int64_t part = begin + next.fetch_add(1, std::memory_order_relaxed);
      if (part >= end) break;
      run(phase, phase.count * part / parts, phase.count * (part + 1) / parts);
      ++done;
    }
    // Those who wait look elsewhere, so that this line goes only from one that ends to the next.
    if (done > 0 && done_[p].value.fetch_add(done, std::memory_order_acq_rel) + done == parts)
      ended_[p].value.store(1, std::memory_order_release);
  }

  void run(const Phase& phase, int64_t begin, int64_t end) {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      phase.run(begin, end);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }

  void wait_for(size_t p, int64_t thread) {
    const bool empty = phases_[p].count == 0;
    const auto ended = [&] { return empty || ended_[p].value.load(std::memory_order_acquire) != 0; };
    if (p + 1 < count_ && !ended()) {
      const Phase& next = phases_[p + 1];
      const int64_t owners = owners_of(p + 1);
      if (next.ahead != nullptr && thread < owners)
        next.ahead(next.count * thread / owners, next.count * (thread + 1) / owners);
    }
    for (int i = 1; !ended(); ++i) {
      relax();
      if (i == kPatience)
        for (int64_t owner = 0; owner < owners_of(p); ++owner) run_parts_of(p, owner);
      if (i % kSpins == 0) sched_yield();
    }
  }

  const Phase* const phases_;
  const size_t count_;
  const int64_t threads_;
  std::vector<Counter> done_, ended_, next_;  // parts of each phase; whether all; of each phase and owner
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace

void run_phases(const std::vector<Phase>& phases) {
  const auto whole = [](const Phase& p) {
    if (p.count > 0) p.run(0, p.count);
  };
  // What one thread does at the beginning or the end needs no region.
  const auto shared = [](const Phase& p) { return p.count > p.grain; };
  const auto first = std::find_if(phases.begin(), phases.end(), shared);
  const auto last = std::find_if(phases.rbegin(), phases.rend(), shared).base();
  int64_t threads = 1;
  if (first != phases.end()) threads = torch::stable::get_num_threads();
  if (threads == 1) {
    std::for_each(phases.begin(), phases.end(), whole);
    return;
  }
  int64_t wanted = 1;
  for (const Phase& p : phases) wanted = std::max(wanted, owners(p, threads));

  std::for_each(phases.begin(), first, whole);
  Region region(&*first, last - first, wanted);
  torch::stable::parallel_for(0, wanted, 1,
                              [&](int64_t begin, int64_t end) { region.take_part(begin, end); });
  region.rethrow();
  std::for_each(last, phases.end(), whole);
}

}  // namespace fp4::cpu
