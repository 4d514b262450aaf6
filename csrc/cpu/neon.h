// Parts that the NEON kernels share. Each file compiles its own copy (see common/convert.h on linkage).
//
// A panel's 16 rows are four groups of four, one row in each 32-bit lane. A pass multiplies one, two or four
// groups over a chunk of k, with all sums in registers. With many activation rows, the registers have room
// for few groups.
#pragma once

#include <arm_neon.h>

#include <algorithm>
#include <bit>

#include "cpu/by_count.h"
#include "cpu/row_kernels.h"
#include "cpu_constants.h"

namespace fp4::cpu {
namespace {

inline constexpr int kGroupRows = 4, kGroups = kPanelRows / kGroupRows;
// The k of a chunk. Its codes and activations stay in the first-level cache while several passes read them.
inline constexpr int64_t kChunk = fitted::neon::chunk_k;
// How many bytes ahead a kernel for one row prefetches weights. This crosses page borders, where hardware
// prefetchers stop.
inline constexpr int kPrefetch = fitted::neon::prefetch_bytes;

// For each code: unit * value.
template <Element element>
inline constexpr std::array<int8_t, 16> kSignedBytes = [] {
  std::array<int8_t, 16> bytes{};
  const Codes& codes = codes_of(element);
  for (int i = 0; i < 16; ++i) bytes[i] = int8_t(codes.unit * codes.values[i]);
  return bytes;
}();

// load_scales returns the block scales of four rows times 1 / kScaleUnit.
template <Scale scale>
inline constexpr float kScaleUnit = scale == Scale::e4m3 ? 256.f : 1.f;

// Shifted by 7, the bits of an e4m3 number are those of a float16 number, which is 2^-8 times as large
// because its exponent bias is 8 larger. The shift leaves the sign in two bits; the lower one is cleared.
inline uint16x8_t e4m3_as_half(uint8x8_t bytes) {
  const int16x8_t wide = vshll_n_s8(vreinterpret_s8_u8(bytes), 7);
  return vandq_u16(vreinterpretq_u16_s16(wide), vdupq_n_u16(0xbfff));
}

// Byte 0 is 2^-127, a subnormal. Byte 255 (NaN) becomes infinity, which makes every sum infinite or NaN.
inline float32x4_t e8m0_as_float(uint16x4_t bytes) {
  const uint32x4_t exponent = vshlq_n_u32(vmovl_u16(bytes), 23);
  return vreinterpretq_f32_u32(vmaxq_u32(exponent, vdupq_n_u32(0x00400000)));
}

template <Scale scale, int groups>
inline void load_scales(const uint8_t* p, float32x4_t (&to)[groups]) {
  if constexpr (scale == Scale::f32) {
    for (int g = 0; g < groups; ++g) to[g] = vld1q_f32(reinterpret_cast<const float*>(p) + g * kGroupRows);
  } else if constexpr (scale == Scale::bf16) {
    for (int g = 0; g < groups; ++g)
      to[g] = vreinterpretq_f32_u32(
          vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p) + g * kGroupRows), 16));
  } else {
    for (int g = 0; g < groups; g += 2) {
      uint8x8_t bytes;
      if constexpr (groups == 1)
        bytes = vreinterpret_u8_s32(vdup_n_s32(load_word(p)));
      else
        bytes = vld1_u8(p + g * kGroupRows);
      const auto both = scale == Scale::e4m3 ? e4m3_as_half(bytes) : vmovl_u8(bytes);
      const auto as_float = [](uint16x4_t v) {
        if constexpr (scale == Scale::e4m3) return vcvt_f32_f16(vreinterpret_f16_u16(v));
        return e8m0_as_float(v);
      };
      to[g] = as_float(vget_low_u16(both));
      if constexpr (groups > 1) to[g + 1] = as_float(vget_high_u16(both));
    }
  }
}

// The scales of group `first` in the block that holds k.
template <Scale scale>
inline const uint8_t* scales_at(const Panel& panel, uint64_t k, int first) {
  // A block of int4 is several steps, a power of two of k; of the others it is the step.
  const uint64_t block =
      element_of(scale) == Element::int4 ? k >> std::countr_zero(unsigned(panel.block)) : k / step_of(scale);
  return panel.scales + (block * kPanelRows + first * kGroupRows) * scale_size(scale);
}

