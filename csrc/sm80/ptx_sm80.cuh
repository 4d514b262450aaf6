// What the mma.sync kernels ask of the GPU beside device/ptx.cuh, and every GPU from sm_80 on has.
// tests/helpers/sm90_emulator/ptx_sm80.cuh says in C++ what each of them does.
#pragma once

#include <cstdint>

namespace fp4::sm80 {

// ---- copies into shared memory that run beside the thread's own work ----

// If `wanted` 16 bytes, which are read if `there` and else are zeros. Past L1. Without branches, so that the
// compiler can put other work between copies.
__device__ __forceinline__ void copy_16(uint32_t smem, const void* from, bool wanted, bool there) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16, %2;\n}\n" ::"r"(smem),
      "l"(from), "r"(there ? 16 : 0), "r"(static_cast<int>(wanted))
      : "memory");
}

// The same of 4 bytes.
__device__ __forceinline__ void copy_4(uint32_t smem, const void* from, bool wanted, bool there) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n"
      "@wanted cp.async.ca.shared.global [%0], [%1], 4, %2;\n}\n" ::"r"(smem),
      "l"(from), "r"(there ? 4 : 0), "r"(static_cast<int>(wanted))
      : "memory");
}

// If `wanted` 16 bytes of weights, which are read once: memory brings what lies beside them, too.
__device__ __forceinline__ void copy_16_ahead(uint32_t smem, const void* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global.L2::256B [%0], [%1], 16;\n}\n" ::"r"(smem),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
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

// ---- mma.sync: D[16, 8] += A[16, 32] B[32, 8], of int8 to int32 ----

__device__ __forceinline__ void mma_int8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fp4::sm80
