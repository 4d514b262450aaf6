// C interface of the products of FP4 rows by FP4 weights on GPUs of compute capability 12.x, beside
// device/interface.h. fp4_ops/backends/launchers/scaled.py has the same struct.
#pragma once

#include "../device/scaled.h"

namespace fp4::sm120 {

// Row r of the output reads row s / a_div of x, x_scales and x_factor. Here s is r, or with sorted_rows the
// row at position r. Scales of weights are [groups, n, k / scale block]. Pointers are 16-byte aligned.
struct ScaledArguments : device::ScaledProduct {
  const int32_t* sorted_rows = nullptr;  // contiguous: the row at each sorted position. Null: the identity
  int a_div = 1;
};

}  // namespace fp4::sm120

extern "C" {

// Returns 0, a cudaError_t or a LaunchError. k must be a multiple of 64, n of 8, x_scale_bytes of 4.
int fp4_kernel_scaled(const fp4::sm120::ScaledArguments* arguments);
int fp4_kernel_scaled_configs();
const char* fp4_kernel_scaled_config_name(int config);
}
