// Linear layers of few rows, bound by memory: out_i = linear(x or its RMS norm, w_i, bias_i) (+ residual).
//
// A tile is 16 rows of a weight. The tiles of all weights of a launch are numbered one after another. In each
// round a cluster takes row_warps tiles. Its blocks split K; within a block, the warps of the same tile split
// K again. A warp streams its part of a tile from global memory through its ring in shared memory and
// multiplies it as the A operand of mma.sync. The rows of x are in shared memory as the B operand; each block
// has its part of K. The partial sums of a tile go to the shared memory of one block of the cluster. It adds
// them in a fixed order, applies the epilogue, and stores the results while the next round is multiplied. The
// result does not depend on timing.
//
// x in shared memory has the order in which the lanes read a weight (linear_weights.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "../device/launch.cuh"
#include "../device/linears.h"
#include "../device/types.cuh"
#include "linear_weights.cuh"
#include "ptx_sm90.cuh"

namespace fp4::sm90 {

constexpr int kLinearThreads = 32 * kLinearWarps;

// ---- 16-bit values ----

template <Element kElement>
struct Half;
template <>
struct Half<Element::kBFloat16> {
  using One = __nv_bfloat16;
  using Two = __nv_bfloat162;
  static __device__ __forceinline__ float2 floats(uint32_t w) {
    return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u));
  }
  static __device__ __forceinline__ Two pair(float a, float b) { return __floats2bfloat162_rn(a, b); }
  static __device__ __forceinline__ One one(float a) { return __float2bfloat16_rn(a); }
  static __device__ __forceinline__ float to_float(One a) { return __bfloat162float(a); }
};
template <>
struct Half<Element::kFloat16> {
  using One = __half;
  using Two = half2;
  static __device__ __forceinline__ float2 floats(uint32_t w) {
    return __half22float2(reinterpret_cast<const half2&>(w));
  }
  static __device__ __forceinline__ Two pair(float a, float b) { return __floats2half2_rn(a, b); }
  static __device__ __forceinline__ One one(float a) { return __float2half_rn(a); }
  static __device__ __forceinline__ float to_float(One a) { return __half2float(a); }
};

// ---- a launch's tiles ----

struct LinearTile {
  int which, tile;  // number of the weight, and of the tile in it

  __device__ __forceinline__ LinearTile(const LinearsParams& p, int all) {
    which = (all >= p.weight[0].tiles_end) + (all >= p.weight[1].tiles_end);
    tile = which == 0 ? all : all - p.weight[which - 1].tiles_end;
  }
};

// The biases of a weight's rows n and n + 1. The second row may not exist.
__device__ __forceinline__ float2 linear_bias(const LinearsParams& p, const LinearWeight& w, int n) {
  float2 bias = make_float2(0.f, 0.f);
  if (w.bias) {
    bias.x = load_as_float(w.bias, n, p.bias_type);
    if (n + 1 < w.n) bias.y = load_as_float(w.bias, n + 1, p.bias_type);
  }
  return bias;
}

// The scales of a weight's rows n and n + 1.
__device__ __forceinline__ float2 linear_scale(const LinearWeight& w, int n) {
  return make_float2(w.scale[n], n + 1 < w.n ? w.scale[n + 1] : 1.f);
}

// Stores the results a and b of a weight's rows n and n + 1 for token m.
template <class Weights>
__device__ __forceinline__ void store_pair(const LinearsParams& p, const LinearWeight& w, int m, int n,
                                           float a, float b) {
  using H = Half<Weights::kElement>;
  const int64_t to = int64_t(m) * w.n + n;
  auto* out = static_cast<typename H::One*>(w.out) + to;
  const auto* residual = static_cast<const typename H::One*>(p.residual) + to;
  if (w.n % 2 == 0) {
    typename H::Two pair = H::pair(a, b);
    if (p.residual) pair = __hadd2_rn(pair, *reinterpret_cast<const typename H::Two*>(residual));
    *reinterpret_cast<typename H::Two*>(out) = pair;
  } else {
    if (p.residual) a = H::to_float(H::one(a)) + H::to_float(residual[0]);
    out[0] = H::one(a);
    if (n + 1 < w.n) {
      if (p.residual) b = H::to_float(H::one(b)) + H::to_float(residual[1]);
      out[1] = H::one(b);
    }
  }
}

