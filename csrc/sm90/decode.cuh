// Decode: grouped products of e2m1 weights in the sm90 layout with a few rows per expert, bound by memory.
//
//   out[r, n] = x_scale[r] * global_scale[e] * sum_k code[e, n, k] * block_scale[e, n, k / 16] * x[r / a_div,
//   k] (+ bias[e, n])
//
// A work item is a row tile: 16 rows of one expert's weight times up to 8 * NT of its activation rows (a
// chunk). Each block, one an SM, takes an equal range of consecutive row tiles. Inside a block the compute
// warps split K: a warp keeps its slice of the activations in registers as the B operand of mma.sync, and
// streams its slice of one row tile after another from global memory straight into registers; no shared
// memory and no barrier lies on that path. The partial sums of a tile go through a ring in shared memory to
// two reducer warps, which add them in a fixed order, apply the epilogue and store: the result does not
// depend on timing.
//
// e2m1 times an e4m3 scale has at most six significant bits, so weights are exact in fp16; activations are
// brought into fp16's range by a power of two for each row and K slice, which is exact but for what float32
// sums would lose.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace fp4::sm90 {

enum class Routing : int { kOffs, kIds32, kIds64, kMasked, kDense };
enum class Act : int { kNone, kSilu, kGelu, kGeluTanh };
enum class DType : int { kFloat32, kBFloat16, kFloat16, kFloat8 };

struct DecodeParams {
  const void* x;              // [rows / a_div, k] of x_type, row stride k (fp8: kp)
  const float* x_scale;       // one a row of x, or null
  const uint8_t* codes;       // sm90 layout
  const uint8_t* scales;      // sm90 layout
  const float* global_scale;  // [groups]
  const void* bias;           // [groups, n] of bias_type, or null
  void* out;                  // [rows, n], gated: [rows, n / 2]
  const void* route;          // offs [groups], ids [rows], or masked_m [groups]
  const int* sorted_rows;     // kOffs: the row at each sorted position, or null for the identity
  int rows, groups, n, k, kp;
  int a_div;  // row r of the output reads row r / a_div of x
  int max_m;  // kMasked: rows an expert
  Routing routing;
  DType x_type, out_type, bias_type;
  Act act;  // gated: rows 2i and 2i + 1 of the weight are gate i and up i
  float act_alpha, act_limit, act_up_offset;
  int k_warps, row_warps, passes;
  float k_warps_inverse, row_warps_inverse;
  uint32_t grid_mul, grid_shift, tiles_mul, tiles_shift, a_div_mul,
      a_div_shift;  // to divide by the grid, N's row tiles, a_div
  bool early;       // the routing was known before the previous kernel began
};

constexpr int kComputeWarps = 16;
constexpr int kReduceWarps = 4;
constexpr int kDecodeThreads = 32 * (kComputeWarps + kReduceWarps);
constexpr int kMaxGroups = kDecodeThreads;  // one thread a group in plan()
constexpr int kMaxSegments = 32;            // chunks that one block may touch
constexpr int kMaxIds = 2048;
constexpr int kPassTiles = 32;  // row tiles whose sums are kept while K is walked in several passes
constexpr int kTileRows = 16;
constexpr int kSliceSteps = 4;                     // 64-steps of K that a warp owns
constexpr int kStepCodes = 512, kStepScales = 64;  // bytes of 16 rows by 64 k

struct Segment {
  int expert;
  int first;  // its first row, as a sorted position
  int count;  // activation rows
  int rank;   // routing by id: rows of this expert in earlier chunks
  int tile_begin, tile_end;
};

struct alignas(16) DecodeShared {
  uint64_t full[4], empty[4];
  Segment segments[kMaxSegments];
  int warp_totals[32];
  int ids[kMaxIds];
  int counts[kMaxGroups];
};

// What follows DecodeShared in shared memory; sizes depend on the launch.
template <int NT>
struct DecodeBuffers {
  static constexpr int kRing = NT > 2 ? 2 : 4;  // steps between the compute and the reducer warps
  uint4* fragments;  // [k_warps][kSliceSteps][NT][2][32]: the activations as B operands
  float4* ring;      // [kRing][k_warps * row_warps][NT][32]
  float4* sums;      // [kPassTiles][NT][32], if there are several passes
  int (*row_list)[8 * NT];

