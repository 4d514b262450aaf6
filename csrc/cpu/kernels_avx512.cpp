// AVX-512 with VNNI (Cascade Lake and later; no bf16 or VBMI instructions).
//
// One 64-byte load of a panel holds eight k of 16 rows, a row a lane. For int8 activations the nibbles become
// unsigned bytes by a table look-up (see Codes), and vpdpbusd multiplies four of them in each lane with four
// activations; starting from -offset * sum(activations) makes the sum exact. For float activations the eight
// nibbles of a lane become float32 by eight permutes.
#include <immintrin.h>

#include <utility>

#include "cpu/row_kernels.h"

namespace fp4::cpu {
namespace {

// How many bytes ahead of its loads a kernel asks for weights. Panels follow each other in memory, so this
// reaches into the next one, across the page borders at which hardware prefetchers stop.
constexpr int kPrefetch = 4096;

// The block scales of 16 rows as float32, times 1 / kScaleUnit.
template <Scale scale>
inline constexpr float kScaleUnit = scale == Scale::e4m3 ? 256.f : 1.f;

template <Scale scale>
inline __m512 load_scales(const uint8_t* p) {
  [[maybe_unused]] const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if constexpr (scale == Scale::e4m3) {
    // The bits of e4m3 are those of a float16 whose exponent bias is 8 larger: value * 2^-8, sign moved
    // apart.
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256 sign_copy = _mm256_castsi256_ps(_mm256_set1_epi16(int16_t(0xbfff)));
    return _mm512_cvtph_ps(_mm256_castps_si256(_mm256_and_ps(_mm256_castsi256_ps(wide), sign_copy)));
  } else if constexpr (scale == Scale::bf16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  } else if constexpr (scale == Scale::f32) {
    return _mm512_loadu_ps(p);
  } else {
    // Byte 0 is 2^-127, a subnormal; byte 255 (NaN) becomes infinity, which no sum hides.
    const __m512i exponent = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(exponent, _mm512_set1_epi32(0x00400000)));
  }
}

inline __m512i broadcast4(const uint8_t* p) { return _mm512_set1_epi32(load_word(p)); }

template <Scale scale, int count>
void int8_tile(const Panel& panel, const uint8_t* const* rows, float* tile) {
  constexpr int step = step_of(scale);
  constexpr const std::array<uint8_t, 16>& bytes = kUnsignedBytes<element_of(scale)>;
  const __m512i table =
      _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes.data())));
  const __m512i nibble = _mm512_set1_epi8(15);
  const int64_t scales_at = Int8Row::scales_at(panel.k), corrections_at = Int8Row::corrections_at(panel.k);
  __m512 sum[count];
  for (int m = 0; m < count; ++m) sum[m] = _mm512_setzero_ps();
  const uint8_t* codes = panel.codes;
  const uint8_t* scales = panel.scales;
  for (int64_t k0 = 0; k0 < panel.k; k0 += step) {
    __m512i dot[count];
    for (int m = 0; m < count; ++m) dot[m] = broadcast4(rows[m] + corrections_at + k0 / step * 4);
#pragma GCC unroll 4
    for (int k = 0; k < step; k += 8, codes += 64) {
      const __m512i words = _mm512_loadu_si512(codes);
      _mm_prefetch(codes + kPrefetch, _MM_HINT_T0);
      const __m512i low = _mm512_shuffle_epi8(table, _mm512_and_si512(words, nibble));
      const __m512i high = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(words, 4), nibble));
#pragma GCC unroll 8
      for (int m = 0; m < count; ++m) {
        dot[m] = _mm512_dpbusd_epi32(dot[m], low, broadcast4(rows[m] + k0 + k));
        dot[m] = _mm512_dpbusd_epi32(dot[m], high, broadcast4(rows[m] + k0 + k + 4));
      }
    }
    const __m512 b_scale = load_scales<scale>(scales);
    scales = next_scales<scale>(panel, scales, k0 + step);
#pragma GCC unroll 8
    for (int m = 0; m < count; ++m) {
      const __m512 a_scale = _mm512_castsi512_ps(broadcast4(rows[m] + scales_at + k0 / kInt8Block * 4));
      sum[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[m]), _mm512_mul_ps(b_scale, a_scale), sum[m]);
    }
  }
  const __m512 unit = _mm512_set1_ps(kScaleUnit<scale> / float(codes_of(element_of(scale)).unit));
  for (int m = 0; m < count; ++m) _mm512_storeu_ps(tile + m * kPanelRows, _mm512_mul_ps(sum[m], unit));
}

