// Folds the block scales of nvfp4 and mxfp4 weights (layout sm90) into e4m3 fragments of wgmma's A operand.
//
// A weight is e2m1 x block scale. The scale is first divided by 8; the epilogue multiplies by 8. The eight
// magnitudes {0, .5, 1, 1.5, 2, 3, 4, 6} times the divided scale are eight e4m3 bytes. These form a table in
// two registers, in which one PRMT looks up four codes. Let s be the byte of scale / 8. Multiplying by 2 adds
// 8 to the byte. The byte of 1.5 s is t = s + 5, or s + 4 if the mantissa of s is 0 or 7 (the layout's flag
// bit): the nearest e4m3 value. This works only if 0.5 s is a normal number. Blocks with smaller scales
// compute their table in float.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../common/sm90_layout.h"
#include "../device/bytes.cuh"
#include "../device/lane_codes.cuh"

namespace fp4::sm90 {

using namespace device;

constexpr uint32_t kEighth = 24;          // a factor of 8 is this distance between e4m3 bytes
constexpr uint32_t kFirstFastScale = 40;  // the byte of scale 0.25: half its eighth is the least normal e4m3
constexpr uint32_t kEveryByte = 0x01010101u;

struct FoldTable {
  uint32_t low, high;  // e4m3 bytes of {0, .5, 1, 1.5} and {2, 3, 4, 6} times scale / 8
};

__host__ __device__ __forceinline__ FoldTable fast_table(uint32_t once, uint32_t once_half, uint32_t index) {
  // Selectors for byte 0. Adding the index to each nibble selects another byte. A selector of 8 | i
  // replicates the sign of byte i, which is 0: this makes the zero of the table.
  constexpr uint32_t kLow = 0x4008, kHigh = 0x4040, kEveryNibble = 0x1111;
  return {permute_bytes(once, once_half, kLow + index * kEveryNibble) - 0x00000800u,
          permute_bytes(once, once_half, kHigh + index * kEveryNibble) + 0x10100808u};
}

// The table of any scale, also zero or subnormal: products in float, rounded to the nearest e4m3.
__host__ __device__ __forceinline__ FoldTable exact_table(uint32_t byte) {
  const float s = __half2float(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)) * 0.125f;
  auto pack = [](float a, float b, float c, float d) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
  };
  return {pack(0.0f, 0.5f * s, s, 1.5f * s), pack(2.0f * s, 3.0f * s, 4.0f * s, 6.0f * s)};
}

// The table of the scale in the lowest byte, by whichever way fits it.
__host__ __device__ __forceinline__ FoldTable any_table(uint32_t scale) {
  uint32_t plain = scale & 0x7F, once = plain - kEighth;
  FoldTable exact = exact_table(plain), fast = fast_table(once, once + 5 - (scale >> 7 & 1), 0);
  bool small = plain < kFirstFastScale;
  return {small ? exact.low : fast.low, small ? exact.high : fast.high};
}

// Converts one word of 8 codes to the two A registers of K 4t..4t+3 and 16+4t..16+4t+3.
__host__ __device__ __forceinline__ void fold_word(uint32_t word, FoldTable table, uint32_t& first,
                                                   uint32_t& second) {
  constexpr uint32_t kSigns = 0x80808080u;
  uint32_t codes = word & 0x77777777u;
  first = permute_bytes(table.low, table.high, codes) | (word & kSigns);
  second = permute_bytes(table.low, table.high, codes >> 16) | ((word << 4) & kSigns);
}

// The tables of a lane's two rows for a half step (64 K).
struct FoldTables {
  FoldTable even, odd;
};

// A lane's scale bytes for 128 K: {half 0: even row, odd row; half 1: even row, odd row}, and values that the
// tables share.
struct FoldScales {
  uint32_t bytes, once, once_half;
  bool small;  // some lane's table needs arithmetic
};

__device__ __forceinline__ FoldScales prepare_scales(uint32_t bytes) {
  FoldScales scales;
  uint32_t plain = bytes & (0x7F * kEveryByte);
  scales.bytes = bytes;
  scales.once = plain - kEighth * kEveryByte;
  scales.once_half = scales.once + 5 * kEveryByte - ((bytes >> 7) & kEveryByte);
  uint32_t large = (plain + (0x80 - kFirstFastScale) * kEveryByte) & (0x80 * kEveryByte);
  scales.small = __any_sync(~0u, large != 0x80 * kEveryByte);
  return scales;
}

template <int Half>
__device__ __forceinline__ FoldTables make_tables(const FoldScales& scales) {
  if (__builtin_expect(scales.small, 0)) {  // a byte may have borrowed from the byte above it
    return {any_table(scales.bytes >> (16 * Half)), any_table(scales.bytes >> (16 * Half + 8))};
  }
  return {fast_table(scales.once, scales.once_half, 2 * Half),
          fast_table(scales.once, scales.once_half, 2 * Half + 1)};
}

// The A operands of the two K = 32 steps: fragment[4 s ..] for step s.
__device__ __forceinline__ void fold_fragments(uint4 codes, const FoldTables& tables,
                                               uint32_t (&fragment)[8]) {
  fold_word(codes.x, tables.even, fragment[0], fragment[2]);
  fold_word(codes.y, tables.even, fragment[4], fragment[6]);
  fold_word(codes.z, tables.odd, fragment[1], fragment[3]);
  fold_word(codes.w, tables.odd, fragment[5], fragment[7]);
}

// The weights of one warp as operand A: two K = 32 instructions for each half step. kScaleBlock: how many K
// share a scale.
template <int kScaleBlock>
class FoldedWeights {
 public:
  static constexpr Element kElement = Element::kE4m3;
  static constexpr int kInstructions = 2, kTileScales = sm90_scales(128, kScaleBlock);
  static constexpr float kFactor = 8.0f;  // the fold divides block scales by this
  using Fragments = uint32_t[4 * kInstructions];
  using Prepared = FoldTables;

  // `codes` and `scales`: the byte offsets of the warp's 16 rows in a stage.
  __device__ __forceinline__ void init(uint32_t codes, uint32_t scales, int lane) {
    codes_.init(codes, lane);
    lane_scales_ = kept_address(scales + Sm90::scales_of(lane, kScaleBlock), lane);
  }

  // Loads a step's codes and scales from the stage at this address of shared memory.
  __device__ __forceinline__ void load(uint32_t stage) {
    scales_ = prepare_scales(load_shared_4(lane_scales_ + stage));
    codes_.load(stage);
  }

  // The part of decoding that need not wait until fragments are free.
  template <int Half>
  __device__ __forceinline__ Prepared prepare() const {
    return make_tables<Half>(scales_);
  }

  template <int Half>
  __device__ __forceinline__ void finish(const Prepared& tables, Fragments& fragments) const {
    fold_fragments(codes_.half[Half], tables, fragments);
  }

 private:
  LaneCodes codes_;
  uint32_t lane_scales_;
  FoldScales scales_;
};

}  // namespace fp4::sm90
