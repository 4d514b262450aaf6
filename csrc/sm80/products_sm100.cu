// Products of FP4 or e4m3 rows by FP4 weights on GPUs of compute capability 10.x: the kernels of csrc/sm100,
// as a part of `_sm80.so`, which such GPUs run. It holds their code only if it is built for 100f.

#include "../sm100/products_host.cuh"

using namespace fp4::sm100;

extern "C" int fp4_kernel_products(const fp4::device::ScaledProduct* arguments) { return run(*arguments); }

extern "C" int fp4_kernel_products_configs() { return kCandidateCount; }

extern "C" const char* fp4_kernel_products_config_name(int config) {
  return config >= 0 && config < kCandidateCount ? kCandidates<Kind::kNvfp4>[config].name : "";
}