template <Scale scale, int count>
void float_tile(const Panel& panel, const uint8_t* const* rows, float* tile) {
  constexpr int step = step_of(scale);
  const __m512 table = _mm512_loadu_ps(codes_of(element_of(scale)).values);
  __m512 sum[count];
  for (int m = 0; m < count; ++m) sum[m] = _mm512_setzero_ps();
  const uint8_t* codes = panel.codes;
  const uint8_t* scales = panel.scales;
  for (int64_t k0 = 0; k0 < panel.k; k0 += step) {
    // Few rows would wait for one chain of additions: they take several.
    constexpr int chains = count <= 2 ? 4 : count <= 4 ? 2 : 1;
    __m512 dot[count][chains];
    for (int m = 0; m < count; ++m)
      for (int c = 0; c < chains; ++c) dot[m][c] = _mm512_setzero_ps();
    for (int k = 0; k < step; k += 8, codes += 64) {
      const __m512i words = _mm512_loadu_si512(codes);
      _mm_prefetch(codes + kPrefetch, _MM_HINT_T0);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        // The permute reads the low four bits of each lane and no others.
        const __m512 b = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * j), table);
#pragma GCC unroll 8
        for (int m = 0; m < count; ++m) {
          const float* a = reinterpret_cast<const float*>(rows[m]) + k0 + k + j;
          dot[m][j % chains] = _mm512_fmadd_ps(b, _mm512_set1_ps(*a), dot[m][j % chains]);
        }
      }
    }
    const __m512 b_scale = load_scales<scale>(scales);
    scales = next_scales<scale>(panel, scales, k0 + step);
#pragma GCC unroll 8
    for (int m = 0; m < count; ++m) {
      __m512 all = dot[m][0];
      for (int c = 1; c < chains; ++c) all = _mm512_add_ps(all, dot[m][c]);
      sum[m] = _mm512_fmadd_ps(all, b_scale, sum[m]);
    }
  }
  const __m512 unit = _mm512_set1_ps(kScaleUnit<scale>);
  for (int m = 0; m < count; ++m) _mm512_storeu_ps(tile + m * kPanelRows, _mm512_mul_ps(sum[m], unit));
}

// Picks the instance for `count` rows, 1 to kTokenBlock, so that every row has its own registers.
template <typename Tile, int... counts>
void dispatch(std::integer_sequence<int, counts...>, const Panel& panel, const uint8_t* const* rows,
              int count, float* tile) {
  (void)((count == counts + 1 && (Tile::template run<counts + 1>(panel, rows, tile), true)) || ...);
}

template <Scale scale>
struct Int8Tile {
  template <int count>
  static void run(const Panel& panel, const uint8_t* const* rows, float* tile) {
    int8_tile<scale, count>(panel, rows, tile);
  }
};

template <Scale scale>
struct FloatTile {
  template <int count>
  static void run(const Panel& panel, const uint8_t* const* rows, float* tile) {
    float_tile<scale, count>(panel, rows, tile);
  }
};

template <typename Tile>
void panel_kernel(const Panel& panel, const uint8_t* const* rows, int count, float* tile) {
  dispatch<Tile>(std::make_integer_sequence<int, kTokenBlock>(), panel, rows, count, tile);
}

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

}  // namespace

const Kernels kAvx512Kernels = with_row_kernels({
    .name = "avx512",
    .supported = supported,
    .panels = {{panel_kernel<Int8Tile<Scale::e4m3>>, panel_kernel<FloatTile<Scale::e4m3>>},
               {panel_kernel<Int8Tile<Scale::e8m0>>, panel_kernel<FloatTile<Scale::e8m0>>},
               {panel_kernel<Int8Tile<Scale::bf16>>, panel_kernel<FloatTile<Scale::bf16>>},
               {panel_kernel<Int8Tile<Scale::f32>>, panel_kernel<FloatTile<Scale::f32>>}},
    .arrange_float = nullptr,
});

}  // namespace fp4::cpu
