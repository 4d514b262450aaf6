// Folds int4 weights of layout sm90_int4 into e4m3 fragments of wgmma's A operand.
//
// A weight is code x scale of its group along K. The layout divides the scales of a matrix by a power of two,
// its factor, such that 8 x the largest scale is just within e4m3's range. The results are multiplied by the
// factor. A weight is rounded once, to e4m3(code x scale). Magnitudes 1 to 8 times the scale are eight bytes,
// a table in two registers. Each lane makes the tables for the groups of its rows.
//
// A code's nibble is {bits 0, 1: (magnitude - 1) % 4; bit 2: sign; bit 3: magnitude above 4}. Zero has no
// magnitude in this scheme; its nibble is 0b1011, which would be +8. Eight nibbles are a word, the lower k in
// the lower nibble. Scales are float32: [N/16][Kp/128][group of the step][g][row 2g, row 2g + 1].
#pragma once

#include <cuda_fp8.h>

#include "../device/bytes.cuh"
#include "../device/lane_codes.cuh"

namespace fp4::sm90 {

using namespace device;

// e4m3 bytes: {1, 2, 3, 4} and {5, 6, 7, 8} times a scale.
struct Int4Magnitudes {
  uint32_t low, high;
};

// `scale` must not be negative, nor -0: the top bits of a table's bytes are signs.
__host__ __device__ __forceinline__ Int4Magnitudes int4_magnitudes(float scale) {
  const auto pair = [scale](float a, float b) -> uint32_t {
    return __nv_cvt_float2_to_fp8x2(make_float2(a * scale, b * scale), __NV_SATFINITE, __NV_E4M3);
  };
  return {pair(1, 2) | pair(3, 4) << 16, pair(5, 6) | pair(7, 8) << 16};
}

// The bytes of both signs. Negative bytes have all bits except the sign inverted.
struct Int4Table {
  uint32_t plus_low, plus_high, minus_low, minus_high;

  __host__ __device__ __forceinline__ explicit Int4Table(const Int4Magnitudes& m)
      : plus_low(m.low), plus_high(m.high & 0x00FFFFFFu), minus_low(~m.low), minus_high(~m.high) {}
};

// a & b in the signs of the bytes, a ^ b in their other bits. This is one LOP3, which the compiler does not
// find.
__host__ __device__ __forceinline__ uint32_t join_lookups(uint32_t a, uint32_t b) {
  constexpr uint32_t kSigns = 0x80808080u;
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x94;" : "=r"(result) : "r"(a), "r"(b), "r"(kSigns));
  return result;
#else
  return ((a ^ b) & ~kSigns) | (a & b & kSigns);
#endif
}

// Converts eight codes to the two A registers of K 4t..4t+3 and 16+4t..16+4t+3.
__host__ __device__ __forceinline__ void int4_word(uint32_t word, const Int4Table& table, uint32_t& first,
                                                   uint32_t& second) {
  // If a nibble's top bit is set, PRMT returns the sign of the selected byte eight times instead. One of the
  // two lookups therefore returns the byte. The other returns all ones if its byte is negative, which inverts
  // the first.
  const auto take = [&table](uint32_t codes, uint32_t flipped) {
    const uint32_t low = permute_bytes(table.plus_low, table.minus_low, codes);
    const uint32_t high = permute_bytes(table.plus_high, table.minus_high, flipped);
    return join_lookups(low, high);
  };
  const uint32_t flipped = word ^ 0x88888888u;
  first = take(word, flipped);
  second = take(word >> 16, flipped >> 16);
}

// The weights of one warp as operand A. kGroup: how many K share a scale.
template <int kGroup>
class Int4Weights {
 public:
  static constexpr Element kElement = Element::kE4m3;
  static constexpr int kInstructions = 2, kGroups = 128 / kGroup, kTileScales = 64 * kGroups;
  static constexpr float kFactor = 1.0f;
  using Fragments = uint32_t[4 * kInstructions];
  struct Prepared {
    Int4Table even, odd;  // tables of rows 2g and 2g + 1
  };

  // `codes` and `scales`: the byte offsets of the warp's 16 rows in a stage.
  __device__ __forceinline__ void init(uint32_t codes, uint32_t scales, int lane) {
    codes_.init(codes, lane);
    // Lane t has block t of the four blocks of a half step. With groups of 32 this selects the group that
    // holds the block.
    const int group = kGroup == 32 ? lane % 4 / 2 : 0;
    lane_scales_ = kept_address(scales + group * 64 + lane / 4 * 8, lane);
  }

  __device__ __forceinline__ void load(uint32_t stage) {
    stage_ = stage;
    codes_.load(stage);
  }

  // The part of decoding that need not wait until fragments are free.
  template <int Half>
  __device__ __forceinline__ Prepared prepare() {
    if constexpr (Half < kScales) {  // else the scale is that of half 0
      const float2 scale = load_shared_pair(lane_scales_ + stage_ + 64 * (kGroups / kScales) * Half);
      even_ = int4_magnitudes(scale.x);
      odd_ = int4_magnitudes(scale.y);
    }
    return {Int4Table(even_), Int4Table(odd_)};
  }

  template <int Half>
  __device__ __forceinline__ void finish(const Prepared& tables, Fragments& fragments) const {
    const uint4 codes = codes_.half[Half];
    int4_word(codes.x, tables.even, fragments[0], fragments[2]);
    int4_word(codes.y, tables.even, fragments[4], fragments[6]);
    int4_word(codes.z, tables.odd, fragments[1], fragments[3]);
    int4_word(codes.w, tables.odd, fragments[5], fragments[7]);
  }

 private:
  static constexpr int kScales = kGroup == 128 ? 1 : 2;  // scales that a lane needs in a step for each row

  LaneCodes codes_;
  uint32_t lane_scales_, stage_;
  Int4Magnitudes even_, odd_;
};

}  // namespace fp4::sm90
