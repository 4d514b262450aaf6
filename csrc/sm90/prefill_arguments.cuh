// What a launch of a prefill kernel is told (fp4_ops/sm90/prefill.py).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "prefill_schedule.cuh"
#include "types.cuh"

namespace fp4::sm90 {

// One launch. Pointers are device pointers, 16-byte aligned.
struct PrefillArguments {
  const void* x;         // [rows, k] of the kernel's element, in the order that it takes
  const float* x_scale;  // [rows]
  const void *codes, *scales;
  const float* global_scale;  // [groups]
  const void* bias;           // [groups, n] of bias_type, or null
  void* out;                  // [rows, n] of out_type, gated: [rows, n / 2]
  const int32_t* group_rows;  // as in Rows
  void* workspace;            // of fp4_sm90_prefill_workspace bytes
  int m, groups, n;
  int k, kp;  // the columns of x, which may be fewer than the weights': zeros follow
  RowMode mode;
  DType out_type, bias_type;
  Gate gate;
  bool early;  // of what is read, the kernel launched before makes x and x_scale at most: weights need not
               // wait
  int config;  // a candidate; -1: the one that `choose` takes
  cudaStream_t stream;
};

}  // namespace fp4::sm90
