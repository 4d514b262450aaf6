// Kernels over single rows and parts that the panel kernels share, in portable code. Every kernels_<isa>.cpp
// compiles its own copy (see common/convert.h on linkage).
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common/convert.h"
#include "cpu/kernels.h"

namespace fp4::cpu {
namespace {

// For each code: unit * value + offset.
template <Element element>
inline constexpr std::array<uint8_t, 16> kUnsignedBytes = [] {
  std::array<uint8_t, 16> bytes{};
  const Codes& codes = codes_of(element);
  for (int i = 0; i < 16; ++i) bytes[i] = uint8_t(int(codes.unit * codes.values[i]) + codes.offset);
  return bytes;
}();

// For each code: one byte of its value as a float32. Byte 0 is the lowest.
template <Element element, int byte>
inline constexpr std::array<uint8_t, 16> kFloatByte = [] {
  std::array<uint8_t, 16> bytes{};
  for (int i = 0; i < 16; ++i)
    bytes[i] = uint8_t(std::bit_cast<uint32_t>(codes_of(element).values[i]) >> (8 * byte));
  return bytes;
}();

// The scales [16] of the step at k, given those of the step before it.
template <Scale scale>
inline const uint8_t* next_scales(const Panel& panel, const uint8_t* scales, int64_t k) {
  // A block of int4 has several steps. A block of the other formats has one.
  if (element_of(scale) == Element::int4 && (k & (panel.block - 1)) != 0) return scales;
  return scales + kPanelRows * scale_size(scale);
}

inline int32_t load_word(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

template <DType dtype>
inline float load_as_float(const void* p, int64_t i) {
  if constexpr (dtype == DType::f32) return static_cast<const float*>(p)[i];
  const uint16_t v = static_cast<const uint16_t*>(p)[i];
  return dtype == DType::bf16 ? bf16_to_float(v) : f16_to_float(v);
}

template <DType dtype>
inline void store_float(void* p, int64_t i, float v) {
  if constexpr (dtype == DType::f32)
    static_cast<float*>(p)[i] = v;
  else
    static_cast<uint16_t*>(p)[i] = dtype == DType::bf16 ? float_to_bf16(v) : float_to_f16(v);
}

// Calls f with the dtype as a compile-time constant.
template <typename F>
inline void with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      return f(std::integral_constant<DType, DType::f32>());
    case DType::bf16:
      return f(std::integral_constant<DType, DType::bf16>());
    case DType::f16:
      return f(std::integral_constant<DType, DType::f16>());
  }
}

// scale = amax / 127 for each 32 values, codes rounded to nearest even. A block of zeros gets scale 0. A NaN
// in x makes the scale NaN: compared as integers, the bits of a NaN are above those of every number.
[[gnu::always_inline]] inline void quantize_block_int8(const float* x, int64_t count, int8_t* codes,
                                                       float* scale) {
  uint32_t top = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7fffffff;
    top = magnitude > top ? magnitude : top;
  }
  const float s = std::bit_cast<float>(top) / 127.f;
  *scale = s;
  if (!(s > 0.f && top < 0x7f800000)) {
    std::memset(codes, 0, count);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
    codes[i] = int8_t(std::bit_cast<int32_t>(x[i] / s + 0x1.8p23f));
  }
}

inline void quantize_int8_row(const void* x, DType dtype, int64_t k, int8_t* codes, float* scales) {
  with_dtype(dtype, [&](auto d) {
    int64_t b = 0;
    float block[kInt8Block];
    for (; b + kInt8Block <= k; b += kInt8Block) {
      for (int64_t i = 0; i < kInt8Block; ++i) block[i] = load_as_float<d.value>(x, b + i);
      quantize_block_int8(block, kInt8Block, codes + b, scales + b / kInt8Block);
    }
    if (b == k) return;
    for (int64_t i = 0; i < k - b; ++i) block[i] = load_as_float<d.value>(x, b + i);
    quantize_block_int8(block, k - b, codes + b, scales + b / kInt8Block);
  });
}

