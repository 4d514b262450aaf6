#include "cpu/sm90_layout.h"

#include <cstring>

namespace fp4::cpu {
namespace {

// Where the bits of code k of a block are, of its 64: bits 0 to 2 are the magnitude, 3 is the sign.
int sm90_bit(int k, int bit) {
  const int word = k / 8 * 32;
  return bit < 3 ? word + k % 8 / 4 * 16 + k % 4 * 4 + bit : word + k % 4 * 8 + (k % 8 / 4 == 0 ? 7 : 3);
}

int bf16_bit(int k, int bit) {
  constexpr int kRotations[8] = {0, 4, 10, 8, 2, 6, 12, 14};
  const int pair = k / 4 * 2 + k % 2;
  const int place = ((bit < 3 ? 6 + bit : 15) + k / 2 % 2 * 16 - kRotations[pair] + 32) % 32;
  const bool second = pair % 4 == 3 ? (0x0603 >> place % 16 & 1) == 0 : pair > 3;
  return place + (second ? 32 : 0);
}

uint8_t sm90_scale(uint8_t e4m3) {
  const int mantissa = e4m3 & 7;
  return e4m3 | (mantissa == 0 || mantissa == 7 ? 0x80 : 0);
}

// {exponent + 10, mantissa} of a value that is not zero; subnormal ones are k x 2^-9.
uint8_t bf16_scale(uint8_t e4m3) {
  if (e4m3 == 0) return 0;
  if (e4m3 >= 8) return e4m3 + (3 << 3);
  int shift = 0;
  while ((e4m3 << shift) < 8) ++shift;
  return uint8_t((4 - shift) << 3 | ((e4m3 << shift) & 7));
}

uint8_t e4m3_of_bf16_scale(uint8_t byte) {
  if (byte == 0) return 0;
  if (byte >= (4 << 3)) return byte - (3 << 3);
  return uint8_t(((byte & 7) | 8) >> (4 - (byte >> 3)));
}

}  // namespace

void sm90_encode(const Block16& block, bool bf16, uint8_t* to, uint8_t* scale) {
  *scale = bf16 ? bf16_scale(block.scale) : sm90_scale(block.scale);
  uint64_t codes = 0, words = 0;
  if (*scale != 0) std::memcpy(&codes, block.codes, sizeof(codes));
  for (int k = 0; k < 16; ++k) {
    for (int bit = 0; bit < 4; ++bit) {
      words |= (codes >> (4 * k + bit) & 1) << (bf16 ? bf16_bit(k, bit) : sm90_bit(k, bit));
    }
  }
  std::memcpy(to, &words, sizeof(words));
}

Block16 sm90_decode(const uint8_t* from, uint8_t scale, bool bf16) {
  uint64_t words, codes = 0;
  std::memcpy(&words, from, sizeof(words));
  for (int k = 0; k < 16; ++k) {
    for (int bit = 0; bit < 4; ++bit) {
      codes |= (words >> (bf16 ? bf16_bit(k, bit) : sm90_bit(k, bit)) & 1) << (4 * k + bit);
    }
  }
  Block16 block{};
  std::memcpy(block.codes, &codes, sizeof(codes));
  block.scale = bf16 ? e4m3_of_bf16_scale(scale) : scale & 0x7f;
  return block;
}

}  // namespace fp4::cpu
