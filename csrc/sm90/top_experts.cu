// Chooses the experts of each token: the k largest logits of a row, and their weights. A warp takes a row. It
// holds the logits in registers, as integers of the same order, and takes the largest k times. Of equal
// logits the lowest index comes first. The interface is plain C, without torch.
#include <climits>

#include "../device/launch.cuh"
#include "../device/ptx.cuh"
#include "../device/top_experts.h"
#include "../device/types.cuh"

namespace fp4::sm90 {
namespace {

using namespace device;

constexpr int kWarps = 4;  // of a block, each with its own row

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

// kEach: logits of a lane. Lane i has those of the experts i, i + 32, and so on.
template <int kEach>
__global__ void __launch_bounds__(32 * kWarps) top_experts_kernel(const TopExpertsParams p) {
  release_next_kernel();
  wait_previous_kernel();
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int64_t from = int64_t(row) * p.experts;
  int keys[kEach];  // INT_MIN: no expert, or one that was chosen. The key of -infinity is larger.
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = lane + 32 * i;
    keys[i] = e < p.experts ? ordered(load_as_float(p.logits, from + e, p.type)) : INT_MIN;
  }
  float most = 0.f, total = 1.f;  // the largest logit, and the sum of exp(logit - most)
  float mine = 0.f;               // the logit, then the weight, of the choice with this lane's number
  int chosen = 0;
  for (int j = 0; j < p.k; ++j) {
    int best = keys[0], at = 0;
#pragma unroll
    for (int i = 1; i < kEach; ++i)
      if (keys[i] > best) best = keys[i], at = i;
    const int largest = __reduce_max_sync(~0u, best);
    const int e = -__reduce_max_sync(~0u, best == largest ? -(lane + 32 * at) : INT_MIN);
    if (j == 0 && p.softmax) {
      most = from_ordered(largest);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (keys[i] != INT_MIN) sum += expf(from_ordered(keys[i]) - most);
      total = sum_of_warp(sum);
    }
    if (lane == j) mine = from_ordered(largest), chosen = e;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (e == lane + 32 * i) keys[i] = INT_MIN;
  }
  if (p.softmax) mine = expf(mine - most) / total;
  if (p.normalize) mine /= sum_of_warp(lane < p.k ? mine : 0.f);
  if (lane >= p.k) return;
  store_weight(p.weights, p.weight_type, int64_t(row) * p.k + lane, mine);
  p.ids[int64_t(row) * p.k + lane] = chosen;
}

}  // namespace
}  // namespace fp4::sm90

extern "C" int fp4_kernel_top_experts(const fp4::device::TopExpertsParams* params, void* stream) {
  using namespace fp4::sm90;
  const TopExpertsParams& p = *params;
  if (p.rows < 1 || p.k < 1 || p.k > p.experts || p.k > kMostChosen || p.experts > kMostScored)
    return cudaErrorInvalidValue;
  const LaunchShape shape = {dim3((p.rows + kWarps - 1) / kWarps),
                             dim3(32 * (p.rows < kWarps ? p.rows : kWarps)), 0, 1, true};
  const auto start = [&](auto* kernel) {
    return launch_kernel(kernel, shape, true, static_cast<cudaStream_t>(stream), p);
  };
  if (p.experts <= 64) return start(top_experts_kernel<2>);
  if (p.experts <= 128) return start(top_experts_kernel<4>);
  return p.experts <= 256 ? start(top_experts_kernel<8>) : start(top_experts_kernel<16>);
}