// The codes of a group's four rows at k, a multiple of 8: eight nibbles in each lane.
inline uint8x16_t load_codes(const Panel& panel, uint64_t k, int group) {
  return vld1q_u8(panel.codes + k * (kPanelRows / 2) + group * 16);
}

// Runs Tile over the panel, chunk by chunk if it needs several passes. Tile has:
//
//   kPassGroups       the number of groups of a pass
//   kSums             the number of registers for its sums
//   Rows              the prepared rows of a chunk: Rows(rows, count, k), load(begin, end)
//   add               adds the products of a chunk to the sums of a pass; k is unsigned, so a division is a
//   shift store             stores the sums of a pass to the tile [count][16]
template <typename Tile>
inline void multiply_panel(const Panel& panel, const uint8_t* const* rows, int count, float* tile) {
  constexpr int passes = kGroups / Tile::kPassGroups;
  const int64_t chunk = passes == 1 && !Tile::Rows::kBuffered ? panel.k : kChunk;
  typename Tile::Rows ready(rows, count, panel.k);
  float32x4_t sums[passes][Tile::kSums];
  for (auto& pass : sums)
    for (auto& sum : pass) sum = vdupq_n_f32(0.f);
  for (int64_t begin = 0; begin < panel.k; begin += chunk) {
    const int64_t end = std::min(begin + chunk, panel.k);
    ready.load(begin, end);
    for (int pass = 0; pass < passes; ++pass)
      Tile::add(panel, ready, begin, end, pass * Tile::kPassGroups, sums[pass]);
  }
  for (int pass = 0; pass < passes; ++pass)
    Tile::store(sums[pass], count, tile + pass * Tile::kPassGroups * kGroupRows);
}

// Rows that are read in place.
struct RowsInPlace {
  static constexpr bool kBuffered = false;
  const uint8_t* const* rows;
  int64_t k;

  RowsInPlace(const uint8_t* const* rows, int, int64_t k) : rows(rows), k(k) {}
  void load(int64_t, int64_t) {}
  const float* floats(int m) const { return reinterpret_cast<const float*>(rows[m]); }
  const float* int8_scales(int m) const {
    return reinterpret_cast<const float*>(rows[m] + Int8Row::scales_at(k));
  }
};

// Stores sums[m][group]; a register has four rows of the weight.
template <int count, int groups>
inline void store_groups(const float32x4_t* sums, float unit, float* tile) {
  for (int m = 0; m < count; ++m)
    for (int g = 0; g < groups; ++g)
      vst1q_f32(tile + m * kPanelRows + g * kGroupRows, vmulq_n_f32(sums[m * groups + g], unit));
}

// Decodes codes to bf16, which is exact. Two look-ups make the two bytes of each value, and an interleave
// joins them.
struct Bf16Codes {
  uint8x16_t lower, upper;

  template <Element element>
  static Bf16Codes of() {
    return {vld1q_u8(kFloatByte<element, 2>.data()), vld1q_u8(kFloatByte<element, 3>.data())};
  }
  // The values of 16 codes, eight to a register.
  void look_up(uint8x16_t codes, uint16x8_t (&to)[2]) const {
    const uint8x16_t low = vqtbl1q_u8(lower, codes), high = vqtbl1q_u8(upper, codes);
    to[0] = vreinterpretq_u16_u8(vzip1q_u8(low, high));
    to[1] = vreinterpretq_u16_u8(vzip2q_u8(low, high));
  }
};

inline uint8x16_t low_nibbles(uint8x16_t v) { return vandq_u8(v, vdupq_n_u8(15)); }
inline uint8x16_t high_nibbles(uint8x16_t v) { return vshrq_n_u8(v, 4); }

// float32 rows in the order of k. A group's codes are transposed: a register then has one k of four rows, and
// is multiplied by one lane of the activations.
template <Scale scale, int count>
struct FloatTile {
  static constexpr int kPassGroups = count == 1 ? 4 : count == 2 ? 2 : 1;
  static constexpr int kSums = count * kPassGroups;
  using Rows = RowsInPlace;

