// Constants of the cost model, fitted to measured times. Each family of kernels has built-in ones
// (fp4_ops/backends/*/constants.json). `python -m fp4_ops tune` measures those of the user's own GPU.
#pragma once

#include <string>

#include "cuda/gpu.h"

namespace fp4::cuda {

// Returns the constants that a plan for this GPU uses. The reference stays valid.
const PlannerConstants& constants_of(const Gpu& gpu);

// Sets the constants of GPUs of this name, for the kernels of a family. Returns their number for
// Gpu::constants.
int add_tuned(const std::string& device, KernelFamily family, const PlannerConstants& constants);

// Returns the number of the constants that were added last for GPUs of this name, or 0 if there are none.
int tuned_for(const std::string& device, KernelFamily family);

}  // namespace fp4::cuda
