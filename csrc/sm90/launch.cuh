// Kernel launches that may overlap (programmatic dependent launch), host and device side.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace fp4::sm90 {

// Until the kernels before this one in the stream have ended and their results can be seen. In a kernel that
// was not launched as `dependent` nothing.
__device__ __forceinline__ void wait_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream begin, if it is `dependent`, once all thread blocks of this one have.
__device__ __forceinline__ void release_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

struct LaunchShape {
  dim3 grid, block;
  size_t shared = 0;
  unsigned cluster = 1;
};

// `dependent`: the kernel may begin while the one before it runs, and calls wait_previous_kernel() before it
// touches what that one reads or writes.
template <class... Parameters>
int launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape, bool dependent,
                  cudaStream_t stream, const Parameters&... parameters) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = shape.cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
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

}  // namespace fp4::sm90
