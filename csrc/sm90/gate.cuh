// The gated activation of an expert: f(gate) * up.
#pragma once

#include <cmath>

#include "types.cuh"

namespace fp4::sm90 {

// silu and tanh-gelu are gate / (1 + exp of this).
__device__ __forceinline__ float gate_exponent(Act act, float alpha, float gate) {
  return act == Act::kGeluTanh ? -1.59576912f * (gate + 0.044715f * gate * gate * gate) : -alpha * gate;
}

__device__ __forceinline__ float gate_value(Act act, float alpha, float limit, float up_offset, float gate,
                                            float up) {
  if (limit > 0.f) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  up += up_offset;
  if (act == Act::kGelu) return 0.5f * gate * (1.f + erff(gate * 0.70710678f)) * up;
  return gate / (1.f + __expf(gate_exponent(act, alpha, gate))) * up;
}

constexpr float kQuotientLeast = 0x1p-64f;

// a / d to nearest for d >= 1, from 1 / d within two ulps, if the result is at least kQuotientLeast in
// magnitude (so not a NaN: d may overflow). The compiler's own division takes these steps too, but asks for
// the range of every quotient apart: a branch each, between which the values of a thread cannot overlap.
__host__ __device__ __forceinline__ float quotient(float a, float d, float inverse) {
  inverse = fmaf(inverse, fmaf(-d, inverse, 1.f), inverse);
  const float q = a * inverse;
  return fmaf(inverse, fmaf(-d, q, a), q);
}

// gate_value of many, the same bits.
template <int kCount>
__device__ __forceinline__ void gate_values(Act act, float alpha, float limit, float up_offset,
                                            const float (&gate)[kCount], const float (&up)[kCount],
                                            float (&out)[kCount]) {
  if (act == Act::kGelu) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) out[j] = gate_value(act, alpha, limit, up_offset, gate[j], up[j]);
    return;
  }
  float g[kCount], d[kCount];
  bool all = true;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    g[j] = limit > 0.f ? fminf(gate[j], limit) : gate[j];
    // As __expf, but what is too small for a normal float is zero: all the same to 1 + it.
    float e, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(gate_exponent(act, alpha, g[j]) * 1.44269502f));
    d[j] = 1.f + e;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(d[j]));
    out[j] = quotient(g[j], d[j], inverse);
    all &= fabsf(out[j]) >= kQuotientLeast;
  }
  if (!all) {  // one test for all of them; rare, but for rows of zeros
#pragma unroll
    for (int j = 0; j < kCount; ++j) out[j] = g[j] / d[j];
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float u = limit > 0.f ? fminf(fmaxf(up[j], -limit), limit) : up[j];
    out[j] *= u + up_offset;
  }
}

}  // namespace fp4::sm90
