// Wraps PTX instructions: one function for each instruction, or for two that belong together.
// tests/helpers/sm90_emulator/ptx.cuh emulates each of them in C++.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "types.cuh"

namespace fp4::device {

// ---- launches that overlap ----

// GPUs before compute capability 9.0 have no such launches; launch.cuh makes none for code that is compiled
// for them.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FP4_GRID_CONTROL(name) asm volatile("griddepcontrol." name ";" ::: "memory")
#else
#define FP4_GRID_CONTROL(name)
#endif

// Waits until the kernels before this one in the stream have ended and their results are visible. Does
// nothing in a kernel that was not launched as `dependent`.
__device__ __forceinline__ void wait_previous_kernel() { FP4_GRID_CONTROL("wait"); }

// Lets the next kernel of the stream begin, if it is `dependent`, once all thread blocks of this one have.
__device__ __forceinline__ void release_next_kernel() { FP4_GRID_CONTROL("launch_dependents"); }

// ---- shared memory ----

// Declares `name`, the memory that the launch gave the block. (If a function returned the pointer, the
// compiler would learn too late that it points to shared memory.)
#define FP4_DYNAMIC_SHARED(type, alignment, name) \
  extern __shared__ __align__(alignment)          \
  type name[]

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers (addresses are 32-bit shared memory addresses) ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A wait that suspends the thread needs compute capability 9.0. Older GPUs test the barrier again and again.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FP4_TRY_WAIT "try_wait"
#else
#define FP4_TRY_WAIT "test_wait"
#endif

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier." FP4_TRY_WAIT
      ".parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Returns whether that phase is over, without waiting.
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n.reg .pred over;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n}\n"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}

// A barrier among `threads` threads of the block (id 0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same where the compiler knows the id.
template <int Id>
__device__ __forceinline__ void named_barrier(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(Id), "r"(threads) : "memory");
}

// ---- flags and counters in global memory ----

// Stores a flag. A thread that reads it with load_acquire also sees everything that this thread wrote before.
__device__ __forceinline__ void store_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// Returns what was there before.
__device__ __forceinline__ uint64_t add_relaxed(uint64_t* word, uint64_t value) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(word), "l"(value)
               : "memory");
  return before;
}

// ---- loads and stores ----

__device__ __forceinline__ uint4 load_shared_16(uint32_t smem) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(smem));
  return value;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t smem) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(smem));
  return value;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t smem) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(smem));
  return value;
}

__device__ __forceinline__ float2 load_shared_pair(uint32_t smem) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(smem));
  return value;
}

// Loads 16 bytes that are read only once, so L1 need not keep them.
__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The same for smaller pieces. Each load brings 256 bytes to L2, because the bytes beside it are read soon,
// too.
__device__ __forceinline__ uint32_t load_stream_word(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t load_stream_half(const void* p) {
  uint16_t v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

// Prefetches the 128-byte line of `p` into L2.
__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Stores 16 bytes with one instruction. The compiler splits an ordinary store if its words come from a
// select.
__device__ __forceinline__ void store_16_bytes(void* to, const uint32_t* w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]),
               "r"(w[3]));
}

// ---- arithmetic ----

__device__ __forceinline__ float approximate_power_of_two(float exponent) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
}

__device__ __forceinline__ float approximate_inverse(float d) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(d));
  return inverse;
}

// Returns the larger value, or NaN if either is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

__device__ __forceinline__ float min_or_nan(float a, float b) {
  float m;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

// ---- order ----

// Makes the compiler have `value` in a register here, and move no use of it, or of memory, across this place.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// The same, but uses of memory may move.
__device__ __forceinline__ void pin(uint32_t& value) { asm volatile("" : "+r"(value)); }

// ---- a thread's own copies, which each family starts in its own way ----

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's committed groups are in flight.
template <int Pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- fragments ----

// Loads four matrices of 8 rows of 16 bytes. Lane i gives the address of row i % 8 of matrix i / 8. It gets,
// from each matrix, the 4 bytes number i % 4 of row i / 4.
__device__ __forceinline__ void load_matrices(uint32_t smem, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(smem)
               : "memory");
}

// ---- mma.sync: D[16, 8] += A[16, 16] B[16, 8], to float32 ----

template <Element kElement>
__device__ __forceinline__ void mma(float4& d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define FP4_MMA(types)                                                      \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." types               \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (kElement == Element::kBFloat16) {
    FP4_MMA("bf16.bf16");
  } else {
    FP4_MMA("f16.f16");
  }
#undef FP4_MMA
}

}  // namespace fp4::device