  __host__ __device__ static int fragment_count(const DecodeParams& p) {
    return p.k_warps * kSliceSteps * NT * 64;
  }
  __host__ __device__ static int stage_count(const DecodeParams& p) {
    return p.k_warps * p.row_warps * NT * 32;
  }
  __host__ __device__ static int sum_count(const DecodeParams& p) {
    return p.passes > 1 ? kPassTiles * NT * 32 : 0;
  }
  __host__ static int bytes(const DecodeParams& p) {
    return 16 * (fragment_count(p) + kRing * stage_count(p) + sum_count(p)) + kMaxSegments * 8 * NT * 4 +
           int(sizeof(DecodeShared));
  }
  __device__ DecodeBuffers(const DecodeParams& p, void* memory) {
    fragments = static_cast<uint4*>(memory);
    ring = reinterpret_cast<float4*>(fragments + fragment_count(p));
    sums = ring + kRing * stage_count(p);
    row_list = reinterpret_cast<int (*)[8 * NT]>(sums + sum_count(p));
  }
};

// --- PTX ---

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;  // as assembly, so that the compiler does not split a selector's mask in two
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

__device__ __forceinline__ void mma_f16(float4& d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t load_stream_word(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// x / d for x < 2^31, with the d's multiplier and shift from the host.
__device__ __forceinline__ int divide(uint32_t x, uint32_t mul, uint32_t shift) {
  return (__umulhi(x, mul) + x) >> shift;
}

// a / b for a below 2^20, with the inverse of b.
__device__ __forceinline__ int divide_small(int a, float inverse) { return int((float(a) + 0.5f) * inverse); }

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint64_t* b, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(b)), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(smem_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra again;\n}" ::"r"(smem_address(b)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void wait_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void release_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// --- weights: one lane's 16 bytes are a block of 16 codes of two rows ---

// Eight codes of one word to fp16, scaled: pairs (0,2), (1,3) of q = 0, then of q = 1.
__device__ __forceinline__ void dequantize_word(uint32_t w, half2 scale, uint32_t (&h)[4]) {
  // The high bytes of 0, 0.5, 1, 1.5, 2, 3, 4, 6 in fp16; the low bytes are zero.
  constexpr uint32_t kLow = 0x3E3C3800, kHigh = 0x46444240;
  const uint32_t index = w & 0x77777777;
  const uint32_t q0 = prmt(kLow, kHigh, index) | (w & 0x80808080);
  const uint32_t q1 = prmt(kLow, kHigh, index >> 16) | ((w << 4) & 0x80808080);
  h[1] = q0 & 0xFF00FF00;
  h[3] = q1 & 0xFF00FF00;
  h[0] = prmt(q0, 0, 0x2404);
  h[2] = prmt(q1, 0, 0x2404);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const half2 v = __hmul2(reinterpret_cast<const half2&>(h[i]), scale);
    h[i] = reinterpret_cast<const uint32_t&>(v);
  }
}

// Two e4m3 scales (their flag bits removed) to fp16.
__device__ __forceinline__ half2 decode_scales(uint32_t two) {
  uint32_t v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"(static_cast<uint16_t>(two)));
  return reinterpret_cast<const half2&>(v);
}

// --- activations ---

__device__ __forceinline__ float apply_gate(Act act, float gate, float up, const DecodeParams& p) {
  if (p.act_limit > 0.f) {
    gate = fminf(gate, p.act_limit);
    up = fminf(fmaxf(up, -p.act_limit), p.act_limit);
  }
  up += p.act_up_offset;
  if (act == Act::kGelu) return 0.5f * gate * (1.f + erff(gate * 0.70710678f)) * up;
  if (act == Act::kGeluTanh) {
    const float inner = 0.79788456f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.f + __expf(-2.f * inner)) * up;
  }
  return gate / (1.f + __expf(-p.act_alpha * gate)) * up;
}

__device__ __forceinline__ float load_as_float(const void* p, int64_t i, DType type) {
  if (type == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  if (type == DType::kFloat16) return __half2float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

__device__ __forceinline__ void store_pair(void* p, int64_t i, float a, float b, DType type) {
  if (type == DType::kBFloat16) {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p) + i) = __floats2bfloat162_rn(a, b);
  } else if (type == DType::kFloat16) {
    *reinterpret_cast<half2*>(static_cast<__half*>(p) + i) = __floats2half2_rn(a, b);
  } else {
    *reinterpret_cast<float2*>(static_cast<float*>(p) + i) = make_float2(a, b);
  }
}

