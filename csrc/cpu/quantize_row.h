// Quantises one row to 4 bits, in portable loops that every kernels_<isa>.cpp compiles for itself (see
// common/convert.h on linkage). No branch depends on the data, so compilers can vectorise the loops.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "cpu/rowwise.h"

namespace fp4::cpu {
namespace {

inline constexpr float kE2m1Max = 6.f;
inline constexpr int kBlocksAtOnce = 32;

// The bits of the largest magnitude. They are compared as integers, where NaN and infinity are above every
// number.
template <DType dtype>
inline uint32_t top_bits(const void* x, int64_t begin, int64_t end) {
  uint32_t top = 0;
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(load_as_float<dtype>(x, i)) & 0x7fffffff;
    top = bits > top ? bits : top;
  }
  return top;
}

inline float max_magnitude_row(const void* x, DType dtype, int64_t count, bool* finite) {
  uint32_t top = 0;
  with_dtype(dtype, [&](auto d) { top = top_bits<d.value>(x, 0, count); });
  if (top >= 0x7f800000) *finite = false;
  return std::bit_cast<float>(top);
}

// float_to_e4m3 without branches. v is finite and not negative.
inline uint32_t e4m3_code(float v) {
  const float capped = v < 448.f ? v : 448.f;
  const uint32_t bits = std::bit_cast<uint32_t>(capped);
  const uint32_t normal = (bits - (120u << 23) + 0x7ffff + ((bits >> 20) & 1)) >> 20;
  // Steps of 2^-9; adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
  const uint32_t subnormal = std::bit_cast<uint32_t>(capped * 0x1p9f + 0x1.8p23f) & 0xf;
  return capped < 0x1p-6f ? subnormal : normal;
}

// OCP MX v1: the exponent of the block's largest magnitude minus e2m1's largest exponent (2), saturating.
inline uint32_t e8m0_code(float amax) {
  const int32_t code = int32_t(std::bit_cast<uint32_t>(amax) >> 23) - 2;
  return uint32_t(code > 0 ? code : 0);
}

// The e2m1 code nearest to v, ties to the even code. The sign of zero is kept.
inline uint32_t e2m1_code(float v) {
  // Compares with the midpoints between neighbours. A tie goes up if the code above is even.
  const float m = std::fabs(v);
  const uint32_t code =
      (m > .25f) + (m >= .75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.f);
  return code | (std::bit_cast<uint32_t>(v) >> 28 & 8);
}

template <DType dtype, Scale scale, int block>
inline void quantize_fp4_as(const void* x, int64_t k, float global_scale, uint8_t* packed, uint8_t* scales) {
  for (int64_t b0 = 0; b0 * block < k; b0 += kBlocksAtOnce) {
    const int64_t count = std::min<int64_t>(kBlocksAtOnce, (k + block - 1) / block - b0);
    float amax[kBlocksAtOnce] = {}, step[kBlocksAtOnce];
    for (int64_t b = 0; b < count; ++b) {
      const int64_t begin = (b0 + b) * block;
      amax[b] = std::bit_cast<float>(top_bits<dtype>(x, begin, std::min<int64_t>(k, begin + block)));
    }
    for (int b = 0; b < kBlocksAtOnce; ++b) {
      const uint32_t code =
          scale == Scale::e4m3 ? e4m3_code(amax[b] / kE2m1Max / global_scale) : e8m0_code(amax[b]);
      const float value = scale == Scale::e4m3 ? e4m3_magnitude(code) * global_scale
                                               : std::bit_cast<float>(code == 0 ? 0x00400000u : code << 23);
      // If the scale of a block is zero, the step is infinity. Division by infinity gives zeros with the
      // values' signs.
      step[b] = value == 0.f ? std::numeric_limits<float>::infinity() : value;
      if (b < count) scales[b0 + b] = uint8_t(code);
    }
    for (int64_t b = 0; b < count; ++b) {
      const int64_t begin = (b0 + b) * block, length = std::min<int64_t>(k - begin, block);
      float values[block] = {};
      uint32_t codes[block];
      if (length == block)
        for (int i = 0; i < block; ++i) values[i] = load_as_float<dtype>(x, begin + i);
      else
        for (int i = 0; i < length; ++i) values[i] = load_as_float<dtype>(x, begin + i);
      for (int i = 0; i < block; ++i) codes[i] = e2m1_code(values[i] / step[b]);
      uint8_t bytes[block / 2];
      for (int i = 0; i < block / 2; ++i) bytes[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
      std::memcpy(packed + begin / 2, bytes, length / 2);
    }
  }
}

// Quantises symmetrically over -7.5 to 7.5, as compressed-tensors does: scale = bf16(amax / 7.5), codes
// rounded to nearest even and clamped to -8 to 7. A block whose scale is zero has codes 0.
template <DType dtype>
inline void quantize_int4_as(const void* x, int64_t k, int block, uint8_t* packed, uint8_t* scales) {
  for (int64_t begin = 0; begin < k; begin += block) {
    const int64_t end = std::min<int64_t>(k, begin + block);
    const float amax = std::bit_cast<float>(top_bits<dtype>(x, begin, end));
    const uint16_t scale = float_to_bf16(amax / 7.5f);
    std::memcpy(scales + begin / block * sizeof(scale), &scale, sizeof(scale));
    const float value = bf16_to_float(scale);
    const float step = value == 0.f ? std::numeric_limits<float>::infinity() : value;
    for (int64_t i = begin; i < end; i += 2) {
      uint32_t codes[2];
      for (int j = 0; j < 2; ++j) {
        const float v = load_as_float<dtype>(x, i + j) / step;
        const float clamped = v < -8.f ? -8.f : v > 7.f ? 7.f : v;
        // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
        codes[j] = std::bit_cast<uint32_t>(clamped + 0x1.8p23f) & 15;
      }
      packed[i / 2] = uint8_t(codes[0] | codes[1] << 4);
    }
  }
}

inline void quantize_row_4bit(const Format& format, const void* x, DType dtype, int64_t k, float global_scale,
                              uint8_t* packed, uint8_t* scales) {
  with_dtype(dtype, [&](auto d) {
    switch (format.scale) {
      case Scale::e4m3:
        return quantize_fp4_as<d.value, Scale::e4m3, 16>(x, k, global_scale, packed, scales);
      case Scale::e8m0:
        return quantize_fp4_as<d.value, Scale::e8m0, 32>(x, k, global_scale, packed, scales);
      default:
        return quantize_int4_as<d.value>(x, k, format.block, packed, scales);
    }
  });
}

}  // namespace
}  // namespace fp4::cpu
