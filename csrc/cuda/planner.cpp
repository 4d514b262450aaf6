// For Python, by ctypes: what the planner decides, without a GPU. fp4_ops/native.py has the signatures.
#include <exception>

#include "cuda/choice.h"
#include "cuda/library.h"

#define FP4_FOR_PYTHON extern "C" __attribute__((visibility("default")))

using namespace fp4::cuda;

FP4_FOR_PYTHON void fp4_cuda_only(int only) { set_only(Only(only)); }

// The kernels of another build, for measurements; 0, or 1 where they do not load.
FP4_FOR_PYTHON int fp4_cuda_use_kernels(const char* path) {
  try {
    use_kernels(path);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

FP4_FOR_PYTHON double fp4_cuda_decode_us(const Product* product, int kernel, int sms) {
  return decode_us(*product, Kernel(kernel), sms);
}

FP4_FOR_PYTHON double fp4_cuda_prefill_us(const Product* product, int kernel, int sms) {
  return prefill_us(*product, Kernel(kernel), sms);
}

FP4_FOR_PYTHON void fp4_cuda_plan(const Product* product, int kernel, int sms, ProductPlan* to) {
  *to = plan(*product, Kernel(kernel), sms);
}

FP4_FOR_PYTHON void fp4_cuda_block_plan(const Block* block, int sms, BlockPlan* to) {
  *to = plan(*block, sms);
}

// False where the kernel cannot run them.
FP4_FOR_PYTHON bool fp4_cuda_decode_config(int rows, int groups, int n, int kp, int sms, DecodeConfig* to) {
  const auto config = choose_decode(rows, groups, n, kp, sms);
  if (config) *to = *config;
  return config.has_value();
}

FP4_FOR_PYTHON bool fp4_cuda_decode_warps(int kp, int compute_warps, DecodeConfig* to) {
  const auto config = decode_warps_for(kp, compute_warps);
  if (config) *to = *config;
  return config.has_value();
}

FP4_FOR_PYTHON bool fp4_cuda_gemv_config(int routing, int rows, int columns, int n, int kp, bool combined,
                                         int sms, GemvConfig* to) {
  const auto config = configure_gemv(Routing(routing), rows, columns, n, kp, combined, sms);
  if (config) *to = *config;
  return config.has_value();
}

FP4_FOR_PYTHON int fp4_cuda_decode_bytes(const DecodeConfig* config) { return config->shared_bytes(); }
FP4_FOR_PYTHON int fp4_cuda_gemv_bytes(const GemvConfig* config) { return config->shared_bytes(); }
