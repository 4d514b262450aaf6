// Selects bytes of words, on the device and on the host.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp4::device {

// PRMT with a run-time selector. Unlike in __byte_perm, a selector's top bit replicates the byte's sign. The
// host has its own code, because tests run the kernels' register arithmetic on the host.
__host__ __device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
#else
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t take = selector >> (4 * i) & 15, byte = bytes >> (8 * (take & 7)) & 0xFF;
    result |= (take < 8 ? byte : byte >> 7 ? 0xFF : 0) << (8 * i);
  }
  return result;
#endif
}

}  // namespace fp4::device
