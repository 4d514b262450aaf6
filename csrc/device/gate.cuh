// The gated activation of an expert: f(gate) * up.
#pragma once

#include <cmath>

#include "ptx.cuh"
#include "types.cuh"

namespace fp4::device {

// Returns the exponent e of silu and tanh-gelu, which are both gate / (1 + exp(e)).
__device__ __forceinline__ float gate_exponent(const Gate& f, float gate) {
  return f.act == Act::kGeluTanh ? -1.59576912f * (gate + 0.044715f * gate * gate * gate) : -f.alpha * gate;
}

__device__ __forceinline__ float limited_gate(const Gate& f, float gate) {
  return f.limit > 0.f ? min_or_nan(gate, f.limit) : gate;
}

__device__ __forceinline__ float limited_up(const Gate& f, float up) {
  return (f.limit > 0.f ? min_or_nan(max_or_nan(up, -f.limit), f.limit) : up) + f.up_offset;
}

__device__ __forceinline__ float gate_value(const Gate& f, float gate, float up) {
  gate = limited_gate(f, gate);
  up = limited_up(f, up);
  if (f.act == Act::kGelu) return 0.5f * gate * (1.f + erff(gate * 0.70710678f)) * up;
  return gate / (1.f + __expf(gate_exponent(f, gate))) * up;
}

// Returns 1 + exp(e), the divisor of silu and tanh-gelu. Unlike __expf it flushes subnormal powers to zero,
// which does not change the sum with 1.
__device__ __forceinline__ float gate_divisor(const Gate& f, float gate) {
  return 1.f + approximate_power_of_two(gate_exponent(f, gate) * 1.44269502f);
}

// Computes gate_value for kSilu, into `up`. The error of a few ulps does not show in a 16-bit result. For
// gates below -43 / alpha the exponential stays at its value there, so that it does not overflow; their
// results are almost zero anyway. kLimited: the gate has a limit; without one it has no offset either.
//
// It is written for a few warps, which cannot hide each other's latency. Two values take three special
// functions; two divisions by 1 + exp would take four. Each step is done for all values before the next step,
// so that latencies overlap. If registers are scarce, ptxas would finish one value after the other and wait
// for each. `after` prevents this: it makes a step depend on the whole step before.
template <bool kLimited, int kCount>
__device__ __forceinline__ void silu_values(const Gate& f, float2 (&gate)[kCount], float2 (&up)[kCount]) {
  constexpr float kMostExponent = 62.f, kNothing = 92.f;
  const float rate = -1.44269502f * f.alpha;
  const uint32_t nothing = static_cast<uint32_t>(f.act) >> 8;  // zero, but the compiler does not know
  const auto power = [=](float g) { return approximate_power_of_two(fminf(g * rate, kMostExponent)); };
  // Returns the product, or zero if the exponential is so large that the result is almost zero. Otherwise a
  // gate of -1e20 would give -20, because its exponential is limited. As with torch, -inf gives NaN.
  const auto dividend = [=](float g, float u) { return g * (g * rate > kNothing ? 0.f : u); };
  // Returns v, but not before all of `seen` is computed.
  const auto after = [=](uint32_t seen, float v) {
    return __uint_as_float(__float_as_uint(v) | (seen & nothing));
  };
  uint32_t powers = 0, inverses = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if constexpr (kLimited) {
      gate[j] = make_float2(min_or_nan(gate[j].x, f.limit), min_or_nan(gate[j].y, f.limit));
      up[j] = make_float2(limited_up(f, up[j].x), limited_up(f, up[j].y));
    }
    up[j] = make_float2(dividend(gate[j].x, up[j].x), dividend(gate[j].y, up[j].y));
    gate[j] = make_float2(power(gate[j].x), power(gate[j].y));
    powers |= __float_as_uint(gate[j].x) | __float_as_uint(gate[j].y);
  }
  const float one = after(powers, 1.f);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float x = one + gate[j].x, y = one + gate[j].y;
    up[j] = make_float2(up[j].x * y, up[j].y * x);
    gate[j].x = approximate_inverse(x * y);
    inverses |= __float_as_uint(gate[j].x);
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float inverse = after(inverses, gate[j].x);
    up[j] = make_float2(up[j].x * inverse, up[j].y * inverse);
  }
}

constexpr float kQuotientLeast = 0x1p-64f;

// Returns a / d for d >= 1, rounded to nearest (except in about one of 10^9 cases). `inverse` is 1 / d within
// two ulps. The result is valid only if its magnitude is at least kQuotientLeast. If d overflows, the result
// is NaN, which is not valid. The compiler's own division has the same steps, but it checks the range of
// every quotient with a branch. The computations of several values cannot overlap across a branch.
__host__ __device__ __forceinline__ float quotient(float a, float d, float inverse) {
  inverse = fmaf(inverse, fmaf(-d, inverse, 1.f), inverse);
  const float q = a * inverse;
  return fmaf(inverse, fmaf(-d, q, a), q);
}

// Computes gate_value for many values, with the same bits.
template <int kCount>
__device__ __forceinline__ void gate_values(const Gate& f, const float (&gate)[kCount],
                                            const float (&up)[kCount], float (&out)[kCount]) {
  if (f.act == Act::kGelu) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) out[j] = gate_value(f, gate[j], up[j]);
    return;
  }
  float g[kCount], d[kCount];
  bool all = true;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    g[j] = limited_gate(f, gate[j]);
    d[j] = gate_divisor(f, g[j]);
    out[j] = quotient(g[j], d[j], approximate_inverse(d[j]));
    all &= fabsf(out[j]) >= kQuotientLeast;
  }
  if (!all) {  // one test for all values; it rarely fails, except in rows of zeros
#pragma unroll
    for (int j = 0; j < kCount; ++j) out[j] = g[j] / d[j];
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) out[j] *= limited_up(f, up[j]);
}

}  // namespace fp4::device
