// The reference kernels: no vector instructions beyond what the compiler finds for the baseline.
#include "cpu/row_kernels.h"

namespace fp4::cpu {
namespace {

template <Scale scale>
float to_float(uint8_t v) {
  return scale == Scale::e4m3 ? e4m3_to_float(v) : e8m0_to_float(v);
}

template <Scale scale, int block>
void panel_float(const Panel& panel, const uint8_t* const* rows, int count, float* tile) {
  for (int m = 0; m < count; ++m) {
    const float* a = reinterpret_cast<const float*>(rows[m]);
    float sum[kPanelRows] = {};
    for (int64_t k0 = 0; k0 < panel.k; k0 += block) {
      float dot[kPanelRows] = {};
      for (int64_t k = k0; k < k0 + block; k += 8) {
        const uint8_t* words = panel.codes + k / 8 * 4 * kPanelRows;
        for (int r = 0; r < kPanelRows; ++r)
          for (int j = 0; j < 8; ++j) dot[r] += a[k + j] * kE2m1[words[4 * r + j / 2] >> (4 * (j % 2)) & 15];
      }
      const uint8_t* scales = panel.scales + k0 / block * kPanelRows;
      for (int r = 0; r < kPanelRows; ++r) sum[r] += dot[r] * to_float<scale>(scales[r]);
    }
    std::memcpy(tile + m * kPanelRows, sum, sizeof(sum));
  }
}

template <Scale scale, int block>
void panel_int8(const Panel& panel, const uint8_t* const* rows, int count, float* tile) {
  for (int m = 0; m < count; ++m) {
    const int8_t* a = reinterpret_cast<const int8_t*>(rows[m]);
    const float* a_scales = reinterpret_cast<const float*>(rows[m] + Int8Row::scales_at(panel.k));
    float sum[kPanelRows] = {};
    for (int64_t k0 = 0; k0 < panel.k; k0 += block) {
      int32_t dot[kPanelRows] = {};  // of 2 * e2m1, which is an integer
      for (int64_t k = k0; k < k0 + block; k += 8) {
        const uint8_t* words = panel.codes + k / 8 * 4 * kPanelRows;
        for (int r = 0; r < kPanelRows; ++r)
          for (int i = 0; i < 4; ++i) {
            const uint8_t codes = words[4 * r + i];
            dot[r] += a[k + i] * int(2 * kE2m1[codes & 15]) + a[k + 4 + i] * int(2 * kE2m1[codes >> 4]);
          }
      }
      const uint8_t* scales = panel.scales + k0 / block * kPanelRows;
      const float a_scale = .5f * a_scales[k0 / kInt8Block];
      for (int r = 0; r < kPanelRows; ++r) sum[r] += float(dot[r]) * (to_float<scale>(scales[r]) * a_scale);
    }
    std::memcpy(tile + m * kPanelRows, sum, sizeof(sum));
  }
}

}  // namespace

const Kernels kScalarKernels = with_row_kernels({
    .name = "scalar",
    .supported = [] { return true; },
    .int8_e4m3 = panel_int8<Scale::e4m3, 16>,
    .int8_e8m0 = panel_int8<Scale::e8m0, 32>,
    .float_e4m3 = panel_float<Scale::e4m3, 16>,
    .float_e8m0 = panel_float<Scale::e8m0, 32>,
    .arrange_float = nullptr,
});

}  // namespace fp4::cpu
