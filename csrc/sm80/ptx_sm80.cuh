// What the mma.sync kernels ask of the GPU beside device/ptx.cuh, and every GPU from sm_80 on has.
// tests/sm90_emulator/ptx_sm80.cuh says in C++ what each of them does.
#pragma once

#include <cstdint>

namespace fp4::sm80 {

// ---- copies into shared memory that run beside the thread's own work ----

// 16 bytes, of which the first `bytes` (0 to 16) are read, and the others are zero. Past L1.
__device__ __forceinline__ void copy_16(uint32_t smem, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(from), "r"(bytes) : "memory");
}

// 16 bytes of weights, which are read once: memory brings what lies beside them, too.
__device__ __forceinline__ void copy_16_ahead(uint32_t smem, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(smem), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `Pending` of this thread's committed groups are under way.
template <int Pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- fragments ----

// Four matrices of 8 rows of 16 bytes, lane i giving the address of row i % 8 of matrix i / 8; lane i gets of
// each matrix the 4 bytes i % 4 of row i / 4.
__device__ __forceinline__ void load_matrices(uint32_t smem, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(smem)
               : "memory");
}

}  // namespace fp4::sm80
