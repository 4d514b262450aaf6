// Kernels for many rows an expert, with AMX's bfloat16 products (Sapphire Rapids and later). One instruction
// multiplies 16 weight rows x 16 activation rows x 32 k.
//
// All kinds of activation rows use bfloat16 products. bfloat16 rows stay as they are. int8 codes are exact in
// bfloat16, and the 32 codes that share a scale are the k of one instruction. AMX also has int8 products, of
// 64 k each. With a scale every 32 k, half of such a product would be unused. nvfp4's scales, one for 16 k,
// could not be multiplied into int8 weights either. float32 rows are split into three bfloat16 planes, whose
// sum is exact.
//
// Weights are converted to bfloat16 once for all rows of a group. e2m1 times e4m3 is exact in bfloat16, and
// e2m1 times e8m0 is exact except at the ends of the range. Such weights are "scaled": they include their
// scales, and sums stay in tiles over all of K. Other weights stay plain codes, and the sums of each block
// are multiplied by its scales in float32.
//
// A tile of weights is the left operand. A row of a tile of sums then has 16 activation rows side by side,
// and their int8 scales are one vector. Within eight k a panel has the pairs 0 4, 1 5, 2 6, 3 7 (see
// kernels_avx512_bf16.cpp), and rows are packed in the same order. bfloat16 subnormals and subnormal sums
// count as zero.
#include "cpu/amx_tiles.h"
#include "cpu/avx512_many.h"

namespace fp4::cpu {
namespace {

constexpr int kStep = 32;                      // k of one tile
constexpr int kSums = kTileRows * kPanelRows;  // floats in one tile of sums
// The largest number of stored tiles of sums that wait for their scales.
constexpr int64_t kScratch = fitted::amx_bf16::waiting_sums;

int64_t planes_of(RowKind kind) { return kind == RowKind::floating ? 3 : 1; }

int64_t scales_at(RowKind kind, int64_t k) { return k / kStep * planes_of(kind) * kTileBytes; }

int64_t rows_bytes(RowKind kind, int64_t k) {
  const int64_t scales = kind == RowKind::int8 ? k / kInt8Block * kTileRows * int64_t(sizeof(float)) : 0;
  return scales_at(kind, k) + scales;
}

// An unpacked panel is its tiles, followed by its scales for each step as float32 [k / 32][16].
int64_t weight_scales_at(int64_t k) { return k / kStep * kTileBytes; }

int64_t panel_bytes(int64_t k) {
  return weight_scales_at(k) + k / kStep * kPanelRows * int64_t(sizeof(float));
}

// --- rows ---

// Converts 16 float32 values whose lower halves are zero to bfloat16.
__m256i upper_halves(__m512i v) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)); }

__m512i join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

// Reorders each group of eight 16-bit values from 0 1 2 3 4 5 6 7 to 0 4 1 5 2 6 3 7.
__m512i pair_fours(__m512i v) {
  const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(order));
}

// The same for values of an Int8Row, whose groups of eight have the order 0 2 4 6 1 3 5 7.
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

// Splits 32 float32 values into three bfloat16 planes. Each plane takes the upper eight significant bits of
// the rest, so no bit remains. Values that are not finite are in the first plane only.
void split(const float* x, __m512i planes[3]) {
  __m256i halves[2][3];
  for (int i = 0; i < 2; ++i) {
    __m512 left = _mm512_loadu_ps(x + 16 * i);
    const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(left), _mm512_set1_ps(HUGE_VALF), _CMP_LT_OQ);
    // A NaN may have its bits only in the lower half. Adding it to itself makes it a quiet NaN, with a bit in
    // the upper half.
    left = _mm512_mask_blend_ps(finite, _mm512_add_ps(left, left), left);
    for (int p = 0; p < 3; ++p) {
      const __m512i top = _mm512_and_si512(_mm512_castps_si512(left), _mm512_set1_epi32(int(0xffff0000)));
      halves[i][p] = upper_halves(top);
      left = _mm512_maskz_sub_ps(finite, left, _mm512_castsi512_ps(top));
    }
  }
  for (int p = 0; p < 3; ++p) planes[p] = join(halves[0][p], halves[1][p]);
}

