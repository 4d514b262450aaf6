// Decodes weights of layout sm90 to fp16. The 16 bytes of a lane are a block of 16 codes of two rows. e2m1 x
// e4m3 is exact.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../common/sm90_layout.h"
#include "bytes.cuh"
#include "e4m3.cuh"
#include "types.cuh"
#include "warp.cuh"

namespace fp4::device {

// Returns where logical element k of an fp16 activation row lies.
__host__ __device__ constexpr int half_position(int k) {
  const int t = k / 16 % 4, sq = k / 4 % 4, i = k % 4;
  return k / 64 * 64 + 16 * sq + 8 * (i % 2) + 2 * t + i / 2;
}

// The high bytes of 0, 0.5, 1, 1.5 and 2, 3, 4, 6 in fp16; the low bytes are zero.
constexpr uint32_t kHalfLow = 0x3E3C3800, kHalfHigh = 0x46444240;

// Converts eight codes of one word to fp16, times `scale`: pairs (0, 2), (1, 3) of q = 0, then of q = 1.
// `low` is kHalfLow.
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

// Decodes a lane's weights from layout sm90 to fp16. kScaleBlock: K that share a scale.
template <int kScaleBlock>
struct HalfWords {
  static constexpr Element kElement = Element::kFloat16;
  static constexpr float kFactor = 1.0f;  // true weights / decoded weights
  using Layout = Sm90;
  using ScaleBytes = uint32_t;           // a lane's scales for 128 k
  static constexpr int kScaleSteps = 1;  // 64-steps that share a result of decode_scales
  static constexpr int kStepScales = sm90_scales(64, kScaleBlock);
  using Scales = half2;  // of rows 2g and 2g + 1

  // Returns where a lane's scales of 16 rows by 128 k are: four bytes. With blocks of 32, two lanes share
  // them.
  static __host__ __device__ __forceinline__ int scales_at(int lane) {
    return Sm90::scales_of(lane, kScaleBlock);
  }

  // Decodes the scales of two blocks from the lower bytes of `two`, whose flags were cleared.
  static __host__ __device__ __forceinline__ Scales decode_scales(uint32_t two) { return e4m3_pair(two); }
  static __host__ __device__ __forceinline__ uint32_t without_flags(uint32_t scales) {
    return scales & 0x7F7F7F7F;
  }

  // Decodes a block of both rows to the A operands of four products: a[2s + q] has codes 8s + 4q + i.
  __host__ __device__ __forceinline__ void dequantize(const uint4& codes, const Scales& scales,
                                                      uint32_t (&a)[4][4]) const {
    const half2 even = __low2half2(scales), odd = __high2half2(scales);
    const uint32_t words[2][2] = {{codes.x, codes.z}, {codes.y, codes.w}};
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      uint32_t h[2][4];
      dequantize_word(words[s][0], even, h[0], table_);
      dequantize_word(words[s][1], odd, h[1], table_);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[2 * s + i / 2][i % 2 * 2] = h[0][i];
        a[2 * s + i / 2][i % 2 * 2 + 1] = h[1][i];
      }
    }
  }

  __device__ __forceinline__ void keep_constants(int lane) { table_ = kept_constant(kHalfLow, lane); }

 private:
  uint32_t table_ = kHalfLow;
};

}  // namespace fp4::device
