// int8 rows with sdot, which multiplies four signed bytes in each lane. For the files whose instruction set
// has it.
#pragma once

#include "cpu/neon.h"

namespace fp4::cpu {
namespace {

// Turns 32 codes into signed bytes, unit * value: those of the low nibbles and those of the high ones.
template <Element element>
struct SignedCodes {
  static constexpr int kUnit = codes_of(element).unit;
  int8x16_t table = vld1q_s8(kSignedBytes<element>.data());

  void look_up(uint8x16_t codes, int8x16_t& low, int8x16_t& high) const {
    low = vqtbl1q_s8(table, low_nibbles(codes));
    high = vqtbl1q_s8(table, high_nibbles(codes));
  }
};

// An int4 nibble in the upper half of a byte is 16 times its value, so no table is needed.
template <>
struct SignedCodes<Element::int4> {
  static constexpr int kUnit = 16;

  void look_up(uint8x16_t codes, int8x16_t& low, int8x16_t& high) const {
    low = vreinterpretq_s8_u8(vshlq_n_u8(codes, 4));
    high = vreinterpretq_s8_u8(vandq_u8(codes, vdupq_n_u8(0xf0)));
  }
};

template <Scale scale>
inline constexpr float kInt8Unit = kScaleUnit<scale> / float(SignedCodes<element_of(scale)>::kUnit);

template <Scale scale, int count>
struct DotTile {
  static constexpr int kPassGroups = count <= 2 ? 4 : count <= 4 ? 2 : 1;
  static constexpr int kSums = count * kPassGroups;
  using Rows = RowsInPlace;

  static void add(const Panel& panel, const Rows& rows, uint64_t begin, uint64_t end, int first,
                  float32x4_t* sums) {
    constexpr int step = step_of(scale), groups = kPassGroups;
    const SignedCodes<element_of(scale)> values;
    float32x4_t sum[count][groups];
    for (int i = 0; i < kSums; ++i) sum[i / groups][i % groups] = sums[i];
    for (uint64_t k0 = begin; k0 < end; k0 += step) {
      int32x4_t dot[count][groups];
      for (int i = 0; i < kSums; ++i) dot[i / groups][i % groups] = vdupq_n_s32(0);
#pragma GCC unroll 2
      for (int k = 0; k < step; k += 16) {
        if constexpr (count == 1) {
          __builtin_prefetch(panel.codes + (k0 + k) * (kPanelRows / 2) + kPrefetch);
          __builtin_prefetch(panel.codes + (k0 + k + 8) * (kPanelRows / 2) + kPrefetch);
        }
        int8x16_t a[count];
        for (int m = 0; m < count; ++m)
          a[m] = vld1q_s8(reinterpret_cast<const int8_t*>(rows.rows[m]) + k0 + k);
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) {
          int8x16_t low[2], high[2];
          for (int word = 0; word < 2; ++word)
            values.look_up(load_codes(panel, k0 + k + 8 * word, first + g), low[word], high[word]);
#pragma GCC unroll 8
          for (int m = 0; m < count; ++m) {
            dot[m][g] = vdotq_laneq_s32(dot[m][g], low[0], a[m], 0);
            dot[m][g] = vdotq_laneq_s32(dot[m][g], low[1], a[m], 1);
            dot[m][g] = vdotq_laneq_s32(dot[m][g], high[0], a[m], 2);
            dot[m][g] = vdotq_laneq_s32(dot[m][g], high[1], a[m], 3);
          }
        }
      }
      float32x4_t b_scale[groups];
      load_scales<scale>(scales_at<scale>(panel, k0, first), b_scale);
#pragma GCC unroll 8
      for (int m = 0; m < count; ++m) {
        const float a_scale = rows.int8_scales(m)[k0 / kInt8Block];
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g)
          sum[m][g] = vfmaq_f32(sum[m][g], vcvtq_f32_s32(dot[m][g]), vmulq_n_f32(b_scale[g], a_scale));
      }
    }
    for (int i = 0; i < kSums; ++i) sums[i] = sum[i / groups][i % groups];
  }

  static void store(const float32x4_t* sums, int, float* tile) {
    store_groups<count, kPassGroups>(sums, kInt8Unit<scale>, tile);
  }
};

}  // namespace
}  // namespace fp4::cpu
