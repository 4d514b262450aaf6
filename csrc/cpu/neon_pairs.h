// Parts that the smmla and bfmmla kernels share. Both instructions multiply two weight rows by two activation
// rows over 8 bytes of each, and add to four sums.
//
// A register of sums has activation rows t and t + 1 times weight rows r and r + 1, in the order (t, r), (t,
// r+1), (t+1, r), (t+1, r+1). An odd last activation row is paired with itself.
#pragma once

#include "cpu/neon.h"

namespace fp4::cpu {
namespace {

inline uint8x16_t first_halves(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}
inline uint8x16_t second_halves(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

// Rows of a chunk in pairs. For each 16 bytes: the first halves of both rows, then the second halves.
template <int pairs, int value_bytes>
struct PairedRows {
  static constexpr bool kBuffered = true;
  const uint8_t* rows[2 * pairs];
  uint64_t k, begin = 0;
  alignas(64) uint8_t bytes[kChunk * value_bytes * 2 * pairs];
  alignas(64) float scales[kChunk / kInt8Block * pairs][4];  // scales of int8 rows, one lane for each sum

  PairedRows(const uint8_t* const* from, int count, int64_t k) : k(k) {
    for (int m = 0; m < 2 * pairs; ++m) rows[m] = from[std::min(m, count - 1)];
  }

  void load(uint64_t from, uint64_t to) {
    begin = from;
    uint8_t* out = bytes;
    for (uint64_t at = from * value_bytes; at < to * value_bytes; at += 16)
      for (int p = 0; p < pairs; ++p, out += 32) {
        const uint8x16_t a = vld1q_u8(rows[2 * p] + at), b = vld1q_u8(rows[2 * p + 1] + at);
        vst1q_u8(out, first_halves(a, b));
        vst1q_u8(out + 16, second_halves(a, b));
      }
    if constexpr (value_bytes == 1) {
      for (uint64_t block = from / kInt8Block; block < to / kInt8Block; ++block)
        for (int p = 0; p < pairs; ++p)
          for (int i = 0; i < 4; ++i)
            std::memcpy(&scales[(block - from / kInt8Block) * pairs + p][i],
                        rows[2 * p + i / 2] + Int8Row::scales_at(k) + block * 4, 4);
    }
  }

  // The two registers of pair p at k, which is a multiple of 16 bytes.
  const uint8_t* at(uint64_t k, int p) const {
    return bytes + (k - begin) * value_bytes * 2 * pairs + p * 32;
  }
  float32x4_t int8_scale(uint64_t k, int p) const {
    return vld1q_f32(scales[(k - begin) / kInt8Block * pairs + p]);
  }
};

inline constexpr int groups_of_pairs(int pairs) { return pairs == 1 ? 4 : pairs == 2 ? 2 : 1; }

// Arranges a group's scales for its two registers of sums.
inline void spread(float32x4_t scale, float32x4_t (&to)[2]) {
  const float64x2_t two = vreinterpretq_f64_f32(scale);
  to[0] = vreinterpretq_f32_f64(vdupq_laneq_f64(two, 0));
  to[1] = vreinterpretq_f32_f64(vdupq_laneq_f64(two, 1));
}

// Stores sums[pair][group][2] to the tile.
template <int pairs, int groups>
inline void store_pairs(const float32x4_t* sums, int count, float unit, float* tile) {
  for (int m = 0; m < count; ++m)
    for (int g = 0; g < groups; ++g) {
      const float64x2_t a = vreinterpretq_f64_f32(sums[(m / 2 * groups + g) * 2]);
      const float64x2_t b = vreinterpretq_f64_f32(sums[(m / 2 * groups + g) * 2 + 1]);
      const float32x4_t row = vreinterpretq_f32_f64(m % 2 == 0 ? vzip1q_f64(a, b) : vzip2q_f64(a, b));
      vst1q_f32(tile + m * kPanelRows + g * kGroupRows, vmulq_n_f32(row, unit));
    }
}

// Runs One<scale> for one row and Pairs<scale, pairs> for more.
template <Scale scale, template <Scale> class One, template <Scale, int> class Pairs>
struct OneOrPairs {
  template <int count>
  static void run(const Panel& panel, const uint8_t* const* rows, float* tile) {
    using Tile = std::conditional_t<count == 1, One<scale>, Pairs<scale, (count + 1) / 2>>;
    multiply_panel<Tile>(panel, rows, count, tile);
  }
};

}  // namespace
}  // namespace fp4::cpu
