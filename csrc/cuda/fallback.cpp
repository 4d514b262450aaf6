#include "cuda/fallback.h"

#include <atomic>
#include <exception>

namespace fp4::cuda {
namespace {

std::atomic<bool> registered{false};
thread_local std::string error;

}  // namespace

void require_fallback(std::string_view op, std::string_view why) {
  if (registered.load(std::memory_order_relaxed)) return;
  fail("fp4::", op, ": ", why,
       ", and there is no native CUDA kernel for that. The operator in Python needs a Python process that "
       "has imported fp4_ops. Without Python, weights must be in a layout whose kernels are native: "
       "mma_bf16, on a GPU of compute capability 8.0 or later, or sm90 or sm90_int4, on one of 9.0 "
       "(fp4_ops.prepare(model, device='cuda') on such a GPU makes them)");
}

std::string take_fallback_error() {
  std::string said;
  said.swap(error);
  return said;
}

}  // namespace fp4::cuda

// Python calls these: the first to say whether `fp4_python` is registered, the second to pass on the message
// of an error in one of its operators, in the thread that called it. (The stable ABI of torch 2.11 and 2.12
// returns no message.)
extern "C" __attribute__((visibility("default"))) void fp4_cuda_has_fallbacks(int yes) {
  fp4::cuda::registered.store(yes != 0);
}
extern "C" __attribute__((visibility("default"))) void fp4_cuda_set_error(const char* message) {
  try {
    fp4::cuda::error = message;
  } catch (const std::exception&) {  // no memory: the message is lost, but the error is still reported
  }
}
