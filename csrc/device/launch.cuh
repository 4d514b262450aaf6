// Host side of kernel launches that may overlap (programmatic dependent launch). The device side is in
// ptx.cuh.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "family.cuh"
#include "interface.h"

namespace fp4::device {

// Holds the facts that a launch needs: the current device and the code that runs there.
struct Launching {
  int shared_bytes = 0;   // the most that a thread block may use
  bool overlaps = false;  // the code is compiled for compute capability 9.0 or later: its kernels can wait
                          // for the one before
};

// Fills `found`. The driver is asked once for each device.
cudaError_t launching(Launching& found);

struct LaunchShape {
  dim3 grid, block;
  size_t shared = 0;
  unsigned cluster = 1;
  bool most_shared = false;  // make as much of L1 as possible shared memory
};

// Launches a kernel. `dependent`: it may begin while the kernel before it runs, and it calls
// wait_previous_kernel() before it touches anything that this one reads or writes. If the code cannot wait,
// it begins after the kernel before.
template <class... Parameters>
int launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape, bool dependent,
                  cudaStream_t stream, const std::common_type_t<Parameters>&... parameters) {
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  Launching now;
  if (const cudaError_t error = launching(now); error != cudaSuccess) return error;
  if (dependent && now.overlaps) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = shape.cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (shape.most_shared) {
    attributes[count].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[count++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

// Compute capability (the first number) and multiprocessors of the current device.
struct CurrentGpu {
  int major = 0, multiprocessors = 0;
};

inline cudaError_t current_gpu(CurrentGpu& found) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&found.major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  return error;
}

// Lets a kernel use `bytes` of dynamic shared memory. The driver keeps this setting for each device, so it is
// set once for each. Every kernel has its own `done`, with a bit for each device where it is set.
template <class Kernel>
cudaError_t allow_shared(Kernel* kernel, int bytes, std::atomic<uint64_t>& done) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
  if (done.load(std::memory_order_acquire) & bit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_release);
  return error;
}

}  // namespace fp4::device