// A block of rows is tiles [k / 32][planes][16 pairs of k][16 rows][2]. For int8 rows, their scales [k /
// 32][16] follow.
void pack_rows(RowKind kind, const uint8_t* const* rows, int count, int64_t k, uint8_t* to) {
  const int64_t planes = planes_of(kind);
  uint8_t* tile = to;
  for (int64_t s = 0; s < k / kStep; ++s) {
    __m512i values[3][kTileRows];
    for (int m = 0; m < kTileRows; ++m) {
      for (int64_t p = 0; p < planes; ++p) values[p][m] = _mm512_setzero_si512();
      if (m >= count) continue;
      const float* x = reinterpret_cast<const float*>(rows[m]) + s * kStep;
      if (kind == RowKind::bf16) {
        values[0][m] = pair_fours(join(upper_halves(load64(x)), upper_halves(load64(x + 16))));
      } else if (kind == RowKind::int8) {
        values[0][m] = pair_int8(codes_as_bf16(rows[m] + s * kStep));
      } else {
        __m512i split_row[3];
        split(x, split_row);
        for (int p = 0; p < 3; ++p) values[p][m] = pair_fours(split_row[p]);
      }
    }
    for (int64_t p = 0; p < planes; ++p, tile += kTileBytes) {
      transpose(values[p]);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(tile + i * kTileRowBytes, values[p][i]);
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

using Table = std::array<uint16_t, 16>;  // bfloat16 by code

constexpr Table table_of(Element element, float scale) {
  Table table{};
  for (int c = 0; c < 16; ++c)
    table[c] = uint16_t(std::bit_cast<uint32_t>(codes_of(element).values[c] * scale) >> 16);
  return table;
}

// For each byte of a scale: the 16 codes times that scale.
alignas(64) constexpr std::array<Table, 256> kE4m3Tables = [] {
  std::array<Table, 256> tables{};
  for (int b = 0; b < 256; ++b) {
    const int exponent = b >> 3 & 15, mantissa = b & 7;
    float scale = exponent == 0 ? float(mantissa) : float(8 + mantissa);
    for (int e = exponent == 0 ? 1 : exponent; e < 10; ++e) scale *= .5f;
    for (int e = 10; e < exponent; ++e) scale *= 2.f;
    const bool nan = (b & 127) == 127;
    tables[b] = table_of(element_of(Scale::e4m3), b > 127 ? -scale : scale);
    if (nan) tables[b].fill(0x7fc0);
  }
  return tables;
}();

alignas(64) constexpr std::array<Table, 256> kE8m0Tables = [] {
  std::array<Table, 256> tables{};
  for (int b = kE8m0Low; b <= kE8m0High; ++b)
    tables[b] = table_of(element_of(Scale::e8m0), std::bit_cast<float>(uint32_t(b) << 23));
  return tables;
}();

__m512i both_halves(const Table& table) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(table.data())));
}

// Writes the 32 weights of each of 16 rows as bfloat16. table(row) has the value of each code; with
// `by_block`, its upper half has the values for the upper 16 k.
template <bool by_block, typename F>
[[gnu::always_inline]] inline void unpack_step(const uint8_t* codes, const F& table, uint8_t* to) {
  const __m512i w[4] = {load64(codes), load64(codes + 64), load64(codes + 128), load64(codes + 192)};
  const __m512i t[4] = {_mm512_unpacklo_epi32(w[0], w[1]), _mm512_unpackhi_epi32(w[0], w[1]),
                        _mm512_unpacklo_epi32(w[2], w[3]), _mm512_unpackhi_epi32(w[2], w[3])};
  // Lane b of rows[i] has the four words of row 4 b + i.
  const __m512i rows[4] = {_mm512_unpacklo_epi64(t[0], t[2]), _mm512_unpackhi_epi64(t[0], t[2]),
                           _mm512_unpacklo_epi64(t[1], t[3]), _mm512_unpackhi_epi64(t[1], t[3])};
  const __m512i words = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const __m512i shifts = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 4, 8, 12));
  const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b) {
    const __m512i lane = _mm512_add_epi32(words, _mm512_set1_epi32(4 * b));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * b + i;
      __m512i pairs = _mm512_srlv_epi32(_mm512_permutexvar_epi32(lane, rows[i]), shifts);
      if constexpr (by_block)  // (pairs & 15) | upper
        pairs = _mm512_ternarylogic_epi32(pairs, _mm512_set1_epi16(15), upper, 0xea);
      _mm512_storeu_si512(to + row * kTileRowBytes, _mm512_permutexvar_epi16(pairs, table(row)));
    }
  }
}

