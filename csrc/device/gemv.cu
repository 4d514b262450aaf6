// Launches the kernels for few rows. The interface is plain C, so this file does not depend on torch.
#include <algorithm>

#include "gemv.cuh"

namespace fp4::device {

template <DType kType, class Words>
int launch(const GemvParams& p, int blocks, cudaStream_t stream) {
  auto* kernel = gemv_kernel<kType, Words>;
  Launching now;
  if (const cudaError_t error = launching(now); error != cudaSuccess) return error;
  const int most = now.shared_bytes;
  // A block takes more than half of the shared memory, so that no two blocks of a launch share a
  // multiprocessor. They would if the kernel before had ended on a few multiprocessors only; others would
  // then get no block. A kernel that may begin `early` needs room beside the kernel before, so it takes no
  // more than it uses.
  const int shared = std::max(GemvBuffers::bytes(p), p.early ? 0 : most / 2 + 1024);
  if (shared > most) return cudaErrorInvalidValue;
  static std::atomic<uint64_t> allowed;
  if (const cudaError_t error = allow_shared(kernel, most, allowed); error != cudaSuccess) return error;
  const LaunchShape shape = {dim3(blocks), dim3(kGemvThreads), size_t(shared), 1, true};
  return launch_kernel(kernel, shape, true, stream, p);
}

}  // namespace fp4::device

extern "C" int fp4_kernel_gemv(const fp4::device::GemvParams* params, int blocks, void* stream) {
  using namespace fp4::device;
  GemvParams p = *params;
  if (p.rows > kGemvRows || p.columns > kChunk || p.slices > kGemvSlices ||
      p.tiles * p.slices > kGemvWarps * kGemvUnits) {
    return cudaErrorInvalidValue;
  }
  set_divisor(blocks, p.grid_mul, p.grid_shift);
  set_divisor(p.a_div, p.a_div_mul, p.a_div_shift);
  p.slices_inverse = 1.f / p.slices;
  p.tokens_inverse = 1.f / std::max(p.tokens, 1);
  auto* s = static_cast<cudaStream_t>(stream);
  return launch_of_types(
      p, [&](auto type, auto words) { return launch<decltype(type)::value, decltype(words)>(p, blocks, s); });
}