// Reorders the bytes of a word to 0 2 4 6 1 3 5 7. Byte 0 is the lowest.
inline uint64_t evens_then_odds(uint64_t word) {
  const auto evens = [](uint64_t x) {
    x &= 0x00ff00ff00ff00ffu;
    x = (x | x >> 8) & 0x0000ffff0000ffffu;
    return (x | x >> 16) & 0xffffffffu;
  };
  return evens(word) | evens(word >> 8) << 32;
}

template <int step>
inline void prepare_int8_steps(const int8_t* codes, int64_t k, int offset, int8_t* to, int32_t* corrections) {
  for (int64_t b = 0; b < padded_k(k); b += kInt8Block) {
    int8_t padded[kInt8Block];
    const int8_t* from = codes + b;
    if (k - b < kInt8Block) {
      std::memset(padded, 0, sizeof(padded));
      std::memcpy(padded, from, k - b);
      from = padded;
    }
    for (int g = 0; g < kInt8Block; g += 8) {
      uint64_t word;
      std::memcpy(&word, from + g, sizeof(word));
      word = evens_then_odds(word);
      std::memcpy(to + b + g, &word, sizeof(word));
    }
    for (int s = 0; s < kInt8Block; s += step) {
      int32_t sum = 0;
      for (int i = 0; i < step; ++i) sum += from[s + i];
      corrections[(b + s) / step] = -offset * sum;
    }
  }
}

inline void prepare_int8_row(const int8_t* codes, const float* scales, int64_t begin, int64_t end, int64_t k,
                             Scale weight, uint8_t* row) {
  const int64_t kp = padded_k(k), blocks = padded_k(end - begin) / kInt8Block;
  int8_t* to = reinterpret_cast<int8_t*>(row) + begin;
  int32_t* corrections =
      reinterpret_cast<int32_t*>(row + Int8Row::corrections_at(kp)) + begin / step_of(weight);
  std::memcpy(row + Int8Row::scales_at(kp) + begin / kInt8Block * sizeof(float), scales,
              blocks * sizeof(float));
  const int offset = codes_of(element_of(weight)).offset;
  const auto steps = step_of(weight) == 16 ? prepare_int8_steps<16> : prepare_int8_steps<32>;
  steps(codes, end - begin, offset, to, corrections);
}

inline void prepare_float_row(const void* x, DType dtype, int64_t k, float* row) {
  with_dtype(dtype, [&](auto d) {
    for (int64_t i = 0; i < k; ++i) row[i] = load_as_float<d.value>(x, i);
  });
  for (int64_t i = k; i < padded_k(k); ++i) row[i] = 0.f;
}

inline void store_row(const float* tile, float factor, const void* bias, DType bias_dtype, void* out,
                      DType out_dtype, int64_t count) {
  float sum[kMostColumns];
  for (int64_t i = 0; i < count; ++i) sum[i] = tile[i] * factor;
  if (bias != nullptr) {
    with_dtype(bias_dtype, [&](auto d) {
      for (int64_t i = 0; i < count; ++i) sum[i] += load_as_float<d.value>(bias, i);
    });
  }
  with_dtype(out_dtype, [&](auto d) {
    for (int64_t i = 0; i < count; ++i) store_float<d.value>(out, i, sum[i]);
  });
}

// e^x = power * (less_one + 1), with power = 2^n and less_one = e^r - 1 for |r| <= ln(2) / 2.
struct Exponential {
  float less_one, power;
};

// It has no branch, so loops over it vectorise. It saturates below -87 and above `most`, near the ends of
// float32's range. A NaN stays NaN.
inline Exponential exponential(float x, float most = 87.f) {
  x = x < -87.f ? -87.f : x;
  x = x > most ? most : x;
  const float shifted = x * 1.44269504088896341f + 0x1.8p23f;  // rounds to an integer, in the low bits
  const float n = shifted - 0x1.8p23f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.f / 5040;
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + .5f;
  return {p * r * r + r, std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u)};
}

// e^x with an error of about 1e-7. It is infinite for x above 88.4: a gate x / (1 + e^-x) is then zero for a
// large negative x, and NaN for minus infinity, as in torch.
inline float exp_float(float x) {
  const Exponential e = exponential(x, 89.f);
  return (e.less_one + 1.f) * e.power;
}