// Writes a panel's weights as tiles [k / 32][16 rows][16 pairs of k][2]. Returns whether they include their
// scales.
template <Scale scale>
bool unpack(const Panel& panel, uint8_t* to) {
  constexpr Element element = element_of(scale);
  const uint8_t* codes = panel.codes;
  const uint8_t* scales = panel.scales;
  const bool scaled = has_bf16_products<scale>(panel);
  float* to_scales = reinterpret_cast<float*>(to + weight_scales_at(panel.k));
  for (int64_t s = 0; s < panel.k / kStep; ++s, codes += 4 * 64, to += kTileBytes) {
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) _mm_prefetch(codes + kPrefetch + 64 * w, _MM_HINT_T0);
    if constexpr (scale == Scale::e4m3) {
      unpack_step<true>(
          codes,
          [&](int row) {
            const auto half = [&](int i) {
              const Table& table = kE4m3Tables[scales[i * kPanelRows + row]];
              return _mm256_load_si256(reinterpret_cast<const __m256i*>(table.data()));
            };
            return join(half(0), half(1));
          },
          to);
      scales += 2 * kPanelRows;
    } else if (scale == Scale::e8m0 && scaled) {
      unpack_step<false>(codes, [&](int row) { return both_halves(kE8m0Tables[scales[row]]); }, to);
      scales += kPanelRows;
    } else {
      constexpr Table values = table_of(element, 1.f);
      const __m512i table = both_halves(values);
      unpack_step<false>(codes, [&](int) { return table; }, to);
      _mm512_storeu_ps(to_scales + s * kPanelRows,
                       _mm512_mul_ps(load_scales<scale>(scales), _mm512_set1_ps(kScaleUnit<scale>)));
      scales = next_scales<scale>(panel, scales, (s + 1) * kStep);
    }
  }
  return scaled;
}

// --- products ---

// The operands of a product of one or two panels with one or two blocks of rows. out[b * 2 + p] gets the sums
// of panel p with block b, as [16 weight rows][16 activation rows].
struct Operands {
  const uint8_t* weights[2];
  const float* weight_scales[2];
  const uint8_t* rows[2];
  const float* row_scales[2];
  float* out[4];
};

// tile(b * 2 + p) += weights[p] . rows[b] for one step. Tiles 0 to 3 are sums, 4 and 5 weights, 6 and 7 rows.
template <int blocks, int panels>
[[gnu::always_inline]] inline void dot_step(const Operands& o, int64_t s, int64_t planes) {
  tile_load<4>(o.weights[0] + s * kTileBytes);
  if constexpr (panels == 2) tile_load<5>(o.weights[1] + s * kTileBytes);
  for (int64_t i = s * planes; i < (s + 1) * planes; ++i) {
    tile_load<6>(o.rows[0] + i * kTileBytes);
    tile_dot_bf16<0, 4, 6>();
    if constexpr (panels == 2) tile_dot_bf16<1, 5, 6>();
    if constexpr (blocks == 2) {
      tile_load<7>(o.rows[1] + i * kTileBytes);
      tile_dot_bf16<2, 4, 7>();
      if constexpr (panels == 2) tile_dot_bf16<3, 5, 7>();
    }
  }
}

