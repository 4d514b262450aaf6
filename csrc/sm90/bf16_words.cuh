// Weights of layout sm90_bf16 as bf16: the counterpart of half_words.cuh, in 12 instructions for eight codes
// and not 15. e2m1 x e4m3 is exact.
//
// Where a code's sign is bit 15 of a half word and its magnitude bits 8 to 6, the half word is the code x
// 2^-126 in bf16, subnormal ones too. So the words of a block hold six pairs of codes such that rotating a
// word brings each there, two more in what is left of both, and the pairs are those that products want. The
// scale that multiplies them has a factor of 2^119, which with scales up to 448 does not overflow.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "bytes.cuh"
#include "types.cuh"

namespace fp4::sm90 {

constexpr uint32_t kBf16Fields = 0x81C081C0, kLeftOfFirst = 0x06030603;

__host__ __device__ __forceinline__ uint32_t rotated_field(uint32_t word, int left) {
#ifdef __CUDA_ARCH__
  return __funnelshift_l(word, word, left) & kBf16Fields;
#else
  return (left == 0 ? word : word << left | word >> (32 - left)) & kBf16Fields;
#endif
}

struct Bf16Words {
  static constexpr Element kElement = Element::kBFloat16;
  static constexpr float kFactor = 128.0f;  // 2^126 / 2^119
  using Pair = __nv_bfloat162;

  // A scale byte is {exponent + 10: 5 bits, mantissa: 3}: of two blocks, from the lower bytes of `two`.
  static __host__ __device__ __forceinline__ Pair decode_scales(uint32_t two) {
    const uint32_t v = permute_bytes(two, 0, 0x4140) * 16 + 0x76007600;
    return reinterpret_cast<const Pair&>(v);
  }
  static __host__ __device__ __forceinline__ uint32_t without_flags(uint32_t scales) { return scales; }
  static __host__ __device__ __forceinline__ Pair low(Pair v) { return __low2bfloat162(v); }
  static __host__ __device__ __forceinline__ Pair high(Pair v) { return __high2bfloat162(v); }

  // A row's block of two words: the pairs of HalfWords, in its order.
  __host__ __device__ __forceinline__ void dequantize(uint32_t first, uint32_t second, Pair scale,
                                                      uint32_t (&h)[2][4]) const {
    const uint32_t left = (first & kLeftOfFirst) | (second & ~kLeftOfFirst);
    h[0][0] = rotated_field(first, 0), h[0][1] = rotated_field(first, 4);
    h[0][2] = rotated_field(first, 10), h[0][3] = rotated_field(left, 8);
    h[1][0] = rotated_field(second, 2), h[1][1] = rotated_field(second, 6);
    h[1][2] = rotated_field(second, 12), h[1][3] = rotated_field(left, 14);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Pair v = __hmul2(reinterpret_cast<const Pair&>(h[s][i]), scale);
        h[s][i] = reinterpret_cast<const uint32_t&>(v);
      }
    }
  }

  __device__ __forceinline__ void keep_constants(int) {}
};

}  // namespace fp4::sm90
