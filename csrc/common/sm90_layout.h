// The weight layouts of the Hopper kernels: where each bit lies. For the CPU, which makes and undoes them,
// and for the kernels that do the same on the device. Knows no torch.
//
// A matrix is e2m1 codes with one e4m3 scale for `scale_block` k, 16 or 32, and K padded to a multiple of 128
// with zero codes. It is cut into 16 rows by 128 k, which are 1024 bytes of codes and 2048 / scale_block of
// scales:
//
//   codes   [N/16][Kp/128][2][32 lanes][16 B]    scales  [N/16][Kp/128][8 g][256 / scale_block B]
//
// Lane 4g + t holds four blocks of 16 codes: number 2c + r (c, r < 2) is the block block_of(t, c) of those
// eight of row 2g + r. Rows 2g and 2g + 1 are rows g and g + 8 of the mma, so that a token's two accumulators
// are neighbours in N. Its codes are four words of 64 bits, w[2i + j] (i, j < 2): in half i at its slot, byte
// 8j. Among the bytes of g, the scale of each block is at scale_at: where every block has one, a lane's four
// lie side by side, in the order of their numbers.
//
// Sm90 (layout sm90): blocks t and 4 + t, one of each 64 k, a word each; two lanes share four scales of 32.
// Bits of code k of a block: the magnitude at 32 (k / 8) + 16 (k / 4 % 2) + 4 (k % 4) and two more, the sign
// at 32 (k / 8) + 8 (k % 4) + 7, or 3 where k / 4 is odd. The scale byte is the e4m3 byte, which has no sign,
// with bit 7 set where its mantissa is 0 or 7 (where 1.5 times the scale needs no extra step).
//
// MmaBf16 (layout mma_bf16): blocks 2t and 2t + 1, for products in bf16; a lane has two scales of 32. Word
// i holds codes 2i, 2i + 1, 2i + 8 and 2i + 9 of all four blocks: what lane i of a product's quad multiplies
// where K is in plain order. So prefill, whose lanes read word t of every lane of their quad, takes
// activations as they are; and decode, which brings activations into any order, reads whole blocks, with a
// scale for 16 codes. Codes k and k + 1 (k even) are the pair p = 4c + 2 (k / 8) + r of their word. With R =
// {0, 4, 10, 8, 2, 6, 12, 14}, in its half of the word, rotated left by R[p], the first has its sign at bit
// 15 and its magnitude at bits 6 to 8, the second 16 bits higher. Pairs 0 to 2 are in the lower half and 4 to
// 6 in the upper; 3 and 7 are in the 32 bits that have the bits 0, 1, 9, 10 (mod 16) of the lower and the
// others of the upper. The scale byte is 8 (exponent + 10) + mantissa, of its three bits, or zero for a zero
// scale, whose codes are zero, too.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FP4_BOTH __host__ __device__
#else
#define FP4_BOTH
#endif

namespace fp4 {

// A tile of a weight: rows, k of a step, and the bytes of codes of these.
inline constexpr int kTileRows = 16, kStepK = 128, kTileCodes = kTileRows * kStepK / 2;

struct Sm90 {
  static constexpr FP4_BOTH int lane_of(int block) { return block % 4; }  // of eight, and its c
  static constexpr FP4_BOTH int part_of(int block) { return block / 4; }
  static constexpr FP4_BOTH int block_of(int t, int c) { return 4 * c + t; }
  static constexpr FP4_BOTH int slot(int g, int t) { return 4 * g + t; }
  static constexpr FP4_BOTH int word(int number, int) { return number; }
  static constexpr FP4_BOTH int scale_at(int block, int r, int scale_block) {
    const int shared = scale_block / 16;
    return block % 4 / shared * 4 + block / 4 * 2 + r;
  }
  // Where the four bytes begin that a lane reads, among those of 16 rows by 128 k.
  static constexpr FP4_BOTH int scales_of(int lane, int scale_block) { return lane * 16 / scale_block * 4; }