  static void add(const Panel& panel, const Rows& rows, uint64_t begin, uint64_t end, int first,
                  float32x4_t* sums) {
    constexpr int step = step_of(scale), groups = kPassGroups, chains = count == 1 ? 2 : 1;
    static constexpr uint8_t kTranspose[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const uint8x16_t transpose = vld1q_u8(kTranspose);
    const Bf16Codes values = Bf16Codes::of<element_of(scale)>();
    float32x4_t sum[count][groups];
    for (int i = 0; i < kSums; ++i) sum[i / groups][i % groups] = sums[i];
    for (uint64_t k0 = begin; k0 < end; k0 += step) {
      float32x4_t dot[count][groups][chains];
#pragma GCC unroll 4
      for (int k = 0; k < step; k += 8) {
        if constexpr (count == 1) __builtin_prefetch(panel.codes + (k0 + k) * (kPanelRows / 2) + kPrefetch);
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) {
          const uint8x16_t codes = vqtbl1q_u8(load_codes(panel, k0 + k, first + g), transpose);
          float32x4_t b[8];  // by k
#pragma GCC unroll 2
          for (int odd = 0; odd < 2; ++odd) {
            uint16x8_t halves[2];
            values.look_up(odd ? high_nibbles(codes) : low_nibbles(codes), halves);
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
              const uint16x8_t zero = vdupq_n_u16(0);
              b[4 * h + odd] = vreinterpretq_f32_u16(vzip1q_u16(zero, halves[h]));
              b[4 * h + 2 + odd] = vreinterpretq_f32_u16(vzip2q_u16(zero, halves[h]));
            }
          }
#pragma GCC unroll 8
          for (int m = 0; m < count; ++m) {
            const float* a = rows.floats(m) + k0 + k;
#pragma GCC unroll 2
            for (int quarter = 0; quarter < 2; ++quarter) {
              const float32x4_t four = vld1q_f32(a + 4 * quarter);
              const auto multiply = [&]<int lane>(std::integral_constant<int, lane>) {
                float32x4_t& to = dot[m][g][lane % chains];
                const float32x4_t value = b[4 * quarter + lane];
                to = k + 4 * quarter + lane < chains ? vmulq_laneq_f32(value, four, lane)
                                                     : vfmaq_laneq_f32(to, value, four, lane);
              };
              multiply(std::integral_constant<int, 0>());
              multiply(std::integral_constant<int, 1>());
              multiply(std::integral_constant<int, 2>());
              multiply(std::integral_constant<int, 3>());
            }
          }
        }
      }
      float32x4_t b_scale[groups];
      load_scales<scale>(scales_at<scale>(panel, k0, first), b_scale);
#pragma GCC unroll 8
      for (int m = 0; m < count; ++m)
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) {
          float32x4_t all = dot[m][g][0];
          if constexpr (chains == 2) all = vaddq_f32(all, dot[m][g][1]);
          sum[m][g] = vfmaq_f32(sum[m][g], all, b_scale[g]);
        }
    }
    for (int i = 0; i < kSums; ++i) sums[i] = sum[i / groups][i % groups];
  }

  static void store(const float32x4_t* sums, int, float* tile) {
    store_groups<count, kPassGroups>(sums, kScaleUnit<scale>, tile);
  }
};

template <Scale scale>
struct FloatTiles {
  template <int count>
  static void run(const Panel& panel, const uint8_t* const* rows, float* tile) {
    multiply_panel<FloatTile<scale, count>>(panel, rows, count, tile);
  }
};

// Writes an Int8Row whose groups of 16 have the order 0 2 4 ... 14 1 3 5 ... 15, for the low nibbles of two
// words and then the high ones. Codes are signed here and need no corrections.
inline void prepare_int8_neon(const int8_t* codes, const float* scales, int64_t begin, int64_t end, int64_t k,
                              Scale, uint8_t* row) {
  const int64_t count = end - begin, padded = padded_k(count);
  int8_t* to = reinterpret_cast<int8_t*>(row) + begin;
  const auto reorder = [to](const int8_t* from, int64_t at) {
    const int8x8x2_t by_parity = vld2_s8(from);
    vst1q_s8(to + at, vcombine_s8(by_parity.val[0], by_parity.val[1]));
  };
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) reorder(codes + i, i);
  for (; i < padded; i += 16) {
    int8_t last[16] = {};
    if (i < count) std::memcpy(last, codes + i, count - i);
    reorder(last, i);
  }
  std::memcpy(row + Int8Row::scales_at(padded_k(k)) + begin / kInt8Block * sizeof(float), scales,
              padded / kInt8Block * sizeof(float));
}

constexpr Kernels with_neon_rows(Kernels kernels) {
  kernels = with_row_kernels(kernels);
  kernels.prepare_int8 = prepare_int8_neon;
  return kernels;
}

}  // namespace
}  // namespace fp4::cpu
