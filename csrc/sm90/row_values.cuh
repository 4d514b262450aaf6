// Rows in registers: sixteen consecutive values a thread at a time, gated where they are halves of a product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "gate.cuh"

namespace fp4::sm90 {

constexpr int kRowValues = 16;  // a thread takes at a time

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

// The values from column k on, zeros past `width`, of row `from` of x or of its gated halves.
template <typename T>
__device__ __forceinline__ void read_values(const T* x, int64_t from, const Gate& gate, int width, int k,
                                            float (&v)[kRowValues]) {
  const T* row = x + from * (gate.act == Act::kNone ? width : 2 * width);
#pragma unroll
  for (float& f : v) f = 0.f;
  if (k >= width) return;
  if (gate.act == Act::kNone) return load_values(row + k, v);
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
    v[j] = gate_value(gate.act, gate.alpha, gate.limit, gate.up_offset, g, u);
  }
}

}  // namespace fp4::sm90
