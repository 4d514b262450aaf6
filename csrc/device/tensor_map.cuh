// The driver's function that makes maps of tensors for the copy engine.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace fp4::device {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Returns null if the driver has no such function. The libraries are not linked with the driver.
inline Encode driver_encode() {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &result);
    const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return encode;
}

}  // namespace fp4::device
