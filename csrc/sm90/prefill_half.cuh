// Weights of layout sm90 as fp16 fragments of wgmma's A operand, for activations in the order that the layout
// gives a lane: no lane needs another's codes or scales. (In plain order each needs those of its whole quad:
// twice the instructions a weight, and twice the time where few rows share a weight.)
//
// In 64 K, lane t of a quad owns block t: K 16t to 16t + 15. Instruction 2s + q of a half step takes its
// codes 8s + 4q + i: i = 0, 2 are the instruction's K 2t, 2t + 1; i = 1, 3 are 2t + 8, 2t + 9. So element 16t
// + 8s + 4q + i of the activations lies at 16 (2s + q) + 8 (i % 2) + 2t + i / 2 (half_position).
#pragma once

#include "half_words.cuh"

namespace fp4::sm90 {

// Where logical element k of an fp16 activation row lies.
__host__ __device__ constexpr int half_position(int k) {
  const int t = k / 16 % 4, sq = k / 4 % 4, i = k % 4;
  return k / 64 * 64 + 16 * sq + 8 * (i % 2) + 2 * t + i / 2;
}

// The weights of one warp as operand A: four K = 16 instructions a half step.
class HalfWeights {
 public:
  static constexpr Element kElement = Element::kFloat16;
  static constexpr int kInstructions = 4, kTileScales = 128;
  static constexpr float kFactor = 1.0f;
  using Fragments = uint32_t[4 * kInstructions];
  struct Prepared {
    half2 even, odd;  // the rows' block scale, twice
  };

  // `codes` and `scales`: shared memory addresses of the warp's 16 rows in stage 0.
  __device__ __forceinline__ void init(uint32_t codes, uint32_t scales, int lane) {
    codes_.init(codes, lane);
    low_ = kept_constant(kHalfLow, lane);
    lane_scales_ = kept_address(scales + lane * 4, lane);
  }

  __device__ __forceinline__ void load(uint32_t codes_offset, uint32_t scales_offset) {
    scales_ = load_shared_4(lane_scales_ + scales_offset) & 0x7F7F7F7F;  // without the flags
    codes_.load(codes_offset);
  }

  template <int Half>
  __device__ __forceinline__ Prepared prepare() const {
    const half2 both = decode_scales(scales_ >> (16 * Half));
    return {__low2half2(both), __high2half2(both)};
  }

  template <int Half>
  __device__ __forceinline__ void finish(const Prepared& prepared, Fragments& fragments) const {
    const uint4 codes = codes_.half[Half];
    half_fragments(codes.x, codes.z, prepared.even, prepared.odd, fragments);
    half_fragments(codes.y, codes.w, prepared.even, prepared.odd, fragments + 8);
  }

 private:
  // The A operands of the two instructions of words s of both rows.
  __device__ __forceinline__ void half_fragments(uint32_t even_word, uint32_t odd_word, half2 even_scale,
                                                 half2 odd_scale, uint32_t* fragment) const {
    uint32_t even[4], odd[4];
    dequantize_word(even_word, even_scale, even, low_);
    dequantize_word(odd_word, odd_scale, odd, low_);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fragment[2 * i] = even[i];
      fragment[2 * i + 1] = odd[i];
    }
  }

  LaneCodes codes_;
  uint32_t lane_scales_, scales_, low_;
};

}  // namespace fp4::sm90
