// Rows in registers: one block a row, sixteen consecutive values a thread at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "gate.cuh"

namespace fp4::sm90 {

constexpr int kRowThreads = 128;
constexpr int kRowValues = 16;

struct Gate {
  Act act;  // kNone: the row as it is
  int interleaved;
  float alpha, limit, up_offset;
};

template <typename T>
__device__ __forceinline__ void load_values(const T* from, float (&v)[kRowValues]) {
  constexpr int kEach = 16 / sizeof(T);
#pragma unroll
  for (int h = 0; h < kRowValues / kEach; ++h) {
    const uint4 u = reinterpret_cast<const uint4*>(from)[h];
    const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        v[4 * h + i] = __uint_as_float(w[i]);
      } else {
        float2 f;
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
          f = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(w[i]));
        } else {
          f = __half22float2(reinterpret_cast<const half2&>(w[i]));
        }
        v[8 * h + 2 * i] = f.x;
        v[8 * h + 2 * i + 1] = f.y;
      }
    }
  }
}

// v[i] = the values from (i * kRowThreads + thread) * kRowValues on, zeros past `width`: of row `from` of x,
// or of its gated halves.
template <typename T, int kBlocks>
__device__ __forceinline__ void read_row(const T* x, int64_t from, const Gate& gate, int width,
                                         float (&v)[kBlocks][kRowValues]) {
  const T* row = x + from * (gate.act == Act::kNone ? width : 2 * width);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int k = (i * kRowThreads + threadIdx.x) * kRowValues;
#pragma unroll
    for (float& f : v[i]) f = 0.f;
    if (k >= width) continue;
    if (gate.act == Act::kNone) {
      load_values(row + k, v[i]);
      continue;
    }
    float a[kRowValues], b[kRowValues];
    load_values(row + (gate.interleaved ? 2 * k : k), a);
    load_values(row + (gate.interleaved ? 2 * k + kRowValues : width + k), b);
#pragma unroll
    for (int j = 0; j < kRowValues; ++j) {
      float g = a[j], u = b[j];
      if (gate.interleaved) {
        g = j < 8 ? a[2 * (j % 8)] : b[2 * (j % 8)];
        u = j < 8 ? a[2 * (j % 8) + 1] : b[2 * (j % 8) + 1];
      }
      v[i][j] = gate_value(gate.act, gate.alpha, gate.limit, gate.up_offset, g, u);
    }
  }
}

// The largest v of the block, by `larger`.
template <class Larger>
__device__ __forceinline__ float block_max(float v, Larger larger) {
  __shared__ float part[kRowThreads / 32];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v = larger(v, __shfl_xor_sync(~0u, v, d));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  float m = part[0];
#pragma unroll
  for (int w = 1; w < kRowThreads / 32; ++w) m = larger(m, part[w]);
  return m;
}

// Calls run(std::integral_constant<int, kBlocks>) for rows of `columns`; false where they are too long.
template <class Run>
bool with_row_blocks(int columns, Run run) {
  const int blocks = (columns / kRowValues + kRowThreads - 1) / kRowThreads;
  if (blocks <= 1) {
    run(std::integral_constant<int, 1>());
  } else if (blocks == 2) {
    run(std::integral_constant<int, 2>());
  } else if (blocks <= 4) {
    run(std::integral_constant<int, 4>());
  } else if (blocks <= 8) {
    run(std::integral_constant<int, 8>());
  } else {
    return false;
  }
  return true;
}

}  // namespace fp4::sm90
