// Linear layers of few rows, bound by memory: out_i = linear(x or its RMS norm, w_i, bias_i) (+ residual).
//
// A tile is 16 rows of a weight. The tiles of all weights of a launch are numbered one after another. In each
// round a cluster takes a group of tiles. Its blocks split K; within a block, the warps take equal parts of
// the group's tiles. A warp streams its part from global memory through its ring in shared memory and
// multiplies it as the A operand of mma.sync. The rows of x are in shared memory as the B operand; each block
// has its part of K. The partial sums of a tile go to the shared memory of one block of the cluster. It adds
// them in a fixed order, applies the epilogue, and stores the results while the next round is multiplied. The
// result does not depend on timing.
//
// x in shared memory has the order in which the lanes read a weight (linear_weights.cuh), or, if there are
// many rows and no norm, its own.
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

// Points at the fragments that a lane multiplies in a step.
struct PreparedRow {
  const uint4* at;
  int place;        // among the four lanes of a quad
  int lanes, step;  // of a fragment, and of a step

  // Returns 32 of K of the lane's row of eight: number h of them.
  template <int kColumns>
  __device__ __forceinline__ uint4 load(int column, int h) const {
    return at[((h / 2 * kColumns + column) * 2 + h % 2) * lanes + (place ^ h)];
  }
  __device__ __forceinline__ void advance(int steps) { at += steps * step, place ^= steps % 2 * 2; }
};

// A thread copies 32 consecutive values of a row at a time, in four pieces of 16 bytes. Later the words
// number i of the four pieces are put together: a lane multiplies these. The four lanes of a quad have the
// pieces in different orders, so that they use different banks.
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
  __device__ __forceinline__ int place(int piece) const { return t % 2 * lanes + (piece ^ t); }

  __device__ __forceinline__ PreparedRow of_lane(const LinearsParams&) const {
    const int all = kColumns > 1 ? 32 : lanes;
    return {fragments + (lane / 4 & ((1 << row_bits) - 1)) * 4, lane % 4, all,
            kColumns * (kStepK / 32) * all};
  }

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

// ---- x as it is ----

template <class Weights>
struct CopiedRow {
  const uint8_t* at;
  int eight;  // bytes of eight rows

  template <int kColumns>
  __device__ __forceinline__ uint4 load(int column, int h) const {
    return Weights::load_copied(at + column * eight + h * 64);
  }
  __device__ __forceinline__ void advance(int steps) { at += steps * kLinearStepK * 2; }
};

// The copy engine copies the block's part of K of each row. `arrived` counts the bytes.
template <class Weights>
struct LinearCopies {
  uint8_t* rows;
  int first, count;  // of the block's k

  __device__ __forceinline__ LinearCopies(const LinearsParams& p, uint4* memory, int first_step, int steps)
      : rows(reinterpret_cast<uint8_t*>(memory)), first(first_step * kLinearStepK) {
    count = min(steps * kLinearStepK, p.k - first);
  }