// Stores rows n and n + 1 of the weight for tokens m and m + 1.
template <class Weights>
__device__ __forceinline__ void store_linear(const LinearsParams& p, int tile, int column,
                                             const float4& sum) {
  const int lane = threadIdx.x % 32, m = column * 8 + lane % 4 * 2;
  const LinearTile at(p, tile);
  const LinearWeight& w = p.weight[at.which];
  const int n = at.tile * 16 + lane / 4 * 2;
  if (n >= w.n) return;
  const float2 bias = linear_bias(p, w, n);
  const float2 scale = Weights::kScaled ? linear_scale(w, n) : make_float2(1.f, 1.f);
  const float values[2][2] = {{sum.x, sum.z}, {sum.y, sum.w}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (m + i >= p.rows) return;
    store_pair<Weights>(p, w, m + i, n, values[i][0] * scale.x + bias.x, values[i][1] * scale.y + bias.y);
  }
}

// ---- x: the block's part of K as B operands ----

// A thread copies 32 consecutive values of a row at a time, in four pieces of 16 bytes. Later the words
// number i of the four pieces are put together: a lane multiplies these.
template <class Weights, int kColumns>
struct LinearRows {
  using H = Half<Weights::kElement>;
  static constexpr int kStepK = kLinearStepK;
  uint4* fragments;  // [steps][kColumns][step's k / 32][lanes]
  int lanes, row_bits, first, count, lane, warp, g, t, sub;