__device__ __forceinline__ void store_one(void* p, int64_t i, float a, DType type) {
  if (type == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(a);
  } else if (type == DType::kFloat16) {
    static_cast<__half*>(p)[i] = __float2half_rn(a);
  } else {
    static_cast<float*>(p)[i] = a;
  }
}

// One lane's share of an activation row in one 64-step: the 16 logical k of its scale block.
template <DType kType>
struct RowBlock {
  uint32_t w[kType == DType::kFloat8 ? 4 : 8];

  __device__ void load(const DecodeParams& p, int row, int k0, int t, bool live) {
#pragma unroll
    for (uint32_t& v : w) v = 0;
    if constexpr (kType == DType::kFloat8) {
      if (live && k0 < p.kp) {  // the layout's order: the four words of this lane lie 16 bytes apart
        const auto* x =
            reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(p.x) + int64_t(row) * p.kp + k0);
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = x[4 * i + t];
      }
    } else if (live && k0 + 16 * t < p.k) {
      const auto* x = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.x) + int64_t(row) * p.k +
                                                     k0 + 16 * t);
      const uint4 a = x[0], b = x[1];
      w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
    }
  }

  __device__ float largest() const {
    if constexpr (kType == DType::kBFloat16) {
      __nv_bfloat162 m = __habs2(reinterpret_cast<const __nv_bfloat162&>(w[0]));
#pragma unroll
      for (int i = 1; i < 8; ++i) m = __hmax2_nan(m, __habs2(reinterpret_cast<const __nv_bfloat162&>(w[i])));
      return fmaxf(__low2float(m), __high2float(m));
    } else {
      half2 m = __habs2(reinterpret_cast<const half2&>(w[0]));
#pragma unroll
      for (int i = 1; i < 8; ++i) m = __hmax2_nan(m, __habs2(reinterpret_cast<const half2&>(w[i])));
      return fmaxf(__low2float(m), __high2float(m));
    }
  }

  // Four consecutive values, times `scale`, as the pairs (0, 2) and (1, 3) of the weights' fragments.
  __device__ uint2 pairs(int i, float scale) const {
    float2 lo, hi;
    if constexpr (kType == DType::kFloat8) {
      lo = __half22float2(decode_scales(w[i])), hi = __half22float2(decode_scales(w[i] >> 16));
    } else if constexpr (kType == DType::kBFloat16) {
      lo = make_float2(__uint_as_float(w[2 * i] << 16), __uint_as_float(w[2 * i] & 0xFFFF0000));
      hi = make_float2(__uint_as_float(w[2 * i + 1] << 16), __uint_as_float(w[2 * i + 1] & 0xFFFF0000));
    } else {
      lo = __half22float2(reinterpret_cast<const half2&>(w[2 * i]));
      hi = __half22float2(reinterpret_cast<const half2&>(w[2 * i + 1]));
    }
    const half2 even = __floats2half2_rn(lo.x * scale, hi.x * scale),
                odd = __floats2half2_rn(lo.y * scale, hi.y * scale);
    return make_uint2(reinterpret_cast<const uint32_t&>(even), reinterpret_cast<const uint32_t&>(odd));
  }
};

// --- the order of a block's work, which compute and reducer warps share ---

// Row tiles of one segment under one K pass: the activations in registers stay the same.
struct Run {
  int segment, pass, begin, end;

  __device__ bool open(const Segment* segments, int count, int passes) {
    if (segment >= count) return false;
    begin = segments[segment].tile_begin;
    close(segments, passes);
    return true;
  }
  __device__ bool next(const Segment* segments, int count, int passes) {
    if (++pass < passes) return true;
    pass = 0;
    begin = end;
    if (begin < segments[segment].tile_end) {
      close(segments, passes);
      return true;
    }
    ++segment;
    return open(segments, count, passes);
  }

 private:
  __device__ void close(const Segment* segments, int passes) {
    end = segments[segment].tile_end;
    if (passes > 1) end = min(end, begin + kPassTiles);
  }
};

