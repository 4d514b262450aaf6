// The prefill kernels with mma.sync. They have the entry points and kernel numbers of Hopper's
// (csrc/sm90/prefill.cu). Only kernels for 16-bit rows in plain order and for int8 rows exist.

#include <mutex>

#include "prefill_candidates.cuh"

using namespace fp4::sm80;

namespace {

Candidates candidates_of(int kernel) {
  switch (PrefillKernel(kernel)) {
    case PrefillKernel::kBf16:
      return bf16_candidates();
    case PrefillKernel::kBf16B32:
      return bf16_b32_candidates();
    case PrefillKernel::kFp16:
      return fp16_candidates();
    case PrefillKernel::kFp16B32:
      return fp16_b32_candidates();
    case PrefillKernel::kInt8:
      return int8_candidates();
    case PrefillKernel::kInt8B32:
      return int8_b32_candidates();
    default:
      return {};
  }
}

// The most shared memory that launches may use, if it is less than the GPU has. For tests and measurements.
std::atomic<int> most_shared{0};

int attribute(cudaDeviceAttr which, int device, int otherwise) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess && value > 0 ? value : otherwise;
}

// Cycles of a tensor core for one mma.m16n8k16 of bf16 with float32 sums. The H100's are measured. sm_80
// makes 2048 operations a clock and multiprocessor, other GPUs half of that, and GeForce cards a quarter.
double mma_cycles(int major, int minor) {
  if (major == 9 || major == 10) return fitted::mma_cycles[0];
  return fitted::mma_cycles[major == 8 && minor == 0 ? 1 : 2];
}

// Reads the properties of the GPU. Properties that CUDA cannot tell get the values of a small GPU.
Device read_device(int device) {
  Device d;
  d.sms = attribute(cudaDevAttrMultiProcessorCount, device, 1);
  d.block_shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device, 101376);
  d.sm_shared = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device, 102400);
  d.clock = 1e3 * attribute(cudaDevAttrClockRate, device, 1700000);
  d.mma_cycles = mma_cycles(attribute(cudaDevAttrComputeCapabilityMajor, device, 8),
                            attribute(cudaDevAttrComputeCapabilityMinor, device, 6));
  const double bits = attribute(cudaDevAttrGlobalMemoryBusWidth, device, 384);
  d.memory_rate =
      fitted::memory_share * 2e3 * attribute(cudaDevAttrMemoryClockRate, device, 9000000) * bits / 8;
  return d;
}

Device current_device() {
  constexpr int kMost = 64;
  static Device known[kMost];
  static std::once_flag once[kMost];
  int device = 0;
  cudaGetDevice(&device);
  Device d;
  if (device < kMost) {
    std::call_once(once[device], [&] { known[device] = read_device(device); });
    d = known[device];
  } else {
    d = read_device(device);
  }
  if (const int most = most_shared.load(); most > 0) {
    d.block_shared = std::min(d.block_shared, most);
    d.sm_shared = std::min(d.sm_shared, most + 1024);
  }
  return d;
}

}  // namespace

extern "C" int fp4_kernel_prefill(int kernel, const PrefillArguments* arguments) {
  return run(candidates_of(kernel), *arguments, current_device());
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

// The choice for a launch with `config` on the current GPU, if it had `sms` multiprocessors.
extern "C" Choice fp4_kernel_prefill_choose(int kernel, int mode, int groups, int m, int n, int kp, int sms,
                                            int config) {
  Device device = current_device();
  device.sms = sms;
  return choose(candidates_of(kernel), {static_cast<RowMode>(mode), groups, m, n, kp}, device, config);
}

// Limits the shared memory of a block in later launches. 0 means no limit but the GPU's.
extern "C" void fp4_kernel_prefill_most_shared(int bytes) { most_shared = bytes; }
