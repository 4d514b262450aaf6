#include "cuda/gpu.h"

#include "cuda/constants.h"

namespace fp4::cuda {

const KernelLibrary* library_of(KernelFamily family) {
  for (const KernelLibrary& library : kKernelLibraries)
    if (library.family == int(family)) return &library;
  return nullptr;
}

Gpu gpu_of(const device::DeviceFacts& facts, KernelFamily family) {
  Gpu gpu{family, facts.sms, facts.shared_bytes};
  const PlannerConstants& constants = constants_of(gpu);
  gpu.copy_rate = int(constants.unknown_copy_rate);  // kept if the driver does not report the clock
  const double bytes_us =
      2.0 * facts.memory_clock_khz * facts.memory_bus_bits / 8 / 1e3;  // two transfers a clock
  if (bytes_us > 0) gpu.copy_rate = int(constants.copy_share * bytes_us);
  return gpu;
}

}  // namespace fp4::cuda
