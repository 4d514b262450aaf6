// Many rows an expert, with AMX's products of bfloat16 (Sapphire Rapids and later): 16 rows x 16 weight rows
// x 32 k an instruction.
//
// Every kind of activation row goes this way. bfloat16 rows are what they are. int8 codes are exact in
// bfloat16, and each 32 of them share a scale, which is one instruction's k. AMX has products of int8 too, of
// 64 k: with a scale every 32 k half of each would be idle, and the scales of nvfp4, one for 16 k, could not
// be in the weights. float32 rows are the sum of three bfloat16 planes, exactly.
//
// Weights become bfloat16 once for all rows of a group. e2m1 times e4m3 is exact in bfloat16, and e2m1 times
// e8m0 is but at the ends of the range, so sums stay in tiles over all of K ("scaled" weights). Other weights
// stay bare codes, and each block's sums meet its scales in float32.
//
// Within eight k the order of a panel's pairs is 0 4, 1 5, 2 6, 3 7 (see kernels_avx512_bf16.cpp), and rows
// are packed to meet it. bfloat16 subnormals count as zero.
#include "cpu/avx512.h"
#include "cpu/tiles.h"

namespace fp4::cpu {
namespace {

constexpr int kStep = 32;  // k of one tile

int64_t planes_of(RowKind kind) { return kind == RowKind::floating ? 3 : 1; }

int64_t scales_at(RowKind kind, int64_t k) { return k / kStep * planes_of(kind) * kTileBytes; }

int64_t rows_bytes(RowKind kind, int64_t k) {
  return scales_at(kind, k) +
         (kind == RowKind::int8 ? k / kInt8Block * kTileRows * int64_t(sizeof(float)) : 0);
}

int64_t panel_bytes(int64_t k) { return k / kStep * kTileBytes; }

// --- rows ---

__m512i load64(const void* p) { return _mm512_loadu_si512(p); }

// 16 values whose lower halves are zero as bfloat16.
__m256i upper_halves(__m512i v) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)); }

__m512i join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

// Each group of eight 16-bit values ordered 0 1 2 3 4 5 6 7 -> 0 4 1 5 2 6 3 7.
__m512i pair_fours(__m512i v) {
  const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(order));
}

// An Int8Row's groups of eight are ordered 0 2 4 6 1 3 5 7.
__m512i pair_int8(__m512i v) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(order));
}

__m512i codes_as_bf16(const uint8_t* codes) {
  const auto half = [&](const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return upper_halves(_mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))));
  };
  return join(half(codes), half(codes + 16));
}

// The three planes of 32 float32: each takes the eight upper bits of what is left, and no bit remains. What
// is not finite is in the first plane alone.
void split(const float* x, __m512i planes[3]) {
  __m256i halves[2][3];
  for (int i = 0; i < 2; ++i) {
    __m512 left = _mm512_loadu_ps(x + 16 * i);
    const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(left), _mm512_set1_ps(HUGE_VALF), _CMP_LT_OQ);
    // A NaN may have its bits in the lower half only.
    left = _mm512_mask_blend_ps(finite, _mm512_add_ps(left, left), left);
    for (int p = 0; p < 3; ++p) {
      const __m512i top = _mm512_and_si512(_mm512_castps_si512(left), _mm512_set1_epi32(int(0xffff0000)));
      halves[i][p] = upper_halves(top);
      left = _mm512_maskz_sub_ps(finite, left, _mm512_castsi512_ps(top));
    }
  }
  for (int p = 0; p < 3; ++p) planes[p] = join(halves[0][p], halves[1][p]);
}

void pack_rows(RowKind kind, const uint8_t* const* rows, int count, int64_t k, uint8_t* to) {
  const int64_t planes = planes_of(kind), step_bytes = planes * kTileBytes;
  for (int m = 0; m < kTileRows; ++m) {
    uint8_t* row = to + m * kTileRowBytes;
    for (int64_t s = 0; s < k / kStep; ++s, row += step_bytes) {
      __m512i values[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
      if (m < count) {
        if (kind == RowKind::bf16) {
          values[0] = load64(rows[m] + s * kTileRowBytes);
        } else if (kind == RowKind::int8) {
          values[0] = pair_int8(codes_as_bf16(rows[m] + s * kStep));
        } else {
          split(reinterpret_cast<const float*>(rows[m]) + s * kStep, values);
          for (int p = 0; p < 3; ++p) values[p] = pair_fours(values[p]);
        }
      }
      for (int64_t p = 0; p < planes; ++p) _mm512_storeu_si512(row + p * kTileBytes, values[p]);
    }
  }
  if (kind != RowKind::int8) return;
  float* scales = reinterpret_cast<float*>(to + scales_at(kind, k));
  for (int m = 0; m < kTileRows; ++m)
    for (int64_t b = 0; b < k / kInt8Block; ++b)
      scales[b * kTileRows + m] =
          m < count ? load_as_float<DType::f32>(rows[m] + Int8Row::scales_at(k), b) : 0.f;
}

// --- weights ---

// Whether codes times the panel's scales are exact bfloat16 numbers, none of them subnormal.
template <Scale scale>
bool exact_in_bf16(const Panel& panel) {
  if constexpr (scale == Scale::e4m3) return true;
  if constexpr (scale != Scale::e8m0) return false;
  __m128i low = _mm_set1_epi8(-1), high = _mm_setzero_si128();
  for (int64_t b = 0; b < panel.k / step_of(scale); ++b) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel.scales + b * kPanelRows));
    low = _mm_min_epu8(low, bytes);
    high = _mm_max_epu8(high, bytes);
  }
  // 0.5 * 2^(2 - 127) is normal, and so is 6 * 2^(252 - 127).
  const __m128i under = _mm_cmpeq_epi8(_mm_min_epu8(low, _mm_set1_epi8(2)), _mm_set1_epi8(2));
  const __m128i over = _mm_cmpeq_epi8(_mm_max_epu8(high, _mm_set1_epi8(char(252))), _mm_set1_epi8(char(252)));
  return (_mm_movemask_epi8(under) & _mm_movemask_epi8(over)) == 0xffff;
}

