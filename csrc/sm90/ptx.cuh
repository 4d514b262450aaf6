// What the kernels ask of the GPU by name: one function for each instruction, or two that belong together,
// and nothing else. tests/sm90_emulator/ptx.cuh says in C++ what each of them does.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "types.cuh"

namespace fp4::sm90 {

// ---- launches that overlap ----

// Until the kernels before this one in the stream have ended and their results can be seen. In a kernel that
// was not launched as `dependent` nothing.
__device__ __forceinline__ void wait_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream begin, if it is `dependent`, once all thread blocks of this one have.
__device__ __forceinline__ void release_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- shared memory ----

// Declares `name`, the memory that the launch gave the block. (Of a pointer that a function returns the
// compiler does not know in time that it is to shared memory.)
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

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives on the same barrier of the cluster's block `rank`. Without .release.cluster, which would cost a
// GPU-wide memory barrier; the arriving threads only read what the barrier protects.
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

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether that phase is over, without waiting.
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

// ---- clusters ----

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// ---- flags and counters in global memory ----

// With all that this thread wrote before.
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

// ---- bulk tensor copies ----

__device__ __forceinline__ void load_box(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x,
                                         int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// The same box into the same place of every block in `blocks` (a bit mask); each one's barrier is told.
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

// Until at most `Pending` committed groups of stores still read shared memory.
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

// Bytes that are read once.
__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The same of pieces so small that memory had better bring what lies beside them, too.
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

// The 128 bytes around it into L2.
__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// One instruction: the compiler splits an ordinary store where the words were selected.
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

// NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

// ---- order ----

// The compiler has a value in its register here, and moves no use of it, or of memory, over this place.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// The same of a value alone.
__device__ __forceinline__ void pin(uint32_t& value) { asm volatile("" : "+r"(value)); }

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

// a0..p are the numbers of the operands that follow the accumulators; tail is what follows keep.
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