// Finds the block's segments. All threads; ends with a barrier. Returns their number.
template <int NT>
__device__ __forceinline__ int plan(const DecodeParams& p, DecodeShared& sh,
                                    const DecodeBuffers<NT>& buffers) {
  constexpr int kChunk = 8 * NT;
  constexpr int kWarps = kDecodeThreads / 32;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int tiles_n = p.n / kTileRows;
  const bool by_id = p.routing == Routing::kIds32 || p.routing == Routing::kIds64;
  int first = 0, count = 0;
  if (by_id) {
    sh.counts[tid] = 0;
    __syncthreads();
    for (int r = tid; r < p.rows; r += kDecodeThreads) {
      const int64_t id = p.routing == Routing::kIds64 ? static_cast<const int64_t*>(p.route)[r]
                                                      : static_cast<const int*>(p.route)[r];
      const bool valid = id >= 0 && id < p.groups;
      sh.ids[r] = valid ? static_cast<int>(id) : -1;
      if (valid) atomicAdd(&sh.counts[id], 1);
    }
    __syncthreads();
    count = sh.counts[tid];
  } else if (tid < p.groups) {
    const int* ends = static_cast<const int*>(p.route);
    if (p.routing == Routing::kOffs) {
      const int end = ends[tid], begin = tid ? ends[tid - 1] : 0;
      first = min(max(begin, 0), p.rows);
      count = max(min(end, p.rows) - first, 0);
    } else if (p.routing == Routing::kMasked) {
      first = tid * p.max_m;
      count = min(max(ends[tid], 0), p.max_m);
    } else {
      count = p.rows;
    }
  }
  const int chunks = (count + kChunk - 1) / kChunk;
  int scan = chunks;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, scan, d);
    if (lane >= d) scan += other;
  }
  if (lane == 31) sh.warp_totals[warp] = scan;
  __syncthreads();
  int mine = scan - chunks, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int t = sh.warp_totals[w];
    mine += w < warp ? t : 0;
    total += t;
  }
  const uint32_t tiles = total * tiles_n;
  const int t0 = divide(tiles * blockIdx.x, p.grid_mul, p.grid_shift);
  const int t1 = divide(tiles * (blockIdx.x + 1), p.grid_mul, p.grid_shift);
  const int c0 = divide(t0, p.tiles_mul, p.tiles_shift);
  const int segments = t0 < t1 ? min(divide(t1 - 1, p.tiles_mul, p.tiles_shift) - c0 + 1, kMaxSegments) : 0;
  for (int i = max(c0 - mine, 0); i < chunks && mine + i < c0 + segments; ++i) {
    const int c = mine + i, done = i * kChunk;
    sh.segments[c - c0] = Segment{tid,
                                  first + done,
                                  min(count - done, kChunk),
                                  done,
                                  max(t0 - c * tiles_n, 0),
                                  min(t1 - c * tiles_n, tiles_n)};
  }
  __syncthreads();
  for (int s = warp; s < segments; s += kWarps) {
    const Segment seg = sh.segments[s];
    if (by_id) {
      int found = -seg.rank;
      for (int r = 0; r < p.rows && found < seg.count; r += 32) {
        const bool hit = r + lane < p.rows && sh.ids[r + lane] == seg.expert;
        const uint32_t hits = __ballot_sync(~0u, hit);
        const int at = found + __popc(hits & ((1u << lane) - 1));
        if (hit && at >= 0 && at < seg.count) buffers.row_list[s][at] = r + lane;
        found += __popc(hits);
      }
    } else if (lane < seg.count) {
      const int at = seg.first + lane;
      buffers.row_list[s][lane] = p.sorted_rows ? p.sorted_rows[at] : at;
    }
  }
  __syncthreads();
  return segments;
}

