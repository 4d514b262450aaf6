// What every decode launch is given, and how its kernels store results.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "gate.cuh"
#include "types.cuh"

namespace fp4::sm90 {

enum class Routing : int { kOffs, kIds32, kIds64, kMasked, kDense };

struct ProductParams {
  const void* x;         // [rows / a_div, k] of x_type, row stride k (fp8: kp)
  const float* x_scale;  // one a row of x; null for ones (16-bit rows)
  const uint8_t* codes;  // layout sm90 or sm90_bf16
  const uint8_t* scales;
  const float* global_scale;  // [groups]
  const void* bias;           // [groups, n] of bias_type, or null
  void* out;                  // [rows, n], gated: [rows, n / 2]
  const void* route;          // offs [groups], ids [rows], or masked_m [groups]
  int rows, groups, n, k, kp;
  int a_div;  // row r of the output reads row r / a_div of x
  Routing routing;
  DType x_type, out_type, bias_type;
  Gate gate;        // gated: rows 2i and 2i + 1 of the weight are gate i and up i
  int scale_block;  // K that share a scale: 16 or 32
  bool early;       // the routing was known before the previous kernel began
  bool bf16_words;  // the weights are of layout sm90_bf16, for bfloat16 rows; else of sm90
  uint32_t grid_mul, grid_shift, a_div_mul, a_div_shift;  // to divide by the grid and a_div
};

constexpr int kTileRows = 16;    // of a weight, which a warp multiplies at a time
constexpr int kChunk = 8;        // activation rows that share an instruction's weights
constexpr int kSliceSteps = 4;   // 64-steps of K that a warp takes at a time
constexpr int kStepCodes = 512;  // bytes of 16 rows by 64 k

// x / d for x < 2^31, with the d's multiplier and shift from the host.
__device__ __forceinline__ int divide(uint32_t x, uint32_t mul, uint32_t shift) {
  return (__umulhi(x, mul) + x) >> shift;
}

// A multiplier and a shift for it.
inline void set_divisor(uint32_t d, uint32_t& mul, uint32_t& shift) {
  shift = 0;
  while ((1u << shift) < d) ++shift;
  mul = static_cast<uint32_t>(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - d)) / d + 1);
}

// a / b for a below 2^20, with the inverse of b.
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

// Columns n and n + 1 of a row of the output, or what their gate makes of them.
__device__ __forceinline__ void store_product(const ProductParams& p, int64_t row, int n, float v0,
                                              float v1) {
  if (p.gate.act == Act::kNone) {
    store_pair(p.out, row * p.n + n, v0, v1, p.out_type);
  } else {
    store_one(p.out, (row * p.n + n) / 2, gate_value(p.gate, v0, v1), p.out_type);
  }
}

// A row of the output, by so many threads.
__device__ __forceinline__ void clear_row(const ProductParams& p, int64_t row, int thread, int threads) {
  const int width = p.gate.act == Act::kNone ? p.n : p.n / 2;
  const int bytes = width * (p.out_type == DType::kFloat32 ? 4 : 2);
  auto* to = reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) + row * bytes);
  for (int i = thread; i < bytes / 16; i += threads) to[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace fp4::sm90