// A panel's weights as tiles: [k / 32][16 pairs of k][16 rows][2]. Returns whether they have their scales.
template <Scale scale>
bool unpack(const Panel& panel, uint8_t* to) {
  const __m512 values = _mm512_loadu_ps(codes_of(element_of(scale)).values);
  const uint8_t* codes = panel.codes;
  if (exact_in_bf16<scale>(panel)) {
    const __m512 table = _mm512_mul_ps(values, _mm512_set1_ps(kScaleUnit<scale>));
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    const uint8_t* scales = panel.scales;
    for (int64_t k0 = 0; k0 < panel.k; k0 += step_of(scale)) {
      const __m512 b_scale = load_scales<scale>(scales);
      scales = next_scales<scale>(panel, scales, k0 + step_of(scale));
      for (int k = 0; k < step_of(scale); k += 8, codes += 64, to += 4 * kTileRowBytes) {
        const __m512i words = load64(codes);
        _mm_prefetch(codes + kPrefetch, _MM_HINT_T0);
        const auto value = [&](int j) {  // of the words' nibbles j
          const __m512 code = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * j), table);
          return _mm512_castps_si512(_mm512_mul_ps(code, b_scale));
        };
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)  // the lower half of value(j) is zero
          _mm512_storeu_si512(to + j * kTileRowBytes, _mm512_or_si512(_mm512_srli_epi32(value(j), 16),
                                                                      _mm512_and_si512(value(j + 4), upper)));
      }
    }
    return true;
  }
  const __m256i narrow = upper_halves(_mm512_castps_si512(values));
  const __m512i table = _mm512_broadcast_i64x4(narrow);  // twice: see kernels_avx512_bf16.cpp
  for (int64_t k = 0; k < panel.k; k += 8, codes += 64, to += 4 * kTileRowBytes) {
    const __m512i words = load64(codes);
    _mm_prefetch(codes + kPrefetch, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      _mm512_storeu_si512(to + j * kTileRowBytes,
                          _mm512_permutexvar_epi16(_mm512_srli_epi32(words, 4 * j), table));
  }
  return false;
}

// --- products ---

// Two blocks of rows x two panels, or one of either, with sums that stay in the tiles 0 to 3 over all of K.
template <int blocks, int panels>
void multiply_whole(const uint8_t* const* a, const uint8_t* const* b, int64_t steps, int64_t planes,
                    float* const (*out)[2]) {
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t s = 0; s < steps; ++s) {
    tile_load<6>(b[0] + s * kTileBytes);
    if constexpr (panels == 2) tile_load<7>(b[1] + s * kTileBytes);
    for (int64_t at = s * planes * kTileBytes, end = at + planes * kTileBytes; at < end; at += kTileBytes) {
      tile_load<4>(a[0] + at);
      tile_dot_bf16<0, 4, 6>();
      if constexpr (panels == 2) tile_dot_bf16<1, 4, 7>();
      if constexpr (blocks == 2) {
        tile_load<5>(a[1] + at);
        tile_dot_bf16<2, 5, 6>();
        if constexpr (panels == 2) tile_dot_bf16<3, 5, 7>();
      }
    }
  }
  tile_store<0>(out[0][0]);
  if constexpr (panels == 2) tile_store<1>(out[0][1]);
  if constexpr (blocks == 2) tile_store<2>(out[1][0]);
  if constexpr (blocks == 2 && panels == 2) tile_store<3>(out[1][1]);
}

// The sums of `steps` steps, by way of tile c.
template <int c, int a_tile, int b_tile>
[[gnu::always_inline]] inline void dot_steps(const uint8_t* a, const uint8_t* b, int64_t steps,
                                             int64_t planes, float* sums) {
  tile_zero<c>();
  for (int64_t s = 0; s < steps; ++s, b += kTileBytes) {
    tile_load<b_tile>(b);
    for (int64_t p = 0; p < planes; ++p, a += kTileBytes) {
      tile_load<a_tile>(a);
      tile_dot_bf16<c, a_tile, b_tile>();
    }
  }
  tile_store<c>(sums);
}

