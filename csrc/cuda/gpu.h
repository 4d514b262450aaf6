// Properties of a GPU that the planner uses. Needs neither torch nor CUDA.
#pragma once

#include "device/interface.h"
#include "kernel_libraries.h"

namespace fp4::cuda {

// Which kernels run there: a family of kKernelLibraries, or none. Those that code here tells apart have
// names.
enum class KernelFamily : int { kNone = 0, kHopper = 90 };

// What is known of a family; null for none.
const KernelLibrary* library_of(KernelFamily family);

struct Gpu {
  KernelFamily family = KernelFamily::kHopper;
  int sms = 0;                    // multiprocessors
  int shared_bytes = 227 * 1024;  // that a thread block may have
  int copy_rate = 0;              // bytes a microsecond that kernels which only copy reach
  int constants = 0;              // of the cost model: 0 for those built in, else as constants.h counts them

  bool hopper() const { return family == KernelFamily::kHopper; }
};

Gpu gpu_of(const device::DeviceFacts& facts, KernelFamily family);

}  // namespace fp4::cuda
