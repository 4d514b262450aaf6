// NEON with smmla (int8 matrix products of Armv8.6: Neoverse V1, N2, V2 and later). A single row uses sdot.
//
// Two words of a row are in different registers. They are put side by side before their nibbles become bytes.
#include <sys/auxv.h>

#include "cpu/neon_dot.h"
#include "cpu/neon_pairs.h"

namespace fp4::cpu {
namespace {

inline uint8x16_t first_rows(uint8x16_t word, uint8x16_t next) {
  return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(word), vreinterpretq_u32_u8(next)));
}
inline uint8x16_t last_rows(uint8x16_t word, uint8x16_t next) {
  return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(word), vreinterpretq_u32_u8(next)));
}

template <Scale scale, int pairs>
struct MatrixTile {
  static constexpr int kPassGroups = groups_of_pairs(pairs);
  static constexpr int kSums = pairs * kPassGroups * 2;
  using Rows = PairedRows<pairs, 1>;

  static void add(const Panel& panel, const Rows& rows, uint64_t begin, uint64_t end, int first,
                  float32x4_t* sums) {
    constexpr int step = step_of(scale), groups = kPassGroups;
    const SignedCodes<element_of(scale)> values;
    float32x4_t sum[kSums];
    for (int i = 0; i < kSums; ++i) sum[i] = sums[i];
    for (uint64_t k0 = begin; k0 < end; k0 += step) {
      int32x4_t dot[kSums];  // [pair][group][2]
      for (auto& d : dot) d = vdupq_n_s32(0);
#pragma GCC unroll 2
      for (int k = 0; k < step; k += 16) {
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) {
          const uint8x16_t word = load_codes(panel, k0 + k, first + g);
          const uint8x16_t next = load_codes(panel, k0 + k + 8, first + g);
          int8x16_t low[2], high[2];
          values.look_up(first_rows(word, next), low[0], high[0]);
          values.look_up(last_rows(word, next), low[1], high[1]);
#pragma GCC unroll 4
          for (int p = 0; p < pairs; ++p) {
            const uint8_t* a = rows.at(k0 + k, p);
            const int8x16_t even = vreinterpretq_s8_u8(vld1q_u8(a));
            const int8x16_t odd = vreinterpretq_s8_u8(vld1q_u8(a + 16));
            int32x4_t* to = dot + (p * groups + g) * 2;
            to[0] = vmmlaq_s32(vmmlaq_s32(to[0], even, low[0]), odd, high[0]);
            to[1] = vmmlaq_s32(vmmlaq_s32(to[1], even, low[1]), odd, high[1]);
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
        for (int p = 0; p < pairs; ++p) {
          const float32x4_t a_scale = rows.int8_scale(k0, p);
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) {
            const int at = (p * groups + g) * 2 + i;
            sum[at] = vfmaq_f32(sum[at], vcvtq_f32_s32(dot[at]), vmulq_f32(b[i], a_scale));
          }
        }
      }
    }
    for (int i = 0; i < kSums; ++i) sums[i] = sum[i];
  }

  static void store(const float32x4_t* sums, int count, float* tile) {
    store_pairs<pairs, kPassGroups>(sums, count, kInt8Unit<scale>, tile);
  }
};

template <Scale scale>
using OneTile = DotTile<scale, 1>;
template <Scale scale>
using Tiles = OneOrPairs<scale, OneTile, MatrixTile>;

bool supported() {
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0 && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
}

}  // namespace

const Kernels kNeonI8mmKernels = with_neon_rows({
    .name = "neon_i8mm",
    .supported = supported,
    .panels = {{panel_kernel<Tiles<Scale::e4m3>>, panel_kernel<FloatTiles<Scale::e4m3>>},
               {panel_kernel<Tiles<Scale::e8m0>>, panel_kernel<FloatTiles<Scale::e8m0>>},
               {panel_kernel<Tiles<Scale::bf16>>, panel_kernel<FloatTiles<Scale::bf16>>},
               {panel_kernel<Tiles<Scale::f32>>, panel_kernel<FloatTiles<Scale::f32>>}},
});

}  // namespace fp4::cpu
