// Kernels for many bfloat16 rows an expert, with vdpbf16ps. The weights of two panels become bfloat16 once
// for up to 128 rows. Then eight rows at a time are multiplied by both panels. This makes 16 chains of sums,
// which hide the latency of the products, and each broadcast activation is used for two products.
//
// As in the AMX kernels, weights include their block scales if that is exact in bfloat16, and their sums stay
// in registers over a chunk of K whose weights fit the L1 cache. Other weights stay plain codes, and the sums
// of each block are multiplied by its scales in float32.
#include "cpu/avx512_many.h"

namespace fp4::cpu {
namespace {

constexpr int kStep = 32;                                 // k that share a stored scale
constexpr int kAtOnce = 8;                                // rows
constexpr int64_t kChunk = fitted::avx512_bf16::chunk_k;  // two panels' weights of 256 k are 16 KiB
constexpr int kVector = 64;  // bytes of a pair of k of 16 rows, and of eight k of a panel's codes
constexpr int kOutRow = 2 * kPanelRows;

int64_t rows_bytes(RowKind, int64_t k) { return k / 2 * kVector; }

// An unpacked panel is its weights [k / 2 pairs][16][2], followed by its scales for each step as float32 [k /
// 32][16].
int64_t weight_scales_at(int64_t k) { return k / 2 * kVector; }

int64_t panel_bytes(int64_t k) {
  return weight_scales_at(k) + k / kStep * kPanelRows * int64_t(sizeof(float));
}

// Packs at most 16 rows [k] as [k / 2][16 rows][2]: the pairs of k one after another, each for all rows.
void pack_rows(RowKind, const uint8_t* const* rows, int count, int64_t k, uint8_t* to) {
  for (int64_t i = 0; i < k / 32; ++i) {
    __m512i values[kTileRows];
    for (int m = 0; m < kTileRows; ++m)
      values[m] = m < count ? load64(rows[m] + i * 64) : _mm512_setzero_si512();
    transpose(values);
    for (int pair = 0; pair < 16; ++pair, to += 64) _mm512_storeu_si512(to, values[pair]);
  }
}

// Decodes a pair of k of 16 weight rows. Products are exact in bfloat16, so the upper halves hold all of
// their bits.
inline __m512i unpack_pair(__m512i words, int j, __m512 values, __m512 scales) {
  const __m512 low = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * j), values), scales);
  const __m512 high =
      _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * j + 16), values), scales);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(low), 16),
                                 _mm512_castps_si512(high));
}

template <Scale scale>
bool unpack(const Panel& panel, uint8_t* to) {
  constexpr int step = step_of(scale);
  const bool scaled = has_bf16_products<scale>(panel);
  const __m512 values = _mm512_loadu_ps(codes_of(element_of(scale)).values);
  const uint8_t* codes = panel.codes;
  const uint8_t* scales = panel.scales;
  float* to_scales = reinterpret_cast<float*>(to + weight_scales_at(panel.k));
  for (int64_t k0 = 0; k0 < panel.k; k0 += step) {
    const __m512 of_block = _mm512_mul_ps(load_scales<scale>(scales), _mm512_set1_ps(kScaleUnit<scale>));
    const __m512 factor = scaled ? of_block : _mm512_set1_ps(1.f);
    if (step == kStep && !scaled) _mm512_storeu_ps(to_scales + k0 / kStep * kPanelRows, of_block);
    scales = next_scales<scale>(panel, scales, k0 + step);
    for (int k = 0; k < step; k += 8, codes += kVector) {
      const __m512i words = _mm512_loadu_si512(codes);
      _mm_prefetch(codes + kPrefetch, _MM_HINT_T0);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j, to += kVector)
        _mm512_storeu_si512(to, unpack_pair(words, j, values, factor));
    }
  }
  return scaled;
}

template <int panels>
struct Operands {
  const uint8_t* weights[panels];
  const float* scales[panels];  // block scales of weights that do not include them
};

