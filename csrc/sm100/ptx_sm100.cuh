// GPU instructions of the kernels for compute capability 10.x beyond sm90/ptx_sm90.cuh: the tensor cores of
// tcgen05, and their memory (TMEM) of 128 lanes by 512 columns of 32 bits. `kCtas`: how many thread blocks of
// a cluster share a product, one or two.
// tests/helpers/sm90_emulator/ptx_sm100.cuh defines each of them in C++.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fp4::sm100 {

// ---- shared memory ----

// Returns the address of the same barrier in the even block of the pair, which starts the pair's products. In
// the addresses of a cluster this bit is the last one of the block's rank.
template <int kCtas>
__device__ __forceinline__ uint32_t leading_barrier(uint32_t barrier) {
  return kCtas == 2 ? barrier & 0xFEFFFFFFu : barrier;
}

// Loads a box to this block. The barrier counts its bytes, and may be leading_barrier's.
template <int kCtas>
__device__ __forceinline__ void load_box(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x,
                                         int y) {
#define FP4_LOAD_BOX(GROUP)                                                                        \
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes" GROUP \
               " [%0], [%1, {%3, %4}], [%2];" ::"r"(smem),                                         \
               "l"(map), "r"(barrier), "r"(x), "r"(y)                                              \
               : "memory")
  if constexpr (kCtas == 2) {
    FP4_LOAD_BOX(".cta_group::2");
  } else {
    FP4_LOAD_BOX("");
  }
#undef FP4_LOAD_BOX
}

__device__ __forceinline__ void store_shared_16(uint32_t smem, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// ---- cluster launch control ----

// Arrives at the same barrier of the cluster's block `rank`, which then also expects bytes.
__device__ __forceinline__ void barrier_expect_bytes_remote(uint32_t barrier, uint32_t rank, uint32_t bytes) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote], %2;\n}\n" ::"r"(barrier),
      "r"(rank), "r"(bytes)
      : "memory");
}

// Cancels the start of a cluster of this launch that has not started, if there is one. The response is
// written to `smem` in each block of the cluster, where the same barrier counts its 16 bytes.
__device__ __forceinline__ void try_cancel(uint32_t smem, uint32_t barrier) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all"
      ".b128 [%0], [%1];" ::"r"(smem),
      "r"(barrier)
      : "memory");
}

// Returns whether a response in this block's shared memory says that a cluster was cancelled, and the index
// of that cluster's first block.
__device__ __forceinline__ bool query_cancel(uint32_t smem, uint32_t& first_block) {
  uint32_t cancelled;
  asm volatile(
      "{\n.reg .pred cancelled;\n.reg .b128 response;\n"
      "ld.shared.b128 response, [%2];\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 cancelled, response;\n"
      "selp.u32 %0, 1, 0, cancelled;\n"
      "mov.b32 %1, 0;\n"
      "@cancelled clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, response;\n}\n"
      : "=r"(cancelled), "=r"(first_block)
      : "r"(smem)
      : "memory");
  return cancelled;
}

// ---- tensor memory ----

// Allocates columns for the block and writes the first one's address to shared memory. A whole warp calls it,
// in each block of a pair.
template <int kCtas>
__device__ __forceinline__ void tensor_allocate(uint32_t smem, uint32_t columns) {
  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem), "r"(columns),
               "n"(kCtas)
               : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(kCtas) : "memory");
}

template <int kCtas>
__device__ __forceinline__ void tensor_free(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns),
               "n"(kCtas)
               : "memory");
}

// Orders tcgen05 instructions of this thread before its next arrival, and after its last wait.
__device__ __forceinline__ void tensor_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tensor_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// Loads 16 columns: register i of lane l gets column i of TMEM lane l, counted from the address. A warp
// reaches the lanes from 32 * (its number % 4) on. The registers count after tensor_load_wait.
__device__ __forceinline__ void tensor_load(uint32_t address, uint32_t (&r)[16]) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, [%16];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]),
        "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15])
      : "r"(address)
      : "memory");
}

// Waits for this thread's loads. The registers are operands, so that nothing that reads them moves up.
__device__ __forceinline__ void tensor_load_wait(uint32_t (&r)[16]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;"
               : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]), "+r"(r[4]), "+r"(r[5]), "+r"(r[6]),
                 "+r"(r[7]), "+r"(r[8]), "+r"(r[9]), "+r"(r[10]), "+r"(r[11]), "+r"(r[12]), "+r"(r[13]),
                 "+r"(r[14]), "+r"(r[15])::"memory");
}

// ---- tensor cores: one thread starts these, and they run in the order in which it does. With a pair it is
// a thread of the even block, and addresses hold in both blocks ----

// Copies 32 rows of 16 bytes to four columns of 32 lanes, and again to each other 32 lanes. Each block of a
// pair copies its own rows to its own tensor memory.
template <int kCtas>
__device__ __forceinline__ void tensor_copy(uint32_t address, uint64_t descriptor) {
  asm volatile("tcgen05.cp.cta_group::%2.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor), "n"(kCtas)
               : "memory");
}

// D[128, N] (+)= A[128, kPart] B[N, kPart] with a scale for kScaleBlock K, to float32. Without `keep`, D is
// overwritten. 64 K are e2m1 codes, with ue4m3 scales for 16 K or ue8m0 scales for 32 K. 32 K have types that
// the instruction descriptor tells, a byte for each code, and ue8m0 scales. (".block16" and ".block32" are
// scale_vec::4X, 2X and 1X in the words that code for a family of GPUs takes.)
//
// With a pair, each block has 128 rows of A and of D, N / 2 rows of B, and the scales of its rows of A and of
// all rows of B.
template <int kCtas, int kPart, int kScaleBlock>
__device__ __forceinline__ void tensor_multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                                                uint32_t a_scales, uint32_t b_scales, bool keep) {
#define FP4_MULTIPLY(KIND)                                                                         \
  asm volatile(                                                                                    \
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %6, 0;\n"                                            \
      "tcgen05.mma.cta_group::%7." KIND " [%0], %1, %2, %3, [%4], [%5], keep;\n}\n" ::"r"(d),      \
      "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(static_cast<int>(keep)), \
      "n"(kCtas)                                                                                   \
      : "memory")
  static_assert(kScaleBlock == 32 || (kPart == 64 && kScaleBlock == 16));
  if constexpr (kPart == 32) {
    FP4_MULTIPLY("kind::mxf8f6f4.block_scale.block32");
  } else if constexpr (kScaleBlock == 16) {
    FP4_MULTIPLY("kind::mxf4nvf4.block_scale.block16");
  } else {
    FP4_MULTIPLY("kind::mxf4nvf4.block_scale.block32");
  }
#undef FP4_MULTIPLY
}

// Arrives at the barrier once all that this thread has started so far is over. With a pair, at that of each
// block of the cluster that is in the bit mask `blocks`.
template <int kCtas>
__device__ __forceinline__ void tensor_commit(uint32_t barrier, uint16_t blocks) {
  if constexpr (kCtas == 2) {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], "
        "%1;" ::"r"(barrier),
        "h"(blocks)
        : "memory");
  } else {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
                 : "memory");
  }
}

}  // namespace fp4::sm100
