// AVX2 and FMA, without VNNI.
//
// A panel's 16 rows are two registers of eight. The weights of one step (step_of) are widened once into a
// small buffer and then multiplied by every activation row. For int8 activations they become unsigned bytes
// (see Codes), at most 24 for e2m1 and 15 for int4. vpmaddubsw adds pairs in 16 bits. The sums of 16 k are at
// most 4 * 2 * 24 * 127 = 24384, so they fit before they are widened. For float activations see
// for_each_weight.
#include <immintrin.h>

#include "cpu/row_kernels.h"

namespace fp4::cpu {
namespace {

inline __m256i load_table(const std::array<uint8_t, 16>& bytes) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes.data())));
}

inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// The block scales of 8 rows as float32.
template <Scale scale>
inline __m256 load_scales(const uint8_t* p) {
  [[maybe_unused]] const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  if constexpr (scale == Scale::e4m3) {
    const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);  // see kernels_avx512.cpp
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(int16_t(0xbfff)))),
                         _mm256_set1_ps(256.f));
  } else if constexpr (scale == Scale::e8m0) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
    return _mm256_castsi256_ps(_mm256_max_epu32(exponent, _mm256_set1_epi32(0x00400000)));
  } else if constexpr (scale == Scale::bf16) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  } else {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  }
}

inline __m256i broadcast4(const uint8_t* p) { return _mm256_set1_epi32(load_word(p)); }

// Looks up the codes of `words` panel words. For each word the results are the low nibbles of rows 0-7 and
// 8-15, then the high nibbles of both.
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

template <Scale scale>
void panel_int8(const Panel& panel, const uint8_t* const* rows, int count, float* tile) {
  constexpr int step = step_of(scale);
  const __m256i table = load_table(kUnsignedBytes<element_of(scale)>), ones = _mm256_set1_epi16(1);
  const int64_t scales_at = Int8Row::scales_at(panel.k), corrections_at = Int8Row::corrections_at(panel.k);
  std::memset(tile, 0, count * kPanelRows * sizeof(float));
  const uint8_t* scales = panel.scales;
  for (int64_t k0 = 0; k0 < panel.k; k0 += step) {
    __m256i bytes[step / 2];
    look_up<step / 8>(panel.codes + k0 * 8, table, bytes);
    const __m256 b_scale[2] = {load_scales<scale>(scales),
                               load_scales<scale>(scales + 8 * scale_size(scale))};
    scales = next_scales<scale>(panel, scales, k0 + step);
    for (int m = 0; m < count; ++m) {
      const uint8_t* a = rows[m] + k0;
      const __m256i correction = broadcast4(rows[m] + corrections_at + k0 / step * 4);
      __m256i dot[2] = {correction, correction};
#pragma GCC unroll 2
      for (int half_step = 0; half_step < step / 16; ++half_step) {
        __m256i pairs[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const __m256i four = broadcast4(a + half_step * 16 + i * 4);
          for (int half = 0; half < 2; ++half)
            pairs[half] = _mm256_add_epi16(pairs[half],
                                           _mm256_maddubs_epi16(bytes[half_step * 8 + i * 2 + half], four));
        }
        for (int half = 0; half < 2; ++half)
          dot[half] = _mm256_add_epi32(dot[half], _mm256_madd_epi16(pairs[half], ones));
      }
      float a_scale;
      std::memcpy(&a_scale, rows[m] + scales_at + k0 / kInt8Block * 4, 4);
      const __m256 factor = _mm256_set1_ps(a_scale / float(codes_of(element_of(scale)).unit));
      for (int half = 0; half < 2; ++half) {
        float* sum = tile + m * kPanelRows + half * 8;
        _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[half]),
                                              _mm256_mul_ps(b_scale[half], factor), _mm256_loadu_ps(sum)));
      }
    }
  }
}

// Calls f(pair, group, b) for the weights of one step as float32. A vector b holds two k of four rows:
//
//   pair   pair p of a word is k = {0, 4}, {2, 6}, {1, 5}, {3, 7}: the order of an arranged activation row
//   group  2 * half + u; lanes 4 l to 4 l + 3 are rows 8 * half + 4 l + 2 u (twice) and the next one (twice)
//
// Values are exact in bf16, which is the upper half of a float32. Two look-ups make its two bytes, and an
// unpack joins them.
template <Scale scale, typename F>
inline void for_each_weight(const uint8_t* codes, const F& f) {
  const __m256i upper = load_table(kFloatByte<element_of(scale), 3>);
  const __m256i lower = load_table(kFloatByte<element_of(scale), 2>);
  const __m256i nibble = _mm256_set1_epi8(15), high_half = _mm256_set1_epi32(int32_t(0xffff0000));
#pragma GCC unroll 4
  for (int w = 0; w < step_of(scale) / 8; ++w)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i packed = load32(codes + w * 64 + half * 32);
#pragma GCC unroll 2
      for (int high = 0; high < 2; ++high) {
        const __m256i code = _mm256_and_si256(high ? _mm256_srli_epi16(packed, 4) : packed, nibble);
        const __m256i bytes[2] = {_mm256_shuffle_epi8(lower, code), _mm256_shuffle_epi8(upper, code)};
        const __m256i bf16[2] = {_mm256_unpacklo_epi8(bytes[0], bytes[1]),
                                 _mm256_unpackhi_epi8(bytes[0], bytes[1])};
#pragma GCC unroll 2
        for (int u = 0; u < 2; ++u) {
          f(4 * w + 2 * high, 2 * half + u, _mm256_castsi256_ps(_mm256_slli_epi32(bf16[u], 16)));
          f(4 * w + 2 * high + 1, 2 * half + u, _mm256_castsi256_ps(_mm256_and_si256(bf16[u], high_half)));
        }
      }
    }
}

