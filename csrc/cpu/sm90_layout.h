// The weight layout of the Hopper kernels (csrc/sm90), made and undone on the CPU. Torch-free.
//
// A matrix is e2m1 codes with one e4m3 scale a block of 16 along K, and K padded to a multiple of 128 with
// zero codes and zero scales. In 16-row tiles, in steps of 64 k, each lane of a warp reads 16 bytes of codes
// in one load and owns whole scale blocks:
//
//   codes   [N/16][K/64][lane][16 B]    scales  [N/16][K/128][lane][4 B]
//
// Lane 4g + t holds rows 2g and 2g + 1 (rows g and g + 8 of the mma, so that a token's two accumulators are
// neighbours in N) and block t of the step. Its 16 bytes are four words: two for row 2g, two for row 2g + 1.
// Its scale bytes are {even step: row 2g, row 2g + 1; odd step: row 2g, row 2g + 1}.
//
// Word s of a block holds its codes 8s + 4q + i (q < 2, i < 4): the magnitude at bits 16q + 4i to 16q + 4i +
// 2, the sign of q = 0 at bit 8i + 7, of q = 1 at bit 8i + 3. The scale byte is the e4m3 byte, which has no
// sign, with bit 7 set where its mantissa is 0 or 7 (where 1.5 times the scale needs no extra step).
//
// Layout sm90_bf16 has the same blocks in the same places for products in bf16. With R = {0, 4, 10, 8, 2, 6,
// 12, 14}, codes i and i + 2 of q and s (i < 2) are the pair j = 4s + 2q + i: in its word, rotated left by
// R[j], the first has its sign at bit 15 and its magnitude at bits 6 to 8, the second 16 bits higher. Pairs 0
// to 2 are in the first word and 4 to 6 in the second; 3 and 7 are in the word that has the bits 0, 1, 9, 10
// (mod 16) of the first and the others of the second. The scale byte is 8 (exponent + 10) + mantissa of its
// three bits, or zero for a zero scale, whose codes are zero, too.
#pragma once

#include <cstdint>

namespace fp4::cpu {

inline constexpr int kSm90Rows = 16, kSm90Block = 16;

// 16 codes (8 bytes, the lower k in the lower nibble) and their e4m3 scale, which is not negative.
struct Block16 {
  uint8_t codes[8];
  uint8_t scale;
};

// Where a row's block is: bytes into the codes and into the scales of its matrix.
struct Sm90Place {
  int64_t codes, scale;
};

inline Sm90Place sm90_place(int64_t row, int64_t block, int64_t padded_k) {
  const int64_t tile = row / 16, step = block / 4, lane = row % 16 / 2 * 4 + block % 4, parity = row % 2;
  return {((tile * (padded_k / 64) + step) * 32 + lane) * 16 + parity * 8,
          ((tile * (padded_k / 128) + step / 2) * 32 + lane) * 4 + step % 2 * 2 + parity};
}

// One block into, or out of, two words and a scale byte, of sm90_bf16 or sm90.
void sm90_encode(const Block16& block, bool bf16, uint8_t* words, uint8_t* scale);
Block16 sm90_decode(const uint8_t* words, uint8_t scale, bool bf16);

// Layout sm90_int4: a lane's words are those of sm90, but a word's eight codes are nibbles in the order of k,
// each {bits 0 and 1: (magnitude - 1) % 4; bit 2: sign; bit 3: magnitude above 4}, and 0b1011 for zero. By
// int4 code:
inline constexpr uint8_t kSm90Int4Nibbles[16] = {0b1011, 0b0000, 0b0001, 0b0010, 0b0011, 0b1000,
                                                 0b1001, 0b1010, 0b1111, 0b1110, 0b1101, 0b1100,
                                                 0b0111, 0b0110, 0b0101, 0b0100};

// Its float32 scales lie in the order [N/16][Kp/block][16 rows]: the index of one in its matrix, `blocks` to
// a row.
inline int64_t sm90_int4_scale(int64_t row, int64_t block, int64_t blocks) {
  return (row / 16 * blocks + block) * 16 + row % 16;
}

// Where logical element k of an e4m3 activation row lies.
inline int64_t sm90_position(int64_t k) {
  const int64_t t = k / 16 % 4, s = k / 8 % 2, q = k / 4 % 2, i = k % 4;
  return k / 64 * 64 + 32 * s + 16 * q + 4 * t + i;
}

}  // namespace fp4::cpu
