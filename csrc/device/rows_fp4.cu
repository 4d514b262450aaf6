// Quantises rows to FP4 and converts them to what the products read: the quantised values as bf16, and a
// float32 factor for each row. bf16 holds them exactly, because e2m1 x e4m3 has six significant bits and e2m1
// x e8m0 two. The interface is plain C, so this file does not depend on torch.
#include <cuda_fp8.h>

#include "fp4_block.cuh"
#include "launch.cuh"
#include "row_values.cuh"

namespace fp4::device {
namespace {

constexpr int kMaxRowThreads = 1024;

// Returns the largest v of the thread block, or NaN if there is one.
__device__ __forceinline__ float block_max_or_nan(float v) {
  __shared__ float part[32];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v = max_or_nan(v, __shfl_xor_sync(~0u, v, d));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  float m = part[0];
  for (int w = 1; w < blockDim.x / 32; ++w) m = max_or_nan(m, part[w]);
  return m;
}

// Quantises row r of x to the rows position[r, ..] of the output, or to row r. The values are those of
// fp4::quantize for a matrix of that row alone. A thread takes sixteen of them. A row with a NaN or infinity
// gets the factor NaN. Only float32 rows are gated.
template <typename T, bool kGated, bool kNvfp4>
__global__ void __launch_bounds__(kMaxRowThreads)
    fp4_row_kernel(const T* x, const int* position, int copies, Gate gate, int interleaved, int width,
                   __nv_bfloat16* out, float* factor) {
  const int64_t r = blockIdx.x;
  const int k = threadIdx.x * kRowValues;
  float v[kRowValues];
  SourceBlock<T, kGated> raw;
  raw.load(x + r * (kGated ? 2 * width : width), interleaved, width, k);
  raw.values(gate, interleaved, width, k, v);
  float amax = 0.f;
#pragma unroll
  for (float f : v) amax = max_or_nan(amax, fabsf(f));
  const float row_max = block_max_or_nan(amax);
  const float global = kNvfp4 ? nvfp4_global_scale(row_max) : 1.f;
  const auto row = [&](int copy) { return int64_t(position ? position[r * copies + copy] : r); };
#pragma unroll 1
  for (int c = threadIdx.x; c < copies; c += blockDim.x) {
    factor[row(c)] = isfinite(row_max) ? global : __int_as_float(0x7FFFFFFF);
  }
  if constexpr (!kNvfp4) amax = max_or_nan(amax, __shfl_xor_sync(~0u, amax, 1));  // blocks of 32
  if (k >= width) return;
  const Fp4Scale scale = kNvfp4 ? nvfp4_scale(amax, global) : mxfp4_scale(amax);
  alignas(16) __nv_bfloat162 pairs[kRowValues / 2];
#pragma unroll
  for (int j = 0; j < kRowValues; j += 2) {
    pairs[j / 2] = __floats2bfloat162_rn(scale.quantized(v[j]), scale.quantized(v[j + 1]));
  }
#pragma unroll 1
  for (int c = 0; c < copies; ++c) {
    auto* to = reinterpret_cast<uint4*>(out + row(c) * width + k);
    to[0] = reinterpret_cast<const uint4*>(pairs)[0];
    to[1] = reinterpret_cast<const uint4*>(pairs)[1];
  }
}

template <typename T>
int launch(const void* x, int count, const int* position, int copies, const Gate& gate, int interleaved,
           int width, int nvfp4, void* out, float* factor, cudaStream_t stream) {
  const int threads = (width / kRowValues + 31) / 32 * 32;
  if (threads > kMaxRowThreads || width % kRowValues != 0) return cudaErrorInvalidValue;
  const auto run = [&](auto kernel) {
    return launch_kernel(kernel, {dim3(count), dim3(threads)}, false, stream, static_cast<const T*>(x),
                         position, copies, gate, interleaved, width, static_cast<__nv_bfloat16*>(out),
                         factor);
  };
  if (gate.act == Act::kNone) {
    return nvfp4 ? run(fp4_row_kernel<T, false, true>) : run(fp4_row_kernel<T, false, false>);
  } else if constexpr (sizeof(T) == 4) {
    return nvfp4 ? run(fp4_row_kernel<T, true, true>) : run(fp4_row_kernel<T, true, false>);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace fp4::device

using namespace fp4::device;

// Quantises the rows of x to `out`, bf16 [.., width], and factor [..]. Row r of x goes to the `copies` rows
// position[r, ..], or to row r if position is null (copies is then 1). A row of x has `width` columns, or 2 *
// width if gated; only float32 rows can be gated. The format is nvfp4, or mxfp4 if `nvfp4` is 0.
extern "C" int fp4_kernel_rows_fp4(const void* x, DType x_type, int count, const int* position, int copies,
                                   Act act, float alpha, float limit, float up_offset, int interleaved,
                                   int width, int nvfp4, void* out, float* factor, void* stream) {
  if (count == 0) return 0;
  const Gate gate{act, alpha, limit, up_offset};
  auto* s = static_cast<cudaStream_t>(stream);
  switch (x_type) {
    case DType::kFloat32:
      return launch<float>(x, count, position, copies, gate, interleaved, width, nvfp4, out, factor, s);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(x, count, position, copies, gate, interleaved, width, nvfp4, out, factor,
                                   s);
    case DType::kFloat16:
      return launch<__half>(x, count, position, copies, gate, interleaved, width, nvfp4, out, factor, s);
    default:
      return cudaErrorInvalidValue;
  }
}
