// Products of FP4 rows by FP4 weights on GPUs of compute capability 12.x: the kernels of csrc/sm120, as a
// part of `_sm80.so`, which such GPUs run. It holds their code only if it is built for 120f.

#include "../sm120/scaled_host.cuh"

using namespace fp4::sm120;

extern "C" int fp4_kernel_scaled(const ScaledArguments* arguments) { return run(*arguments); }

extern "C" int fp4_kernel_scaled_configs() { return kCandidateCount; }

extern "C" const char* fp4_kernel_scaled_config_name(int config) {
  return config >= 0 && config < kCandidateCount ? kCandidates<true>[config].name : "";
}