// cap * tanh(x / cap), as t / (t + 2) with t = e^(2 x / cap) - 1, which loses no digits near zero.
inline float soft_cap(float x, float cap) {
  const Exponential e = exponential(2.f * x / cap);
  const float t = e.less_one * e.power + (e.power - 1.f);
  return cap * (t / (t + 2.f));  // t may be as large as a float
}

template <Activation::Function function>
inline float apply(float gate, const Activation& a) {
  if constexpr (function == Activation::Function::silu) return gate / (1.f + exp_float(-a.alpha * gate));
  if constexpr (function == Activation::Function::situ)
    return soft_cap(gate, a.gate_cap) / (1.f + exp_float(-gate));
  if constexpr (function == Activation::Function::gelu)
    return .5f * gate * (1.f + std::erf(gate * 0.70710678118654752f));
  if constexpr (function == Activation::Function::relu2) {
    const float positive = gate < 0.f ? 0.f : gate;  // a NaN stays one
    return positive * positive;
  }
  // gelu_tanh: (1 + tanh(y)) / 2 = 1 / (1 + e^-2y)
  const float twice_y = 1.59576912160573072f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.f + exp_float(-twice_y));
}

template <Activation::Function function>
inline void activate_as(const float* gate_up, const Activation& a, int64_t k, int64_t begin, int64_t end,
                        float* h) {
  const int64_t count = end - begin;
  if (!a.gated) {
    for (int64_t i = 0; i < count; ++i) h[i] = apply<function>(gate_up[begin + i], a);
    return;
  }
  const int64_t step = a.interleaved ? 2 : 1, up_at = a.interleaved ? 1 : k;
  gate_up += begin * step;
  for (int64_t i = 0; i < count; ++i) {
    float gate = gate_up[i * step], up = gate_up[i * step + up_at];
    if (a.limit > 0.f) {  // written so that a NaN stays one
      gate = gate > a.limit ? a.limit : gate;
      up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
    }
    if constexpr (function == Activation::Function::situ) up = soft_cap(up, a.up_cap);
    h[i] = apply<function>(gate, a) * (up + a.up_offset);
  }
}

inline void activate_row(const float* gate_up, const Activation& a, int64_t k, int64_t begin, int64_t end,
                         float* h) {
  using F = Activation::Function;
  switch (a.function) {
    case F::silu:
      return activate_as<F::silu>(gate_up, a, k, begin, end, h);
    case F::gelu:
      return activate_as<F::gelu>(gate_up, a, k, begin, end, h);
    case F::gelu_tanh:
      return activate_as<F::gelu_tanh>(gate_up, a, k, begin, end, h);
    case F::relu2:
      return activate_as<F::relu2>(gate_up, a, k, begin, end, h);
    case F::situ:
      return activate_as<F::situ>(gate_up, a, k, begin, end, h);
  }
}

inline void convert_row(const float* x, int64_t n, void* out, DType out_dtype) {
  with_dtype(out_dtype, [&](auto d) {
    for (int64_t i = 0; i < n; ++i) store_float<d.value>(out, i, x[i]);
  });
}

inline void accumulate_row(const float* x, float weight, int64_t n, float* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += weight * x[i];
}

// The values of one register. A vector of more values would be moved through memory by gcc.
#if defined(__AVX512F__)
constexpr int kPartSize = 16;
#elif defined(__AVX__)
constexpr int kPartSize = 8;
#else
constexpr int kPartSize = 4;
#endif
typedef float Part [[gnu::vector_size(kPartSize * 4)]];
typedef uint32_t PartWords [[gnu::vector_size(kPartSize * 4)]];
typedef uint16_t PartHalves [[gnu::vector_size(kPartSize * 2)]];
typedef float Lanes8 [[gnu::vector_size(32)]];
typedef float Lanes4 [[gnu::vector_size(16)]];

// 16 values.
struct Lanes {
  static constexpr int kParts = 16 / kPartSize;
  Part parts[kParts];