  // Where bit 0 to 2 of the magnitude of code k, or its sign (3), is in its word.
  static constexpr FP4_BOTH int bit(int, int k, int bit) {
    return k / 8 * 32 + (bit < 3 ? k / 4 % 2 * 16 + k % 4 * 4 + bit : k % 4 * 8 + (k / 4 % 2 == 0 ? 7 : 3));
  }

  static constexpr FP4_BOTH uint8_t encode_scale(uint8_t e4m3) {
    return e4m3 | ((e4m3 & 7) == 0 || (e4m3 & 7) == 7 ? 0x80 : 0);
  }
  static constexpr FP4_BOTH uint8_t decode_scale(uint8_t byte) { return byte & 0x7F; }
};

struct MmaBf16 {
  static constexpr FP4_BOTH int lane_of(int block) { return block / 2; }
  static constexpr FP4_BOTH int part_of(int block) { return block % 2; }
  static constexpr FP4_BOTH int block_of(int t, int c) { return 2 * t + c; }
  static constexpr FP4_BOTH int word(int, int k) { return k % 8 / 2; }
  static constexpr FP4_BOTH int scale_at(int block, int r, int scale_block) {
    return block * 16 / scale_block * 2 + r;
  }

  // Eight lanes of decode read 128 consecutive bytes. Sixteen of prefill, which read word 2i + j with i, j
  // and g their own and t the same for all, find half of them in different banks of shared memory.
  static constexpr FP4_BOTH int slot(int g, int t) {
    return g / 2 * 8 + t / 2 * 4 + g % 2 * 2 + ((t ^ g / 2) & 1);
  }

  static constexpr FP4_BOTH int bit(int number, int k, int bit) {
    constexpr uint32_t kRotations = 0xEC628A40;
    const int pair = number / 2 * 4 + k / 8 * 2 + number % 2;
    const int left = kRotations >> (4 * pair) & 15;
    const int place = ((bit < 3 ? 6 + bit : 15) + k % 2 * 16 - left) & 31;
    const bool upper = pair % 4 == 3 ? (0x0603 >> place % 16 & 1) == 0 : pair > 3;
    return place + (upper ? 32 : 0);
  }

  static constexpr FP4_BOTH uint8_t encode_scale(uint8_t e4m3) {
    if (e4m3 == 0) return 0;
    if (e4m3 >= 8) return e4m3 + (3 << 3);
    int shift = 0;  // subnormal: k x 2^-9
    while ((e4m3 << shift) < 8) ++shift;
    return static_cast<uint8_t>((4 - shift) << 3 | ((e4m3 << shift) & 7));
  }
  static constexpr FP4_BOTH uint8_t decode_scale(uint8_t byte) {
    if (byte == 0) return 0;
    if (byte >= (4 << 3)) return byte - (3 << 3);
    return static_cast<uint8_t>(((byte & 7) | 8) >> (4 - (byte >> 3)));
  }
};

// Bytes of the scales of 16 rows by `k`.
constexpr FP4_BOTH int sm90_scales(int k, int scale_block) { return 16 * k / scale_block; }

// What a lane holds: bytes into the codes of its matrix, and into the scales for those of its g.
struct Sm90Lane {
  int64_t codes, scales;

  constexpr FP4_BOTH int64_t word(int i) const { return codes + i / 2 * 512 + i % 2 * 8; }
};

// Of the `tile`-th 16 rows and the `step`-th 128 k, of a matrix of `steps`.
template <class Bits>
constexpr FP4_BOTH Sm90Lane sm90_lane(int64_t tile, int64_t step, int64_t steps, int g, int t,
                                      int scale_block) {
  const int64_t at = tile * steps + step;
  return {at * 1024 + Bits::slot(g, t) * 16, (at * 8 + g) * (256 / scale_block)};
}

}  // namespace fp4
