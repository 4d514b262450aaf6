// Conversions between float32 and the narrow types, in portable code that a compiler can vectorise.
//
// Everything here has internal linkage on purpose. These functions are compiled once for each instruction
// set. With a shared inline symbol, the linker could choose the AVX-512 copy for a machine without AVX-512.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace fp4 {
namespace {

inline float bf16_to_float(uint16_t v) { return std::bit_cast<float>(uint32_t(v) << 16); }

inline uint16_t float_to_bf16(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

inline float f16_to_float(uint16_t v) {
  const uint32_t sign = uint32_t(v & 0x8000) << 16;
  const uint32_t magnitude = uint32_t(v & 0x7fff) << 13;
  // Changes the exponent bias from 15 to 127. No intermediate value is a float32 subnormal, which
  // torch.set_flush_denormal would change to zero.
  const float subnormal = std::bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;
  const uint32_t finite =
      magnitude < (1u << 23) ? std::bit_cast<uint32_t>(subnormal) : magnitude + (112u << 23);
  const uint32_t bits = (v & 0x7c00) == 0x7c00 ? (magnitude | 0x7f800000) : finite;
  return std::bit_cast<float>(bits | sign);
}

inline uint16_t float_to_f16(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds past 65504
  if (magnitude < 0x38800000) {                                 // subnormal: let one addition round it
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000));
  }
  const uint32_t rounded = magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1);
  return uint16_t(sign | (rounded >> 13));
}

// The value of an e4m3 code below 0x7f. No intermediate value is a float32 subnormal, as in f16_to_float.
constexpr float e4m3_magnitude(uint32_t code) {
  const float normal = std::bit_cast<float>((code << 20) + (120u << 23));
  const float subnormal = std::bit_cast<float>((code << 20) + (121u << 23)) - 0x1p-6f;
  return code < 8 ? subnormal : normal;
}

constexpr float e4m3_to_float(uint8_t v) {
  if ((v & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fc00000u);
  const float magnitude = e4m3_magnitude(v & 0x7f);
  return v & 0x80 ? -magnitude : magnitude;
}

// Rounds to nearest even and saturates at 448. v is finite and not negative.
inline uint8_t float_to_e4m3(float v) {
  if (v >= 448.f) return 0x7e;
  if (v < 0x1p-6f) return uint8_t(std::nearbyint(v * 0x1p9f));  // subnormal, in steps of 2^-9
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  return uint8_t((bits - (120u << 23) + 0x7ffff + ((bits >> 20) & 1)) >> 20);
}

inline float e8m0_to_float(uint8_t v) {
  if (v == 255) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(v == 0 ? 0x00400000u : uint32_t(v) << 23);
}

}  // namespace
}  // namespace fp4
