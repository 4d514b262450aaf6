// The gated activation of an expert: f(gate) * up.
#pragma once

#include "types.cuh"

namespace fp4::sm90 {

__device__ __forceinline__ float gate_value(Act act, float alpha, float limit, float up_offset, float gate,
                                            float up) {
  if (limit > 0.f) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  up += up_offset;
  if (act == Act::kGelu) return 0.5f * gate * (1.f + erff(gate * 0.70710678f)) * up;
  if (act == Act::kGeluTanh)
    return gate / (1.f + __expf(-1.59576912f * (gate + 0.044715f * gate * gate * gate))) * up;
  return gate / (1.f + __expf(-alpha * gate)) * up;
}

}  // namespace fp4::sm90
