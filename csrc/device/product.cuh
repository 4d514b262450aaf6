// Divides indices and stores results for decode and gemv. A launch's arguments are in interface.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "few_rows.h"
#include "gate.cuh"
#include "types.cuh"

namespace fp4::device {

// Returns x / d for x < 2^31. The host computes d's multiplier and shift with set_divisor.
__device__ __forceinline__ int divide(uint32_t x, uint32_t mul, uint32_t shift) {
  return (__umulhi(x, mul) + x) >> shift;
}

// Computes the multiplier and the shift that divide() needs.
inline void set_divisor(uint32_t d, uint32_t& mul, uint32_t& shift) {
  shift = 0;
  while ((1u << shift) < d) ++shift;
  mul = static_cast<uint32_t>(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - d)) / d + 1);
}

// Returns a / b for a below 2^20, from the inverse of b.
__device__ __forceinline__ int divide_small(int a, float inverse) { return int((float(a) + 0.5f) * inverse); }

__device__ __forceinline__ void store_pair(void* p, int64_t i, float a, float b, DType type) {
  if (type == DType::kBFloat16) {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p) + i) = __floats2bfloat162_rn(a, b);
  } else if (type == DType::kFloat16) {
    *reinterpret_cast<half2*>(static_cast<__half*>(p) + i) = __floats2half2_rn(a, b);
  } else {
    *reinterpret_cast<float2*>(static_cast<float*>(p) + i) = make_float2(a, b);
  }
}

__device__ __forceinline__ void store_one(void* p, int64_t i, float a, DType type) {
  if (type == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(a);
  } else if (type == DType::kFloat16) {
    static_cast<__half*>(p)[i] = __float2half_rn(a);
  } else {
    static_cast<float*>(p)[i] = a;
  }
}

// Stores columns n and n + 1 of a row of the output, or the result of their gate.
__device__ __forceinline__ void store_product(const ProductParams& p, int64_t row, int n, float v0,
                                              float v1) {
  if (p.gate.act == Act::kNone) {
    store_pair(p.out, row * p.n + n, v0, v1, p.out_type);
  } else {
    store_one(p.out, (row * p.n + n) / 2, gate_value(p.gate, v0, v1), p.out_type);
  }
}

// Writes zeros to a row of the output, with `threads` threads.
__device__ __forceinline__ void clear_row(const ProductParams& p, int64_t row, int thread, int threads) {
  const int width = p.gate.act == Act::kNone ? p.n : p.n / 2;
  const int bytes = width * (p.out_type == DType::kFloat32 ? 4 : 2);
  auto* to = reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) + row * bytes);
  for (int i = thread; i < bytes / 16; i += threads) to[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace fp4::device
