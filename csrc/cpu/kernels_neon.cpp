// Baseline NEON, which every aarch64 processor has.
//
// int8 activations: products are summed in 16 bits over a step of k. A lane is at most 8 * 12 * 128 = 12288
// (see kSignedBytes), and twice that after lanes are added in pairs.
#include "cpu/neon.h"

namespace fp4::cpu {
namespace {

template <Scale scale, int count>
struct Int8Tile {
  static constexpr int kPassGroups = count == 1 ? 4 : count == 2 ? 2 : 1;
  static constexpr int kSums = count * kPassGroups;
  using Rows = RowsInPlace;

  static void add(const Panel& panel, const Rows& rows, uint64_t begin, uint64_t end, int first,
                  float32x4_t* sums) {
    constexpr int step = step_of(scale), groups = kPassGroups;
    const int8x16_t table = vld1q_s8(kSignedBytes<element_of(scale)>.data());
    for (uint64_t k0 = begin; k0 < end; k0 += step) {
      int16x8_t dot[count][groups][2];  // of rows 0 and 1, of rows 2 and 3
      for (auto& row : dot)
        for (auto& group : row) group[0] = group[1] = vdupq_n_s16(0);
#pragma GCC unroll 2
      for (int k = 0; k < step; k += 16)
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) {
          int8x16_t b[4];  // in the order of the words of an activation row
          for (int word = 0; word < 2; ++word) {
            const uint8x16_t codes = load_codes(panel, k0 + k + 8 * word, first + g);
            b[word] = vqtbl1q_s8(table, low_nibbles(codes));
            b[2 + word] = vqtbl1q_s8(table, high_nibbles(codes));
          }
#pragma GCC unroll 8
          for (int m = 0; m < count; ++m)
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
              const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(load_word(rows.rows[m] + k0 + k + 4 * i)));
              dot[m][g][0] = vmlal_s8(dot[m][g][0], vget_low_s8(b[i]), vget_low_s8(a));
              dot[m][g][1] = vmlal_high_s8(dot[m][g][1], b[i], a);
            }
        }
      float32x4_t b_scale[groups];
      load_scales<scale>(scales_at<scale>(panel, k0, first), b_scale);
#pragma GCC unroll 8
      for (int m = 0; m < count; ++m) {
        const float a_scale = rows.int8_scales(m)[k0 / kInt8Block];
#pragma GCC unroll 4
        for (int g = 0; g < groups; ++g) {
          const int32x4_t all = vpaddlq_s16(vpaddq_s16(dot[m][g][0], dot[m][g][1]));
          float32x4_t& sum = sums[m * groups + g];
          sum = vfmaq_f32(sum, vcvtq_f32_s32(all), vmulq_n_f32(b_scale[g], a_scale));
        }
      }
    }
  }

  static void store(const float32x4_t* sums, int, float* tile) {
    store_groups<count, kPassGroups>(sums, kScaleUnit<scale> / float(codes_of(element_of(scale)).unit), tile);
  }
};

template <Scale scale>
struct Int8Tiles {
  template <int count>
  static void run(const Panel& panel, const uint8_t* const* rows, float* tile) {
    multiply_panel<Int8Tile<scale, count>>(panel, rows, count, tile);
  }
};

bool supported() { return true; }

}  // namespace

const Kernels kNeonKernels = with_neon_rows({
    .name = "neon",
    .supported = supported,
    .panels = {{panel_kernel<Int8Tiles<Scale::e4m3>>, panel_kernel<FloatTiles<Scale::e4m3>>},
               {panel_kernel<Int8Tiles<Scale::e8m0>>, panel_kernel<FloatTiles<Scale::e8m0>>},
               {panel_kernel<Int8Tiles<Scale::bf16>>, panel_kernel<FloatTiles<Scale::bf16>>},
               {panel_kernel<Int8Tiles<Scale::f32>>, panel_kernel<FloatTiles<Scale::f32>>}},
});

}  // namespace fp4::cpu
