#include "cuda/gpu.h"

namespace fp4::cuda {
namespace {

constexpr double kReached = 0.9;          // of the memory's rate, by a copy: 3.02 of 3.35 TB/s on an H100
constexpr int kUnknownRate = 500 * 1000;  // where the driver does not tell the clock, as of shared memory

}  // namespace

Gpu gpu_of(const device::DeviceFacts& facts, KernelFamily family) {
  Gpu gpu{family, facts.sms, facts.shared_bytes, kUnknownRate};
  const double bytes_us = 2.0 * facts.memory_clock_khz * facts.memory_bus_bits / 8 / 1e3;  // at both edges
  if (bytes_us > 0) gpu.copy_rate = int(kReached * bytes_us);
  return gpu;
}

}  // namespace fp4::cuda
