// Packs weights into layouts sm90 and mma_bf16 on the device, and dequantises them. The interface is plain C,
// so this file does not depend on torch.
#include <cstdint>
#include <type_traits>

#include "launch.cuh"
#include "weights.cuh"

namespace fp4::device {
namespace {

constexpr int kThreads = 256;

template <class Bits>
__global__ void pack_kernel(const uint8_t* packed, const uint8_t* scales, int64_t count, int k, int kp,
                            int scale_block, uint8_t* to_packed, uint8_t* to_scales) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) pack_lane<Bits>(i, packed, scales, k, kp, scale_block, to_packed, to_scales);
}

template <class Bits, typename T>
__global__ void dequantize_kernel(const uint8_t* packed, const uint8_t* scales, const float* global_scale,
                                  int64_t count, int64_t n, int kp, int scale_block, T* out) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) dequantize_lane<Bits>(i, packed, scales, global_scale, n, kp, scale_block, out);
}

int64_t lanes_of(int64_t rows, int kp) { return rows / 16 * (kp / kStep) * 32; }

dim3 blocks_of(int64_t count) { return dim3((count + kThreads - 1) / kThreads); }

}  // namespace
}  // namespace fp4::device

using namespace fp4;
using namespace fp4::device;

// Packs codes [rows, k / 2] and e4m3 scales [rows, ceil(k / scale_block)] from plain order into layout sm90,
// or mma_bf16 if `bf16_words`. `rows` counts over all matrices.
extern "C" int fp4_kernel_pack(const uint8_t* packed, const uint8_t* scales, int64_t rows, int k, int kp,
                               int scale_block, int bf16_words, uint8_t* to_packed, uint8_t* to_scales,
                               void* stream) {
  const int64_t count = lanes_of(rows, kp);
  if (count == 0) return 0;
  auto* kernel = bf16_words ? pack_kernel<MmaBf16> : pack_kernel<Sm90>;
  return launch_kernel(kernel, {blocks_of(count), dim3(kThreads)}, false, static_cast<cudaStream_t>(stream),
                       packed, scales, count, k, kp, scale_block, to_packed, to_scales);
}

// Dequantises a layout to values [rows, kp]. out_type: 0 float32, 1 bfloat16, 2 float16, 3 float64. n: rows
// of a matrix.
extern "C" int fp4_kernel_dequantize(const uint8_t* packed, const uint8_t* scales, const float* global_scale,
                                     int64_t rows, int64_t n, int kp, int scale_block, int bf16_words,
                                     void* out, int out_type, void* stream) {
  const int64_t count = lanes_of(rows, kp);
  if (count == 0) return 0;
  auto* s = static_cast<cudaStream_t>(stream);
  const auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    auto* kernel = bf16_words ? dequantize_kernel<MmaBf16, T> : dequantize_kernel<Sm90, T>;
    return launch_kernel(kernel, {blocks_of(count), dim3(kThreads)}, false, s, packed, scales, global_scale,
                         count, n, kp, scale_block, to);
  };
  switch (out_type) {
    case 0:
      return run(static_cast<float*>(out));
    case 1:
      return run(static_cast<__nv_bfloat16*>(out));
    case 2:
      return run(static_cast<__half*>(out));
    case 3:
      return run(static_cast<double*>(out));
    default:
      return cudaErrorInvalidValue;
  }
}
