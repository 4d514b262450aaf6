// Functions that Python calls through ctypes; fp4_ops/runtime/native.py has the signatures. Tests and tools
// see more of the planner (csrc/dev/module.cpp).
//
// An exception that left through ctypes would end the process. So each function that can throw returns kThrew
// instead, and fp4_cuda_thrown returns the message.
#include <cstdio>
#include <exception>
#include <limits>

#include "cuda/choice.h"
#include "cuda/constants.h"
#include "cuda/library.h"

#define FP4_FOR_PYTHON extern "C" __attribute__((visibility("default")))

using namespace fp4::cuda;

namespace {

constexpr int kThrew = -1;  // other results are never negative

thread_local char thrown[2048];  // an array, because to store the message must not throw either

// Returns the result of `work`, or kThrew.
template <typename F>
int caught(const F& work) noexcept {
  try {
    return work();
  } catch (const std::exception& e) {
    std::snprintf(thrown, sizeof(thrown), "%s", e.what());
  } catch (...) {
    std::snprintf(thrown, sizeof(thrown), "fp4: an exception was thrown that is not a std::exception");
  }
  return kThrew;
}

}  // namespace

// Returns the message of the last call in this thread that returned kThrew.
FP4_FOR_PYTHON const char* fp4_cuda_thrown() { return thrown; }

FP4_FOR_PYTHON void fp4_cuda_only(int only) { set_only(Only(only)); }

// Returns the family of kernels that this GPU runs, or 0 if there is none or the GPU cannot be asked.
FP4_FOR_PYTHON int fp4_cuda_family(int device) {
  const int found = caught([&] { return int(device_kind(device).gpu.family); });
  return found == kThrew ? 0 : found;
}

// Writes what the planner knows about a GPU.
FP4_FOR_PYTHON int fp4_cuda_gpu(int device, Gpu* to) {
  return caught([&] {
    *to = device_kind(device).gpu;
    return 0;
  });
}

// Uses the kernels of another build, for tests and measurements. Returns their family.
FP4_FOR_PYTHON int fp4_cuda_use_kernels(const char* path, int shared_bytes) {
  return caught([&] { return int(use_kernels(path, shared_bytes)); });
}

// Writes the constants that a plan for a GPU uses.
FP4_FOR_PYTHON int fp4_cuda_constants(const Gpu* gpu, fp4::PlannerConstants* to) {
  return caught([&] {
    *to = constants_of(*gpu);
    return 0;
  });
}

// Sets the constants of GPUs of this name. `bytes`: the size of a PlannerConstants. Returns the number of the
// constants, or 0 if the size shows that they come from another build.
FP4_FOR_PYTHON int fp4_cuda_tuned(const char* device, int family, const fp4::PlannerConstants* constants,
                                  int bytes) {
  return caught([&] {
    if (bytes != int(sizeof(*constants))) return 0;
    const int number = add_tuned(device, KernelFamily(family), *constants);
    forget_devices();
    return number;
  });
}

// Writes the inputs of the cost models: DecodeWork (all NaN if decode cannot run) and PrefillWork.
FP4_FOR_PYTHON int fp4_cuda_work(const Product* product, int kernel, const Gpu* gpu, DecodeWork* decode,
                                 PrefillWork* prefill) {
  return caught([&] {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    *decode = decode_work(*product, *gpu).value_or(DecodeWork{kNone, kNone, kNone});
    *prefill = prefill_work(*product, Kernel(kernel), *gpu);
    return 0;
  });
}

// Returns 1 if decode or gemv runs an expert block of `rows` (token, expert) pairs on a Hopper GPU.
// `expected` of the pairs have an expert here; 0: all.
FP4_FOR_PYTHON int fp4_cuda_takes_few(int groups, int rows, int up_n, int up_kp, int down_n, int down_kp,
                                      int block, const char* a_format, bool prefill_alone, int sms,
                                      int expected) {
  return caught([&] {
    const Product up{Routing::kOffs, groups, rows, up_n, up_kp, block};
    const Product down{Routing::kOffs, groups, rows, down_n, down_kp, block};
    return int(plan({up, down, 1, false, prefill_alone, index_of(a_format), expected}, {.sms = sms}).few);
  });
}
