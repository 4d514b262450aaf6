// What the launchers have to know of a GPU.
#include <cuda_runtime.h>

#include "interface.h"

extern "C" int fp4_kernel_device(int device, int* major, int* minor, int* multiprocessors) {
  cudaError_t error = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  return error;
}
