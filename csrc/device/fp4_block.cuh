// Quantises and dequantises one block of FP4, bit for bit as csrc/cpu/quantize_row.h does.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>

namespace fp4::device {

// A block's scale. The originals are divided by `step`, and the rounded codes are multiplied by `value`. If
// `step` is zero, the block becomes zeros.
struct Fp4Scale {
  float value, step;

  // Returns the e2m1 value nearest to v / step (ties go to the even code), times `value`.
  __host__ __device__ __forceinline__ float quantized(float v) const {
    if (!(step > 0.f)) return 0.f;
    const float q = v / step, m = fminf(fabsf(q), 6.f);
    // e2m1 has steps of 0.5 below 2, of 1 below 4, and of 2 from there. An even multiple of the step is an
    // even code, so rintf, which rounds ties to even, does the same to codes.
    const float unit = m < 2.f ? 0.5f : m < 4.f ? 1.f : 2.f, inverse = m < 2.f ? 2.f : m < 4.f ? 1.f : 0.5f;
    return copysignf(rintf(m * inverse) * unit * value, q);
  }
};

__host__ __device__ __forceinline__ float nvfp4_global_scale(float row_max) {
  return row_max == 0.f ? 1.f : row_max / (6.f * 448.f);
}

__host__ __device__ __forceinline__ Fp4Scale nvfp4_scale(float block_max, float global) {
  const __nv_fp8_storage_t byte = __nv_cvt_float_to_fp8(block_max / 6.f / global, __NV_SATFINITE, __NV_E4M3);
  const float scale = __half2float(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3));
  return {scale, scale * global};
}

// 2^(floor(log2(block_max)) - 2), at least 2^-127.
__host__ __device__ __forceinline__ Fp4Scale mxfp4_scale(float block_max) {
  union {
    float number;
    uint32_t bits;
  } scale = {block_max};
  const int exponent = static_cast<int>(scale.bits >> 23) - 2;
  scale.bits = exponent > 0 ? static_cast<uint32_t>(exponent) << 23 : 0x00400000u;
  return {scale.number, scale.number};
}

}  // namespace fp4::device
