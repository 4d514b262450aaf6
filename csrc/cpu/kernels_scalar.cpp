// The reference kernels. They use only vector instructions that the compiler finds for the baseline
// processor.
#include "cpu/row_kernels.h"

namespace fp4::cpu {
namespace {

template <Scale scale>
float load_scale(const uint8_t* scales, int r) {
  if constexpr (scale == Scale::e4m3) return e4m3_to_float(scales[r]);
  if constexpr (scale == Scale::e8m0) return e8m0_to_float(scales[r]);
  return load_as_float<scale == Scale::f32 ? DType::f32 : DType::bf16>(scales, r);
}

template <Scale scale>
void panel_float(const Panel& panel, const uint8_t* const* rows, int count, float* tile) {
  constexpr int step = step_of(scale);
  constexpr const float* values = codes_of(element_of(scale)).values;
  for (int m = 0; m < count; ++m) {
    const float* a = reinterpret_cast<const float*>(rows[m]);
    float sum[kPanelRows] = {};
    const uint8_t* scales = panel.scales;
    for (int64_t k0 = 0; k0 < panel.k; k0 += step) {
      float dot[kPanelRows] = {};
      for (int64_t k = k0; k < k0 + step; k += 8) {
        const uint8_t* words = panel.codes + k / 8 * 4 * kPanelRows;
        for (int r = 0; r < kPanelRows; ++r)
          for (int j = 0; j < 8; ++j) dot[r] += a[k + j] * values[words[4 * r + j / 2] >> (4 * (j % 2)) & 15];
      }
      for (int r = 0; r < kPanelRows; ++r) sum[r] += dot[r] * load_scale<scale>(scales, r);
      scales = next_scales<scale>(panel, scales, k0 + step);
    }
    std::memcpy(tile + m * kPanelRows, sum, sizeof(sum));
  }
}

template <Scale scale>
void panel_int8(const Panel& panel, const uint8_t* const* rows, int count, float* tile) {
  constexpr int step = step_of(scale);
  constexpr const Codes& table = codes_of(element_of(scale));
  for (int m = 0; m < count; ++m) {
    const int8_t* a = reinterpret_cast<const int8_t*>(rows[m]);
    const float* a_scales = reinterpret_cast<const float*>(rows[m] + Int8Row::scales_at(panel.k));
    float sum[kPanelRows] = {};
    const uint8_t* scales = panel.scales;
    for (int64_t k0 = 0; k0 < panel.k; k0 += step) {
      int32_t dot[kPanelRows] = {};  // sums of a * (unit * value), which are integers
      for (int64_t k = k0; k < k0 + step; k += 8) {
        const uint8_t* words = panel.codes + k / 8 * 4 * kPanelRows;
        for (int r = 0; r < kPanelRows; ++r)
          for (int i = 0; i < 4; ++i) {
            const uint8_t codes = words[4 * r + i];
            dot[r] += a[k + i] * int(table.unit * table.values[codes & 15]) +
                      a[k + 4 + i] * int(table.unit * table.values[codes >> 4]);
          }
      }
      const float a_scale = a_scales[k0 / kInt8Block] / float(table.unit);
      for (int r = 0; r < kPanelRows; ++r) sum[r] += float(dot[r]) * (load_scale<scale>(scales, r) * a_scale);
      scales = next_scales<scale>(panel, scales, k0 + step);
    }
    std::memcpy(tile + m * kPanelRows, sum, sizeof(sum));
  }
}

}  // namespace

const Kernels kScalarKernels = with_row_kernels({
    .name = "scalar",
    .supported = [] { return true; },
    .panels = {{panel_int8<Scale::e4m3>, panel_float<Scale::e4m3>},
               {panel_int8<Scale::e8m0>, panel_float<Scale::e8m0>},
               {panel_int8<Scale::bf16>, panel_float<Scale::bf16>},
               {panel_int8<Scale::f32>, panel_float<Scale::f32>}},
    .bf16 = nullptr,
    .tiles = nullptr,
    .one_order = true,
    .arrange_float = nullptr,
});

}  // namespace fp4::cpu
