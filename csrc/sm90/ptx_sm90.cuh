// GPU instructions of the Hopper kernels beyond ../device/ptx.cuh: one function for each instruction, or for
// two that belong together, and nothing else. tests/helpers/sm90_emulator defines the same in C++.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../device/ptx.cuh"

namespace fp4::sm90 {

using namespace device;

// ---- mbarriers that count bytes, and mbarriers of other blocks ----

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at the same barrier of the cluster's block `rank`. It is not .release.cluster, which would cost a
// GPU-wide memory barrier. This is enough, because the arriving threads only read what the barrier protects.
__device__ __forceinline__ void barrier_arrive_remote(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// ---- clusters ----

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The two halves of cluster_sync. They order only what threads read before they arrive, and barriers that
// barrier_init_fence has made visible. (.release would wait for all memory operations of a thread, over the
// whole GPU.)
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Stores to the shared memory of the cluster's block `rank`, at this block's address `smem`. The barrier
// there counts the bytes.
__device__ __forceinline__ void store_cluster(uint32_t smem, uint32_t barrier, uint32_t rank, float value) {
  asm volatile(
      "{\n.reg .b32 to, told;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 told, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %3, [told];\n}\n" ::"r"(smem),
      "r"(barrier), "r"(rank), "f"(value)
      : "memory");
}
__device__ __forceinline__ void store_cluster(uint32_t smem, uint32_t barrier, uint32_t rank,
                                              const float4& value) {
  asm volatile(
      "{\n.reg .b32 to, told;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 told, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [told];\n}\n" ::
          "r"(smem),
      "r"(barrier), "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

// ---- a thread's own copies ----

// Copies 16 bytes to shared memory, past L1. Writes zeros if not `there`.
__device__ __forceinline__ void copy_16(uint32_t smem, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
// The same for bytes that are read only once. Memory also brings the bytes beside them into L2.
__device__ __forceinline__ void copy_16_ahead(uint32_t smem, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(smem), "l"(from) : "memory");
}

// ---- bulk copies ----

// Copies bytes, a multiple of 16, between addresses that are multiples of 16. `barrier` counts them.
__device__ __forceinline__ void copy_bytes(uint32_t smem, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void load_box(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x,
                                         int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// Loads the same box to the same place in every block of `blocks` (a bit mask). The barrier of each block
// counts the bytes.
__device__ __forceinline__ void load_box_multicast(uint32_t smem, const CUtensorMap* map, uint32_t barrier,
                                                   int x, int y, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t smem, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(smem), "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most `Pending` committed groups of stores still read shared memory.
template <int Pending>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// Makes this thread's writes to shared memory visible to the copy engine.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- warps and registers ----

template <int Registers>
__device__ __forceinline__ void register_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void register_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// True in one lane of a warp that has converged.
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, one;\n}\n"
               : "=r"(elected));
  return elected != 0;
}

// Transposes a matrix of 8 rows of 16 bytes: lane i has the 4 bytes number i % 4 of row i / 4, before and
// after.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}

// ---- wgmma: D[64, Tokens] (+)= A[64, 32 bytes] (registers) x B[Tokens, 32 bytes] (shared memory), to
// float32 ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

template <Element kElement, int Tokens>
struct Wgmma;

// The operand lists of wgmma, four accumulators (eight tokens) or more at a time.
#define FP4_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FP4_D8(i) FP4_D4(i), FP4_D4(i + 4)
#define FP4_D16(i) FP4_D8(i), FP4_D8(i + 8)
#define FP4_D32(i) FP4_D16(i), FP4_D16(i + 16)
#define FP4_D64(i) FP4_D32(i), FP4_D32(i + 32)
#define FP4_D128(i) FP4_D64(i), FP4_D64(i + 64)

#define FP4_S8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FP4_S12 FP4_S8 ",%8,%9,%10,%11"
#define FP4_S16 FP4_S12 ",%12,%13,%14,%15"
#define FP4_S20 FP4_S16 ",%16,%17,%18,%19"
#define FP4_S24 FP4_S20 ",%20,%21,%22,%23"
#define FP4_S32 FP4_S24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define FP4_S40 FP4_S32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FP4_S48 FP4_S40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FP4_S56 FP4_S48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FP4_S64 FP4_S56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define FP4_S72 FP4_S64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define FP4_S80 FP4_S72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define FP4_S88 FP4_S80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define FP4_S96 FP4_S88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define FP4_S104 FP4_S96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define FP4_S112 FP4_S104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define FP4_S120 FP4_S112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define FP4_S128 FP4_S120 ",%120,%121,%122,%123,%124,%125,%126,%127"

// a0..p are the numbers of the operands after the accumulators. `tail` is the text after `keep`.
#define FP4_WGMMA_OF(element, types, tail, tokens, list, outputs, a0, a1, a2, a3, b, p)                   \
  template <>                                                                                             \
  struct Wgmma<element, tokens> {                                                                         \
    static __device__ __forceinline__ void run(float* d, const uint32_t* a, uint64_t b_desc, int keep) {  \
      asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #p                                          \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #tokens types " {" list "}, {%" #a0 ",%" #a1 \
                   ",%" #a2 ",%" #a3 "}, %" #b ", keep, " tail ";\n}\n"                                   \
                   : FP4_UNPACK outputs                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc), "r"(keep));                 \
    }                                                                                                     \
  };
#define FP4_WGMMA(...)                                                       \
  FP4_WGMMA_OF(Element::kE4m3, "k32.f32.e4m3.e4m3", "1, 1", __VA_ARGS__)     \
  FP4_WGMMA_OF(Element::kFloat16, "k16.f32.f16.f16", "1, 1, 0", __VA_ARGS__) \
  FP4_WGMMA_OF(Element::kBFloat16, "k16.f32.bf16.bf16", "1, 1, 0", __VA_ARGS__)

#define FP4_UNPACK(...) __VA_ARGS__
FP4_WGMMA(16, FP4_S8, (FP4_D8(0)), 8, 9, 10, 11, 12, 13)
FP4_WGMMA(24, FP4_S12, (FP4_D8(0), FP4_D4(8)), 12, 13, 14, 15, 16, 17)
FP4_WGMMA(32, FP4_S16, (FP4_D16(0)), 16, 17, 18, 19, 20, 21)
FP4_WGMMA(40, FP4_S20, (FP4_D16(0), FP4_D4(16)), 20, 21, 22, 23, 24, 25)
FP4_WGMMA(48, FP4_S24, (FP4_D16(0), FP4_D8(16)), 24, 25, 26, 27, 28, 29)
FP4_WGMMA(64, FP4_S32, (FP4_D32(0)), 32, 33, 34, 35, 36, 37)
FP4_WGMMA(80, FP4_S40, (FP4_D32(0), FP4_D8(32)), 40, 41, 42, 43, 44, 45)
FP4_WGMMA(96, FP4_S48, (FP4_D32(0), FP4_D16(32)), 48, 49, 50, 51, 52, 53)
FP4_WGMMA(112, FP4_S56, (FP4_D32(0), FP4_D16(32), FP4_D8(48)), 56, 57, 58, 59, 60, 61)
FP4_WGMMA(128, FP4_S64, (FP4_D64(0)), 64, 65, 66, 67, 68, 69)
FP4_WGMMA(144, FP4_S72, (FP4_D64(0), FP4_D8(64)), 72, 73, 74, 75, 76, 77)
FP4_WGMMA(160, FP4_S80, (FP4_D64(0), FP4_D16(64)), 80, 81, 82, 83, 84, 85)
FP4_WGMMA(176, FP4_S88, (FP4_D64(0), FP4_D16(64), FP4_D8(80)), 88, 89, 90, 91, 92, 93)
FP4_WGMMA(192, FP4_S96, (FP4_D64(0), FP4_D32(64)), 96, 97, 98, 99, 100, 101)
FP4_WGMMA(208, FP4_S104, (FP4_D64(0), FP4_D32(64), FP4_D8(96)), 104, 105, 106, 107, 108, 109)
FP4_WGMMA(224, FP4_S112, (FP4_D64(0), FP4_D32(64), FP4_D16(96)), 112, 113, 114, 115, 116, 117)
FP4_WGMMA(240, FP4_S120, (FP4_D64(0), FP4_D32(64), FP4_D16(96), FP4_D8(112)), 120, 121, 122, 123, 124, 125)
FP4_WGMMA(256, FP4_S128, (FP4_D128(0)), 128, 129, 130, 131, 132, 133)

}  // namespace fp4::sm90
