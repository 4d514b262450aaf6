// Products of float32 rows with rows of a weight in fp8 (e4m3).
//
// Shifted by 7, the bits of an e4m3 number are those of a float16 number that is 2^-8 times as large, because
// its exponent bias is 8 larger. Processors convert float16 to float32 exactly. A product's sum is multiplied
// by 2^8, which is exact, too. NaN would become 480, so products look for its two codes.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__F16C__)
#include <immintrin.h>
#endif

#include "cpu/rowwise.h"

namespace fp4::cpu {
namespace {

constexpr float kE4m3Factor = 0x1p8f;

// For each code: its value / kE4m3Factor.
inline constexpr std::array<float, 256> kE4m3Values = [] {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) values[code] = e4m3_to_float(uint8_t(code)) / kE4m3Factor;
  return values;
}();

// Converts 16 codes to their values / kE4m3Factor, and NaN to any number.
[[gnu::always_inline]] inline void load_e4m3(const uint8_t* codes, Lanes& to) {
#if defined(__AVX512F__)
  // The shift leaves the sign in two bits; the lower one is cleared.
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  to.parts[0] = _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0xbfff))));
#elif defined(__F16C__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m256i wide =
      _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), _mm256_set1_epi16(int16_t(0xbfff)));
  to.parts[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(wide));
  to.parts[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(wide, 1));
#elif defined(__aarch64__)
  for (int i = 0; i < 2; ++i) {
    const int8x8_t bytes = vld1_s8(reinterpret_cast<const int8_t*>(codes) + 8 * i);
    const int16x8_t wide = vandq_s16(vshll_n_s8(bytes, 7), vdupq_n_s16(int16_t(0xbfff)));
    const float16x8_t halves = vreinterpretq_f16_s16(wide);
    to.parts[2 * i] = vcvt_f32_f16(vget_low_f16(halves));
    to.parts[2 * i + 1] = vcvt_high_f32_f16(halves);
  }
#else
  for (int lane = 0; lane < 16; ++lane)
    to.parts[lane / kPartSize][lane % kPartSize] = kE4m3Values[codes[lane]];
#endif
}

// Looks for NaN among codes, 32 at a time.
struct NanCodes {
  typedef uint8_t Bytes [[gnu::vector_size(32)]];
  Bytes most = {};  // the largest code of each lane, with the sign of a negative number

  [[gnu::always_inline]] void add(const uint8_t* codes) {
    Bytes bytes;
    std::memcpy(&bytes, codes, sizeof(bytes));
    bytes |= 0x80;
    most = bytes > most ? bytes : most;
  }

  bool found() const {
    int result = 0;
    for (int lane = 0; lane < 32; ++lane) result |= most[lane] == 0xff;
    return result != 0;
  }
};

// out[m] = x[m] . w, for k that is a multiple of 32. The order of a product's sums is that of dot_of.
template <int rows>
[[gnu::always_inline]] inline void dot_e4m3_of(const float* x, int64_t stride, const uint8_t* w, int64_t k,
                                               float* out) {
  Lanes sums[rows][2] = {};
  NanCodes nan;
  for (int64_t i = 0; i < k; i += 32) {
    __builtin_prefetch(w + i + kRowPrefetch);
    nan.add(w + i);
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      Lanes a, b;
      load_e4m3(w + i + c * 16, b);
#pragma GCC unroll 4
      for (int m = 0; m < rows; ++m) {
        load_lanes<DType::f32>(x + m * stride, i + c * 16, a);
        sums[m][c].add_product(a, b);
      }
    }
  }
  const float factor = nan.found() ? std::numeric_limits<float>::quiet_NaN() : kE4m3Factor;
#pragma GCC unroll 4
  for (int m = 0; m < rows; ++m) {
    sums[m][0] += sums[m][1];
    out[m] = add_lanes(sums[m][0]) * factor;
  }
}

// See Kernels::dot_e4m3.
inline void dot_rows_e4m3(const float* x, int64_t stride, int count, const uint8_t* w, int64_t k,
                          float* out) {
  static_assert(kRowsAtOnce == 4);
  int m = 0;
  for (; m + 4 <= count; m += 4) dot_e4m3_of<4>(x + m * stride, stride, w, k, out + m);
  if (count - m == 3) dot_e4m3_of<3>(x + m * stride, stride, w, k, out + m);
  if (count - m == 2) dot_e4m3_of<2>(x + m * stride, stride, w, k, out + m);
  if (count - m == 1) dot_e4m3_of<1>(x + m * stride, stride, w, k, out + m);
}

// See Kernels::widen_e4m3.
inline void widen_row_e4m3(const uint8_t* codes, int64_t k, float* to) {
  NanCodes nan;
  int64_t i = 0;
  for (; i + 32 <= k; i += 32) {
    nan.add(codes + i);
    for (int c = 0; c < 32; c += 16) {
      Lanes values;
      load_e4m3(codes + i + c, values);
      values *= kE4m3Factor;
      std::memcpy(to + i + c, &values, sizeof(values));
    }
  }
  if (nan.found()) i = 0;
  for (; i < k; ++i) to[i] = kE4m3Values[codes[i]] * kE4m3Factor;
}

}  // namespace
}  // namespace fp4::cpu
