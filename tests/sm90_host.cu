// What the Hopper kernels compute in registers, run on the host for test_sm90_host.py: no GPU is needed.
#include "decode.cuh"
#include "prefill_fold.cuh"

using namespace fp4::sm90;

// bytes [256][8]: the e4m3 fold of the magnitudes 0 to 6 for each scale byte (with the layout's flag).
extern "C" void fold_tables(const uint8_t* scales, int count, int fast, uint8_t* bytes) {
  for (int i = 0; i < count; ++i) {
    const uint32_t plain = scales[i] & 0x7F, once = plain - kEighth;
    const FoldTable table = fast ? fast_table(once, once + 5 - (scales[i] >> 7), 0) : any_table(scales[i]);
    memcpy(bytes + 8 * i, &table.low, 4);
    memcpy(bytes + 8 * i + 4, &table.high, 4);
  }
}

// Words of eight codes with the scale byte of each: the A operand's bytes for 4t..4t+3 and 16+4t..16+4t+3.
extern "C" void fold_words(const uint32_t* words, const uint8_t* scales, int count, uint32_t* out) {
  for (int i = 0; i < count; ++i) fold_word(words[i], any_table(scales[i]), out[2 * i], out[2 * i + 1]);
}

// The same for decode: four fp16 pairs a word.
extern "C" void decode_words(const uint32_t* words, const uint8_t* scales, int count, uint16_t* out) {
  for (int i = 0; i < count; ++i) {
    uint32_t pairs[4];
    dequantize_word(words[i], __low2half2(decode_scales(scales[i] & 0x7F)), pairs);
    memcpy(out + 8 * i, pairs, sizeof(pairs));
  }
}
