// Constants of the cost model, fitted to measured times. Each family of kernels has built-in ones
// (fp4_ops/backends/*/constants.json). `python -m fp4_ops tune` measures those of the user's own GPU.
#pragma once

#include <string>

#include "cuda/gpu.h"

namespace fp4::cuda {

// Those that a plan for this GPU uses. They never move.
const PlannerConstants& constants_of(const Gpu& gpu);

// From now on GPUs of this name have these constants for kernels of a family. Returns their number, as
// Gpu::constants has it.
int add_tuned(const std::string& device, KernelFamily family, const PlannerConstants& constants);

// The number of those that were added last for GPUs of this name; 0 for none.
int tuned_for(const std::string& device, KernelFamily family);

}  // namespace fp4::cuda
