// Converts e4m3 to fp16, exactly.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace fp4::device {

// Converts the lower two bytes.
__host__ __device__ __forceinline__ half2 e4m3_pair(uint32_t two) {
  return __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
}

}  // namespace fp4::device
