#include "cpu/sm90_layout.h"

#include <cstring>

namespace fp4::cpu {
namespace {

int magnitude_bit(int k) { return k % 8 / 4 * 16 + k % 4 * 4; }
int sign_bit(int k) { return k % 4 * 8 + (k % 8 / 4 == 0 ? 7 : 3); }

}  // namespace

void sm90_encode(const Block16& block, uint8_t* to, uint8_t* scale) {
  uint32_t words[2] = {0, 0};
  for (int k = 0; k < 16; ++k) {
    const uint32_t code = block.codes[k / 2] >> (4 * (k % 2)) & 15;
    words[k / 8] |= (code & 7) << magnitude_bit(k) | (code >> 3) << sign_bit(k);
  }
  std::memcpy(to, words, sizeof(words));
  const int mantissa = block.scale & 7;
  *scale = block.scale | (mantissa == 0 || mantissa == 7 ? 0x80 : 0);
}

Block16 sm90_decode(const uint8_t* from, uint8_t scale) {
  uint32_t words[2];
  std::memcpy(words, from, sizeof(words));
  Block16 block{};
  for (int k = 0; k < 16; ++k) {
    const uint32_t word = words[k / 8];
    const uint32_t code = (word >> magnitude_bit(k) & 7) | (word >> sign_bit(k) & 1) << 3;
    block.codes[k / 2] |= uint8_t(code << (4 * (k % 2)));
  }
  block.scale = scale & 0x7f;
  return block;
}

}  // namespace fp4::cpu