// Rows of no expert come back as zeros.
__device__ __forceinline__ void clear_rows(const DecodeParams& p, const DecodeShared& sh) {
  const int width = p.act == Act::kNone ? p.n : p.n / 2;
  const int bytes = width * (p.out_type == DType::kFloat32 ? 4 : 2);
  const int end = p.routing == Routing::kOffs ? max(static_cast<const int*>(p.route)[p.groups - 1], 0) : 0;
  for (int r = blockIdx.x; r < p.rows; r += gridDim.x) {
    bool clear = false;
    int row = r;
    if (p.routing == Routing::kOffs) {
      clear = r >= end;
      if (clear && p.sorted_rows) row = p.sorted_rows[r];
    } else if (p.routing == Routing::kMasked) {
      clear = r % p.max_m >= static_cast<const int*>(p.route)[r / p.max_m];
    } else if (p.routing != Routing::kDense) {
      clear = sh.ids[r] < 0;
    }
    if (!clear) continue;
    auto* to = reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) + int64_t(row) * bytes);
    for (int i = threadIdx.x % (32 * kReduceWarps); i < bytes / 16; i += 32 * kReduceWarps)
      to[i] = make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void sync_compute_warps(const DecodeParams& p) {
  asm volatile("bar.sync 1, %0;" ::"r"(32 * p.k_warps * p.row_warps) : "memory");
}

// Puts the activations of a run into shared memory as B fragments, each compute warp some of its slice, and
// returns for this lane's two tokens the factor that its sums carry.
template <DType kType, int NT>
__device__ __forceinline__ void load_activations(const DecodeParams& p, const DecodeShared& sh,
                                                 const DecodeBuffers<NT>& buffers, const Run& run, int slice,
                                                 uint32_t share, float (&factor)[NT][2]) {
  const int lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
  const int count = sh.segments[run.segment].count;
  const int k0 = (run.pass * p.k_warps + slice) * kSliceSteps * 64;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const int at = nt * 8 + g;
    const bool live = at < count;
    const int row = live ? divide(buffers.row_list[run.segment][at], p.a_div_mul, p.a_div_shift) : 0;
    RowBlock<kType> raw[kSliceSteps];
#pragma unroll
    for (int j = 0; j < kSliceSteps; ++j) raw[j].load(p, row, k0 + 64 * j, t, live);
    float up = 1.f, down;
    if constexpr (kType == DType::kFloat8) {
      down = live ? p.x_scale[row] : 0.f;
    } else {
      float amax = 0.f;
#pragma unroll
      for (int j = 0; j < kSliceSteps; ++j) amax = fmaxf(amax, raw[j].largest());
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
      // The largest value's exponent becomes 14.
      const int exponent = max(int(__float_as_uint(amax) >> 23), 15);
      up = __uint_as_float(uint32_t(268 - exponent) << 23);
      down = __uint_as_float(uint32_t(exponent - 14) << 23);
    }
    factor[nt][0] = __shfl_sync(~0u, down, 8 * t);
    factor[nt][1] = __shfl_sync(~0u, down, 8 * t + 4);
    if (nt == 0) sync_compute_warps(p);  // the fragments of the run before are done with
#pragma unroll
    for (int j = 0; j < kSliceSteps; ++j) {
      if (!(share >> j & 1)) continue;
      uint4* to = buffers.fragments + ((slice * kSliceSteps + j) * NT + nt) * 64 + lane;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint2 a = raw[j].pairs(2 * h, up), b = raw[j].pairs(2 * h + 1, up);
        to[32 * h] = make_uint4(a.x, a.y, b.x, b.y);
      }
    }
  }
  sync_compute_warps(p);
}

// One compute warp: its K slice of one row tile after another. Four 64-steps are always in flight: a register
// that was dequantised is loaded again at once for the next tile.
template <DType kType, int NT>
__device__ __forceinline__ void compute(const DecodeParams& p, DecodeShared& sh,
                                        const DecodeBuffers<NT>& buffers, int segments) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_warp = divide_small(warp, p.k_warps_inverse), slice = warp - row_warp * p.k_warps;
  const int k_steps = p.kp / 64, tiles_n = p.n / kTileRows;

  // The 64-steps of the slice whose activations this warp converts, for all warps of the slice.
  uint32_t share = 0;
  for (int j = 0, r = 0; j < kSliceSteps; ++j, r = r + 1 < p.row_warps ? r + 1 : 0)
    share |= (r == row_warp) << j;

  Run run{}, ahead{};
  bool more = run.open(sh.segments, segments, p.passes);
  bool more_ahead = ahead.open(sh.segments, segments, p.passes);
  if (!more) {
    if (p.early) wait_previous_kernel();
    return;
  }

  uint4 codes[kSliceSteps];
  uint32_t scales[kSliceSteps / 2] = {};
