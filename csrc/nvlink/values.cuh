// Converts 16 bytes of a result's type to float32 values and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "interface.h"

namespace fp4::nvlink {

template <Type type>
struct Values;

template <>
struct Values<kFloat32> {
  static constexpr int kCount = 4;
  static __device__ __forceinline__ void add(float (&s)[4], const uint4& u, float w) {
    s[0] += w * __uint_as_float(u.x), s[1] += w * __uint_as_float(u.y);
    s[2] += w * __uint_as_float(u.z), s[3] += w * __uint_as_float(u.w);
  }
  static __device__ __forceinline__ uint4 pack(const float (&s)[4]) {
    return make_uint4(__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]),
                      __float_as_uint(s[3]));
  }
};

template <>
struct Values<kBFloat16> {
  static constexpr int kCount = 8;
  static __device__ __forceinline__ void add(float (&s)[8], const uint4& u, float w) {
    const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[2 * i] += w * __uint_as_float(words[i] << 16);
      s[2 * i + 1] += w * __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&s)[8]) {
    uint4 u;
    auto* b = reinterpret_cast<__nv_bfloat162*>(&u);
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = __floats2bfloat162_rn(s[2 * i], s[2 * i + 1]);
    return u;
  }
};

template <>
struct Values<kFloat16> {
  static constexpr int kCount = 8;
  static __device__ __forceinline__ void add(float (&s)[8], const uint4& u, float w) {
    const auto* b = reinterpret_cast<const __half2*>(&u);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = __half22float2(b[i]);
      s[2 * i] += w * f.x, s[2 * i + 1] += w * f.y;
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&s)[8]) {
    uint4 u;
    auto* b = reinterpret_cast<__half2*>(&u);
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = __floats2half2_rn(s[2 * i], s[2 * i + 1]);
    return u;
  }
};

__device__ __forceinline__ float load_float(const void* p, int type, int64_t i) {
  if (type == kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  if (type == kFloat16) return __half2float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

}  // namespace fp4::nvlink
