// Launches linear layers of few rows. The interface is plain C, without torch.
#include "linears.cuh"

namespace fp4::sm90 {
namespace {

template <class Weights, int kColumns, bool kCopied>
int launch(LinearsParams& p, int sms, cudaStream_t stream) {
  auto* kernel = linears_kernel<Weights, kColumns, kCopied>;
  Launching now;
  if (const cudaError_t error = launching(now); error != cudaSuccess) return error;
  const int shared = complete_linears(p, sms);
  if (shared > now.shared_bytes) return cudaErrorInvalidValue;
  count_sums(p);
  static std::atomic<uint64_t> allowed;
  if (const cudaError_t error = allow_shared(kernel, now.shared_bytes, allowed); error != cudaSuccess)
    return error;
  const unsigned blocks = 1 << p.config.cluster_bits;
  const LaunchShape shape = {dim3(p.config.clusters * blocks), dim3(kLinearThreads), size_t(shared), blocks,
                             true};
  return launch_kernel(kernel, shape, true, stream, p);
}

template <class Weights>
int launch_columns(LinearsParams& p, int sms, cudaStream_t stream) {
  if (p.rows <= 8) return launch<Weights, 1, false>(p, sms, stream);
  if (p.rows <= 16) return launch<Weights, 2, false>(p, sms, stream);
  if (p.rows <= 32) return launch<Weights, 4, true>(p, sms, stream);
  return launch<Weights, 8, true>(p, sms, stream);
}

}  // namespace
}  // namespace fp4::sm90

extern "C" int fp4_kernel_linears(const fp4::device::LinearsParams* params, int sms, void* stream) {
  using namespace fp4::sm90;
  LinearsParams p = *params;
  if (p.rows < 1 || p.rows > p.most_rows() || p.count < 1 || p.count > kMostLinears)
    return cudaErrorInvalidValue;
  if (p.k % kLinearStepK != 0) return cudaErrorInvalidValue;
  auto* s = static_cast<cudaStream_t>(stream);
  if (p.fp8)
    return p.type == DType::kBFloat16 ? launch_columns<Fp8Weights<Element::kBFloat16>>(p, sms, s)
                                      : launch_columns<Fp8Weights<Element::kFloat16>>(p, sms, s);
  return p.type == DType::kBFloat16 ? launch_columns<PlainWeights<Element::kBFloat16>>(p, sms, s)
                                    : launch_columns<PlainWeights<Element::kFloat16>>(p, sms, s);
}
