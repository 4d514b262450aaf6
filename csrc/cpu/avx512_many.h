// Parts that the AVX-512 kernels for many rows share: those with AMX and those with vdpbf16ps.
#pragma once

#include "cpu/avx512.h"

namespace fp4::cpu {
namespace {

inline __m512i load64(const void* p) { return _mm512_loadu_si512(p); }

// Transposes r as a matrix of 16 x 16 values of 32 bits, in place.
[[gnu::always_inline]] inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Lane b of r[4 a + c] now holds rows 4 a to 4 a + 3 of column 4 b + c.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i ab_low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    const __m512i ab_high = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i cd_low = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i cd_high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(ab_low, cd_low, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(ab_low, cd_low, 0xdd);
    t[12 + c] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// With e8m0 bytes in this range, products with the weights stay far from the ends of float32's range.
inline constexpr int kE8m0Low = 64, kE8m0High = 190;

// True if codes times the panel's scales are exact in bfloat16.
template <Scale scale>
inline bool has_bf16_products(const Panel& panel) {
  if constexpr (scale == Scale::e4m3) return true;
  if constexpr (scale != Scale::e8m0) return false;
  __m128i low = _mm_set1_epi8(char(kE8m0Low)), high = _mm_set1_epi8(char(kE8m0High));
  const __m128i lowest = low, highest = high;
  for (int64_t b = 0; b < panel.k / step_of(scale); ++b) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel.scales + b * kPanelRows));
    low = _mm_min_epu8(low, bytes);
    high = _mm_max_epu8(high, bytes);
  }
  return _mm_movemask_epi8(_mm_and_si128(_mm_cmpeq_epi8(low, lowest), _mm_cmpeq_epi8(high, highest))) ==
         0xffff;
}

}  // namespace
}  // namespace fp4::cpu