#pragma unroll
  for (uint4& c : codes) c = make_uint4(0, 0, 0, 0);
  const uint8_t* code_at = nullptr;  // this lane's part of the tile ahead
  const uint8_t* scale_at = nullptr;
  int live = 0;            // 64-steps to load of it
  int steps_ahead = 0;     // of the run ahead, that tile's included
  bool last_live = false;  // whether this warp has a tile in the last of them
  const int64_t stride = int64_t(p.row_warps) * k_steps;
  auto aim = [&] {  // at the first tile of the run ahead
    live = 0;
    if (!more_ahead) return;
    const int rows = ahead.end - ahead.begin;
    steps_ahead = divide_small(rows + p.row_warps - 1, p.row_warps_inverse);
    last_live = row_warp < rows - (steps_ahead - 1) * p.row_warps;
    const int k_step = (ahead.pass * p.k_warps + slice) * kSliceSteps;
    const int64_t tile = int64_t(sh.segments[ahead.segment].expert) * tiles_n + ahead.begin + row_warp;
    code_at = p.codes + (tile * k_steps + k_step) * kStepCodes + lane * 16;
    scale_at = p.scales + (tile * k_steps + k_step) * kStepScales + lane * 4;
    live = row_warp < rows ? k_steps - k_step : 0;
  };
  auto advance = [&] {
    code_at += stride * kStepCodes;
    scale_at += stride * kStepScales;
    if (--steps_ahead > 1) return;
    if (steps_ahead == 1) {  // the last step may be short of row tiles
      if (!last_live) live = 0;
    } else {
      more_ahead = more_ahead && ahead.next(sh.segments, segments, p.passes);
      aim();
    }
  };
  auto fetch = [&](int j) {
    if (j < live) codes[j] = load_stream(code_at + j * kStepCodes);
  };
  auto fetch_scales = [&](int j) {
    if (j < live) scales[j / 2] = load_stream_word(scale_at + j * kStepScales);
  };
  aim();
#pragma unroll
  for (int j = 0; j < kSliceSteps; ++j) {
    fetch(j);
    if (j % 2 == 0) fetch_scales(j);
  }
  advance();
  if (p.early) wait_previous_kernel();

  const uint4* fragments = buffers.fragments + slice * kSliceSteps * NT * 64 + lane;
  float4* const ring = buffers.ring + warp * NT * 32 + lane;
  const int stage_size = buffers.stage_count(p);
  uint32_t step = 0;
  while (more) {
    float factor[NT][2];
    load_activations<kType, NT>(p, sh, buffers, run, slice, share, factor);
    for (int left = run.end - run.begin; left > 0; left -= p.row_warps) {
      float4 acc[NT];
#pragma unroll
      for (float4& a : acc) a = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int j = 0; j < kSliceSteps; ++j) {
        if (j % 2 == 0) scales[j / 2] &= 0x7F7F7F7F;  // without the flags
        const half2 both = decode_scales(scales[j / 2] >> (16 * (j % 2)));
        const half2 scale0 = __low2half2(both), scale1 = __high2half2(both);
        uint32_t even[2][4], odd[2][4];  // rows 2g and 2g + 1, words s
        dequantize_word(codes[j].x, scale0, even[0]);
        dequantize_word(codes[j].y, scale0, even[1]);
        dequantize_word(codes[j].z, scale1, odd[0]);
        dequantize_word(codes[j].w, scale1, odd[1]);
        fetch(j);
        if (j % 2 == 1) fetch_scales(j - 1);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            const uint4 b = fragments[(j * NT + nt) * 64 + 32 * s];
            const uint32_t a0[4] = {even[s][0], odd[s][0], even[s][1], odd[s][1]};
            const uint32_t a1[4] = {even[s][2], odd[s][2], even[s][3], odd[s][3]};
            mma_f16(acc[nt], a0, b.x, b.y);
            mma_f16(acc[nt], a1, b.z, b.w);
          }
        }
      }
      advance();
      const uint32_t stage = step % buffers.kRing;
      barrier_wait(&sh.empty[stage], (step / buffers.kRing + 1) & 1);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const float4 v = acc[nt];
        ring[stage * stage_size + nt * 32] =
            make_float4(v.x * factor[nt][0], v.y * factor[nt][1], v.z * factor[nt][0], v.w * factor[nt][1]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&sh.full[stage]);
      ++step;
    }
    more = run.next(sh.segments, segments, p.passes);
  }
}

