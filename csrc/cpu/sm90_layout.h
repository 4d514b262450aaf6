// Moves blocks into and out of the weight layouts of the Hopper kernels (common/sm90_layout.h), and computes
// the orders of their other operands. Uses no torch.
#pragma once

#include <cstdint>

#include "common/sm90_layout.h"

namespace fp4::cpu {

inline constexpr int kSm90Rows = 16, kSm90Block = 16, kSm90Step = 128;

// 16 codes (8 bytes, the lower k in the lower nibble) and their e4m3 scale, which is not negative. If a scale
// serves 32 codes, two blocks have the same scale.
struct Block16 {
  uint8_t codes[8];
  uint8_t scale;
};

// The place of a block of a row: the lane that holds it, its number among the lane's four blocks, and its
// scale.
struct Sm90Place {
  Sm90Lane lane;
  int number;
  int64_t scale;
};

// `scale_block`: how many k share a scale, 16 or 32.
template <class Bits>
Sm90Place sm90_place(int64_t row, int64_t block, int64_t padded_k, int scale_block) {
  const int in = int(block % 8), r = int(row % 2);
  const Sm90Lane lane = sm90_lane<Bits>(row / 16, block / 8, padded_k / kSm90Step, int(row % 16 / 2),
                                        Bits::lane_of(in), scale_block);
  return {lane, 2 * Bits::part_of(in) + r, lane.scales + Bits::scale_at(in, r, scale_block)};
}

// Bits: Sm90 or MmaBf16. `codes` and `scales` are those of the matrix. Storing changes no bits of other
// blocks.
template <class Bits>
void sm90_store(const Block16& block, const Sm90Place& at, uint8_t* codes, uint8_t* scales);
template <class Bits>
Block16 sm90_load(const Sm90Place& at, const uint8_t* codes, const uint8_t* scales);

// Layout sm90_int4: a block's eight bytes have the same place as in sm90, but hold 16 nibbles in the order of
// k. Each nibble is {bits 0 and 1: (magnitude - 1) % 4; bit 2: sign; bit 3: magnitude above 4}, and 0b1011 is
// zero. By int4 code:
inline constexpr uint8_t kSm90Int4Nibbles[16] = {0b1011, 0b0000, 0b0001, 0b0010, 0b0011, 0b1000,
                                                 0b1001, 0b1010, 0b1111, 0b1110, 0b1101, 0b1100,
                                                 0b0111, 0b0110, 0b0101, 0b0100};

inline int64_t sm90_int4_codes(int64_t row, int64_t block, int64_t padded_k) {
  const Sm90Place at = sm90_place<Sm90>(row, block, padded_k, kSm90Block);
  return at.lane.word(at.number);
}

// The index of a float32 scale of sm90_int4 in its matrix. Scales have the order [N/16][Kp/block][16 rows],
// with `blocks` in a row.
inline int64_t sm90_int4_scale(int64_t row, int64_t block, int64_t blocks) {
  return (row / 16 * blocks + block) * 16 + row % 16;
}

// The position of element k in an e4m3 activation row.
inline int64_t sm90_position(int64_t k) {
  const int64_t t = k / 16 % 4, s = k / 8 % 2, q = k / 4 % 2, i = k % 4;
  return k / 64 * 64 + 32 * s + 16 * q + 4 * t + i;
}

}  // namespace fp4::cpu
