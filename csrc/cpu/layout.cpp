#include "cpu/layout.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstring>

namespace fp4::cpu {
namespace {

#if defined(__SSE2__) || defined(__aarch64__)

// Vectors of 16 bytes, and functions that interleave the first or last halves of two of them.
#if defined(__SSE2__)

using Bytes = __m128i;

Bytes load(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const Bytes*>(p)); }
void store(uint8_t* p, Bytes v) { _mm_storeu_si128(reinterpret_cast<Bytes*>(p), v); }
Bytes first_bytes(Bytes a, Bytes b) { return _mm_unpacklo_epi8(a, b); }
Bytes last_bytes(Bytes a, Bytes b) { return _mm_unpackhi_epi8(a, b); }
Bytes first_words(Bytes a, Bytes b) { return _mm_unpacklo_epi32(a, b); }
Bytes last_words(Bytes a, Bytes b) { return _mm_unpackhi_epi32(a, b); }
Bytes first_halves(Bytes a, Bytes b) { return _mm_unpacklo_epi64(a, b); }
Bytes last_halves(Bytes a, Bytes b) { return _mm_unpackhi_epi64(a, b); }

#else

using Bytes = uint8x16_t;

Bytes load(const uint8_t* p) { return vld1q_u8(p); }
void store(uint8_t* p, Bytes v) { vst1q_u8(p, v); }
uint32x4_t words(Bytes v) { return vreinterpretq_u32_u8(v); }
uint64x2_t halves(Bytes v) { return vreinterpretq_u64_u8(v); }
Bytes first_bytes(Bytes a, Bytes b) { return vzip1q_u8(a, b); }
Bytes last_bytes(Bytes a, Bytes b) { return vzip2q_u8(a, b); }
Bytes first_words(Bytes a, Bytes b) { return vreinterpretq_u8_u32(vzip1q_u32(words(a), words(b))); }
Bytes last_words(Bytes a, Bytes b) { return vreinterpretq_u8_u32(vzip2q_u32(words(a), words(b))); }
Bytes first_halves(Bytes a, Bytes b) { return vreinterpretq_u8_u64(vzip1q_u64(halves(a), halves(b))); }
Bytes last_halves(Bytes a, Bytes b) { return vreinterpretq_u8_u64(vzip2q_u64(halves(a), halves(b))); }

#endif

// Transposes four words of each of 16 rows: to[w][row] = from[row][w].
void transpose_words(const uint8_t* from, int64_t row_bytes, uint8_t* to) {
  for (int r = 0; r < kPanelRows; r += 4, from += 4 * row_bytes) {
    const Bytes a = load(from), b = load(from + row_bytes), c = load(from + 2 * row_bytes),
                d = load(from + 3 * row_bytes);
    const Bytes ab_first = first_words(a, b), ab_last = last_words(a, b);
    const Bytes cd_first = first_words(c, d), cd_last = last_words(c, d);
    store(to + 4 * r, first_halves(ab_first, cd_first));
    store(to + 4 * r + 64, last_halves(ab_first, cd_first));
    store(to + 4 * r + 128, first_halves(ab_last, cd_last));
    store(to + 4 * r + 192, last_halves(ab_last, cd_last));
  }
}

// Transposes 16 bytes of each of 16 rows: to[b][row] = from[row][b]. Each of the four rounds interleaves the
// first half of the rows with the second half.
void transpose_bytes(const uint8_t* from, int64_t row_bytes, uint8_t* to) {
  Bytes rows[16], next[16];
  for (int r = 0; r < 16; ++r) rows[r] = load(from + r * row_bytes);
  for (int round = 0; round < 4; ++round) {
    for (int r = 0; r < 8; ++r) {
      next[2 * r] = first_bytes(rows[r], rows[r + 8]);
      next[2 * r + 1] = last_bytes(rows[r], rows[r + 8]);
    }
    std::memcpy(rows, next, sizeof(rows));
  }
  for (int b = 0; b < 16; ++b) store(to + 16 * b, rows[b]);
}

#else

void transpose_words(const uint8_t* from, int64_t row_bytes, uint8_t* to) {
  for (int r = 0; r < kPanelRows; ++r)
    for (int w = 0; w < 4; ++w) std::memcpy(to + 64 * w + 4 * r, from + r * row_bytes + 4 * w, 4);
}

void transpose_bytes(const uint8_t* from, int64_t row_bytes, uint8_t* to) {
  for (int r = 0; r < kPanelRows; ++r)
    for (int b = 0; b < 16; ++b) to[16 * b + r] = from[r * row_bytes + b];
}

#endif

}  // namespace

void pack_panel(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t k, BlockScales of,
                uint8_t* panel_codes, uint8_t* panel_scales) {
  const int64_t row_bytes = k / 2, blocks = of.count(k), size = scale_size(of.scale);
  const int64_t words = padded_k(k) / 8;
  if (rows < kPanelRows || k % kPanelK != 0) {
    std::memset(panel_codes, 0, words * 4 * kPanelRows);
    std::memset(panel_scales, 0, of.bytes(padded_k(k)) * kPanelRows);
  }
  // Panels of fewer rows, and the part that whole vectors do not cover, are moved word by word and byte by
  // byte.
  int64_t word = 0, block_at = 0;
  if (rows == kPanelRows) {
    for (; (word + 4) * 4 <= row_bytes; word += 4)
      transpose_words(codes + word * 4, row_bytes, panel_codes + word * 4 * kPanelRows);
    if (size == 1)
      for (; block_at + 16 <= blocks; block_at += 16)
        transpose_bytes(scales + block_at, blocks, panel_scales + block_at * kPanelRows);
  }
  const int64_t whole_words = row_bytes / 4;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* row = codes + r * row_bytes;
    uint8_t* to = panel_codes + r * 4;
    for (int64_t w = word; w < whole_words; ++w) std::memcpy(to + w * 4 * kPanelRows, row + w * 4, 4);
    std::memcpy(to + whole_words * 4 * kPanelRows, row + whole_words * 4, row_bytes % 4);
    for (int64_t b = block_at; b < blocks; ++b)
      std::memcpy(panel_scales + (b * kPanelRows + r) * size, scales + (r * blocks + b) * size, size);
  }
}

void unpack_panel(const uint8_t* panel_codes, const uint8_t* panel_scales, int64_t k, BlockScales of,
                  uint8_t* codes, uint8_t* scales) {
  const int64_t words = k / 8, blocks = of.count(k), size = scale_size(of.scale);
  for (int64_t r = 0; r < kPanelRows; ++r) {
    for (int64_t w = 0; w < words; ++w)
      std::memcpy(codes + (r * words + w) * 4, panel_codes + (w * kPanelRows + r) * 4, 4);
    for (int64_t b = 0; b < blocks; ++b)
      std::memcpy(scales + (r * blocks + b) * size, panel_scales + (b * kPanelRows + r) * size, size);
  }
}

}  // namespace fp4::cpu
