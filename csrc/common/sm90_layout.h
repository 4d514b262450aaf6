// The weight layouts of the Hopper kernels: the place of each bit. The CPU uses this to convert weights, and
// kernels use it to do the same on the device. Uses no torch.
//
// A matrix is e2m1 codes with one e4m3 scale for `scale_block` k, 16 or 32. K is padded to a multiple of 128
// with zero codes. The matrix is cut into pieces of 16 rows by 128 k. A piece has 1024 bytes of codes and
// 2048 / scale_block bytes of scales:
//
//   codes   [N/16][Kp/128][2][32 lanes][16 B]    scales  [N/16][Kp/128][8 g][256 / scale_block B]
//
// Lane 4g + t holds four blocks of 16 codes. Its block number 2c + r (c, r < 2) is block block_of(t, c) of
// the eight blocks of row 2g + r. Rows 2g and 2g + 1 are rows g and g + 8 of the mma, so the two accumulators
// of a token are neighbours in N. The lane's codes are four words of 64 bits, w[2i + j] (i, j < 2). Word w[2i
// + j] is in half i, at the lane's slot, byte 8j. The scale of each block is at scale_at among the bytes of
// g. If every block has a scale of its own, a lane's four scales are side by side, in the order of their
// numbers.
//
// Sm90 (layout sm90): a lane holds blocks t and 4 + t, one of each 64 k, and each block is one word. With
// scales for 32 k, two lanes share four scales. Code k of a block has its magnitude at bit 32 (k / 8) + 16 (k
// / 4 % 2) + 4 (k % 4) and the next two bits. Its sign is at bit 32 (k / 8) + 8 (k % 4) + 7, or + 3 if k / 4
// is odd. The scale byte is the e4m3 byte, which has no sign. Its bit 7 is set if its mantissa is 0 or 7
// (then 1.5 times the scale needs no extra step).
//
// MmaBf16 (layout mma_bf16): a lane holds blocks 2t and 2t + 1, for products in bf16. With scales for 32 k, a
// lane has two. Word i holds codes 2i, 2i + 1, 2i + 8 and 2i + 9 of all four blocks. These are the codes that
// lane i of a quad multiplies if K is in plain order. Prefill lanes read word t of every lane of their quad
// and need no reordering of activations. Decode reorders activations anyway and reads whole blocks, with one
// scale for 16 codes.
//
// Codes k and k + 1 (k even) are pair p = 4c + 2 (k / 8) + r of their word. A pair is stored in a half of the
// word, rotated. Rotating that half left by R[p], with R = {0, 4, 10, 8, 2, 6, 12, 14}, brings the first
// code's sign to bit 15 and its magnitude to bits 6 to 8; the second code is 16 bits higher. Pairs 0 to 2 are
// in the lower half of the word, pairs 4 to 6 in the upper. Pairs 3 and 7 are in the 32 bits made of the bits
// 0, 1, 9, 10 (mod 16) of the lower half and the other bits of the upper half. The scale byte is 8 (exponent
// + 10) + mantissa (three bits). It is zero for a zero scale, whose codes are zero, too.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FP4_BOTH __host__ __device__
#else
#define FP4_BOTH
#endif

namespace fp4 {

// A tile of a weight: its rows, its k, and the bytes of its codes.
inline constexpr int kTileRows = 16, kStepK = 128, kTileCodes = kTileRows * kStepK / 2;

struct Sm90 {
  // The lane that holds one of a row's eight blocks, and the block's c.
  static constexpr FP4_BOTH int lane_of(int block) { return block % 4; }
  static constexpr FP4_BOTH int part_of(int block) { return block / 4; }
  static constexpr FP4_BOTH int block_of(int t, int c) { return 4 * c + t; }
  static constexpr FP4_BOTH int slot(int g, int t) { return 4 * g + t; }
  static constexpr FP4_BOTH int word(int number, int) { return number; }
  static constexpr FP4_BOTH int scale_at(int block, int r, int scale_block) {
    const int shared = scale_block / 16;
    return block % 4 / shared * 4 + block / 4 * 2 + r;
  }
  // The first of the four scale bytes that a lane reads, among those of 16 rows by 128 k.
  static constexpr FP4_BOTH int scales_of(int lane, int scale_block) { return lane * 16 / scale_block * 4; }

  // The position in its word of bit 0, 1 or 2 of the magnitude of code k, or of its sign (bit 3).
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

  // Eight lanes of decode read 128 consecutive bytes. Sixteen lanes of prefill read word 2i + j, each with
  // its own i, j and g and all with the same t. With this slot, half of them use other banks of shared memory
  // than the other half.
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

// The data of a lane: offsets in bytes into the codes of its matrix, and into the scales for the codes of its
// g.
struct Sm90Lane {
  int64_t codes, scales;

  constexpr FP4_BOTH int64_t word(int i) const { return codes + i / 2 * 512 + i % 2 * 8; }
};

// The lane's data for the `tile`-th 16 rows and the `step`-th 128 k, in a matrix of `steps` steps.
template <class Bits>
constexpr FP4_BOTH Sm90Lane sm90_lane(int64_t tile, int64_t step, int64_t steps, int g, int t,
                                      int scale_block) {
  const int64_t at = tile * steps + step;
  return {at * 1024 + Bits::slot(g, t) * 16, (at * 8 + g) * (256 / scale_block)};
}

}  // namespace fp4