template <int blocks, int panels>
[[gnu::always_inline]] inline void zero_tiles() {
  tile_zero<0>();
  if constexpr (panels == 2) tile_zero<1>();
  if constexpr (blocks == 2) tile_zero<2>();
  if constexpr (blocks == 2 && panels == 2) tile_zero<3>();
}

template <int blocks, int panels>
[[gnu::always_inline]] inline void store_tiles(float* const* to) {
  tile_store<0>(to[0]);
  if constexpr (panels == 2) tile_store<1>(to[1]);
  if constexpr (blocks == 2) tile_store<2>(to[2]);
  if constexpr (blocks == 2 && panels == 2) tile_store<3>(to[3]);
}

// Multiplies all steps and keeps the sums in tiles.
template <int blocks, int panels>
void multiply_whole(const Operands& o, int64_t steps, int64_t, int64_t planes) {
  zero_tiles<blocks, panels>();
  for (int64_t s = 0; s < steps; ++s) dot_step<blocks, panels>(o, s, planes);
  store_tiles<blocks, panels>(o.out);
}

// The same if sums must be multiplied by scales: with `by_row` by the rows' scales after each step, with
// `by_panel` by the panel's scales, each of which holds for `group` steps.
template <bool by_row, bool by_panel, int blocks, int panels>
void multiply_scaled(const Operands& o, int64_t steps, int64_t group, int64_t planes) {
  alignas(64) float scratch[kScratch][4][kSums];
  // Tiles are stored after `each` steps. After `times` stores, the stored sums are added up. Where rows and
  // panels have scales, these are multiplied with each other first, as in the panel kernels.
  const int64_t each = by_row ? 1 : group, times = by_row ? kScratch : 1;
  for (int64_t s = 0; s < steps; s += times * each) {
    const int64_t stored = std::min(times, (steps - s + each - 1) / each);
    for (int64_t t = 0; t < stored; ++t) {
      zero_tiles<blocks, panels>();
      for (int64_t i = s + t * each; i < std::min(steps, s + (t + 1) * each); ++i)
        dot_step<blocks, panels>(o, i, planes);
      float* const to[4] = {scratch[t][0], scratch[t][1], scratch[t][2], scratch[t][3]};
      store_tiles<blocks, panels>(to);
    }
    for (int b = 0; b < blocks; ++b)
      for (int p = 0; p < panels; ++p) {
        float* out = o.out[b * 2 + p];
        __m512 total[kPanelRows];
#pragma GCC unroll 16
        for (int n = 0; n < kPanelRows; ++n)
          total[n] = s == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(out + n * kTileRows);
        for (int64_t t = 0; t < stored; ++t) {
          const float* sums = scratch[t][b * 2 + p];
          const float* panel_scales = o.weight_scales[p] + (s + t) * kPanelRows;
          const __m512 row_scales =
              by_row ? _mm512_loadu_ps(o.row_scales[b] + (s + t) * kTileRows) : _mm512_setzero_ps();
#pragma GCC unroll 16
          for (int n = 0; n < kPanelRows; ++n) {
            const __m512 panel_scale = by_panel ? _mm512_set1_ps(panel_scales[n]) : _mm512_setzero_ps();
            const __m512 scales = !by_row     ? panel_scale
                                  : !by_panel ? row_scales
                                              : _mm512_mul_ps(panel_scale, row_scales);
            total[n] = _mm512_fmadd_ps(_mm512_load_ps(sums + n * kTileRows), scales, total[n]);
          }
        }
#pragma GCC unroll 16
        for (int n = 0; n < kPanelRows; ++n) _mm512_storeu_ps(out + n * kTileRows, total[n]);
      }
  }
}

using Steps = void (*)(const Operands&, int64_t steps, int64_t group, int64_t planes);