  // Warp 0 starts the copies. A weight may end in the middle of a step; there x becomes zero.
  __device__ __forceinline__ void start(const LinearsParams& p, uint32_t arrived) const {
    const int bytes = count * 2;
    if (threadIdx.x == 0) barrier_expect_bytes(arrived, p.rows * bytes);
    __syncwarp();
    const auto* from = static_cast<const uint8_t*>(p.x) + int64_t(first) * 2;
    for (int row = threadIdx.x; threadIdx.x < 32 && bytes > 0 && row < p.rows; row += 32)
      copy_bytes(smem_address(rows + row * p.row_bytes), from + int64_t(row) * p.k * 2, bytes, arrived);
    if (count % (Weights::Copies::kSteps * kLinearStepK) == 0) return;
    for (int i = threadIdx.x; i < p.rows * 8; i += kLinearThreads)
      *reinterpret_cast<uint4*>(rows + i / 8 * p.row_bytes + bytes + i % 8 * 16) = make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ CopiedRow<Weights> of_lane(const LinearsParams& p) const {
    return {rows + Weights::copied_at(p.row_bytes), 8 * p.row_bytes};
  }
};

// ---- the kernel ----

struct alignas(16) LinearsShared {
  uint64_t full[2], stats, rows;
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

// kColumns: tokens / 8. kCopied: x is copied as it is.
template <class Weights, int kColumns, bool kCopied>
__global__ void __launch_bounds__(kLinearThreads, kColumns < 8 ? 2 : 1)
    linears_kernel(const __grid_constant__ LinearsParams p) {
  using Copies = typename Weights::Copies;
  constexpr int kChains = kColumns < 4 ? 4 / kColumns : 1;
  constexpr int kSlot = kLinearSlot;
  const int depth = p.config.depth;
  FP4_DYNAMIC_SHARED(uint4, 16, memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int cluster_bits = p.config.cluster_bits, blocks = 1 << cluster_bits, group = p.config.group;
  const int rank = blocks > 1 ? cluster_rank() : 0, cluster = blockIdx.x >> cluster_bits;
  const int first = p.steps * rank >> cluster_bits;  // the block's steps of K
  const int count = (p.steps * (rank + 1) >> cluster_bits) - first;
  // The warp has a part of one or two tiles of each group: of tile own_tile from step own_begin to own_end,
  // and of the next to next_end.
  const int own_tile = warp * group / kLinearWarps, from = warp * group % kLinearWarps, to = from + group;
  const int parts = to > kLinearWarps ? 2 : 1;
  const int own_begin = count * from / kLinearWarps, own_end = count * min(to, kLinearWarps) / kLinearWarps;
  const int next_end = count * (to - kLinearWarps) / kLinearWarps;
  const int stride = p.config.clusters * group, first_tile = cluster * group;  // of a round

  // These barriers complete when the partial sums of a round have arrived, those of the norm, and copied
  // rows. A single block needs none but the last.
  auto& sh = *reinterpret_cast<LinearsShared*>(memory);
  const uint32_t wanted = blocks > 1 ? p.sums_bytes[rank] : 0;  // bytes of a round's sums
  if (kCopied && threadIdx.x == 0) {
    barrier_init(smem_address(&sh.rows), 1);
    barrier_init_fence();
  }
  if (blocks > 1) {
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

  using Rows = std::conditional_t<kCopied, LinearCopies<Weights>, LinearRows<Weights, kColumns>>;
  const Rows x(p, memory + p.x_at, first * Copies::kSteps, count * Copies::kSteps);
  uint4* const norm = memory + p.norm_at;
  const uint32_t ring = smem_address(memory + kLinearsHead) + warp * depth * kSlot;
  Copies ahead;  // the step that is requested next
  int ahead_round = first_tile, ahead_part = 0, ahead_left = 0;
  const auto aim = [&] {
    const int tile = ahead_round + own_tile + ahead_part, begin = ahead_part ? 0 : own_begin;
    if (tile < p.tiles) {
      const LinearTile at(p, tile);
      ahead = Copies::at(p, p.weight[at.which], at.tile, first + begin);
      ahead_left = (ahead_part ? next_end : own_end) - begin;
    }
    if (++ahead_part == parts) ahead_part = 0, ahead_round += stride;
  };
  // Makes a group of copies for each step, even if there is nothing left to copy.
  const auto request = [&](uint32_t slot) {
    while (ahead_left == 0 && ahead_round < p.tiles) aim();
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
  if constexpr (!kCopied) {
    if (p.norm_weight) x.bring_norm(p, norm);
    copy_commit();
  }
  if (p.early) {
    begin_requests();
    wait_previous_kernel();
  }
  release_next_kernel();
  if constexpr (kCopied) {
    x.start(p, smem_address(&sh.rows));
  } else {
    x.load(p, cluster == 0 ? p.sum : nullptr);
  }
  if (!p.early) begin_requests();

  if constexpr (!kCopied) copy_wait_but<0>(depth);  // the norm's weight has arrived
  if (blocks > 1) cluster_wait();                   // all blocks have begun
  if constexpr (kCopied) {
    __syncthreads();
    barrier_wait(smem_address(&sh.rows), 0);
  } else {
    float scale = 1.f;
    if (p.norm_weight)
      scale = x.norm_scale(p, reinterpret_cast<float*>(memory + p.stats_at), smem_address(&sh.stats), rank);
    __syncthreads();  // the norm's weight has arrived
    x.finish(p, scale, p.norm_weight ? norm : nullptr, cluster == 0 ? p.normed : nullptr);
    __syncthreads();
  }

  // A block gets an item, the sums of a tile for eight rows, from each warp of the cluster that multiplied a
  // part of it.
  float4* const sums = reinterpret_cast<float4*>(memory + p.sums_at);  // [2][items / blocks][slots][32]
  // Adds up and stores the cluster's results of a round. Each block handles its part of the items.
  const auto finish = [&](int round) {
    const float4* const from = sums + (round & 1) * p.sums_size + lane;
    for (int i = (warp << cluster_bits) + rank; i < kColumns * group; i += kLinearWarps << cluster_bits) {
      const int tile = first_tile + round * stride + i / kColumns;
      if (tile >= p.tiles || i % kColumns * 8 >= p.rows) continue;
      const int slots = p.warps[i / kColumns].count << cluster_bits;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
      for (int s = 0; s < slots; ++s) {
        const float4 v = from[((i >> cluster_bits) * p.slots + s) * 32];
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

  const bool whole = p.slots == 1;  // each warp multiplies whole tiles, and stores their results itself
  uint32_t slot = ring;
  // Multiplies steps begin to end of a tile by x.
  const auto multiply = [&](int begin, int end, float4(&acc)[kColumns]) {
    float4 chains[kColumns * kChains];
#pragma unroll
    for (float4& a : chains) a = make_float4(0.f, 0.f, 0.f, 0.f);
    auto rows = x.of_lane(p);
    rows.advance(begin * Copies::kSteps);
    for (int left = end - begin; left > 0; --left, rows.advance(Copies::kSteps)) {
      copy_wait_but<1>(depth);
      __syncwarp();
      Weights::template multiply<kColumns, kChains>(slot, rows, chains);
      __syncwarp();  // all lanes have read the slot
      request(slot);
      slot = slot + kSlot == ring + depth * kSlot ? ring : slot + kSlot;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      acc[c] = chains[c * kChains];
#pragma unroll
      for (int i = 1; i < kChains; ++i) {
        const float4 v = chains[c * kChains + i];
        acc[c].x += v.x, acc[c].y += v.y, acc[c].z += v.z, acc[c].w += v.w;
      }
    }
  };
  for (int round = 0; round < p.rounds; ++round) {
    if (blocks == 1 && !whole && round > 0) {
      __syncthreads();
      finish(round - 1);
    }
    // By now all warps have read the data of the round before the last in this buffer.
    if (blocks > 1 && round > 1) cluster_wait();
    float4* const to = sums + (round & 1) * p.sums_size + lane;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const int number = own_tile + part, tile = first_tile + round * stride + number;
      float4 acc[kColumns] = {};
      if (tile < p.tiles) multiply(part ? 0 : own_begin, part ? next_end : own_end, acc);
      const TileWarps warps = p.warps[number];
      const int slot = rank * warps.count + warp - warps.first;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int i = number * kColumns + c;
        float4* const there = to + ((i >> cluster_bits) * p.slots + slot) * 32;
        if (whole) {
          if (tile < p.tiles) store_linear<Weights>(p, tile, c, acc[c]);
        } else if (blocks == 1) {
          *there = acc[c];
        } else {
          store_cluster(smem_address(there), smem_address(&sh.full[round & 1]), i & (blocks - 1), acc[c]);
        }
      }
    }
    if (blocks > 1 && round > 0) {
      receive(round - 1);
      finish(round - 1);
      if (round + 1 < p.rounds) cluster_arrive();
    }
  }
  if (whole) return;
  if (blocks > 1) {
    receive(p.rounds - 1);
  } else {
    __syncthreads();
  }
  finish(p.rounds - 1);
}

}  // namespace fp4::sm90
