// int4 weights as e4m3 fragments of wgmma's A operand: -8 to 7 are exact. The scales of their groups along K
// multiply the sums (PrefillBlock::multiply_groups).
//
// Codes lie as layout sm90 has those of e2m1: the low three bits where the magnitude is, the top bit where
// the sign is. Scales are float32: [N/16][Kp/128][group of the step][g][row 2g, row 2g + 1].
#pragma once

#include "ptx.cuh"

namespace fp4::sm90 {

// Eight codes: the two A registers of K 4t..4t+3 and 16+4t..16+4t+3.
__host__ __device__ __forceinline__ void int4_word(uint32_t word, uint32_t& first, uint32_t& second) {
  // e4m3 of 0, 1, 2, 3 and 4, 5, 6, 7; of -8, -7, -6, -5 and -4, -3, -2, -1.
  constexpr uint32_t kPlus0 = 0x44403800, kPlus4 = 0x4E4C4A48, kMinus8 = 0xCACCCED0, kMinus4 = 0xB8C0C4C8;
  const uint32_t low = word & 0x77777777u;
  const auto take = [](uint32_t codes, uint32_t signs) {
    const uint32_t negative = permute_bytes(signs, 0, 0xBA98);  // each byte its sign bit, eight times
    return (permute_bytes(kPlus0, kPlus4, codes) & ~negative) |
           (permute_bytes(kMinus8, kMinus4, codes) & negative);
  };
  first = take(low, word);
  second = take(low >> 16, word << 4);
}

// kGroup_: K that share a scale.
template <int kGroup_>
class Int4Weights {
 public:
  static constexpr Element kElement = Element::kE4m3;
  static constexpr int kGroup = kGroup_, kInstructions = 2, kGroups = 128 / kGroup;
  static constexpr int kTileScales = 64 * kGroups;
  static constexpr float kFactor = 1.0f;
  using Fragments = uint32_t[4 * kInstructions];
  struct Prepared {};
  struct Scales {
    float2 of[kGroups];  // rows 2g and 2g + 1
  };

  // `codes` and `scales`: shared memory addresses of the warp's 16 rows in stage 0.
  __device__ __forceinline__ void init(uint32_t codes, uint32_t scales, int lane) {
    codes_.init(codes, lane);
    lane_scales_ = kept_address(scales + lane / 4 * 8, lane);
  }

  __device__ __forceinline__ void load(uint32_t codes_offset, uint32_t scales_offset) {
    codes_.load(codes_offset);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) scales_.of[i] = load_shared_pair(lane_scales_ + scales_offset + 64 * i);
  }

  __device__ __forceinline__ Scales scales() const { return scales_; }

  template <int Half>
  __device__ __forceinline__ Prepared prepare() const {
    return {};
  }

  template <int Half>
  __device__ __forceinline__ void finish(const Prepared&, Fragments& fragments) const {
    const uint4 codes = codes_.half[Half];
    int4_word(codes.x, fragments[0], fragments[2]);
    int4_word(codes.y, fragments[4], fragments[6]);
    int4_word(codes.z, fragments[1], fragments[3]);
    int4_word(codes.w, fragments[5], fragments[7]);
  }

 private:
  LaneCodes codes_;
  uint32_t lane_scales_;
  Scales scales_;
};

}  // namespace fp4::sm90
