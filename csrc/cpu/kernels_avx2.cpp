// AVX2 and FMA, without VNNI.
//
// A panel's 16 rows are two registers of eight. The weights of one scale block are widened once to a small
// buffer and then met by every activation row. For int8 activations they become the unsigned bytes
// 2 * e2m1 + 12, and vpmaddubsw adds pairs in 16 bits: at most 4 * 2 * 24 * 127 = 24384, so 16 k fit before
// the sums are widened.
#include <immintrin.h>

#include "cpu/quantize_row.h"
#include "cpu/rowwise.h"

namespace fp4::cpu {
namespace {

inline __m256i table_of(__m128i bytes) { return _mm256_broadcastsi128_si256(bytes); }

// 2 * e2m1 + 12 by code, and 2 * e2m1.
inline __m256i unsigned_table() {
  return table_of(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}
inline __m256i signed_table() {
  return table_of(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}

inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// The block scales of 8 rows as float32.
template <Scale scale>
inline __m256 load_scales(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  if constexpr (scale == Scale::e4m3) {
    const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);  // see kernels_avx512.cpp
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(int16_t(0xbfff)))),
                         _mm256_set1_ps(256.f));
  } else {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
    return _mm256_castsi256_ps(_mm256_max_epu32(exponent, _mm256_set1_epi32(0x00400000)));
  }
}

inline __m256i broadcast4(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

// The codes of `words` panel words, looked up: for each word the low nibbles of rows 0-7 and 8-15, then the
// high nibbles of both.
template <int words>
inline void look_up(const uint8_t* codes, __m256i table, __m256i* bytes) {
  const __m256i nibble = _mm256_set1_epi8(15);
#pragma GCC unroll 4
  for (int w = 0; w < words; ++w)
    for (int half = 0; half < 2; ++half) {
      const __m256i packed = load32(codes + w * 64 + half * 32);
      bytes[4 * w + half] = _mm256_shuffle_epi8(table, _mm256_and_si256(packed, nibble));
      bytes[4 * w + 2 + half] =
          _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble));
    }
}

template <Scale scale, int block>
void panel_int8(const Panel& panel, const uint8_t* const* rows, int count, float* tile) {
  const __m256i table = unsigned_table(), ones = _mm256_set1_epi16(1);
  const int64_t scales_at = Int8Row::scales_at(panel.k), corrections_at = Int8Row::corrections_at(panel.k);
  std::memset(tile, 0, count * kPanelRows * sizeof(float));
  for (int64_t k0 = 0; k0 < panel.k; k0 += block) {
    __m256i bytes[block / 2];
    look_up<block / 8>(panel.codes + k0 * 8, table, bytes);
    const uint8_t* scales = panel.scales + k0 / block * kPanelRows;
    const __m256 b_scale[2] = {load_scales<scale>(scales), load_scales<scale>(scales + 8)};
    for (int m = 0; m < count; ++m) {
      const uint8_t* a = rows[m] + k0;
      const __m256i correction = broadcast4(rows[m] + corrections_at + k0 / block * 4);
      __m256i dot[2] = {correction, correction};
#pragma GCC unroll 2
      for (int half_block = 0; half_block < block / 16; ++half_block) {
        __m256i pairs[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const __m256i four = broadcast4(a + half_block * 16 + i * 4);
          for (int half = 0; half < 2; ++half)
            pairs[half] = _mm256_add_epi16(pairs[half],
                                           _mm256_maddubs_epi16(bytes[half_block * 8 + i * 2 + half], four));
        }
        for (int half = 0; half < 2; ++half)
          dot[half] = _mm256_add_epi32(dot[half], _mm256_madd_epi16(pairs[half], ones));
      }
      float a_scale;
      std::memcpy(&a_scale, rows[m] + scales_at + k0 / kInt8Block * 4, 4);
      const __m256 factor = _mm256_set1_ps(.5f * a_scale);
      for (int half = 0; half < 2; ++half) {
        float* sum = tile + m * kPanelRows + half * 8;
        _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[half]),
                                              _mm256_mul_ps(b_scale[half], factor), _mm256_loadu_ps(sum)));
      }
    }
  }
}

template <Scale scale, int block>
void panel_float(const Panel& panel, const uint8_t* const* rows, int count, float* tile) {
  const __m256i table = signed_table();
  std::memset(tile, 0, count * kPanelRows * sizeof(float));
  for (int64_t k0 = 0; k0 < panel.k; k0 += block) {
    __m256i bytes[block / 2];
    look_up<block / 8>(panel.codes + k0 * 8, table, bytes);
    const uint8_t* scales = panel.scales + k0 / block * kPanelRows;
    const __m256 half_unit = _mm256_set1_ps(.5f);
    const __m256 b_scale[2] = {_mm256_mul_ps(load_scales<scale>(scales), half_unit),
                               _mm256_mul_ps(load_scales<scale>(scales + 8), half_unit)};
    // b[k][half]: the weights as float32, scaled.
    __m256 b[block][2];
    for (int w = 0; w < block / 8; ++w)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        for (int half = 0; half < 2; ++half)
          for (int high = 0; high < 2; ++high) {
            const __m256i lane = _mm256_slli_epi32(bytes[4 * w + 2 * high + half], 24 - 8 * i);
            b[8 * w + 2 * i + high][half] =
                _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(lane, 24)), b_scale[half]);
          }
    for (int m = 0; m < count; ++m) {
      const float* a = reinterpret_cast<const float*>(rows[m]) + k0;
      float* to = tile + m * kPanelRows;
      __m256 sum[4][2] = {};  // four chains of additions a half, so that none is waited for
      for (int k = 0; k < block; k += 4)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half)
            sum[c][half] = _mm256_fmadd_ps(b[k + c][half], _mm256_set1_ps(a[k + c]), sum[c][half]);
      for (int half = 0; half < 2; ++half) {
        const __m256 all = _mm256_add_ps(_mm256_add_ps(sum[0][half], sum[1][half]),
                                         _mm256_add_ps(sum[2][half], sum[3][half]));
        _mm256_storeu_ps(to + 8 * half, _mm256_add_ps(_mm256_loadu_ps(to + 8 * half), all));
      }
    }
  }
}

bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

const Kernels kAvx2Kernels = {
    .name = "avx2",
    .supported = supported,
    .int8_e4m3 = panel_int8<Scale::e4m3, 16>,
    .int8_e8m0 = panel_int8<Scale::e8m0, 32>,
    .float_e4m3 = panel_float<Scale::e4m3, 16>,
    .float_e8m0 = panel_float<Scale::e8m0, 32>,
    .max_magnitude = max_magnitude_row,
    .quantize_fp4 = quantize_fp4_row,
    .quantize_int8 = quantize_int8_row,
    .prepare_int8 = prepare_int8_row,
    .prepare_float = prepare_float_row,
    .store = store_row,
    .activate = activate_row,
    .convert = convert_row,
    .accumulate = accumulate_row,
};

}  // namespace fp4::cpu
