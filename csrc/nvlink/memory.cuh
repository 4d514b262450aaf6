// Loads and stores of memory that several GPUs share: only the PTX.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fp4::nvlink {

// Stores v after everything that this thread wrote before and, through a barrier, everything that its block
// wrote.
__device__ __forceinline__ void store_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// Stores two pieces of eight bytes, each with data and flag. GPUs deliver eight bytes as a whole.
__device__ __forceinline__ void store_word(void* p, uint2 data, uint32_t flag) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(p), "r"(data.x), "r"(flag),
               "r"(data.y)
               : "memory");
}

// Returns data in x and z, flags in y and w.
__device__ __forceinline__ uint4 load_word(const void* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Loads data that another GPU wrote, past the caches of this multiprocessor.
__device__ __forceinline__ uint4 load_data(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ int64_t nanoseconds() {
  int64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}

// Waits until everything that earlier kernels wrote is visible. This kernel may have begun while the last of
// them ran.
__device__ __forceinline__ void wait_previous_kernel() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel begin. That kernel must wait for the end of this one by itself.
__device__ __forceinline__ void release_next_kernel() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Ends the kernel with an error. The process cannot use the GPU afterwards.
__device__ __forceinline__ void abort_kernel() {
  __threadfence_system();
  __trap();
}

// Called in each round of a wait.
__device__ __forceinline__ void keep_waiting() {}

}  // namespace fp4::nvlink
