#include "cpu/sm90_layout.h"

#include <cstring>

namespace fp4::cpu {
namespace {

uint64_t load(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

}  // namespace

template <class Bits>
void sm90_store(const Block16& block, const Sm90Place& at, uint8_t* codes, uint8_t* scales) {
  const uint8_t byte = Bits::encode_scale(block.scale);
  const uint64_t from = byte == 0 ? 0 : load(block.codes);
  uint64_t mine[4] = {}, words[4] = {};
  for (int k = 0; k < 16; ++k) {
    const int word = Bits::word(at.number, k);
    for (int bit = 0; bit < 4; ++bit) {
      const int place = Bits::bit(at.number, k, bit);
      mine[word] |= uint64_t(1) << place;
      words[word] |= (from >> (4 * k + bit) & 1) << place;
    }
  }
  for (int i = 0; i < 4; ++i) {
    if (mine[i] == 0) continue;
    uint8_t* to = codes + at.lane.word(i);
    const uint64_t word = (load(to) & ~mine[i]) | words[i];
    std::memcpy(to, &word, sizeof(word));
  }
  scales[at.scale] = byte;
}

template <class Bits>
Block16 sm90_load(const Sm90Place& at, const uint8_t* codes, const uint8_t* scales) {
  uint64_t words[4], to = 0;
  for (int i = 0; i < 4; ++i) words[i] = load(codes + at.lane.word(i));
  for (int k = 0; k < 16; ++k) {
    for (int bit = 0; bit < 4; ++bit) {
      to |= (words[Bits::word(at.number, k)] >> Bits::bit(at.number, k, bit) & 1) << (4 * k + bit);
    }
  }
  Block16 block;
  std::memcpy(block.codes, &to, sizeof(to));
  block.scale = Bits::decode_scale(scales[at.scale]);
  return block;
}

template void sm90_store<Sm90>(const Block16&, const Sm90Place&, uint8_t*, uint8_t*);
template void sm90_store<MmaBf16>(const Block16&, const Sm90Place&, uint8_t*, uint8_t*);
template Block16 sm90_load<Sm90>(const Sm90Place&, const uint8_t*, const uint8_t*);
template Block16 sm90_load<MmaBf16>(const Sm90Place&, const uint8_t*, const uint8_t*);

}  // namespace fp4::cpu
