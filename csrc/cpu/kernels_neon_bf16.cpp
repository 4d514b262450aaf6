// bfloat16 activations without conversion, with bfmmla (bfloat16 matrix products of Armv8.6: Neoverse V1, N2,
// V2 and later). A single row uses bfdot. Codes are exact in bfloat16, products in float32. bfloat16
// subnormals count as zero.
#include <sys/auxv.h>

#include "cpu/neon_pairs.h"

namespace fp4::cpu {
namespace {

inline bfloat16x8_t as_bf16(uint16x8_t v) { return vreinterpretq_bf16_u16(v); }
inline bfloat16x8_t load_bf16(const uint8_t* p) { return vreinterpretq_bf16_u8(vld1q_u8(p)); }

// A group stores the first two bytes of each row's codes before the last two. A lane of the values is then
// two k of one row, which are multiplied by a lane of the activations.
template <Scale scale>
struct DotTile {
  static constexpr int kPassGroups = kGroups, kSums = kGroups;
  using Rows = RowsInPlace;

  static void add(const Panel& panel, const Rows& rows, uint64_t begin, uint64_t end, int,
                  float32x4_t* sums) {
    constexpr int step = step_of(scale);
    static constexpr uint8_t kHalves[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
    const uint8x16_t halves = vld1q_u8(kHalves);
    const Bf16Codes values = Bf16Codes::of<element_of(scale)>();
    float32x4_t sum[kGroups];
    for (int g = 0; g < kGroups; ++g) sum[g] = sums[g];
    for (uint64_t k0 = begin; k0 < end; k0 += step) {
      float32x4_t dot[kGroups][2];
      for (auto& d : dot) d[0] = d[1] = vdupq_n_f32(0.f);
#pragma GCC unroll 4
      for (int k = 0; k < step; k += 8) {
        __builtin_prefetch(panel.codes + (k0 + k) * (kPanelRows / 2) + kPrefetch);
        const bfloat16x8_t a = load_bf16(rows.rows[0] + (k0 + k) * 2);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) {
          const uint8x16_t codes = vqtbl1q_u8(load_codes(panel, k0 + k, g), halves);
          uint16x8_t even[2], odd[2];
          values.look_up(low_nibbles(codes), even);
          values.look_up(high_nibbles(codes), odd);
          dot[g][0] = vbfdotq_laneq_f32(dot[g][0], as_bf16(even[0]), a, 0);
          dot[g][1] = vbfdotq_laneq_f32(dot[g][1], as_bf16(even[1]), a, 1);
          dot[g][0] = vbfdotq_laneq_f32(dot[g][0], as_bf16(odd[0]), a, 2);
          dot[g][1] = vbfdotq_laneq_f32(dot[g][1], as_bf16(odd[1]), a, 3);
        }
      }
      float32x4_t b_scale[kGroups];
      load_scales<scale>(scales_at<scale>(panel, k0, 0), b_scale);
      for (int g = 0; g < kGroups; ++g)
        sum[g] = vfmaq_f32(sum[g], vaddq_f32(dot[g][0], dot[g][1]), b_scale[g]);
    }
    for (int g = 0; g < kGroups; ++g) sums[g] = sum[g];
  }

  static void store(const float32x4_t* sums, int, float* tile) {
    store_groups<1, kGroups>(sums, kScaleUnit<scale>, tile);
  }
};

template <Scale scale, int pairs>
struct MatrixTile {
  static constexpr int kPassGroups = groups_of_pairs(pairs);
  static constexpr int kSums = pairs * kPassGroups * 2;
  using Rows = PairedRows<pairs, 2>;

  static void add(const Panel& panel, const Rows& rows, uint64_t begin, uint64_t end, int first,
                  float32x4_t* sums) {
    constexpr int step = step_of(scale), groups = kPassGroups;
    const Bf16Codes values = Bf16Codes::of<element_of(scale)>();
    float32x4_t sum[kSums];
    for (int i = 0; i < kSums; ++i) sum[i] = sums[i];
    for (uint64_t k0 = begin; k0 < end; k0 += step) {
      float32x4_t dot[kSums];  // [pair][group][2]
      for (auto& d : dot) d = vdupq_n_f32(0.f);
#pragma GCC unroll 4
      for (int k = 0; k < step; k += 8) {
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) {
          const uint8x16_t codes = load_codes(panel, k0 + k, first + g);
          uint16x8_t even[2], odd[2];  // of rows 0 and 1, of rows 2 and 3
          values.look_up(low_nibbles(codes), even);
          values.look_up(high_nibbles(codes), odd);
#pragma GCC unroll 4
          for (int p = 0; p < pairs; ++p) {
            const uint8_t* a = rows.at(k0 + k, p);
            const bfloat16x8_t a_even = load_bf16(a), a_odd = load_bf16(a + 16);
            float32x4_t* to = dot + (p * groups + g) * 2;
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i)
              to[i] = vbfmmlaq_f32(vbfmmlaq_f32(to[i], a_even, as_bf16(even[i])), a_odd, as_bf16(odd[i]));
          }
        }
      }
      float32x4_t b_scale[groups];
      load_scales<scale>(scales_at<scale>(panel, k0, first), b_scale);
#pragma GCC unroll 4
      for (int g = 0; g < groups; ++g) {
        float32x4_t b[2];
        spread(b_scale[g], b);
#pragma GCC unroll 4
        for (int p = 0; p < pairs; ++p)
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) {
            const int at = (p * groups + g) * 2 + i;
            sum[at] = vfmaq_f32(sum[at], dot[at], b[i]);
          }
      }
    }
    for (int i = 0; i < kSums; ++i) sums[i] = sum[i];
  }

  static void store(const float32x4_t* sums, int count, float* tile) {
    store_pairs<pairs, kPassGroups>(sums, count, kScaleUnit<scale>, tile);
  }
};

template <Scale scale>
constexpr PanelKernel kernel() {
  return panel_kernel<OneOrPairs<scale, DotTile, MatrixTile>>;
}

bool supported() { return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }

// Each group of eight gets the order 0 2 4 6 1 3 5 7.
void prepare(const uint16_t* x, int64_t k, uint8_t* to) {
  uint16_t* row = reinterpret_cast<uint16_t*>(to);
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) {
    const uint16x4x2_t by_parity = vld2_u16(x + i);
    vst1q_u16(row + i, vcombine_u16(by_parity.val[0], by_parity.val[1]));
  }
  for (; i < padded_k(k); i += 8)
    for (int64_t j = 0; j < 8; ++j) {
      const int64_t from = i + (j < 4 ? 2 * j : 2 * j - 7);
      row[i + j] = from < k ? x[from] : 0;
    }
}

}  // namespace

const Bf16Kernels kNeonBf16 = {
    .supported = supported,
    .panels = {kernel<Scale::e4m3>(), kernel<Scale::e8m0>(), kernel<Scale::bf16>(), kernel<Scale::f32>()},
    .value_bytes = 2,
    .prepare = prepare,
};

}  // namespace fp4::cpu