  __device__ __forceinline__ LinearRows(const LinearsParams& p, uint4* memory, int first, int count)
      : fragments(memory), first(first), count(count) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane_bits = kColumns > 1 ? 5 : p.lane_bits;
    lanes = 1 << lane_bits, row_bits = lane_bits - 2;
    t = lane % 4, g = lane / 4 & ((1 << row_bits) - 1), sub = lane >> lane_bits;
  }

  // Calls f(k, to) for each 32 values of this thread: k of the first value, and the place of their fragments.
  // All values belong to one row.
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) const {
    const int column = warp % kColumns, each = 8 >> row_bits;  // pairs of steps: a quad copies one
#pragma unroll 2
    for (int i = warp / kColumns; i * each * 2 < count; i += kLinearWarps / kColumns) {
      const int step = (i * each + sub) * 2 + t / 2;
      if (step < count)
        f((first + step) * kStepK + t % 2 * 32,
          fragments + (step * kColumns + column) * (kStepK / 32) * lanes + 4 * g);
    }
  }
  __device__ __forceinline__ int row() const { return warp % kColumns * 8 + g; }
  __device__ __forceinline__ int place(int piece) const { return t % 2 * lanes + piece; }

  static __device__ __forceinline__ uint32_t added(uint32_t a, uint32_t b) {
    const typename H::Two sum =
        __hadd2_rn(reinterpret_cast<const typename H::Two&>(a), reinterpret_cast<const typename H::Two&>(b));
    return reinterpret_cast<const uint32_t&>(sum);
  }

  // Copies the norm's weight to `norm`.
  __device__ __forceinline__ void bring_norm(const LinearsParams& p, uint4* norm) const {
    const auto* from = static_cast<const uint16_t*>(p.norm_weight) + first * kStepK;
    for (int i = threadIdx.x; i * 8 < count * kStepK; i += kLinearThreads) {
      const bool there = first * kStepK + i * 8 < p.k;
      copy_16(smem_address(norm + i), there ? from + i * 8 : from, there);
    }
  }

  // Loads this thread's values of x, and adds the addend. `sum`: gets the sums in plain order, or null. These
  // are no asynchronous copies: they would arrive after all weights that were requested before.
  __device__ __forceinline__ void load(const LinearsParams& p, void* sum) const {
    if (row() >= p.rows) return;
    const int64_t at = int64_t(row()) * p.k;
    const auto* x = static_cast<const typename H::One*>(p.x) + at;
    const auto* addend = p.addend ? static_cast<const typename H::One*>(p.addend) + at : nullptr;
    auto* const out = static_cast<typename H::One*>(sum) + at;
    for_each([&](int k, uint4* to) {
      uint4 v[4], w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = k + 8 * i < p.k;
        v[i] = there ? *reinterpret_cast<const uint4*>(x + k + 8 * i) : make_uint4(0, 0, 0, 0);
        if (addend)
          w[i] = there ? *reinterpret_cast<const uint4*>(addend + k + 8 * i) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (addend)
          v[i] = make_uint4(added(v[i].x, w[i].x), added(v[i].y, w[i].y), added(v[i].z, w[i].z),
                            added(v[i].w, w[i].w));
        to[place(i)] = v[i];
        if (sum && k + 8 * i < p.k) *reinterpret_cast<uint4*>(out + k + 8 * i) = v[i];
      }
    });
  }

  // The sum of the squares of this thread's values. Each piece has a sum, so that these do not wait for one
  // another.
  __device__ __forceinline__ float squares() const {
    float sums[4] = {};
    for_each([&](int, uint4* to) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 v = to[place(i)];
        for (const uint32_t w : {v.x, v.y, v.z, v.w}) {
          const float2 f = H::floats(w);
          sums[i] += f.x * f.x;
          sums[i] += f.y * f.y;
        }
      }
    });
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  // Adds up the values of all lanes of the warp with this lane's row.
  __device__ __forceinline__ float sum_of_row(float sum) const {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    for (int d = lanes; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
  }

  // Returns 1 / the root mean square of this thread's row. `stats` [blocks][warps][8] gets the sums of all
  // warps of the cluster, and `arrived` counts their bytes. A single block does not use it.
  __device__ __forceinline__ float norm_scale(const LinearsParams& p, float* stats, uint32_t arrived,
                                              int rank) const {
    const int blocks = 1 << p.config.cluster_bits;
    float sum = sum_of_row(squares());
    if (t == 0 && sub == 0) {
      float* const to = stats + (rank * kLinearWarps + warp) * 8 + g;
      if (blocks == 1) *to = sum;
      for (int r = 0; blocks > 1 && r < blocks; ++r) store_cluster(smem_address(to), arrived, r, sum);
    }
    if (blocks > 1) {
      barrier_wait(arrived, 0);
    } else {
      __syncthreads();
    }
    sum = 0.f;
    for (int i = sub * 4 + t; i < blocks * kLinearWarps / kColumns; i += 128 / lanes)
      sum += stats[(i * kColumns + warp % kColumns) * 8 + g];
    return rsqrtf(sum_of_row(sum) / p.k + p.eps);
  }

  static __device__ __forceinline__ uint32_t normalized(uint32_t w, float scale, uint32_t weight,
                                                        bool in_float) {
    const float2 f = H::floats(w), g = H::floats(weight);
    const typename H::Two rounded =
        __hmul2_rn(H::pair(f.x * scale, f.y * scale), reinterpret_cast<const typename H::Two&>(weight));
    const typename H::Two v = in_float ? H::pair(f.x * scale * g.x, f.y * scale * g.y) : rounded;
    return reinterpret_cast<const uint32_t&>(v);
  }

  // Normalises the rows in place and puts them in the order of the fragments. `weight`: the norm's weight
  // from the block's first k on, or null. `normed`: gets the normalised rows in plain order, or null.
  __device__ __forceinline__ void finish(const LinearsParams& p, float scale, const uint4* weight,
                                         void* normed) const {
    if (row() >= p.rows) return;
    auto* const out = static_cast<typename H::One*>(normed) + int64_t(row()) * p.k;
    for_each([&](int k, uint4* to) {
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = to[place(i)];
        if (weight) {
          const uint4 by = weight[(k - first * kStepK) / 8 + i];
          const bool in_float = p.norm_in_float;
          v[i] = make_uint4(
              normalized(v[i].x, scale, by.x, in_float), normalized(v[i].y, scale, by.y, in_float),
              normalized(v[i].z, scale, by.z, in_float), normalized(v[i].w, scale, by.w, in_float));
          if (normed && k + 8 * i < p.k) *reinterpret_cast<uint4*>(out + k + 8 * i) = v[i];
        }
      }
      uint4 w[4];
      Weights::arrange(v, w);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[place(i)] = w[i];
    });
  }
};

// ---- the kernel ----