  // Calls f with the number of each part.
  template <typename F>
  [[gnu::always_inline]] static void for_parts(F f) {
    f(0);
    if constexpr (kParts > 1) f(1);
    if constexpr (kParts > 2) f(2), f(3);
  }
  // this += a * b
  [[gnu::always_inline]] void add_product(const Lanes& a, const Lanes& b) {
    for_parts([&](int p) { parts[p] += a.parts[p] * b.parts[p]; });
  }
  [[gnu::always_inline]] void add_product(float a, const Lanes& b) {
    for_parts([&](int p) { parts[p] += a * b.parts[p]; });
  }
  [[gnu::always_inline]] void operator+=(const Lanes& a) {
    for_parts([&](int p) { parts[p] += a.parts[p]; });
  }
  [[gnu::always_inline]] void operator*=(float factor) {
    for_parts([&](int p) { parts[p] *= factor; });
  }
};

[[gnu::always_inline]] inline float add_lanes(const Lanes& x) {
  Lanes8 eight[2];
  std::memcpy(eight, &x, sizeof(x));
  const Lanes8 sums = eight[0] + eight[1];
  Lanes4 four[2];
  std::memcpy(four, &sums, sizeof(sums));
  const Lanes4 last = four[0] + four[1];
  return (last[0] + last[2]) + (last[1] + last[3]);
}

template <DType dtype>
[[gnu::always_inline]] inline void load_lanes(const void* x, int64_t i, Lanes& to) {
  Lanes::for_parts([&](int p) {
    const int64_t at = i + p * kPartSize;
    if constexpr (dtype == DType::f32) {
      std::memcpy(&to.parts[p], static_cast<const float*>(x) + at, sizeof(Part));
    } else if constexpr (dtype == DType::bf16) {
      PartHalves halves;
      std::memcpy(&halves, static_cast<const uint16_t*>(x) + at, sizeof(halves));
#if defined(__AVX512F__)  // gcc makes five instructions of a conversion
      const auto wide = reinterpret_cast<PartWords>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(halves)));
#elif defined(__AVX2__)
      const auto wide = reinterpret_cast<PartWords>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(halves)));
#else
      const PartWords wide = __builtin_convertvector(halves, PartWords);
#endif
      to.parts[p] = reinterpret_cast<Part>(wide << 16);
    } else {
      for (int lane = 0; lane < kPartSize; ++lane) to.parts[p][lane] = load_as_float<dtype>(x, at + lane);
    }
  });
}

// How many bytes ahead of a product its weight is requested: into the next row, because hardware stops at the
// end of a page.
constexpr int64_t kRowPrefetch = 4096;

// One function multiplies this number of rows, columns and chunks of 16 values at once. More need more
// registers than there are.
#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 4, kColumnsAtOnce = 2, kChunksAtOnce = 4;
#else
constexpr int kRowsAtOnce = 4, kColumnsAtOnce = 1, kChunksAtOnce = 2;
#endif

