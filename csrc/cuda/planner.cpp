// For Python, by ctypes: fp4_ops/native.py has the signatures. Tests and tools see more of the planner
// (csrc/dev/module.cpp).
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

// Whether decode or gemv run an expert block of `rows` (token, expert) pairs on a Hopper GPU, of which
// `expected` have an expert here (0: all).
FP4_FOR_PYTHON bool fp4_cuda_takes_few(int groups, int rows, int up_n, int up_kp, int down_n, int down_kp,
                                       int block, const char* a_format, bool int4, int sms, int expected) {
  const Product up{Routing::kOffs, groups, rows, up_n, up_kp, block};
  const Product down{Routing::kOffs, groups, rows, down_n, down_kp, block};
  return plan({up, down, 1, false, int4, index_of(a_format), expected}, {.sms = sms}).few;
}