// The kernel for this number of blocks and panels.
template <bool by_row, bool by_panel>
Steps steps_for(int blocks, int panels) {
  if constexpr (!by_row && !by_panel) {
    constexpr Steps found[2][2] = {{multiply_whole<1, 1>, multiply_whole<1, 2>},
                                   {multiply_whole<2, 1>, multiply_whole<2, 2>}};
    return found[blocks - 1][panels - 1];
  } else {
    constexpr Steps found[2][2] = {
        {multiply_scaled<by_row, by_panel, 1, 1>, multiply_scaled<by_row, by_panel, 1, 2>},
        {multiply_scaled<by_row, by_panel, 2, 1>, multiply_scaled<by_row, by_panel, 2, 2>}};
    return found[blocks - 1][panels - 1];
  }
}

void multiply(RowKind kind, const uint8_t* rows, int row_count, const Panel* panels, int count,
              uint8_t* const* weights, const bool* scaled, float* out) {
  const int64_t k = panels[0].k, planes = planes_of(kind), stride = rows_bytes(kind, k);
  const int blocks = (row_count + kTileRows - 1) / kTileRows;
  const bool by_row = kind == RowKind::int8;
  const int64_t group = std::max(1, panels[0].block / kStep);
  const TileScope scope;
  // Two panels are multiplied together if both include their scales, or neither does.
  const int together = count == 2 && scaled[0] == scaled[1] ? 2 : 1;
  for (int i = 0; i < blocks; i += 2) {
    const int two = std::min(2, blocks - i);
    alignas(64) float sums[4][kSums];  // in the order of Operands::out
    for (int p = 0; p < count; p += together) {
      Operands o;
      for (int j = 0; j < 2; ++j) {
        const uint8_t* const w = weights[std::min(p + j, count - 1)];
        o.weights[j] = w;
        o.weight_scales[j] = reinterpret_cast<const float*>(w + weight_scales_at(k));
        o.rows[j] = rows + (i + std::min(j, two - 1)) * stride;
        o.row_scales[j] = reinterpret_cast<const float*>(o.rows[j] + scales_at(kind, k));
      }
      for (int j = 0; j < 4; ++j) o.out[j] = sums[j / 2 * 2 + std::min(p + j % 2, 1)];
      const Steps run =
          scaled[p]
              ? (by_row ? steps_for<true, false>(two, together) : steps_for<false, false>(two, together))
              : (by_row ? steps_for<true, true>(two, together) : steps_for<false, true>(two, together));
      run(o, k / kStep, group, planes);
    }
    for (int b = 0; b < two; ++b)
      for (int p = 0; p < count; ++p) {
        __m512i values[16];
        for (int n = 0; n < kPanelRows; ++n) values[n] = load64(sums[b * 2 + p] + n * kTileRows);
        transpose(values);
        float* to = out + ((i + b) * kTileRows * 2 + p) * kPanelRows;
        for (int m = 0; m < kTileRows; ++m) _mm512_storeu_si512(to + m * 2 * kPanelRows, values[m]);
      }
  }
}

// True if this kernel and the panel kernel give the same bits. Sums of int8 codes times 4-bit codes are exact
// integers in both, and stay exact under scales that are powers of two. Other scales are applied after the
// same steps in both, except e4m3 scales: there is one for 16 k, half a step.
bool same_bits(RowKind kind, Scale scale) { return kind == RowKind::int8 && scale != Scale::e4m3; }

bool supported() { return __builtin_cpu_supports("avx512bf16") && tiles_supported(); }

}  // namespace

const TileKernels kAmxBf16 = {
    .supported = supported,
    .min_rows = {.floating = fitted::amx_bf16::min_rows_floating,
                 .int8 = fitted::amx_bf16::min_rows_int8,
                 .bf16 = fitted::amx_bf16::min_rows_bf16},
    .speed = fitted::amx_bf16::speed,
    .same_bits = same_bits,
    .rows_bytes = rows_bytes,
    .pack_rows = pack_rows,
    .panel_bytes = panel_bytes,
    .unpack = {unpack<Scale::e4m3>, unpack<Scale::e8m0>, unpack<Scale::bf16>, unpack<Scale::f32>},
    .multiply = multiply,
};

}  // namespace fp4::cpu
