// Weights of layout sm90 as fp16: one lane's 16 bytes are a block of 16 codes of two rows. e2m1 x e4m3 is
// exact.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "bytes.cuh"
#include "types.cuh"
#include "warp.cuh"

namespace fp4::sm90 {

// The high bytes of 0, 0.5, 1, 1.5 and 2, 3, 4, 6 in fp16; the low bytes are zero.
constexpr uint32_t kHalfLow = 0x3E3C3800, kHalfHigh = 0x46444240;

// Eight codes of one word to fp16, scaled: pairs (0,2), (1,3) of q = 0, then of q = 1. `low` is kHalfLow.
__host__ __device__ __forceinline__ void dequantize_word(uint32_t w, half2 scale, uint32_t (&h)[4],
                                                         uint32_t low = kHalfLow) {
  const uint32_t index = w & 0x77777777;
  const uint32_t q0 = permute_bytes(low, kHalfHigh, index) | (w & 0x80808080);
  const uint32_t q1 = permute_bytes(low, kHalfHigh, index >> 16) | ((w << 4) & 0x80808080);
  h[1] = q0 & 0xFF00FF00;
  h[3] = q1 & 0xFF00FF00;
  h[0] = permute_bytes(q0, 0, 0x2404);
  h[2] = permute_bytes(q1, 0, 0x2404);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const half2 v = __hmul2(reinterpret_cast<const half2&>(h[i]), scale);
    h[i] = reinterpret_cast<const uint32_t&>(v);
  }
}

// How a lane of a product takes its weights: layout sm90 as fp16.
struct HalfWords {
  static constexpr Element kElement = Element::kFloat16;
  static constexpr float kFactor = 1.0f;  // of the values that they stand for, over those that they have
  using Pair = half2;

  // Of two blocks, from the lower bytes of `two`, whose flags are gone.
  static __host__ __device__ __forceinline__ Pair decode_scales(uint32_t two) {
    return __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
  }
  static __host__ __device__ __forceinline__ uint32_t without_flags(uint32_t scales) {
    return scales & 0x7F7F7F7F;
  }
  static __host__ __device__ __forceinline__ Pair low(Pair v) { return __low2half2(v); }
  static __host__ __device__ __forceinline__ Pair high(Pair v) { return __high2half2(v); }

  // A row's block of two words: of word s, pairs (0, 2) and (1, 3) of q = 0, then of q = 1.
  __host__ __device__ __forceinline__ void dequantize(uint32_t first, uint32_t second, Pair scale,
                                                      uint32_t (&h)[2][4]) const {
    dequantize_word(first, scale, h[0], table_);
    dequantize_word(second, scale, h[1], table_);
  }

  __device__ __forceinline__ void keep_constants(int lane) { table_ = kept_constant(kHalfLow, lane); }

 private:
  uint32_t table_ = kHalfLow;
};

}  // namespace fp4::sm90
