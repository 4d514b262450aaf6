// Chooses the experts of each token. A warp takes a row of logits. The interface is plain C, without torch.
#include "../device/launch.cuh"
#include "choose_experts.cuh"

namespace fp4::sm90 {
namespace {

constexpr int kWarps = 4;  // of a block, each with its own row

template <int kEach, bool kHalf>
__global__ void __launch_bounds__(32 * kWarps) top_experts_kernel(const TopExpertsParams p) {
  release_next_kernel();
  wait_previous_kernel();
  const int row = blockIdx.x * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int64_t from = int64_t(row) * p.experts;
  choose_experts<kEach, kHalf>(p, row, [&](int e) { return load_as_float(p.logits, from + e, p.type); });
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
  const auto start = [&](auto each) {
    constexpr int kEach = decltype(each)::value;
    auto* kernel =
        p.type == DType::kFloat32 ? top_experts_kernel<kEach, false> : top_experts_kernel<kEach, true>;
    return launch_kernel(kernel, shape, true, static_cast<cudaStream_t>(stream), p);
  };
  if (p.experts <= 64) return start(std::integral_constant<int, 2>());
  if (p.experts <= 128) return start(std::integral_constant<int, 4>());
  return p.experts <= 256 ? start(std::integral_constant<int, 8>())
                          : start(std::integral_constant<int, 16>());
}
