// What surrounds the products of an expert block: routing, quantisation, gate and combine. Memory-bound; one
// pass each. A plain C interface, so that nothing here knows torch. All are safe in CUDA graphs and
// deterministic.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "row_values.cuh"
#include "types.cuh"

namespace fp4::sm90 {
namespace {

constexpr int kRouteThreads = 1024;
constexpr int kRouteWarps = kRouteThreads / 32;
constexpr float kFp8Max = 448.f;

// --- routing: a stable counting sort of expert ids ---

__device__ int read_id(const void* ids, bool wide, int r, int groups) {
  const int64_t id = wide ? static_cast<const int64_t*>(ids)[r] : static_cast<const int*>(ids)[r];
  return id >= 0 && id < groups ? int(id) : groups;  // ids of no expert sort last
}

__global__ void count_kernel(const void* ids, bool wide, int rows, int groups, int* counts) {
  extern __shared__ int count[];
  for (int g = threadIdx.x; g <= groups; g += kRouteThreads) count[g] = 0;
  __syncthreads();
  const int r = blockIdx.x * kRouteThreads + threadIdx.x;
  if (r < rows) atomicAdd(&count[read_id(ids, wide, r, groups)], 1);
  __syncthreads();
  for (int g = threadIdx.x; g <= groups; g += kRouteThreads) counts[blockIdx.x * (groups + 1) + g] = count[g];
}

// Each block places the ids of its chunk: start of the expert + those in earlier chunks + those earlier in
// this one.
__global__ void place_kernel(const void* ids, bool wide, int rows, int groups, const int* counts, int* offs,
                             int* sorted_rows, int* position) {
  extern __shared__ int shared[];
  const int bins = groups + 1;
  int* start = shared;                                            // [bins]: first position in this chunk
  auto* warp_count = reinterpret_cast<uint16_t*>(shared + bins);  // [warps][bins]
  __shared__ int totals[kRouteWarps];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  for (int i = tid; i < kRouteWarps * bins; i += kRouteThreads) warp_count[i] = 0;
  // Totals and earlier chunks of each expert, then an exclusive scan over the experts (at most one a thread).
  int before = 0, all = 0;
  if (tid < bins) {
    for (int c = 0; c < gridDim.x; ++c) {
      const int n = counts[c * bins + tid];
      before += c < blockIdx.x ? n : 0;
      all += n;
    }
  }
  int scan = all;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, scan, d);
    if (lane >= d) scan += other;
  }
  if (lane == 31) totals[warp] = scan;
  __syncthreads();
  for (int w = 0; w < warp; ++w) scan += totals[w];
  if (tid < bins) start[tid] = scan - all + before;
  if (tid < groups && blockIdx.x == 0) offs[tid] = scan;

  const int r = blockIdx.x * kRouteThreads + tid;
  const int id = r < rows ? read_id(ids, wide, r, groups) : -1;
  const uint32_t same = __match_any_sync(~0u, id);
  const int rank = __popc(same & ((1u << lane) - 1));
  if (id >= 0 && rank == 0) warp_count[warp * bins + id] = __popc(same);
  __syncthreads();
  if (tid < bins) {
    int sum = 0;
    for (int w = 0; w < kRouteWarps; ++w) {
      const int n = warp_count[w * bins + tid];
      warp_count[w * bins + tid] = sum;
      sum += n;
    }
  }
  __syncthreads();
  if (id >= 0) {
    const int at = start[id] + warp_count[warp * bins + id] + rank;
    sorted_rows[at] = r;
    position[r] = at;
  }
}

// --- rows: one block a row ---

constexpr int kRowThreads = 128;

__device__ float block_max(float v) {
  __shared__ float part[kRowThreads / 32];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  float m = part[0];
#pragma unroll
  for (int w = 1; w < kRowThreads / 32; ++w) m = fmaxf(m, part[w]);
  return m;
}

__device__ uint32_t pack_fp8(float a, float b, float c, float d) {
  const uint32_t lo = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t hi = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return lo | hi << 16;
}

