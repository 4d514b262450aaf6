// GPU instructions of the mma.sync kernels beyond device/ptx.cuh. Every GPU from sm_80 on has them.
// tests/helpers/sm90_emulator/ptx_sm80.cuh defines each of them in C++.
#pragma once

#include <cstdint>

namespace fp4::sm80 {

// ---- copies into shared memory that run in the background ----

// Copies 16 bytes if `wanted`, past L1. They are read from memory if `there` and are zeros otherwise. It has
// no branches, so the compiler can put other work between copies.
__device__ __forceinline__ void copy_16(uint32_t smem, const void* from, bool wanted, bool there) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16, %2;\n}\n" ::"r"(smem),
      "l"(from), "r"(there ? 16 : 0), "r"(static_cast<int>(wanted))
      : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void copy_4(uint32_t smem, const void* from, bool wanted, bool there) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n"
      "@wanted cp.async.ca.shared.global [%0], [%1], 4, %2;\n}\n" ::"r"(smem),
      "l"(from), "r"(there ? 4 : 0), "r"(static_cast<int>(wanted))
      : "memory");
}

// Copies 16 bytes of weights if `wanted`. Memory also brings the bytes beside them into L2. Weights are read
// only once.
__device__ __forceinline__ void copy_16_ahead(uint32_t smem, const void* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global.L2::256B [%0], [%1], 16;\n}\n" ::"r"(smem),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

// ---- mma.sync: D[16, 8] += A[16, 32] B[32, 8], int8 operands, int32 sums ----

__device__ __forceinline__ void mma_int8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fp4::sm80
