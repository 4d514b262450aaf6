// Rows as prefill_half.cu reads them: fp16 in the layout's order, each row times a power of two, so that
// bfloat16 rows keep all their bits down to 2^-31 of the largest value. A plain C interface, so that nothing
// here knows torch.
#include <algorithm>

#include "prefill_half.cuh"
#include "row_values.cuh"

namespace fp4::sm90 {
namespace {

constexpr int kMaxRowThreads = 1024;

__device__ __forceinline__ float block_max(float v) {
  __shared__ float part[kMaxRowThreads / 32];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  if (blockDim.x == 32) return v;
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  float m = part[0];
  for (int w = 1; w < blockDim.x / 32; ++w) m = fmaxf(m, part[w]);
  return m;
}

// Four lanes of a quad, four words each: lane t takes word t of every lane.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    const bool upper = t & d;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & d) continue;
      const uint32_t other = __shfl_xor_sync(~0u, upper ? w[i] : w[i + d], d);
      (upper ? w[i] : w[i + d]) = other;
    }
  }
}

// Sixteen values, a block of the layout, times `up` to their places; called by whole quads.
__device__ __forceinline__ void store_half(const float (&v)[kRowValues], float up, __half* row, int k,
                                           int padded) {
  // Word c of the block is chunk c of its 64 columns: half_position(16t + 4 (c / 2) + c % 2) = 8c + 2t.
  uint32_t word[2][4];
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const int i = c / 2 * 4 + c % 2;
    const half2 pair = __floats2half2_rn(v[i] * up, v[i + 2] * up);
    word[c / 4][c % 4] = reinterpret_cast<const uint32_t&>(pair);
  }
  transpose_quad(word[0]);
  transpose_quad(word[1]);
  if (k >= padded) return;
  auto* to = reinterpret_cast<uint4*>(row + k / 64 * 64) + threadIdx.x % 4;
  to[0] = make_uint4(word[0][0], word[0][1], word[0][2], word[0][3]);
  to[4] = make_uint4(word[1][0], word[1][1], word[1][2], word[1][3]);
}

// Row r of the output from row (rows ? rows[r] / div : r) of x, gated where it is two halves; sixteen values
// a thread at a time. kOnce: no row is wider than the block, so it is read once.
template <typename T, bool kOnce>
__global__ void __launch_bounds__(kMaxRowThreads)
    half_row_kernel(const T* x, const int* rows, int div, Gate gate, int width, int padded, __half* out,
                    float* factor) {
  const int64_t r = blockIdx.x, from = rows ? rows[r] / div : r;
  const int first = threadIdx.x * kRowValues, step = blockDim.x * kRowValues;
  const int end = kOnce ? step : (padded + step - 1) / step * step;
  float v[kRowValues], amax = 0.f;
  for (int k = first; k < end; k += step) {
    read_values(x, from, gate, width, k, v);
#pragma unroll
    for (float f : v) amax = fmaxf(amax, fabsf(f));
  }
  // The largest value's exponent becomes 14; infinities stay what they are.
  const int exponent = min(max(int(__float_as_uint(block_max(amax)) >> 23), 15), 254);
  const float up = __uint_as_float(uint32_t(268 - exponent) << 23);
  if (threadIdx.x == 0) factor[r] = __uint_as_float(uint32_t(exponent - 14) << 23);
  for (int k = first; k < end; k += step) {
    if constexpr (!kOnce) read_values(x, from, gate, width, k, v);
    store_half(v, up, out + r * padded, k, padded);
  }
}

template <typename T>
int launch(const void* x, const int* rows, int count, int div, const Gate& gate, int width, int padded,
           void* out, float* factor, cudaStream_t stream) {
  const int threads = std::min((padded / kRowValues + 31) / 32 * 32, kMaxRowThreads);
  const auto run = [&](auto kernel) {
    kernel<<<count, threads, 0, stream>>>(static_cast<const T*>(x), rows, div, gate, width, padded,
                                          static_cast<__half*>(out), factor);
  };
  padded <= threads* kRowValues ? run(half_row_kernel<T, true>) : run(half_row_kernel<T, false>);
  return cudaGetLastError();
}

}  // namespace
}  // namespace fp4::sm90

using namespace fp4::sm90;

// Rows of x (16-bit, `width` columns, a multiple of 16; 2 * width if gated) to `out` fp16 [count, padded] in
// the order of half_position and factor [count].
extern "C" int fp4_sm90_rows_half(const void* x, DType x_type, const int* rows, int count, int div, Act act,
                                  int interleaved, float alpha, float limit, float up_offset, int width,
                                  int padded, void* out, float* factor, void* stream) {
  if (count == 0) return 0;
  const Gate gate{act, interleaved, alpha, limit, up_offset};
  auto* s = static_cast<cudaStream_t>(stream);
  if (x_type == DType::kBFloat16)
    return launch<__nv_bfloat16>(x, rows, count, div, gate, width, padded, out, factor, s);
  if (x_type == DType::kFloat16)
    return launch<__half>(x, rows, count, div, gate, width, padded, out, factor, s);
  return cudaErrorInvalidValue;
}
