// C interface of the products of FP4 rows by FP4 weights on GPUs of compute capability 12.x, beside
// device/interface.h. fp4_ops/backends/launchers/scaled.py has the same struct.
#pragma once

#include "../device/interface.h"

namespace fp4::sm120 {

// out[r, n] = global_scale[g] * x_factor[s] * sum_k w[g, n, k] * x[s, k] + bias[g, n], where s = r / a_div.
// Codes and scales have layout plain. Pointers are 16-byte aligned.
struct ScaledArguments {
  const void* x = nullptr;               // [.., k / 2]
  const void* x_scales = nullptr;        // [.., x_scale_bytes]
  const float* x_factor = nullptr;       // [..], or null: ones
  const void* codes = nullptr;           // [groups, n, k / 2]
  const void* scales = nullptr;          // [groups, n, k / scale block]
  const float* global_scale = nullptr;   // [groups], or null: ones
  const void* bias = nullptr;            // [groups, n] of bias_type, or null
  void* out = nullptr;                   // [rows, n] of out_type. Rows of no group become zeros
  const int32_t* group_rows = nullptr;   // as in Rows
  const int32_t* sorted_rows = nullptr;  // contiguous: the row at each sorted position. Null: the identity
  void* stream = nullptr;
  int m = 0, groups = 0, n = 0, k = 0;  // m: all rows; masked: rows of every group
  int a_div = 1;
  int x_scale_bytes = 0;  // bytes of a row of x_scales
  int nvfp4 = 1;          // or mxfp4
  int config = -1;        // number of a candidate; -1: the one that the sizes suggest
  device::RowMode mode = device::RowMode::kDense;
  device::DType out_type = device::DType::kFloat32, bias_type = device::DType::kFloat32;
};

}  // namespace fp4::sm120

extern "C" {

// Returns 0, a cudaError_t, or -1 if the kernels cannot run these sizes: k a multiple of 64, n of 8,
// x_scale_bytes of 4.
int fp4_kernel_scaled(const fp4::sm120::ScaledArguments* arguments);
int fp4_kernel_scaled_configs();
const char* fp4_kernel_scaled_config_name(int config);
}
