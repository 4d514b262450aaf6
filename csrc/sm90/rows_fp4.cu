// Rows quantised to FP4 and taken back to what the products read: the quantised values as bf16, which are
// exact (e2m1 x e4m3 has six significant bits, e2m1 x e8m0 two), and a float32 factor for each row. A plain C
// interface, so that nothing here knows torch.
#include <cuda_fp8.h>

#include "fp4_block.cuh"
#include "row_values.cuh"

namespace fp4::sm90 {
namespace {

// NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

// Row r of the output from row (rows ? rows[r] / div : r) of x, as fp4::quantize does it for a matrix of that
// row alone. A row with a NaN or infinity gets the factor NaN.
template <typename T, int kBlocks, bool kNvfp4>
__global__ void __launch_bounds__(kRowThreads) fp4_row_kernel(const T* x, const int* rows, int div, Gate gate,
                                                              int width, __nv_bfloat16* out, float* factor) {
  const int64_t r = blockIdx.x;
  float v[kBlocks][kRowValues];
  read_row(x, rows ? rows[r] / div : r, gate, width, v);
  float amax[kBlocks], row_max = 0.f;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    amax[i] = 0.f;
#pragma unroll
    for (float f : v[i]) amax[i] = max_or_nan(amax[i], fabsf(f));
    row_max = max_or_nan(row_max, amax[i]);
    if constexpr (!kNvfp4) amax[i] = max_or_nan(amax[i], __shfl_xor_sync(~0u, amax[i], 1));  // blocks of 32
  }
  row_max = block_max(row_max, max_or_nan);
  const float global = kNvfp4 ? nvfp4_global_scale(row_max) : 1.f;
  if (threadIdx.x == 0) factor[r] = isfinite(row_max) ? global : __int_as_float(0x7FFFFFFF);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int k = (i * kRowThreads + threadIdx.x) * kRowValues;
    if (k >= width) continue;
    const Fp4Scale scale = kNvfp4 ? nvfp4_scale(amax[i], global) : mxfp4_scale(amax[i]);
    alignas(16) __nv_bfloat162 pairs[kRowValues / 2];
#pragma unroll
    for (int j = 0; j < kRowValues; j += 2) {
      pairs[j / 2] = __floats2bfloat162_rn(scale.quantized(v[i][j]), scale.quantized(v[i][j + 1]));
    }
    auto* to = reinterpret_cast<uint4*>(out + r * width + k);
    to[0] = reinterpret_cast<const uint4*>(pairs)[0];
    to[1] = reinterpret_cast<const uint4*>(pairs)[1];
  }
}

template <typename T>
int launch(const void* x, const int* rows, int count, int div, const Gate& gate, int width, int nvfp4,
           void* out, float* factor, cudaStream_t stream) {
  const bool fits = with_row_blocks(width, [&](auto blocks) {
    const auto run = [&](auto kernel) {
      kernel<<<count, kRowThreads, 0, stream>>>(static_cast<const T*>(x), rows, div, gate, width,
                                                static_cast<__nv_bfloat16*>(out), factor);
    };
    nvfp4 ? run(fp4_row_kernel<T, blocks.value, true>) : run(fp4_row_kernel<T, blocks.value, false>);
  });
  return fits ? cudaGetLastError() : cudaErrorInvalidValue;
}

}  // namespace
}  // namespace fp4::sm90

using namespace fp4::sm90;

// Rows of x (`width` columns; 2 * width if gated) to `out` bf16 [count, width] and factor [count]. nvfp4:
// else mxfp4.
extern "C" int fp4_sm90_rows_fp4(const void* x, DType x_type, const int* rows, int count, int div, Act act,
                                 int interleaved, float alpha, float limit, float up_offset, int width,
                                 int nvfp4, void* out, float* factor, void* stream) {
  if (count == 0) return 0;
  const Gate gate{act, interleaved, alpha, limit, up_offset};
  auto* s = static_cast<cudaStream_t>(stream);
  switch (x_type) {
    case DType::kFloat32:
      return launch<float>(x, rows, count, div, gate, width, nvfp4, out, factor, s);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(x, rows, count, div, gate, width, nvfp4, out, factor, s);
    case DType::kFloat16:
      return launch<__half>(x, rows, count, div, gate, width, nvfp4, out, factor, s);
    default:
      return cudaErrorInvalidValue;
  }
}
