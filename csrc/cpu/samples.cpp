// Short runs of bytes at many addresses, read or compared with what they held: how a changed weight is noticed.
//
// A plain C interface for ctypes: addresses of tensors' insides are no operands of an operator.

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kRun = 64;  // the most bytes of one run; those held are this far apart
constexpr int64_t kAhead = 12;  // runs asked for before they are compared: each may be a miss of every cache
constexpr int64_t kRunsPerThread = 4096;

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void fp4_samples_read(const uint8_t* const* at, const int64_t* bytes, int64_t runs, uint8_t* held) {
  for (int64_t i = 0; i < runs; ++i) std::memcpy(held + i * kRun, at[i], bytes[i]);
}

// Whether any run holds other bytes now.
EXPORT int fp4_samples_differ(const uint8_t* const* at, const int64_t* bytes, int64_t runs, const uint8_t* held) {
  std::atomic<bool> found{false};
  const auto compare = [&](int64_t begin, int64_t end) {
    bool differs = false;
    for (int64_t i = begin; i < end && !differs; ++i) {
      __builtin_prefetch(at[i + kAhead < end ? i + kAhead : i]);
      differs = bytes[i] == kRun ? std::memcmp(at[i], held + i * kRun, kRun) != 0
                                 : std::memcmp(at[i], held + i * kRun, bytes[i]) != 0;
    }
    if (differs) found = true;
  };
  if (runs < 2 * kRunsPerThread)
    compare(0, runs);
  else
    torch::stable::parallel_for(0, runs, kRunsPerThread, compare);
  return found;
}
