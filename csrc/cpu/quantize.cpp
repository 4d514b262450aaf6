#include "cpu/quantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "cpu/rowwise.h"

namespace fp4::cpu {
namespace {

constexpr float kE2m1Max = 6.f, kE4m3Max = 448.f;

float scale_value(Scale scale, const uint8_t* scales, int64_t i) {
  switch (scale) {
    case Scale::e4m3:
      return e4m3_to_float(scales[i]);
    case Scale::e8m0:
      return e8m0_to_float(scales[i]);
    case Scale::bf16:
      return load_as_float<DType::bf16>(scales, i);
    case Scale::f32:
      break;
  }
  return load_as_float<DType::f32>(scales, i);
}

}  // namespace

float max_magnitude(const void* x, DType dtype, int64_t count, bool* finite) {
  return kernels().max_magnitude(x, dtype, count, finite);
}

float global_scale_for(float amax) { return amax == 0.f ? 1.f : amax / (kE2m1Max * kE4m3Max); }

void quantize_row(const Format& format, const void* x, DType dtype, int64_t k, float global_scale,
                  uint8_t* packed, uint8_t* scales) {
  kernels().quantize(format, x, dtype, k, global_scale, packed, scales);
}

void dequantize_row(const Format& format, Scale scale, const uint8_t* packed, const uint8_t* scales,
                    int64_t k, double global_scale, double* values) {
  const Codes& codes = codes_of(format.element);
  for (int64_t k0 = 0; k0 < k; k0 += format.block) {
    const double s = double(scale_value(scale, scales, k0 / format.block));
    double table[16];
    for (int code = 0; code < 16; ++code) table[code] = double(codes.values[code]) * s * global_scale;
    for (int64_t i = k0; i < std::min<int64_t>(k, k0 + format.block); ++i)
      values[i] = table[packed[i / 2] >> (4 * (i % 2)) & 15];
  }
}

void dequantize_row_to_float(const Format& format, const uint8_t* packed, const uint8_t* scales, int64_t k,
                             float global_scale, float* row) {
  std::vector<double> values(k);
  dequantize_row(format, format.scale, packed, scales, k, double(global_scale), values.data());
  std::copy(values.begin(), values.end(), row);
}

float quantize_row_fp8(const void* x, DType dtype, int64_t k, uint8_t* codes) {
  bool finite = true;
  const float scale = max_magnitude(x, dtype, k, &finite) / kE4m3Max;
  if (!finite || scale == 0.f) {
    std::fill(codes, codes + k, uint8_t(0));
    return scale;
  }
  with_dtype(dtype, [&](auto d) {
    for (int64_t i = 0; i < k; ++i) {
      const float v = load_as_float<d.value>(x, i) / scale;
      codes[i] = uint8_t(float_to_e4m3(std::fabs(v)) | (std::signbit(v) ? 0x80 : 0));
    }
  });
  return scale;
}

void dequantize_row_fp8(const uint8_t* codes, int64_t k, float scale, float* row) {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values;
    for (int code = 0; code < 256; ++code) values[code] = e4m3_to_float(uint8_t(code));
    return values;
  }();
  for (int64_t i = 0; i < k; ++i) row[i] = table[codes[i]] * scale;
}

void store_values(const double* values, int64_t k, DType dtype, void* out) {
  with_dtype(dtype, [&](auto d) {
    for (int64_t i = 0; i < k; ++i) store_float<d.value>(out, i, float(values[i]));
  });
}

}  // namespace fp4::cpu