// out[m * out_stride + j] = x[m] . w[j]. The order of a product's sums depends on neither number.
template <DType dtype, int rows, int columns>
[[gnu::always_inline]] inline void dot_of(const float* x, int64_t stride, const void* const (&w)[columns],
                                          int64_t k, float* out, int64_t out_stride) {
  constexpr int chains = 2, step = chains * 16;
  Lanes sums[rows][columns][chains] = {};
  int64_t i = 0;
  for (; i + step <= k; i += step) {
    for (const void* from : w)
      __builtin_prefetch(static_cast<const char*>(from) + i * dtype_size(dtype) + kRowPrefetch);
#pragma GCC unroll 2
    for (int c = 0; c < chains; ++c) {
      Lanes a, b[columns];
#pragma GCC unroll 2
      for (int j = 0; j < columns; ++j) load_lanes<dtype>(w[j], i + c * 16, b[j]);
#pragma GCC unroll 4
      for (int m = 0; m < rows; ++m) {
        load_lanes<DType::f32>(x + m * stride, i + c * 16, a);
#pragma GCC unroll 2
        for (int j = 0; j < columns; ++j) sums[m][j][c].add_product(a, b[j]);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
    for (int j = 0; j < columns; ++j) {
      sums[m][j][0] += sums[m][j][1];
      float sum = add_lanes(sums[m][j][0]);
      for (int64_t l = i; l < k; ++l) sum += x[m * stride + l] * load_as_float<dtype>(w[j], l);
      out[m * out_stride + j] = sum;
    }
}

template <DType dtype, int columns>
[[gnu::always_inline]] inline void dot_columns(const float* x, int64_t stride, int64_t rows,
                                               const void* const (&w)[columns], int64_t k, float* out,
                                               int64_t out_stride) {
  static_assert(kRowsAtOnce == 4);
  int64_t m = 0;
  for (; m + 4 <= rows; m += 4)
    dot_of<dtype, 4>(x + m * stride, stride, w, k, out + m * out_stride, out_stride);
  if (rows - m == 3) dot_of<dtype, 3>(x + m * stride, stride, w, k, out + m * out_stride, out_stride);
  if (rows - m == 2) dot_of<dtype, 2>(x + m * stride, stride, w, k, out + m * out_stride, out_stride);
  if (rows - m == 1) dot_of<dtype, 1>(x + m * stride, stride, w, k, out + m * out_stride, out_stride);
}

inline void dot_rows(const float* x, int64_t stride, int count, const void* w, DType dtype, int64_t k,
                     float* out) {
  with_dtype(dtype, [&](auto d) { dot_columns<d.value, 1>(x, stride, count, {w}, k, out, 1); });
}

inline void dots_of_rows(const float* x, int64_t stride, int64_t rows, const void* w, DType dtype,
                         const int64_t* indices, int64_t count, int64_t k, float* out, int64_t out_stride) {
  with_dtype(dtype, [&](auto d) {
    const auto row = [&](int64_t j) -> const void* {
      return static_cast<const char*>(w) + indices[j] * k * dtype_size(d.value);
    };
    int64_t j = 0;
    if constexpr (kColumnsAtOnce == 2)
      for (; j + 2 <= count; j += 2)
        dot_columns<d.value, 2>(x, stride, rows, {row(j), row(j + 1)}, k, out + j, out_stride);
    for (; j < count; ++j) dot_columns<d.value, 1>(x, stride, rows, {row(j)}, k, out + j, out_stride);
  });
}

// Returns what a model has after a result was stored as `dtype`.
template <DType dtype>
inline float rounded(float v) {
  if constexpr (dtype == DType::bf16) return bf16_to_float(float_to_bf16(v));
  if constexpr (dtype == DType::f16) return f16_to_float(float_to_f16(v));
  return v;
}

template <DType dtype>
[[gnu::always_inline]] inline void rotate_as(const void* x, const void* norm_weight, float eps,
                                             const void* cos, const void* sin, int64_t size, float* scratch,
                                             void* out) {
  for (int64_t i = 0; i < size; ++i) scratch[i] = load_as_float<dtype>(x, i);
  if (norm_weight != nullptr) {
    float squares;
    dot_of<DType::f32, 1, 1>(scratch, size, {scratch}, size, &squares, 1);
    const float factor = 1.f / std::sqrt(squares / float(size) + eps);
    for (int64_t i = 0; i < size; ++i)
      scratch[i] = rounded<dtype>(load_as_float<dtype>(norm_weight, i) * rounded<dtype>(scratch[i] * factor));
  }
  const int64_t half = size / 2;
  const auto turn = [&](int64_t at, const float* plain, const float* turned, float sign) {
    for (int64_t i = 0; i < half; ++i)
      store_float<dtype>(out, at + i,
                         rounded<dtype>(plain[i] * load_as_float<dtype>(cos, at + i)) +
                             rounded<dtype>(sign * turned[i] * load_as_float<dtype>(sin, at + i)));
  };
  turn(0, scratch, scratch + half, -1.f);
  turn(half, scratch + half, scratch, 1.f);
}

inline void rotate_row(const void* x, const void* norm_weight, float eps, const void* cos, const void* sin,
                       DType dtype, int64_t size, float* scratch, void* out) {
  with_dtype(dtype, [&](auto d) { rotate_as<d.value>(x, norm_weight, eps, cos, sin, size, scratch, out); });
}

// Multiplies x by scale. Returns the largest product, or NaN if one is.
inline float scale_and_find_most(float* x, int64_t count, float scale) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  Lanes most, sums = {}, values;
  Lanes::for_parts([&](int p) { most.parts[p] = Part{} + kNothing; });
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    load_lanes<DType::f32>(x, i, values);
    values *= scale;
    std::memcpy(x + i, &values, sizeof(values));
    Lanes::for_parts(
        [&](int p) { most.parts[p] = values.parts[p] > most.parts[p] ? values.parts[p] : most.parts[p]; });
    sums.add_product(0.f, values);  // NaN if a value is NaN or infinite
  }
  float found = kNothing, nan = add_lanes(sums), tops[16];
  std::memcpy(tops, &most, sizeof(most));
  for (const float top : tops) found = top > found ? top : found;
  if (nan != nan)
    for (int64_t j = 0; j < i; ++j) found = x[j] > found || x[j] != x[j] ? x[j] : found;
  for (; i < count; ++i) {
    x[i] *= scale;
    found = x[i] > found || x[i] != x[i] ? x[i] : found;
  }
  return found;
}

// See Kernels::exponentiate.
inline float exponentiate_row(float* x, int64_t count, float scale, float* most) {
  const float top = *most = scale_and_find_most(x, count, scale);
  for (int64_t i = 0; i < count; ++i) x[i] = exp_float(x[i] - top);
  Lanes sums = {}, values;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    load_lanes<DType::f32>(x, i, values);
    sums += values;
  }
  float sum = add_lanes(sums);
  for (; i < count; ++i) sum += x[i];
  return sum;
}

