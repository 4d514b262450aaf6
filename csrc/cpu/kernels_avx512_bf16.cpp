// bfloat16 activations without conversion, with vdpbf16ps (Cooper Lake, Sapphire Rapids, Zen 4 and later).
// One instruction makes twice as many products as one in float32. Codes are exact in bfloat16, products in
// float32. bfloat16 subnormals count as zero.
//
// A lane's word has the nibbles of eight k. After a shift right by 4 j, its two halves begin with the nibbles
// of k = j and j + 4. A permute of 16-bit values turns them into a pair of weights, which is multiplied by
// activations j and j + 4.
#include "cpu/avx512.h"

namespace fp4::cpu {
namespace {

template <Scale scale, int count>
void bf16_tile(const Panel& panel, const uint8_t* const* rows, float* tile) {
  constexpr int step = step_of(scale);
  // All 16 values, twice: a permute reads five bits, and the fifth belongs to the next code.
  const __m512i values =
      _mm512_srli_epi32(_mm512_castps_si512(_mm512_loadu_ps(codes_of(element_of(scale)).values)), 16);
  const __m256i narrow = _mm512_cvtepi32_epi16(values);
  const __m512i table = _mm512_broadcast_i64x4(narrow);
  __m512 sum[count];
  for (int m = 0; m < count; ++m) sum[m] = _mm512_setzero_ps();
  const uint8_t* codes = panel.codes;
  const uint8_t* scales = panel.scales;
  for (int64_t k0 = 0; k0 < panel.k; k0 += step) {
    __m512 dot[count][kBf16Chains];
    for (int m = 0; m < count; ++m)
      for (int c = 0; c < kBf16Chains; ++c) dot[m][c] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int k = 0; k < step; k += 8, codes += 64) {
      const __m512i words = _mm512_loadu_si512(codes);
      _mm_prefetch(codes + kPrefetch, _MM_HINT_T0);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const auto b = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32(words, 4 * j), table);
#pragma GCC unroll 8
        for (int m = 0; m < count; ++m) {
          const auto a = (__m512bh)broadcast4(rows[m] + (k0 + k + 2 * j) * 2);
          dot[m][j % kBf16Chains] = _mm512_dpbf16_ps(dot[m][j % kBf16Chains], b, a);
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
struct Bf16Tile {
  template <int count>
  static void run(const Panel& panel, const uint8_t* const* rows, float* tile) {
    bf16_tile<scale, count>(panel, rows, tile);
  }
};

bool supported() { return __builtin_cpu_supports("avx512bf16"); }

// Each group of eight gets the order 0 4 1 5 2 6 3 7.
void prepare(const uint16_t* x, int64_t k, uint8_t* row) {
  const __m512i order =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  for (int64_t i = 0; i < padded_k(k); i += 32) {
    const __mmask32 there = k - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (k - i)) - 1;
    const __m512i values = _mm512_maskz_loadu_epi16(there, x + i);
    _mm512_storeu_si512(row + i * 2, _mm512_shuffle_epi8(values, order));
  }
}

}  // namespace

const Bf16Kernels kAvx512Bf16 = {
    .supported = supported,
    .panels = {panel_kernel<Bf16Tile<Scale::e4m3>>, panel_kernel<Bf16Tile<Scale::e8m0>>,
               panel_kernel<Bf16Tile<Scale::bf16>>, panel_kernel<Bf16Tile<Scale::f32>>},
    .value_bytes = 2,
    .one_order = true,
    .prepare = prepare,
};

}  // namespace fp4::cpu
