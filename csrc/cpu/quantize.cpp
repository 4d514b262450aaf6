#include "cpu/quantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "cpu/rowwise.h"

namespace fp4::cpu {
namespace {

constexpr float kE2m1Max = 6.f, kE4m3Max = 448.f;

// The nearest e2m1 to v, ties to the even code; the sign of zero is kept.
uint8_t nearest_e2m1(float v) {
  // The midpoints between neighbours. A tie goes up where the code above is even.
  const float m = std::fabs(v);
  const int code =
      (m > .25f) + (m >= .75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.f);
  return uint8_t(code | (std::signbit(v) ? 8 : 0));
}

// OCP MX v1: the largest power of two in the block, less e2m1's largest exponent (2), saturating.
uint8_t e8m0_for(float amax) {
  if (amax == 0.f) return 0;
  return uint8_t(std::clamp(std::ilogb(amax) - 2, -127, 127) + 127);
}

}  // namespace

float max_magnitude(const void* x, DType dtype, int64_t count, bool* finite) {
  uint32_t top = 0;  // compared as integers, NaN and infinity are above every number
  with_dtype(dtype, [&](auto d) {
    for (int64_t i = 0; i < count; ++i)
      top = std::max(top, std::bit_cast<uint32_t>(load_as_float<d.value>(x, i)) & 0x7fffffff);
  });
  if (top >= 0x7f800000) *finite = false;
  return std::bit_cast<float>(top);
}

float global_scale_for(float amax) { return amax == 0.f ? 1.f : amax / (kE2m1Max * kE4m3Max); }

void quantize_row(const Format& format, const void* x, DType dtype, int64_t k, float global_scale,
                  uint8_t* packed, uint8_t* scales) {
  with_dtype(dtype, [&](auto d) {
    for (int64_t k0 = 0; k0 < k; k0 += format.block) {
      const int64_t end = std::min<int64_t>(k, k0 + format.block);
      float amax = 0;
      for (int64_t i = k0; i < end; ++i) amax = std::max(amax, std::fabs(load_as_float<d.value>(x, i)));
      const bool e4m3 = format.scale == Scale::e4m3;
      const uint8_t scale = e4m3 ? float_to_e4m3(amax / kE2m1Max / global_scale) : e8m0_for(amax);
      scales[k0 / format.block] = scale;
      const float step = e4m3 ? e4m3_to_float(scale) * global_scale : e8m0_to_float(scale);
      const auto code = [&](int64_t i) {
        const float v = load_as_float<d.value>(x, i);
        return nearest_e2m1(step == 0.f ? std::copysign(0.f, v) : v / step);
      };
      for (int64_t i = k0; i < end; i += 2) packed[i / 2] = uint8_t(code(i) | code(i + 1) << 4);
    }
  });
}

void dequantize_row(const Format& format, const uint8_t* packed, const uint8_t* scales, int64_t k,
                    double global_scale, double* values) {
  for (int64_t k0 = 0; k0 < k; k0 += format.block) {
    const uint8_t scale = scales[k0 / format.block];
    const double s = double(format.scale == Scale::e4m3 ? e4m3_to_float(scale) : e8m0_to_float(scale));
    double table[16];
    for (int code = 0; code < 16; ++code) table[code] = double(kE2m1[code]) * s * global_scale;
    for (int64_t i = k0; i < std::min<int64_t>(k, k0 + format.block); ++i)
      values[i] = table[packed[i / 2] >> (4 * (i % 2)) & 15];
  }
}

void dequantize_row_to_float(const Format& format, const uint8_t* packed, const uint8_t* scales, int64_t k,
                             float global_scale, float* row) {
  std::vector<double> values(k);
  dequantize_row(format, packed, scales, k, double(global_scale), values.data());
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
