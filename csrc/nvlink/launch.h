// The host side of a launch.
#pragma once

#include <cuda_runtime.h>

namespace fp4::nvlink {

// Launches a kernel that may begin while the kernel before it still runs. It must call wait_previous_kernel()
// before it uses that kernel's results.
template <class Params>
int launch(void (*kernel)(const Params), int blocks, int threads, void* stream, const Params& params) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// The number of blocks. It must be the same on all ranks, because blocks with the same number wait for each
// other.
inline int at_most(int64_t blocks, int most) { return int(blocks < 1 ? 1 : blocks < most ? blocks : most); }

}  // namespace fp4::nvlink
