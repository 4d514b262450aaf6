// Kernel launches that may overlap (programmatic dependent launch): the host's side. In ptx.cuh is the
// device's.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

namespace fp4::sm90 {

struct LaunchShape {
  dim3 grid, block;
  size_t shared = 0;
  unsigned cluster = 1;
  bool most_shared = false;  // the multiprocessors' L1 is shared memory, as far as it can be
};

// `dependent`: the kernel may begin while the one before it runs, and calls wait_previous_kernel() before it
// touches what that one reads or writes.
template <class... Parameters>
int launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape, bool dependent,
                  cudaStream_t stream, const std::common_type_t<Parameters>&... parameters) {
  cudaLaunchAttribute attributes[3] = {};
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

}  // namespace fp4::sm90
