// The numbers by which dtypes and gates cross the C interface (fp4_ops/sm90/library.py, decode.py), how
// values of such a dtype are read, and what tensor cores multiply.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fp4::sm90 {

enum class DType : int { kFloat32, kBFloat16, kFloat16, kFloat8 };
enum class Act : int { kNone, kSilu, kGelu, kGeluTanh };
enum class Element { kE4m3, kFloat16, kBFloat16 };

// Not of kFloat8.
__device__ __forceinline__ float load_as_float(const void* p, int64_t i, DType type) {
  if (type == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  if (type == DType::kFloat16) return __half2float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

// An activation of meta/formats.py: f(gate) * up.
struct Gate {
  Act act;  // f; kNone: values as they are
  float alpha, limit, up_offset;
};

}  // namespace fp4::sm90