inline __m256 broadcast_pair(const float* p) {
  return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
}

// to [16] += the sums of one step (by group), times the scales of the rows.
inline void add_scaled(const __m256 sum[4], const __m256 b_scale[2], float* to) {
  for (int half = 0; half < 2; ++half) {
    const __m256 rows = _mm256_hadd_ps(sum[2 * half], sum[2 * half + 1]);  // adds the two k of each row
    _mm256_storeu_ps(to + 8 * half, _mm256_fmadd_ps(rows, b_scale[half], _mm256_loadu_ps(to + 8 * half)));
  }
}

// `count` activation rows times the weights b[pair][group] of one step.
template <int step, int count>
inline void multiply_step(const __m256 (*b)[4], const uint8_t* const* rows, int64_t k0,
                          const __m256 b_scale[2], float* tile) {
  __m256 sum[count][4] = {};
#pragma GCC unroll 4
  for (int pair = 0; pair < step / 2; ++pair) {
    __m256 a[count];
    for (int m = 0; m < count; ++m)
      a[m] = broadcast_pair(reinterpret_cast<const float*>(rows[m]) + k0 + 2 * pair);
    for (int g = 0; g < 4; ++g)
      for (int m = 0; m < count; ++m) sum[m][g] = _mm256_fmadd_ps(b[pair][g], a[m], sum[m][g]);
  }
  for (int m = 0; m < count; ++m) add_scaled(sum[m], b_scale, tile + m * kPanelRows);
}

template <Scale scale>
void panel_float(const Panel& panel, const uint8_t* const* rows, int count, float* tile) {
  constexpr int step = step_of(scale);
  std::memset(tile, 0, count * kPanelRows * sizeof(float));
  const uint8_t* scales = panel.scales;
  for (int64_t k0 = 0; k0 < panel.k; k0 += step) {
    const uint8_t* codes = panel.codes + k0 * 8;
    const __m256 b_scale[2] = {load_scales<scale>(scales),
                               load_scales<scale>(scales + 8 * scale_size(scale))};
    scales = next_scales<scale>(panel, scales, k0 + step);
    if (count == 1) {  // each weight is used once, right after it is decoded, in the order of multiply_step
      const float* a = reinterpret_cast<const float*>(rows[0]) + k0;
      __m256 sum[4] = {};
      for_each_weight<scale>(codes, [&](int pair, int group, __m256 b) {
        sum[group] = _mm256_fmadd_ps(b, broadcast_pair(a + 2 * pair), sum[group]);
      });
      add_scaled(sum, b_scale, tile);
      continue;
    }
    __m256 b[step / 2][4];
    for_each_weight<scale>(codes, [&](int pair, int group, __m256 value) { b[pair][group] = value; });
    int m = 0;
    for (; count - m >= 3; m += 3)  // three rows fill the registers
      multiply_step<step, 3>(b, rows + m, k0, b_scale, tile + m * kPanelRows);
    if (count - m == 2) multiply_step<step, 2>(b, rows + m, k0, b_scale, tile + m * kPanelRows);
    if (count - m == 1) multiply_step<step, 1>(b, rows + m, k0, b_scale, tile + m * kPanelRows);
  }
}

// Puts the pairs of for_each_weight side by side: each group of eight gets the order 0 4 2 6 1 5 3 7.
void arrange_row(float* row, int64_t k) {
  const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
  for (int64_t i = 0; i < k; i += 8)
    _mm256_storeu_ps(row + i, _mm256_permutevar8x32_ps(_mm256_loadu_ps(row + i), order));
}

bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

const Kernels kAvx2Kernels = with_row_kernels({
    .name = "avx2",
    .supported = supported,
    .panels = {{panel_int8<Scale::e4m3>, panel_float<Scale::e4m3>},
               {panel_int8<Scale::e8m0>, panel_float<Scale::e8m0>},
               {panel_int8<Scale::bf16>, panel_float<Scale::bf16>},
               {panel_int8<Scale::f32>, panel_float<Scale::f32>}},
    .bf16 = nullptr,
    .tiles = nullptr,
    .one_order = true,
    .arrange_float = arrange_row,
});

}  // namespace fp4::cpu
