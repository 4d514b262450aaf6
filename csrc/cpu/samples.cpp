// Hashes short runs of bytes at many addresses, to detect that a weight has changed.
//
// It has a plain C interface for ctypes, because addresses inside tensors cannot be operands of an operator.

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>

#include "cpu_constants.h"

namespace {

constexpr int64_t kRun = 64;                                       // the most bytes of one run
constexpr int64_t kAhead = fp4::cpu::fitted::samples::runs_ahead;  // runs prefetched before they are read:
                                                                   // each may be a miss of every cache
constexpr int64_t kRunsPerThread = fp4::cpu::fitted::samples::runs_per_thread;

uint64_t number(const uint8_t* at, int64_t bytes) {
  uint64_t words[kRun / 8] = {};
  if (bytes == kRun)
    std::memcpy(words, at, kRun);
  else
    std::memcpy(words, at, bytes);
  uint64_t hash = 0x9E3779B97F4A7C15u;
  for (const uint64_t word : words) {
    hash = (hash ^ word) * 0xD6E8FEB86659FD93u;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void fp4_runs_read(const uint8_t* const* at, const int64_t* bytes, int64_t runs, uint64_t* held) {
  for (int64_t i = 0; i < runs; ++i) held[i] = number(at[i], bytes == nullptr ? kRun : bytes[i]);
}

// True if any run has changed. `bytes` may be null: then all runs have kRun bytes.
EXPORT int fp4_runs_differ(const uint8_t* const* at, const int64_t* bytes, int64_t runs,
                           const uint64_t* held) {
  std::atomic<bool> found{false};
  const auto compare = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && i < begin + kAhead; ++i) __builtin_prefetch(at[i]);
    bool differs = false;
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) __builtin_prefetch(at[i + kAhead]);
      differs |= number(at[i], bytes == nullptr ? kRun : bytes[i]) != held[i];
    }
    if (differs) found = true;
  };
  if (runs >= 2 * kRunsPerThread) {
    try {
      torch::stable::parallel_for(0, runs, kRunsPerThread, compare);
      return found;
    } catch (const std::exception&) {  // an exception of torch's threads must not leave through ctypes
    }
  }
  compare(0, runs);
  return found;
}

// Polls a number that a GPU writes until its last 40 bits are at least `least`, or until `nanoseconds` have
// passed. Returns the number.
EXPORT int64_t fp4_await(const int64_t* at, int64_t least, int64_t nanoseconds) {
  using Clock = std::chrono::steady_clock;
  const auto seen = [at] { return __atomic_load_n(at, __ATOMIC_ACQUIRE); };
  const auto enough = [least](int64_t number) { return (number & ((int64_t{1} << 40) - 1)) >= least; };
  const Clock::time_point end = Clock::now() + std::chrono::nanoseconds(nanoseconds);
  int64_t number = seen();
  while (!enough(number) && Clock::now() < end) {
    for (int look = 0; look < 32 && !enough(number); ++look) number = seen();
  }
  return number;
}
