// Properties of a GPU that the planner uses. Needs neither torch nor CUDA.
#pragma once

#include "device/interface.h"
#include "kernel_libraries.h"

namespace fp4::cuda {

// The family of kernels that the GPU runs: one of kKernelLibraries, or none. Only families that this code
// treats specially have names.
enum class KernelFamily : int { kNone = 0, kHopper = 90 };

// The properties of a family. Null for kNone.
const KernelLibrary* library_of(KernelFamily family);

struct Gpu {
  KernelFamily family = KernelFamily::kHopper;
  int sms = 0;                    // multiprocessors
  int shared_bytes = 227 * 1024;  // the most shared memory of a thread block
  int copy_rate = 0;              // rate of kernels that only copy, in bytes a microsecond
  int constants = 0;              // of the cost model. 0: built in; else the number that add_tuned returned

  bool hopper() const { return family == KernelFamily::kHopper; }
};

Gpu gpu_of(const device::DeviceFacts& facts, KernelFamily family);

}  // namespace fp4::cuda
