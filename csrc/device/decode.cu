// Launches the decode kernels. The interface is plain C, so this file does not depend on torch.
#include "decode.cuh"

namespace fp4::device {

template <DType kType, class Words, int kComputeWarps, int kRing>
int launch(const DecodeParams& p, int blocks, cudaStream_t stream) {
  auto* kernel = decode_kernel<kType, Words, kComputeWarps, kRing>;
  Launching now;
  if (const cudaError_t error = launching(now); error != cudaSuccess) return error;
  const int shared = DecodeBuffers::bytes(p), most = now.shared_bytes;
  if (shared > most) return cudaErrorInvalidValue;
  static std::atomic<uint64_t> allowed;
  if (const cudaError_t error = allow_shared(kernel, most, allowed); error != cudaSuccess) return error;
  const LaunchShape shape = {dim3(blocks), dim3(32 * (kComputeWarps + kReduceWarps)), size_t(shared)};
  return launch_kernel(kernel, shape, true, stream, p);
}

template <DType kType, class Words, int kRing>
int launch_warps(const DecodeParams& p, int blocks, cudaStream_t stream) {
  const int warps = p.k_warps * p.row_warps;
  if (warps <= kFewComputeWarps) return launch<kType, Words, kFewComputeWarps, kRing>(p, blocks, stream);
  if (warps <= kManyComputeWarps) return launch<kType, Words, kManyComputeWarps, kRing>(p, blocks, stream);
  return cudaErrorInvalidValue;
}

// Hopper always has room for the longer ring.
template <DType kType, class Words>
int launch_ring(const DecodeParams& p, int blocks, cudaStream_t stream) {
  if (p.ring == kLongRing) return launch_warps<kType, Words, kLongRing>(p, blocks, stream);
  if constexpr (!kHopper) {
    if (p.ring == kShortRing) return launch_warps<kType, Words, kShortRing>(p, blocks, stream);
  }
  return cudaErrorInvalidValue;
}

// Approximate cost of a block's change to the next chunk or pass, as the bytes of weights that it could read
// in that time.
constexpr double kChangeBytes = 16 * 1024;
constexpr int kStepBytes = kStepCodes + 64;  // with nvfp4's scales

}  // namespace fp4::device

extern "C" int fp4_kernel_decode(const fp4::device::DecodeParams* params, int blocks, void* stream) {
  using namespace fp4::device;
  DecodeParams p = *params;
  set_divisor(blocks, p.grid_mul, p.grid_shift);
  p.change_units = int(kTileUnits * p.passes * kChangeBytes / (p.kp / 64 * kStepBytes) + 0.5);
  p.chunk_units = p.n / fp4::kTileRows * kTileUnits + p.change_units;
  set_divisor(p.chunk_units, p.chunk_mul, p.chunk_shift);
  set_divisor(p.a_div, p.a_div_mul, p.a_div_shift);
  p.k_warps_inverse = 1.f / p.k_warps;
  p.row_warps_inverse = 1.f / p.row_warps;
  auto* s = static_cast<cudaStream_t>(stream);
  return launch_of_types(p, [&](auto type, auto words) {
    return launch_ring<decltype(type)::value, decltype(words)>(p, blocks, s);
  });
}