// out [8][2][16] += rows . panels, for `pairs` pairs of k. The first chunk writes out instead of adding.
template <int panels, bool scaled>
void multiply_rows(const Operands<panels>& o, const uint8_t* rows, int64_t pairs, bool first, float* out) {
  const __m512 zero = _mm512_setzero_ps();
  __m512 sum[kAtOnce][panels];
#pragma GCC unroll 8
  for (int m = 0; m < kAtOnce; ++m)
#pragma GCC unroll 2
    for (int p = 0; p < panels; ++p)
      sum[m][p] = first || !scaled ? zero : _mm512_loadu_ps(out + m * kOutRow + p * kPanelRows);
#pragma GCC unroll 4
  for (int64_t i = 0; i < pairs; ++i) {
    __m512bh weights[panels];
    for (int p = 0; p < panels; ++p) weights[p] = (__m512bh)_mm512_loadu_si512(o.weights[p] + i * kVector);
#pragma GCC unroll 8
    for (int m = 0; m < kAtOnce; ++m) {
      const auto a = (__m512bh)broadcast4(rows + i * kVector + m * 4);
#pragma GCC unroll 2
      for (int p = 0; p < panels; ++p) sum[m][p] = _mm512_dpbf16_ps(sum[m][p], weights[p], a);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kAtOnce; ++m)
#pragma GCC unroll 2
    for (int p = 0; p < panels; ++p) {
      float* const to = out + m * kOutRow + p * kPanelRows;
      if (!scaled)
        sum[m][p] =
            _mm512_fmadd_ps(sum[m][p], _mm512_loadu_ps(o.scales[p]), first ? zero : _mm512_loadu_ps(to));
      _mm512_storeu_ps(to, sum[m][p]);
    }
}

// For panels that all include their scales, or all do not.
template <int panels, bool scaled>
void multiply_panels(const uint8_t* rows, int row_count, const Panel& panel, const uint8_t* const* weights,
                     float* out) {
  const int64_t k = panel.k, chunk = scaled ? kChunk : std::min<int64_t>(kChunk, panel.block);
  for (int64_t k0 = 0; k0 < k; k0 += chunk) {
    Operands<panels> o;
    for (int p = 0; p < panels; ++p) {
      o.weights[p] = weights[p] + k0 / 2 * kVector;
      o.scales[p] =
          reinterpret_cast<const float*>(weights[p] + weight_scales_at(k)) + k0 / kStep * kPanelRows;
    }
    const int64_t pairs = std::min(chunk, k - k0) / 2;
    for (int m = 0; m < row_count; m += kAtOnce) {
      const uint8_t* from = rows + m / kTileRows * rows_bytes(RowKind::bf16, k) + m % kTileRows * 4;
      multiply_rows<panels, scaled>(o, from + k0 / 2 * kVector, pairs, k0 == 0, out + m * kOutRow);
    }
  }
}

void multiply(RowKind, const uint8_t* rows, int row_count, const Panel* panels, int count,
              uint8_t* const* weights, const bool* scaled, float* out) {
  if (count == 2 && scaled[0] == scaled[1])
    return scaled[0] ? multiply_panels<2, true>(rows, row_count, panels[0], weights, out)
                     : multiply_panels<2, false>(rows, row_count, panels[0], weights, out);
  for (int p = 0; p < count; ++p)
    (scaled[p] ? multiply_panels<1, true> : multiply_panels<1, false>)(rows, row_count, panels[p],
                                                                       weights + p, out + p * kPanelRows);
}

bool supported() { return __builtin_cpu_supports("avx512bf16"); }

}  // namespace

const TileKernels kAvx512Bf16Tiles = {
    .supported = supported,
    .min_rows = {.floating = fitted::avx512_bf16::min_rows_floating,
                 .int8 = fitted::avx512_bf16::min_rows_int8,
                 .bf16 = fitted::avx512_bf16::min_rows_bf16},
    .speed = fitted::avx512_bf16::speed,
    .same_bits = [](RowKind, Scale) { return false; },
    .rows_bytes = rows_bytes,
    .pack_rows = pack_rows,
    .panel_bytes = panel_bytes,
    .unpack = {unpack<Scale::e4m3>, unpack<Scale::e8m0>, unpack<Scale::bf16>, unpack<Scale::f32>},
    .multiply = multiply,
};

}  // namespace fp4::cpu
