// Reads values of a dtype, and names the type that tensor cores multiply.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "interface.h"

namespace fp4::device {

enum class Element { kE4m3, kFloat16, kBFloat16, kInt8 };

// Loads element i as a float. `type` is not kFloat8.
__device__ __forceinline__ float load_as_float(const void* p, int64_t i, DType type) {
  if (type == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  if (type == DType::kFloat16) return __half2float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

}  // namespace fp4::device