struct alignas(16) LinearsShared {
  uint64_t full[2], stats;
};
static_assert(sizeof(LinearsShared) == 16 * kLinearsHead);

// Waits until at most depth - kLess groups are in flight.
template <int kLess>
__device__ __forceinline__ void copy_wait_but(int depth) {
  static_assert(kLinearDepths[0] == 8 && kLinearDepths[1] == 6 && kLinearDepths[2] == 4);
  if (depth == 8) {
    copy_wait<8 - kLess>();
  } else if (depth == 6) {
    copy_wait<6 - kLess>();
  } else if (depth == 4) {
    copy_wait<4 - kLess>();
  } else {
    copy_wait<3 - kLess>();
  }
}

// kColumns: tokens / 8.
template <class Weights, int kColumns>
__global__ void __launch_bounds__(kLinearThreads, 2) linears_kernel(const __grid_constant__ LinearsParams p) {
  using Copies = typename Weights::Copies;
  constexpr int kSlot = kLinearSlot;
  const int depth = p.config.depth;
  FP4_DYNAMIC_SHARED(uint4, 16, memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int cluster_bits = p.config.cluster_bits, row_warp_bits = p.config.row_warp_bits;
  const int blocks = 1 << cluster_bits, row_warps = 1 << row_warp_bits;
  const int k_warp_bits = kLinearWarpBits - row_warp_bits, slots = blocks << k_warp_bits;
  const int rank = blocks > 1 ? cluster_rank() : 0, cluster = blockIdx.x >> cluster_bits;
  const int row_warp = warp & (row_warps - 1), k_warp = warp >> row_warp_bits;
  // first and count are the block's steps of K; begin and own are the warp's among these.
  const int first = p.steps * rank >> cluster_bits;
  const int count = (p.steps * (rank + 1) >> cluster_bits) - first;
  const int begin = count * k_warp >> k_warp_bits, own = (count * (k_warp + 1) >> k_warp_bits) - begin;
  const int stride = p.config.clusters << row_warp_bits;  // number of tiles in a round
  const int first_tile = (cluster << row_warp_bits) + row_warp;

  // These barriers complete when the partial sums of a round have arrived, and those of the norm. A single
  // block needs none.
  auto& sh = *reinterpret_cast<LinearsShared*>(memory);
  uint32_t wanted = 0;  // bytes of a round's sums
  if (blocks > 1) {
    const int items = ((kColumns << row_warp_bits) - rank + blocks - 1) >> cluster_bits;
    wanted = items * slots * 32 * sizeof(float4);
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : sh.full) barrier_init(smem_address(&barrier), 1);
      barrier_init(smem_address(&sh.stats), 1);
      barrier_init_fence();
      for (uint64_t& barrier : sh.full) barrier_expect_bytes(smem_address(&barrier), wanted);
      barrier_expect_bytes(smem_address(&sh.stats), blocks << (kLinearWarpBits + p.lane_bits));
    }
    __syncwarp();
    cluster_arrive();
  }

  const LinearRows<Weights, kColumns> x(p, memory + p.x_at, first * Copies::kSteps, count * Copies::kSteps);
  uint4* const norm = memory + p.norm_at;
  const uint32_t ring = smem_address(memory + kLinearsHead) + warp * depth * kSlot;
  Copies ahead;  // the step that is requested next
  int ahead_tile = first_tile, ahead_left = 0;
  const auto aim = [&] {
    if (ahead_tile >= p.tiles) return;
    const LinearTile at(p, ahead_tile);
    ahead = Copies::at(p, p.weight[at.which], at.tile, first + begin);
    ahead_left = own;
    ahead_tile += stride;
  };
  // Makes a group of copies for each step, even if there is nothing left to copy.
  const auto request = [&](uint32_t slot) {
    if (ahead_left == 0) aim();
    if (ahead_left > 0) {
      ahead.fetch(p, slot);
      ahead.advance();
      --ahead_left;
    }
    copy_commit();
  };
  const auto begin_requests = [&] {
    for (int j = 0; j < depth; ++j) request(ring + j * kSlot);
  };

  if (!p.early) wait_previous_kernel();
  if (p.norm_weight) x.bring_norm(p, norm);
  copy_commit();
  if (p.early) {
    begin_requests();
    wait_previous_kernel();
  }
  release_next_kernel();
  x.load(p, cluster == 0 ? p.sum : nullptr);
  if (!p.early) begin_requests();
  copy_wait_but<0>(depth);  // the norm's weight has arrived

  if (blocks > 1) cluster_wait();  // all blocks have begun
  float scale = 1.f;
  if (p.norm_weight)
    scale = x.norm_scale(p, reinterpret_cast<float*>(memory + p.stats_at), smem_address(&sh.stats), rank);
  __syncthreads();  // the norm's weight has arrived
  x.finish(p, scale, p.norm_weight ? norm : nullptr, cluster == 0 ? p.normed : nullptr);
  __syncthreads();

  float4* const sums = reinterpret_cast<float4*>(memory + p.sums_at);  // [2][items / blocks][slots][32]
  // Adds up and stores the cluster's results of a round. Each block handles its part of the items.
  const auto finish = [&](int round) {
    const float4* const from = sums + (round & 1) * p.sums_size + lane;
    for (int i = (warp << cluster_bits) + rank; i < kColumns << row_warp_bits;
         i += kLinearWarps << cluster_bits) {
      const int tile = round * stride + (cluster << row_warp_bits) + i / kColumns;
      if (tile >= p.tiles || i % kColumns * 8 >= p.rows) continue;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
      for (int s = 0; s < slots; ++s) {
        const float4 v = from[((i >> cluster_bits) * slots + s) * 32];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      store_linear<Weights>(p, tile, i % kColumns, sum);
    }
  };

  // Waits for the sums of a round, and prepares the barrier for the sums of the round after the next.
  const auto receive = [&](int round) {
    if (wanted == 0) return;
    const uint32_t full = smem_address(&sh.full[round & 1]);
    barrier_wait(full, round / 2 & 1);
    if (threadIdx.x == 0 && round + 2 < p.rounds) barrier_expect_bytes(full, wanted);
  };

  const int frag_lane = kColumns > 1 ? lane : (lane / 4 & ((1 << x.row_bits) - 1)) * 4 + lane % 4;
  const int lanes = kColumns > 1 ? 32 : x.lanes,
            step_size = Copies::kSteps * kColumns * (kLinearStepK / 32) * lanes;
  const uint4* const fragments = x.fragments + begin * step_size + frag_lane;
  uint32_t slot = ring;
  for (int round = 0; round < p.rounds; ++round) {
    float4 acc[kColumns];
#pragma unroll
    for (float4& a : acc) a = make_float4(0.f, 0.f, 0.f, 0.f);
    const int tile = first_tile + round * stride;
    if (tile < p.tiles) {
      const uint4* at = fragments;
      for (int left = own; left > 0; --left, at += step_size) {
        copy_wait_but<1>(depth);
        __syncwarp();
        Weights::template multiply<kColumns>(slot, at, lanes, acc);
        __syncwarp();  // all lanes have read the slot
        request(slot);
        slot = slot + kSlot == ring + depth * kSlot ? ring : slot + kSlot;
      }
    }
    if (slots == 1) {
      if (tile < p.tiles) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) store_linear<Weights>(p, tile, c, acc[c]);
      }
      continue;
    }
    if (blocks == 1 && round > 0) {
      __syncthreads();
      finish(round - 1);
    }
    // By now all warps have read the data of the round before the last in this buffer.
    if (blocks > 1 && round > 1) cluster_wait();
    float4* const to = sums + (round & 1) * p.sums_size + (rank << k_warp_bits | k_warp) * 32 + lane;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = row_warp * kColumns + c;
      float4* const there = to + (i >> cluster_bits) * slots * 32;
      if (blocks == 1) {
        *there = acc[c];
      } else {
        store_cluster(smem_address(there), smem_address(&sh.full[round & 1]), i & (blocks - 1), acc[c]);
      }
    }
    if (blocks > 1 && round > 0) {
      receive(round - 1);
      finish(round - 1);
      if (round + 1 < p.rounds) cluster_arrive();
    }
  }
  if (slots == 1) return;
  if (blocks > 1) {
    receive(p.rounds - 1);
  } else {
    __syncthreads();
  }
  finish(p.rounds - 1);
}

}  // namespace fp4::sm90
