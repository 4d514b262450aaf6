// Linear layers of few rows: how a launch divides its products.
#pragma once

#include <optional>

#include "cuda/gpu.h"
#include "device/linears.h"

namespace fp4::cuda {

// Returns the division for these weights, rows and K on this GPU, or nothing if the kernels cannot run them.
std::optional<device::LinearsConfig> configure_linears(const device::LinearsParams& p, const Gpu& gpu);

}  // namespace fp4::cuda