// Sums chunks of 16 values for some rows of weights.
template <DType dtype, int rows, int chunks>
[[gnu::always_inline]] inline void weighted_sums_of(const void* x, const int64_t* indices,
                                                    const float* weights, int64_t stride, int64_t count,
                                                    int64_t n, int64_t at, float* out) {
  Lanes sums[rows][chunks] = {}, values[chunks];
  for (int64_t j = 0; j < count; ++j) {
#pragma GCC unroll 4
    for (int c = 0; c < chunks; ++c) load_lanes<dtype>(x, indices[j] * n + at + c * 16, values[c]);
#pragma GCC unroll 4
    for (int m = 0; m < rows; ++m)
#pragma GCC unroll 4
      for (int c = 0; c < chunks; ++c) sums[m][c].add_product(weights[m * stride + j], values[c]);
  }
  for (int m = 0; m < rows; ++m) std::memcpy(out + m * n + at, sums[m], sizeof(sums[m]));
}

template <DType dtype, int rows>
[[gnu::always_inline]] inline void weighted_rows(const void* x, const int64_t* indices, const float* weights,
                                                 int64_t stride, int64_t count, int64_t n, float* out) {
  constexpr int kStep = 16 * kChunksAtOnce;
  int64_t at = 0;
  for (; at + kStep <= n; at += kStep)
    weighted_sums_of<dtype, rows, kChunksAtOnce>(x, indices, weights, stride, count, n, at, out);
  for (; at + 16 <= n; at += 16)
    weighted_sums_of<dtype, rows, 1>(x, indices, weights, stride, count, n, at, out);
  for (; at < n; ++at)
    for (int m = 0; m < rows; ++m) {
      float sum = 0;
      for (int64_t j = 0; j < count; ++j)
        sum += weights[m * stride + j] * load_as_float<dtype>(x, indices[j] * n + at);
      out[m * n + at] = sum;
    }
}

inline void weighted_sums(const void* x, DType dtype, const int64_t* indices, const float* weights,
                          int64_t stride, int64_t rows, int64_t count, int64_t n, float* out) {
  with_dtype(dtype, [&](auto d) {
    int64_t m = 0;
    for (; m + kRowsAtOnce <= rows; m += kRowsAtOnce)
      weighted_rows<d.value, kRowsAtOnce>(x, indices, weights + m * stride, stride, count, n, out + m * n);
    for (; m < rows; ++m)
      weighted_rows<d.value, 1>(x, indices, weights + m * stride, stride, count, n, out + m * n);
  });
}

}  // namespace
}  // namespace fp4::cpu
