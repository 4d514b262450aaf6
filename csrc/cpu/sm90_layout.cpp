#include "cpu/sm90_layout.h"

#include <cstring>

namespace fp4::cpu {

template <class Bits>
void sm90_encode(const Block16& block, uint8_t* to, uint8_t* scale) {
  *scale = Bits::encode_scale(block.scale);
  uint64_t codes = 0, word = 0;
  if (*scale != 0) std::memcpy(&codes, block.codes, sizeof(codes));
  for (int k = 0; k < 16; ++k) {
    for (int bit = 0; bit < 4; ++bit) word |= (codes >> (4 * k + bit) & 1) << Bits::bit(k, bit);
  }
  std::memcpy(to, &word, sizeof(word));
}

template <class Bits>
Block16 sm90_decode(const uint8_t* from, uint8_t scale) {
  uint64_t word, codes = 0;
  std::memcpy(&word, from, sizeof(word));
  for (int k = 0; k < 16; ++k) {
    for (int bit = 0; bit < 4; ++bit) codes |= (word >> Bits::bit(k, bit) & 1) << (4 * k + bit);
  }
  Block16 block;
  std::memcpy(block.codes, &codes, sizeof(codes));
  block.scale = Bits::decode_scale(scale);
  return block;
}

template void sm90_encode<Sm90>(const Block16&, uint8_t*, uint8_t*);
template void sm90_encode<Sm90Bf16>(const Block16&, uint8_t*, uint8_t*);
template Block16 sm90_decode<Sm90>(const uint8_t*, uint8_t);
template Block16 sm90_decode<Sm90Bf16>(const uint8_t*, uint8_t);

}  // namespace fp4::cpu