// The sixteen values of one scale block, in the order of layout sm90: word 2s + q of the block lies 32s + 16q
// bytes into its 64 columns, 4t bytes further for block t of the four.
__device__ void store_fp8(uint8_t* row, int block, const float (&v)[kRowValues], float inverse) {
  auto* to = reinterpret_cast<uint32_t*>(row + block / 4 * 64) + block % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[4 * i] =
        pack_fp8(v[4 * i] * inverse, v[4 * i + 1] * inverse, v[4 * i + 2] * inverse, v[4 * i + 3] * inverse);
  }
}

// Row r of the output from row (rows ? rows[r] / div : r) of x; quantised to fp8 with one scale a row, or in
// x's type.
template <typename T, int kBlocks>
__global__ void __launch_bounds__(kRowThreads) row_kernel(const T* x, const int* rows, int div, Gate gate,
                                                          int width, int padded, void* out, float* scale) {
  const int64_t r = blockIdx.x, from = rows ? rows[r] / div : r;
  float v[kBlocks][kRowValues];
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    read_values(x, from, gate, width, (i * kRowThreads + threadIdx.x) * kRowValues, v[i]);
#pragma unroll
    for (float f : v[i]) amax = fmaxf(amax, fabsf(f));
  }
  if (scale == nullptr) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int k = (i * kRowThreads + threadIdx.x) * kRowValues;
      if (k >= width) continue;
      T* to = static_cast<T*>(out) + r * width + k;
#pragma unroll
      for (int j = 0; j < kRowValues; j += 2) {
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
          *reinterpret_cast<__nv_bfloat162*>(to + j) = __floats2bfloat162_rn(v[i][j], v[i][j + 1]);
        } else {
          *reinterpret_cast<half2*>(to + j) = __floats2half2_rn(v[i][j], v[i][j + 1]);
        }
      }
    }
    return;
  }
  amax = block_max(amax);
  const float s = amax / kFp8Max;
  const float inverse = amax > 0.f ? kFp8Max / amax : 0.f;
  if (threadIdx.x == 0) scale[r] = s;
  uint8_t* to = static_cast<uint8_t*>(out) + r * padded;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int block = i * kRowThreads + threadIdx.x;
    if (block * kRowValues < padded) store_fp8(to, block, v[i], inverse);
  }
}

// --- combine ---

// out[t] = sum over j of weights[t, j] * (y[position of row t * k + j] + bias[its expert]); ids of no expert
// add nothing.
template <typename Y>
__global__ void combine_kernel(const Y* y, const int* position, const void* ids, bool wide,
                               const void* weights, DType weight_type, const void* bias, DType bias_type,
                               void* out, DType out_type, int tokens, int top_k, int groups, int n) {
  const int t = blockIdx.x;
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (c >= n) return;
  const auto as_float = [](const void* p, DType type, int64_t i) {
    if (type == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
    if (type == DType::kFloat16) return __half2float(static_cast<const __half*>(p)[i]);
    return static_cast<const float*>(p)[i];
  };
  float sum[4] = {};
  for (int j = 0; j < top_k; ++j) {
    const int r = t * top_k + j;
    const int id = read_id(ids, wide, r, groups);
    if (id == groups) continue;
    const float w = as_float(weights, weight_type, r);
    const int64_t from = int64_t(position ? position[r] : r) * n + c;
    float v[4];
    if constexpr (sizeof(Y) == 4) {
      const float4 u = *reinterpret_cast<const float4*>(y + from);
      v[0] = u.x, v[1] = u.y, v[2] = u.z, v[3] = u.w;
    } else {
      const uint2 u = *reinterpret_cast<const uint2*>(y + from);
      const float2 a = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(u.x));
      const float2 b = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(u.y));
      v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (bias) v[i] += as_float(bias, bias_type, int64_t(id) * n + c + i);
      sum[i] += w * v[i];
    }
  }
  const int64_t to = int64_t(t) * n + c;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    if (out_type == DType::kBFloat16) {
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(out) + to + i) =
          __floats2bfloat162_rn(sum[i], sum[i + 1]);
    } else if (out_type == DType::kFloat16) {
      *reinterpret_cast<half2*>(static_cast<__half*>(out) + to + i) = __floats2half2_rn(sum[i], sum[i + 1]);
    } else {
      *reinterpret_cast<float2*>(static_cast<float*>(out) + to + i) = make_float2(sum[i], sum[i + 1]);
    }
  }
}

