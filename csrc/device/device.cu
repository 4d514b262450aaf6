// Asks the driver about a GPU, and about the code that runs there.
#include "launch.cuh"

namespace fp4::device {
namespace {

__global__ void probe_kernel() {}

constexpr int kDevices = 64;

cudaError_t ask(int device, Launching& found) {
  const cudaError_t error =
      cudaDeviceGetAttribute(&found.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  // If the driver translates code that was compiled for an older GPU, ptxVersion names the older GPU.
  cudaFuncAttributes attributes = {};
  const cudaError_t code = cudaFuncGetAttributes(&attributes, probe_kernel);
  found.overlaps = attributes.ptxVersion >= 90;
  return code;
}

}  // namespace

cudaError_t launching(Launching& found) {
  static std::atomic<int> known[kDevices];  // 0: not asked; bit 0: overlaps, above it the bytes
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const int before = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (before != 0) {
    found = {before >> 1, (before & 1) != 0};
    return cudaSuccess;
  }
  const cudaError_t error = ask(device, found);
  if (error == cudaSuccess && device < kDevices)
    known[device].store(found.shared_bytes << 1 | int(found.overlaps), std::memory_order_relaxed);
  return error;
}

}  // namespace fp4::device

using namespace fp4::device;

extern "C" int fp4_kernel_family() { return FP4_FAMILY; }

extern "C" int fp4_kernel_device(int device, DeviceFacts* facts) {
  const struct {
    cudaDeviceAttr attribute;
    int* to;
  } asked[] = {{cudaDevAttrComputeCapabilityMajor, &facts->major},
               {cudaDevAttrComputeCapabilityMinor, &facts->minor},
               {cudaDevAttrMultiProcessorCount, &facts->sms},
               {cudaDevAttrMaxSharedMemoryPerBlockOptin, &facts->shared_bytes},
               {cudaDevAttrClockRate, &facts->clock_khz},
               {cudaDevAttrMemoryClockRate, &facts->memory_clock_khz},
               {cudaDevAttrGlobalMemoryBusWidth, &facts->memory_bus_bits}};
  for (const auto& [attribute, to] : asked) {
    if (const cudaError_t error = cudaDeviceGetAttribute(to, attribute, device); error != cudaSuccess)
      return error;
  }
  return 0;
}

extern "C" int fp4_kernel_runs(int device) {
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  Launching found;
  if (error == cudaSuccess) error = launching(found);
  cudaSetDevice(current);
  cudaGetLastError();  // clears the error that a GPU without code leaves
  return error == cudaSuccess;
}