// One block of rows x one panel, whose sums meet scales on the way: those of rows after each step, where
// there are any (by_row), and those of the panel at the end of a block, where its weights lack them
// (by_panel).
template <Scale scale, bool by_row, bool by_panel>
void multiply_scaled(const uint8_t* a, const float* a_scales, const uint8_t* b, const Panel& panel,
                     int64_t planes, float* out) {
  const int64_t steps = panel.k / kStep, group = by_row ? 1 : panel.block / kStep;
  alignas(64) float sums[2][kTileRows * kPanelRows];
  __m512 total[kTileRows];
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) total[m] = _mm512_setzero_ps();
  const auto add = [&](const float* sum, int64_t s) __attribute__((always_inline)) {
    __m512 b_scale = _mm512_set1_ps(1.f);
    if constexpr (by_panel)
      b_scale = load_scales<scale>(panel.scales + s * kStep / panel.block * kPanelRows * scale_size(scale));
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m) {
      __m512 factor = b_scale;
      if constexpr (by_row) {
        factor = _mm512_set1_ps(a_scales[s * kTileRows + m]);
        if constexpr (by_panel) factor = _mm512_mul_ps(factor, b_scale);
      }
      total[m] = _mm512_fmadd_ps(_mm512_loadu_ps(sum + m * kPanelRows), factor, total[m]);
    }
  };
  // Two at a time: while one's sums are added, the other's are made.
  const int64_t a_step = planes * kTileBytes;
  int64_t s = 0;
  for (; s + 2 * group <= steps; s += 2 * group) {
    dot_steps<0, 4, 6>(a + s * a_step, b + s * kTileBytes, group, planes, sums[0]);
    dot_steps<1, 5, 7>(a + (s + group) * a_step, b + (s + group) * kTileBytes, group, planes, sums[1]);
    add(sums[0], s);
    add(sums[1], s + group);
  }
  for (; s < steps; s += group) {
    dot_steps<0, 4, 6>(a + s * a_step, b + s * kTileBytes, std::min(group, steps - s), planes, sums[0]);
    add(sums[0], s);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) _mm512_storeu_ps(out + m * kPanelRows, total[m]);
}

template <Scale scale>
void multiply(RowKind kind, const uint8_t* rows, int blocks, const Panel* panels, int count,
              uint8_t* const* weights, const bool* scaled, float* out) {
  const int64_t k = panels[0].k, planes = planes_of(kind), stride = rows_bytes(kind, k);
  const auto tile = [&](int block, int p) { return out + (block * 2 + p) * kTileRows * kPanelRows; };
  const TileScope scope;
  if (kind != RowKind::int8 && scaled[0] && (count == 1 || scaled[1])) {
    for (int i = 0; i < blocks; i += 2) {
      const int two = std::min(2, blocks - i), last = i + two - 1;
      const uint8_t* const a[2] = {rows + i * stride, rows + last * stride};
      float* const to[2][2] = {{tile(i, 0), tile(i, 1)}, {tile(last, 0), tile(last, 1)}};
      const auto run = two == 2 ? (count == 2 ? multiply_whole<2, 2> : multiply_whole<2, 1>)
                                : (count == 2 ? multiply_whole<1, 2> : multiply_whole<1, 1>);
      run(a, weights, k / kStep, planes, to);
    }
    return;
  }
  for (int p = 0; p < count; ++p)
    for (int i = 0; i < blocks; ++i) {
      const uint8_t* a = rows + i * stride;
      const float* a_scales = reinterpret_cast<const float*>(a + scales_at(kind, k));
      const bool by_row = kind == RowKind::int8;
      if (scaled[p] && !by_row) {
        float* const to[1][2] = {{tile(i, p), nullptr}};
        multiply_whole<1, 1>(&a, weights + p, k / kStep, planes, to);
        continue;
      }
      const auto run = scaled[p] ? multiply_scaled<scale, true, false>
                       : by_row  ? multiply_scaled<scale, true, true>
                                 : multiply_scaled<scale, false, true>;
      run(a, a_scales, weights[p], panels[p], planes, tile(i, p));
    }
}

bool supported() { return __builtin_cpu_supports("avx512bf16") && tiles_supported(); }

}  // namespace

const TileKernels kAmxBf16 = {
    .supported = supported,
    .rows_bytes = rows_bytes,
    .pack_rows = pack_rows,
    .panel_bytes = panel_bytes,
    .unpack = {unpack<Scale::e4m3>, unpack<Scale::e8m0>, unpack<Scale::bf16>, unpack<Scale::f32>},
    .multiply = {multiply<Scale::e4m3>, multiply<Scale::e8m0>, multiply<Scale::bf16>, multiply<Scale::f32>},
};

}  // namespace fp4::cpu
