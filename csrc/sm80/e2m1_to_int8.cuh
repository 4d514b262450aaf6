// Converts weights of layout mma_bf16 to int8, for int8 rows. A code times its block scale is rounded once to
// an integer number of steps. Each weight row has one step size for 128 K.
//
// Codes and scales become fp16 as for fp16 rows. Their product, in units of the step, is added to 24 by one
// instruction. Numbers near 24 have a spacing of 1/64 in fp16, so the low byte of the sum is the integer. The
// step's inverse needs no division: the bits of a constant minus the bits of the largest scale are nearly its
// inverse. The result has few significant bits, so its products with scales are exact. With a scale for 16 K,
// the largest code x the largest scale becomes 120 to 127. With a scale for 32 K, where scales are powers of
// two, it becomes 96. Codes are then exact if their scale is at least an eighth of the largest.
#pragma once

#include "../device/e2m1_mma_bf16.cuh"
#include "../device/ptx.cuh"

namespace fp4::sm80 {

using namespace device;

template <int kScaleBlock_>
struct Int8Words {
  static constexpr Element kElement = Element::kInt8;
  static constexpr int kScaleBlock = kScaleBlock_;
  static constexpr float kFactor = 2.0f;  // an integer is 64 times the sum's value; 2^14 x 2^-7 / 64
  static constexpr int kWords = 4;        // words of 32 K in a step
  static constexpr int kScaleWords = 64 / kScaleBlock;  // 32-bit words of a lane's scales in a step

  // A lane's two rows for a step: the factors of the two blocks of each word, and the value of one integer
  // step.
  struct Rows {
    half2 factor[kWords][2];
    float step[2];
  };

  __device__ __forceinline__ void decode_scales(const uint32_t (&bytes)[kScaleWords], Rows& rows) const {
    half2(&scale)[kWords][2] = rows.factor;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      typename Halves::Scales of_word;
      if constexpr (kScaleBlock == 16) {
        of_word = halves_.decode_scales(bytes[i]);
      } else if (i % 2 == 0) {
        of_word = halves_.template decode_scales<0>(bytes[i / 2]);
      } else {
        of_word = halves_.template decode_scales<2>(bytes[i / 2]);
      }
      scale[i][0] = of_word.row[0], scale[i][1] = of_word.row[1];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      half2 most = __hmax2(__hmax2(scale[0][r], scale[1][r]), __hmax2(scale[2][r], scale[3][r]));
      most = __hmax2(most, __lowhigh2highlow(most));
      const uint32_t bits = kNearlyOne - reinterpret_cast<const uint32_t&>(most);
      const half2 inverse = reinterpret_cast<const half2&>(bits);
      rows.step[r] = approximate_inverse(__low2float(inverse));
#pragma unroll
      for (int i = 0; i < kWords; ++i) scale[i][r] = __hmul2(scale[i][r], inverse);
    }
  }

  // Converts one word to the A operand of a product of 32 K. K 4t to 4t + 3 of the operand are K 2t, 2t + 1,
  // 2t + 8 and 2t + 9 of the first block. 16 K further are those of the second block.
  static __device__ __forceinline__ void quantize(uint2 word, const half2 (&factor)[2], uint32_t (&a)[4]) {
    uint32_t codes[2][4];
    Halves::codes(word.x, word.y, codes);
    const half2 middle = __float2half2_rn(24.f);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const half2 by = c ? high_twice(factor[r]) : low_twice(factor[r]);
        const half2 near = __hfma2(reinterpret_cast<const half2&>(codes[c][r]), by, middle),
                    far = __hfma2(reinterpret_cast<const half2&>(codes[c][2 + r]), by, middle);
        a[2 * c + r] = permute_bytes(reinterpret_cast<const uint32_t&>(near),
                                     reinterpret_cast<const uint32_t&>(far), 0x6420);
      }
    }
  }

  __device__ __forceinline__ void keep_constants(int lane) { halves_.keep_constants(lane); }

 private:
  using Halves = Fp16Words<kScaleBlock>;

  // The constant is in both halves, so the subtraction borrows from neither. For the largest scale, scale x
  // inverse is 2^12 to 1.125 x 2^12, or 1.25 to 1.32 x 2^12.
  static constexpr uint32_t kNearlyOne = kScaleBlock == 16 ? 0xA900A900 : 0xA800A800;

  Halves halves_;
};

}  // namespace fp4::sm80
