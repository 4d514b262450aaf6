// For Python, by ctypes: fp4_ops/runtime/native.py has the signatures. Tests and tools see more of the
// planner (csrc/dev/module.cpp).
//
// An exception that left through ctypes would end the process. So each function that can throw returns kThrew
// instead, and fp4_cuda_thrown says what it was.
#include <cstdio>
#include <exception>
#include <limits>

#include "cuda/choice.h"
#include "cuda/constants.h"
#include "cuda/library.h"

#define FP4_FOR_PYTHON extern "C" __attribute__((visibility("default")))

using namespace fp4::cuda;

namespace {

constexpr int kThrew = -1;  // what they return otherwise is never negative

thread_local char thrown[2048];  // an array: to keep the words must not throw, too

// What `work` returns, or kThrew.
template <typename F>
int caught(const F& work) noexcept {
  try {
    return work();
  } catch (const std::exception& e) {
    std::snprintf(thrown, sizeof(thrown), "%s", e.what());
  } catch (...) {
    std::snprintf(thrown, sizeof(thrown), "fp4: something was thrown that is no std::exception");
  }
  return kThrew;
}

}  // namespace

// Of the last call in this thread that returned kThrew.
FP4_FOR_PYTHON const char* fp4_cuda_thrown() { return thrown; }

FP4_FOR_PYTHON void fp4_cuda_only(int only) { set_only(Only(only)); }

// The family of kernels that this GPU runs; 0 for none, and where the GPU cannot be asked.
FP4_FOR_PYTHON int fp4_cuda_family(int device) {
  const int found = caught([&] { return int(device_kind(device).gpu.family); });
  return found == kThrew ? 0 : found;
}

// What the planner knows of a GPU.
FP4_FOR_PYTHON int fp4_cuda_gpu(int device, Gpu* to) {
  return caught([&] {
    *to = device_kind(device).gpu;
    return 0;
  });
}

// The kernels of another build, for tests and measurements; returns their family.
FP4_FOR_PYTHON int fp4_cuda_use_kernels(const char* path, int shared_bytes) {
  return caught([&] { return int(use_kernels(path, shared_bytes)); });
}

// The constants that a plan for a GPU uses.
FP4_FOR_PYTHON int fp4_cuda_constants(const Gpu* gpu, fp4::PlannerConstants* to) {
  return caught([&] {
    *to = constants_of(*gpu);
    return 0;
  });
}

// From now on GPUs of this name have these constants. `bytes`: of a PlannerConstants. Their number, or 0
// where they are of another build.
FP4_FOR_PYTHON int fp4_cuda_tuned(const char* device, int family, const fp4::PlannerConstants* constants,
                                  int bytes) {
  return caught([&] {
    if (bytes != int(sizeof(*constants))) return 0;
    const int number = add_tuned(device, KernelFamily(family), *constants);
    forget_devices();
    return number;
  });
}

// What the models are of: DecodeWork (all NaN where decode cannot run), PrefillWork.
FP4_FOR_PYTHON int fp4_cuda_work(const Product* product, int kernel, const Gpu* gpu, DecodeWork* decode,
                                 PrefillWork* prefill) {
  return caught([&] {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    *decode = decode_work(*product, *gpu).value_or(DecodeWork{kNone, kNone, kNone});
    *prefill = prefill_work(*product, Kernel(kernel), *gpu);
    return 0;
  });
}

// Whether decode or gemv run an expert block of `rows` (token, expert) pairs on a Hopper GPU, of which
// `expected` have an expert here (0: all).
FP4_FOR_PYTHON int fp4_cuda_takes_few(int groups, int rows, int up_n, int up_kp, int down_n, int down_kp,
                                      int block, const char* a_format, bool int4, int sms, int expected) {
  return caught([&] {
    const Product up{Routing::kOffs, groups, rows, up_n, up_kp, block};
    const Product down{Routing::kOffs, groups, rows, down_n, down_kp, block};
    return int(plan({up, down, 1, false, int4, index_of(a_format), expected}, {.sms = sms}).few);
  });
}
