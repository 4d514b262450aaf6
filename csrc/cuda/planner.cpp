// For Python, by ctypes: what the planner decides, without a GPU. fp4_ops/native.py has the signatures.
#include <exception>
#include <limits>

#include "cuda/choice.h"
#include "cuda/constants.h"
#include "cuda/library.h"

#define FP4_FOR_PYTHON extern "C" __attribute__((visibility("default")))

using namespace fp4::cuda;

FP4_FOR_PYTHON void fp4_cuda_only(int only) { set_only(Only(only)); }

// The family of kernels that this GPU runs; 0 for none, and where the GPU cannot be asked.
FP4_FOR_PYTHON int fp4_cuda_family(int device) {
  try {
    return int(device_kind(device).gpu.family);
  } catch (const std::exception&) {
    return 0;
  }
}

// What the planner knows of a GPU; 0, or 1 where it cannot be asked.
FP4_FOR_PYTHON int fp4_cuda_gpu(int device, Gpu* to) {
  try {
    *to = device_kind(device).gpu;
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

// The kernels of another build, for tests and measurements; their family, or 0 where they do not load.
FP4_FOR_PYTHON int fp4_cuda_use_kernels(const char* path, int shared_bytes) {
  try {
    return int(use_kernels(path, shared_bytes));
  } catch (const std::exception&) {
    return 0;
  }
}

// The constants that a plan for a GPU uses.
FP4_FOR_PYTHON void fp4_cuda_constants(const Gpu* gpu, fp4::PlannerConstants* to) {
  *to = constants_of(*gpu);
}

// From now on GPUs of this name have these constants. `bytes`: of a PlannerConstants. Their number, or 0
// where they are of another build.
FP4_FOR_PYTHON int fp4_cuda_tuned(const char* device, int family, const fp4::PlannerConstants* constants,
                                  int bytes) {
  if (bytes != int(sizeof(*constants))) return 0;
  const int number = add_tuned(device, KernelFamily(family), *constants);
  forget_devices();
  return number;
}

// What the models are of: DecodeWork (all NaN where decode cannot run), PrefillWork.
FP4_FOR_PYTHON void fp4_cuda_work(const Product* product, int kernel, const Gpu* gpu, DecodeWork* decode,
                                  PrefillWork* prefill) {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  *decode = decode_work(*product, *gpu).value_or(DecodeWork{kNone, kNone, kNone});
  *prefill = prefill_work(*product, Kernel(kernel), *gpu);
}

FP4_FOR_PYTHON double fp4_cuda_decode_us(const Product* product, int kernel, const Gpu* gpu) {
  return decode_us(*product, Kernel(kernel), *gpu);
}

FP4_FOR_PYTHON double fp4_cuda_prefill_us(const Product* product, int kernel, const Gpu* gpu) {
  return prefill_us(*product, Kernel(kernel), *gpu);
}

FP4_FOR_PYTHON void fp4_cuda_plan(const Product* product, int kernel, const Gpu* gpu, ProductPlan* to) {
  *to = plan(*product, Kernel(kernel), *gpu);
}

FP4_FOR_PYTHON void fp4_cuda_block_plan(const Block* block, const Gpu* gpu, BlockPlan* to) {
  *to = plan(*block, *gpu);
}

// False where the kernel cannot run them.
FP4_FOR_PYTHON bool fp4_cuda_decode_config(int rows, int groups, int n, int kp, const Gpu* gpu,
                                           DecodeConfig* to) {
  const auto config = choose_decode(rows, groups, n, kp, *gpu);
  if (config) *to = *config;
  return config.has_value();
}

FP4_FOR_PYTHON bool fp4_cuda_decode_warps(int rows, int kp, int compute_warps, const Gpu* gpu,
                                          DecodeConfig* to) {
  const auto config = decode_warps_for(rows, kp, compute_warps, *gpu);
  if (config) *to = *config;
  return config.has_value();
}

FP4_FOR_PYTHON bool fp4_cuda_gemv_config(int routing, int rows, int columns, int n, int kp, bool combined,
                                         const Gpu* gpu, GemvConfig* to) {
  const auto config = configure_gemv(Routing(routing), rows, columns, n, kp, combined, *gpu);
  if (config) *to = *config;
  return config.has_value();
}

FP4_FOR_PYTHON int fp4_cuda_decode_bytes(const DecodeConfig* config) { return config->shared_bytes(); }
FP4_FOR_PYTHON int fp4_cuda_gemv_bytes(const GemvConfig* config) { return config->shared_bytes(); }
