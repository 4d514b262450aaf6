// C interface of the products of NVFP4 rows by NVFP4 weights on GPUs of compute capability 10.x, beside
// device/interface.h. fp4_ops/backends/launchers/scaled_sm100.py has the same struct.
#pragma once

#include "../device/interface.h"

namespace fp4::sm100 {

// out[r, n] = global_scale[g] * x_factor[r] * sum_k w[g, n, k] * x[r, k] + bias[g, n]. Rows and codes have
// layout plain. A row of x that has a scale with a sign becomes NaN. Scales of weights must have no sign.
//
// Scales of the weights are in blocks of 512 bytes for 128 rows and 64 K: byte 16 (r % 32) + 4 (r / 32) + s
// is scale s of row r. The blocks are [groups, ceil(n / 128), k / 64], and rows that do not exist have scales
// 0. This is how torch.nn.functional.scaled_mm takes them (SwizzleType.SWIZZLE_32_4_4).
struct ProductArguments {
  const void* x = nullptr;              // [rows, k / 2]
  const void* x_scales = nullptr;       // [rows, x_scale_bytes], of which k / 16 count
  const float* x_factor = nullptr;      // [rows], or null: ones
  const void* codes = nullptr;          // [groups, n, k / 2]
  const void* scales = nullptr;         // blocks
  const float* global_scale = nullptr;  // [groups], or null: ones
  const void* bias = nullptr;           // [groups, n] of bias_type, or null
  void* out = nullptr;                  // [rows, n] of out_type. Rows of no group become zeros
  const int32_t* group_rows = nullptr;  // as in Rows
  void* stream = nullptr;
  int m = 0, groups = 0, n = 0, k = 0;  // m: all rows; masked: rows of every group
  int x_scale_bytes = 0;
  int config = -1;  // number of a candidate; -1: the one that the sizes suggest
  device::RowMode mode = device::RowMode::kDense;
  device::DType out_type = device::DType::kFloat32, bias_type = device::DType::kFloat32;
};

}  // namespace fp4::sm100

extern "C" {

// Returns 0, a cudaError_t, or a negative number: -1 if the kernels cannot run these sizes (k a multiple of
// 64, n of 8, x_scale_bytes of 16, pointers of 16 bytes), -2 if the driver makes no tensor maps.
int fp4_kernel_products(const fp4::sm100::ProductArguments* arguments);
int fp4_kernel_products_configs();
const char* fp4_kernel_products_config_name(int config);
}
