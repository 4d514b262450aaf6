// Parts that the AVX-512 kernels share. Each file compiles its own copy (see common/convert.h on linkage).
#pragma once

#include <immintrin.h>

#include "cpu/by_count.h"
#include "cpu/row_kernels.h"
#include "cpu_constants.h"

namespace fp4::cpu {
namespace {

// How many bytes ahead a kernel prefetches weights. Panels follow each other in memory, so this reaches into
// the next panel. It crosses page borders, where hardware prefetchers stop.
constexpr int kPrefetch = fitted::avx512::prefetch_bytes;

// load_scales returns the block scales of 16 rows as float32, times 1 / kScaleUnit.
template <Scale scale>
inline constexpr float kScaleUnit = scale == Scale::e4m3 ? 256.f : 1.f;

template <Scale scale>
inline __m512 load_scales(const uint8_t* p) {
  [[maybe_unused]] const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if constexpr (scale == Scale::e4m3) {
    // Shifted by 7, the bits of an e4m3 number are those of a float16 number, which is 2^-8 times as large
    // because its exponent bias is 8 larger. The shift leaves the sign in two bits; the lower one is cleared.
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256 sign_copy = _mm256_castsi256_ps(_mm256_set1_epi16(int16_t(0xbfff)));
    return _mm512_cvtph_ps(_mm256_castps_si256(_mm256_and_ps(_mm256_castsi256_ps(wide), sign_copy)));
  } else if constexpr (scale == Scale::bf16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  } else if constexpr (scale == Scale::f32) {
    return _mm512_loadu_ps(p);
  } else {
    // Byte 0 is 2^-127, a subnormal. Byte 255 (NaN) becomes infinity, which makes every sum infinite or NaN.
    const __m512i exponent = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(exponent, _mm512_set1_epi32(0x00400000)));
  }
}

// The number of chains of additions for a row in a block of K. It is the same for any number of rows, so that
// the sums of a row have one order. A single row hardly waits for its chains, because the processor works on
// the next blocks in the meantime.
constexpr int kFloatChains = 1, kBf16Chains = 2;

// For each row: sum += b_scale * (the chains of a block, added up).
template <int count, int chains>
[[gnu::always_inline]] inline void add_block(const __m512 (&dot)[count][chains], __m512 b_scale,
                                             __m512 (&sum)[count]) {
#pragma GCC unroll 8
  for (int m = 0; m < count; ++m) {
    __m512 all = dot[m][0];
    for (int c = 1; c < chains; ++c) all = _mm512_add_ps(all, dot[m][c]);
    sum[m] = _mm512_fmadd_ps(all, b_scale, sum[m]);
  }
}

template <int count>
[[gnu::always_inline]] inline void store_sums(const __m512 (&sum)[count], float unit, float* tile) {
  for (int m = 0; m < count; ++m)
    _mm512_storeu_ps(tile + m * kPanelRows, _mm512_mul_ps(sum[m], _mm512_set1_ps(unit)));
}

inline __m512i broadcast4(const uint8_t* p) { return _mm512_set1_epi32(load_word(p)); }

}  // namespace
}  // namespace fp4::cpu
