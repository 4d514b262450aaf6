// GPU instructions of the kernels for compute capability 12.x beyond device/ptx.cuh.
// tests/helpers/sm90_emulator/ptx_sm120.cuh defines each of them in C++.
#pragma once

#include <cstdint>

namespace fp4::sm120 {

// Copies 16 bytes into shared memory in the background if `wanted`, past L1. It has no branches.
__device__ __forceinline__ void copy_16(uint32_t smem, const void* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n}\n" ::"r"(smem),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

// The same for 4 bytes, which L1 keeps.
__device__ __forceinline__ void copy_4(uint32_t smem, const void* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\n"
      "@wanted cp.async.ca.shared.global [%0], [%1], 4;\n}\n" ::"r"(smem),
      "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

__device__ __forceinline__ uint32_t load_shared_2(uint32_t smem) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(smem));
  return value;
}

// D[16, 8] += A[16, 64] B[64, 8] of e2m1 codes with block scales, to float32.
//
// Lane 4g + t has codes 8t to 8t + 7 of each half of K: of rows g (a[0] and a[2]) and g + 8 (a[1] and a[3]),
// and of column g (b0 and b1). Its sums are those of rows g (x, y) and g + 8 (z, w), columns 2t and 2t + 1.
//
// The scales of row g come from sfa of the lane with t = 0, and those of row g + 8 from t = 1. The scales of
// column g come from sfb of the lane with t = 0. Other lanes' words are not read. nvfp4 has four e4m3 scales
// without a sign, of 16 K each; mxfp4 has two e8m0 scales of 32 K each in the lower half of the word. In a
// word the lowest code or scale comes first.
template <bool kNvfp4>
__device__ __forceinline__ void mma_scaled(float4& d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                           uint32_t sfa, uint32_t sfb) {
#define FP4_MMA(vector, types)                                                                    \
  asm volatile("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::" vector  \
               ".f32.e2m1.e2m1.f32." types                                                        \
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {0, 0}, %11, {0, 0};" \
               : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(sfa), "r"(sfb))
  if constexpr (kNvfp4) {
    FP4_MMA("4X", "ue4m3");
  } else {
    FP4_MMA("2X", "ue8m0");
  }
#undef FP4_MMA
}

}  // namespace fp4::sm120