template <typename T>
int launch_rows(const void* x, const int* rows, int count, int div, const Gate& gate, int width, int padded,
                void* out, float* scale, cudaStream_t stream) {
  const int blocks = (padded / kRowValues + kRowThreads - 1) / kRowThreads;
  const auto run = [&](auto kernel) {
    kernel<<<count, kRowThreads, 0, stream>>>(static_cast<const T*>(x), rows, div, gate, width, padded, out,
                                              scale);
  };
  switch (blocks) {
    case 1:
      run(row_kernel<T, 1>);
      break;
    case 2:
      run(row_kernel<T, 2>);
      break;
    case 3:
    case 4:
      run(row_kernel<T, 4>);
      break;
    case 5:
    case 6:
    case 7:
    case 8:
      run(row_kernel<T, 8>);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace
}  // namespace fp4::sm90

using namespace fp4::sm90;

// ids [rows] int32 or int64 -> offs [groups], sorted_rows [rows] (position -> row), position [rows] (row ->
// position). counts: scratch, ceil(rows / 1024) * (groups + 1) ints.
extern "C" int fp4_sm90_route(const void* ids, int wide, int rows, int groups, int* counts, int* offs,
                              int* sorted_rows, int* position, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  const int chunks = (rows + kRouteThreads - 1) / kRouteThreads, bins = groups + 1;
  if (bins > kRouteThreads) return cudaErrorInvalidValue;
  const int shared = bins * (4 + 2 * kRouteWarps);
  static const cudaError_t allowed = cudaFuncSetAttribute(
      place_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRouteThreads * (4 + 2 * kRouteWarps));
  if (allowed != cudaSuccess) return allowed;
  count_kernel<<<chunks, kRouteThreads, bins * 4, s>>>(ids, wide, rows, groups, counts);
  place_kernel<<<chunks, kRouteThreads, shared, s>>>(ids, wide, rows, groups, counts, offs, sorted_rows,
                                                     position);
  return cudaGetLastError();
}

// Rows of x (16-bit, `width` columns; 2 * width if gated) to `out`: e4m3 [count, padded] in layout sm90 with
// scale [count], or, where scale is null, x's type [count, width].
extern "C" int fp4_sm90_rows(const void* x, DType x_type, const int* rows, int count, int div, Act act,
                             int interleaved, float alpha, float limit, float up_offset, int width,
                             int padded, void* out, float* scale, void* stream) {
  if (count == 0) return 0;
  const Gate gate{act, interleaved, alpha, limit, up_offset};
  auto* s = static_cast<cudaStream_t>(stream);
  if (x_type == DType::kBFloat16)
    return launch_rows<__nv_bfloat16>(x, rows, count, div, gate, width, padded, out, scale, s);
  if (x_type == DType::kFloat16)
    return launch_rows<__half>(x, rows, count, div, gate, width, padded, out, scale, s);
  return cudaErrorInvalidValue;
}

// y float32 or bf16 [rows, n], n a multiple of 4.
extern "C" int fp4_sm90_combine(const void* y, DType y_type, const int* position, const void* ids, int wide,
                                const void* weights, DType weight_type, const void* bias, DType bias_type,
                                void* out, DType out_type, int tokens, int top_k, int groups, int n,
                                void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  const int threads = tokens < 64 ? 64 : 256;
  const dim3 grid(tokens, (n / 4 + threads - 1) / threads);
  if (y_type == DType::kFloat32) {
    combine_kernel<float><<<grid, threads, 0, s>>>(static_cast<const float*>(y), position, ids, wide, weights,
                                                   weight_type, bias, bias_type, out, out_type, tokens, top_k,
                                                   groups, n);
  } else {
    combine_kernel<__nv_bfloat16><<<grid, threads, 0, s>>>(static_cast<const __nv_bfloat16*>(y), position,
                                                           ids, wide, weights, weight_type, bias, bias_type,
                                                           out, out_type, tokens, top_k, groups, n);
  }
  return cudaGetLastError();
}
