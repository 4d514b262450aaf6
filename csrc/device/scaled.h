// The arguments that products of FP4 or e4m3 rows by FP4 weights have in common (csrc/sm100, csrc/sm120).
// fp4_ops/backends/launchers/scaled.py has the same fields in the same order.
#pragma once

#include "interface.h"

namespace fp4::device {

// out[r, n] = global_scale[g] * x_factor[r] * sum_k w[g, n, k] * x[r, k] + bias[g, n]. Rows and codes have
// layout plain, and so have their scales where the header of a kernel says nothing else.
//
// With k_ends, groups lie along K. Then `codes` is one matrix [n, k / 2], and its rows of scales have
// x_scale_bytes. out [groups, m, n] has in group g the sums over k_ends[g - 1] <= k < k_ends[g], from 0 on
// for the first group. Ends are k or multiples of a block of scales. The mode is kDense, and there is no
// bias.
struct ScaledProduct {
  const uint8_t* x = nullptr;           // [rows, k / 2], or [rows, k] of e4m3
  const uint8_t* x_scales = nullptr;    // [rows, x_scale_bytes], of which k / scale block count; see x_fp8
  const float* x_factor = nullptr;      // [rows], or null: ones
  const uint8_t* codes = nullptr;       // [groups, n, k / 2]
  const uint8_t* scales = nullptr;      // of the weights
  const float* global_scale = nullptr;  // [groups], or null: ones
  const void* bias = nullptr;           // [groups, n] of bias_type, or null
  void* out = nullptr;                  // [rows, n] of out_type. Rows of no group become zeros
  const int32_t* group_rows = nullptr;  // as in Rows
  const int32_t* k_ends = nullptr;      // [groups], or null
  void* stream = nullptr;
  int m = 0, groups = 0, n = 0, k = 0;  // m: all rows; masked: rows of every group
  int x_scale_bytes = 0;                // bytes of a row of x_scales
  int nvfp4 = 1;                        // or mxfp4
  int config = -1;                      // number of a candidate; -1: the one that the sizes suggest
  RowMode mode = RowMode::kDense;
  DType out_type = DType::kFloat32, bias_type = DType::kFloat32;
  int x_fp8 = 0;  // rows are e4m3 with scales of mxfp4, or of null: ones
};

}  // namespace fp4::device