// Epilogue and store of one row tile: lane (g, t) holds rows 2g, 2g + 1 of the weight for tokens 2t, 2t + 1.
template <int NT>
__device__ __forceinline__ void finish(const DecodeParams& p, const DecodeShared& sh,
                                       const DecodeBuffers<NT>& buffers, int segment, int tile, float scale,
                                       const float4 (&sum)[NT]) {
  const int lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
  const Segment& seg = sh.segments[segment];
  const int n = tile * kTileRows + 2 * g;
  float bias0 = 0.f, bias1 = 0.f;
  if (p.bias) {
    const int64_t at = int64_t(seg.expert) * p.n + n;
    bias0 = load_as_float(p.bias, at, p.bias_type);
    bias1 = load_as_float(p.bias, at + 1, p.bias_type);
  }
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = nt * 8 + 2 * t + i;
      if (at >= seg.count) continue;
      const int64_t row = buffers.row_list[segment][at];
      const float v0 = (i ? sum[nt].y : sum[nt].x) * scale + bias0,
                  v1 = (i ? sum[nt].w : sum[nt].z) * scale + bias1;
      if (p.act == Act::kNone) {
        store_pair(p.out, row * p.n + n, v0, v1, p.out_type);
      } else {
        store_one(p.out, (row * p.n + n) / 2, apply_gate(p.act, v0, v1, p), p.out_type);
      }
    }
  }
}

// One reducer warp: adds the partial sums of its row tiles over the K slices, in their order.
template <int NT>
__device__ __forceinline__ void reduce(const DecodeParams& p, DecodeShared& sh,
                                       const DecodeBuffers<NT>& buffers, int segments) {
  const int lane = threadIdx.x % 32, which = threadIdx.x / 32 - kComputeWarps;
  const int stage_size = buffers.stage_count(p);
  Run run{};
  bool more = run.open(sh.segments, segments, p.passes);
  uint32_t count = 0;
  while (more) {
    const float scale = p.global_scale[sh.segments[run.segment].expert];
    const int rows = run.end - run.begin;
    for (int step = 0; step < rows; step += p.row_warps, ++count) {
      const uint32_t stage = count % buffers.kRing;
      barrier_wait(&sh.full[stage], (count / buffers.kRing) & 1);
      for (int r = (which - step) & (kReduceWarps - 1); r < min(p.row_warps, rows - step);
           r += kReduceWarps) {
        const float4* from = buffers.ring + stage * stage_size + r * p.k_warps * NT * 32 + lane;
        float4* kept = buffers.sums + (step + r) * NT * 32 + lane;
        float4 sum[NT];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) sum[nt] = run.pass ? kept[nt * 32] : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
        for (int w = 0; w < p.k_warps; ++w) {
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            const float4 v = from[(w * NT + nt) * 32];
            sum[nt].x += v.x, sum[nt].y += v.y, sum[nt].z += v.z, sum[nt].w += v.w;
          }
        }
        if (run.pass + 1 == p.passes) {
          finish(p, sh, buffers, run.segment, run.begin + step + r, scale, sum);
        } else {
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) kept[nt * 32] = sum[nt];
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&sh.empty[stage]);
    }
    more = run.next(sh.segments, segments, p.passes);
  }
}

template <DType kType, int NT>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& sh = *reinterpret_cast<DecodeShared*>(memory);
  const DecodeBuffers<NT> buffers(p, memory + sizeof(DecodeShared));
  const int warp = threadIdx.x / 32;
  if (!p.early) wait_previous_kernel();
  if (threadIdx.x == 0) {
    for (int i = 0; i < buffers.kRing; ++i) {
      barrier_init(&sh.full[i], p.k_warps * p.row_warps);
      barrier_init(&sh.empty[i], kReduceWarps);
    }
  }
  const int segments = plan<NT>(p, sh, buffers);
  if (!p.early) release_next_kernel();
  if (warp >= kComputeWarps) {
    if (p.early) wait_previous_kernel();
    clear_rows(p, sh);
    reduce<NT>(p, sh, buffers, segments);
  } else if (warp < p.k_warps * p.row_warps) {
    compute<kType, NT>(p, sh, buffers, segments);
  } else if (p.early) {
    wait_previous_kernel();
  }
  if (p.early) release_next_kernel();
}

}  // namespace fp4::sm90
