// A warp chooses the experts of one token: the k largest logits, and their weights. It holds the logits in
// registers, as integers of the same order, and takes the largest k times. Of equal logits the lowest index
// comes first.
#pragma once

#include <climits>
#include <cstdint>

#include "../device/ptx.cuh"
#include "../device/top_experts.h"
#include "../device/types.cuh"

namespace fp4::sm90 {

using namespace device;

// Maps floats to integers in the same order. NaN becomes the largest integer, and -0 the same one as 0.
__device__ __forceinline__ int ordered(float x) {
  if (x != x) return INT_MAX;
  const int bits = int(__float_as_uint(x + 0.f));
  return bits < 0 ? bits ^ INT_MAX : bits;
}

__device__ __forceinline__ float from_ordered(int order) {
  return __uint_as_float(uint32_t(order < 0 ? order ^ INT_MAX : order));  // INT_MAX is a NaN
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

__device__ __forceinline__ void store_weight(void* out, DType type, int64_t i, float x) {
  if (type == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(x);
  } else if (type == DType::kFloat16) {
    static_cast<__half*>(out)[i] = __float2half_rn(x);
  } else {
    static_cast<float*>(out)[i] = x;
  }
}

// The bits of a float32 that are 0 in every bf16 and fp16 value. The key of such a logit has its expert
// there, so one reduction finds both.
constexpr int kExpertBits = (1 << 13) - 1;
static_assert(kMostScored <= kExpertBits);

// Chooses for the token `row`. logit(e): the logit of expert e. kEach: logits of a lane; lane i has those of
// the experts i, i + 32, and so on. kHalf: the logits are bf16 or fp16 values.
template <int kEach, bool kHalf, class Logit>
__device__ __forceinline__ void choose_experts(const TopExpertsParams& p, int row, const Logit& logit) {
  const int lane = threadIdx.x % 32;
  int keys[kEach];  // INT_MIN: no expert, or one that was chosen. The key of -infinity is larger.
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = lane + 32 * i;
    keys[i] = INT_MIN;
    if (e >= p.experts) continue;
    const int order = ordered(logit(e));
    keys[i] = kHalf ? (order & ~kExpertBits) | (kExpertBits - e) : order;
  }
  const auto value = [](int key) {
    if (kHalf) key = key < 0 ? key | kExpertBits : key & ~kExpertBits;
    return from_ordered(key);
  };
  float most = 0.f, total = 1.f;  // the largest logit, and the sum of exp(logit - most)
  float mine = 0.f;               // the logit, then the weight, of the choice with this lane's number
  int chosen = 0;
  for (int j = 0; j < p.k; ++j) {
    int best = keys[0], at = 0;
#pragma unroll
    for (int i = 1; i < kEach; ++i)
      if (keys[i] > best) best = keys[i], at = i;
    const int largest = __reduce_max_sync(~0u, best);
    const int e = kHalf ? kExpertBits - (largest & kExpertBits)
                        : -__reduce_max_sync(~0u, best == largest ? -(lane + 32 * at) : INT_MIN);
    if (j == 0 && p.softmax) {
      most = value(largest);
      float sum = 0.f;
      if (!p.normalize) {  // else the sum is a factor of each weight
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (keys[i] != INT_MIN) sum += expf(value(keys[i]) - most);
        total = sum_of_warp(sum);
      }
    }
    if (lane == j) mine = value(largest), chosen = e;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (kHalf ? keys[i] == largest : e == lane + 32 * i) keys[i] = INT_MIN;
  }
  if (p.softmax) mine = expf(mine - most) / total;
  if (p.normalize) mine /= sum_of_warp(lane < p.k ? mine : 0.f);
  if (lane >= p.k) return;
  store_weight(p.weights, p.weight_type, int64_t(row) * p.k + lane, mine);
  p.ids[int64_t(row) * p.k + lane] = chosen;
}

}  // namespace fp4::sm90
