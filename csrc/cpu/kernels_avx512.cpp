// AVX-512 with VNNI (Cascade Lake and later; no bf16 or VBMI instructions).
//
// One 64-byte load of a panel holds eight k of 16 rows, one row in each lane. For int8 activations a table
// look-up turns the nibbles into unsigned bytes (see Codes), and vpdpbusd multiplies four of them in each
// lane by four activations. The sum starts at -offset * sum(activations), which makes it exact. For float
// activations eight permutes turn the eight nibbles of a lane into float32.
#include "cpu/avx512.h"

namespace fp4::cpu {
namespace {

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
  store_sums(sum, kScaleUnit<scale> / float(codes_of(element_of(scale)).unit), tile);
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
    __m512 dot[count][kFloatChains];
    for (int m = 0; m < count; ++m)
      for (int c = 0; c < kFloatChains; ++c) dot[m][c] = _mm512_setzero_ps();
    for (int k = 0; k < step; k += 8, codes += 64) {
      const __m512i words = _mm512_loadu_si512(codes);
      _mm_prefetch(codes + kPrefetch, _MM_HINT_T0);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        // The permute reads only the low four bits of each lane.
        const __m512 b = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * j), table);
#pragma GCC unroll 8
        for (int m = 0; m < count; ++m) {
          const float* a = reinterpret_cast<const float*>(rows[m]) + k0 + k + j;
          dot[m][j % kFloatChains] = _mm512_fmadd_ps(b, _mm512_set1_ps(*a), dot[m][j % kFloatChains]);
        }
      }
    }
    const __m512 b_scale = load_scales<scale>(scales);
    scales = next_scales<scale>(panel, scales, k0 + step);
    add_block(dot, b_scale, sum);
  }
  store_sums(sum, kScaleUnit<scale>, tile);
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

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

void widen(const uint16_t* x, int64_t k, uint8_t* row) {
  prepare_float_row(x, DType::bf16, k, reinterpret_cast<float*>(row));
}

}  // namespace

const Kernels kAvx512Kernels = with_row_kernels({
    .name = "avx512",
    .supported = supported,
    .panels = {{panel_kernel<Int8Tile<Scale::e4m3>>, panel_kernel<FloatTile<Scale::e4m3>>},
               {panel_kernel<Int8Tile<Scale::e8m0>>, panel_kernel<FloatTile<Scale::e8m0>>},
               {panel_kernel<Int8Tile<Scale::bf16>>, panel_kernel<FloatTile<Scale::bf16>>},
               {panel_kernel<Int8Tile<Scale::f32>>, panel_kernel<FloatTile<Scale::f32>>}},
    .bf16 = nullptr,
    .tiles = nullptr,
    .one_order = true,
    .arrange_float = nullptr,
});

// Few bfloat16 rows, where tiles serve many: they become float32 rows, and only the tiles know that they are
// bfloat16.
const Bf16Kernels kAvx512WidenedBf16 = {
    .supported = supported,
    .panels = {panel_kernel<FloatTile<Scale::e4m3>>, panel_kernel<FloatTile<Scale::e8m0>>,
               panel_kernel<FloatTile<Scale::bf16>>, panel_kernel<FloatTile<Scale::f32>>},
    .value_bytes = 4,
    .one_order = true,
    .prepare = widen,
};

}  // namespace fp4::cpu
