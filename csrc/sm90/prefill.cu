// The prefill kernels behind one set of entry points. Each kernel is a list of candidates.

#include "prefill_host.cuh"

using namespace fp4::sm90;

namespace {

// In the order of PrefillKernel.
constexpr Candidates (*kKernels[])() = {w4a8_candidates,     w4a8_b32_candidates, half_candidates,
                                        half_b32_candidates, bf16_candidates,     bf16_b32_candidates,
                                        int4_candidates,     int4_g64_candidates, int4_g32_candidates};

// The candidates of a kernel. Kernels of other libraries have none here.
Candidates candidates_of(int kernel) {
  return kernel < int(sizeof(kKernels) / sizeof(*kKernels)) ? kKernels[kernel]() : Candidates{};
}

}  // namespace

extern "C" int fp4_kernel_prefill(int kernel, const PrefillArguments* arguments) {
  const Candidates candidates = candidates_of(kernel);
  return candidates.count > 0 ? run(candidates, *arguments) : kBadArgument;
}

extern "C" int fp4_kernel_prefill_configs(int kernel) { return candidates_of(kernel).count; }

extern "C" const char* fp4_kernel_prefill_config_name(int kernel, int config) {
  const Candidates candidates = candidates_of(kernel);
  return config >= 0 && config < candidates.count ? candidates.list[config].name : "";
}

// The size in bytes of the scratch memory that a launch needs.
extern "C" int64_t fp4_kernel_prefill_workspace(int kernel, int sms) {
  return workspace_bytes(candidates_of(kernel), sms);
}

// The choice for a launch with `config` on a GPU of `sms` multiprocessors.
extern "C" Choice fp4_kernel_prefill_choose(int kernel, int mode, int groups, int m, int n, int kp, int sms,
                                            int config) {
  const Candidates candidates = candidates_of(kernel);
  if (candidates.count == 0) return {-1, {}};
  return choose(candidates, {static_cast<RowMode>(mode), groups, m, n, kp, sms}, config);
}
