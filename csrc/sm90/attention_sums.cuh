// A block's place in attention, and the sums over some of the keys, which are added in a fixed order, first
// in the block, then in the cluster. A sink of a head is added last.
#pragma once

#include <cfloat>

#include "../device/attention.h"
#include "../device/launch.cuh"
#include "../device/types.cuh"
#include "ptx_sm90.cuh"

namespace fp4::sm90::attention {

using namespace device;

constexpr float kLog2E = 1.4426950408889634f;

// The most blocks that divide the keys of a head. With four warps in each, they take 1024 keys at a time.
constexpr int most_splits(int size) { return size / 8; }

// ---- places ----

// The query heads of a block, which share keys, and its rank among the blocks that divide the keys.
struct Place {
  int splits, rank, sequence, kv_head, part, heads, head;  // head: the first one, in its sequence
  int64_t first;                                           // the first one, over all sequences

  __device__ __forceinline__ Place(const AttentionParams& p, int most_heads) {
    splits = 1 << p.split_bits, rank = splits > 1 ? cluster_rank() : 0;
    const int cluster = blockIdx.x >> p.split_bits, group = p.q_heads / p.kv_heads;
    part = cluster % p.parts;
    kv_head = cluster / p.parts % p.kv_heads, sequence = cluster / p.parts / p.kv_heads;
    heads = min(most_heads, group - part * most_heads);
    head = kv_head * group + part * most_heads;
    first = int64_t(sequence) * p.q_heads + head;
  }

  // Block h % splits adds up head h.
  __device__ __forceinline__ int own(int bits) const { return (heads - rank + splits - 1) >> bits; }

  // The cache's rows before those of these heads.
  __device__ __forceinline__ int64_t cache(const AttentionParams& p) const {
    return (int64_t(sequence) * p.kv_heads + kv_head) * p.length;
  }

  __device__ __forceinline__ const bool* mask(const AttentionParams& p) const {
    return p.mask ? p.mask + sequence * p.mask_stride : nullptr;
  }
};

// ---- sums over some of the keys ----

// The largest score, and the sum of the weights: the weight of a key is 2^(its score - most).
struct alignas(8) Weights {
  float most, total;
};

// Four elements of the weighted sum of the values, with the weights' sum.
struct Sum {
  Weights of = {-FLT_MAX, 0.f};
  float4 values = {};

  // Adds `count` sums, which lie side by side. All lanes have the same `weights`.
  __device__ __forceinline__ static Sum of_all(const Weights* weights, int stride, const float4* values,
                                               int value_stride, int count, bool own) {
    Sum sum;
    for (int i = 0; i < count; ++i) sum.of.most = fmaxf(sum.of.most, weights[i * stride].most);
    for (int i = 0; i < count; ++i) {
      const Weights w = weights[i * stride];
      const float by = exp2f(w.most - sum.of.most);
      sum.of.total += by * w.total;
      if (!own) continue;
      const float4 v = values[i * value_stride];
      sum.values.x += by * v.x, sum.values.y += by * v.y;
      sum.values.z += by * v.z, sum.values.w += by * v.w;
    }
    return sum;
  }

  // Adds a weight that no value has. `sink` is its score.
  __device__ __forceinline__ void add_sink(float sink) {
    const float most = fmaxf(of.most, sink), by = exp2f(of.most - most);
    of = {most, by * of.total + exp2f(sink - most)};
    values.x *= by, values.y *= by, values.z *= by, values.w *= by;
  }
};

// Each warp of a block has a sum for each of `kHeads` heads.
template <int kSize, int kHeads, int kWarps>
struct SharedSums {
  // Rows for the heads that this block adds up. Row h / splits * splits + r has block r's sum of head h.
  static constexpr int kArrived = kHeads > most_splits(kSize) ? kHeads : most_splits(kSize);

  float4 values[kWarps][kHeads][kSize / 4];
  float4 arrived[kArrived][kSize / 4];
  Weights weights[kWarps][kHeads];
  float4 arrived_weights[kArrived];
  float sinks[kHeads];
  uint64_t full;
};

template <class Half>
struct alignas(8) Four {
  Half values[4];
};

template <class Half>
__device__ __forceinline__ void store(void* out, int64_t at, const Sum& sum) {
  const float total = sum.of.total;
  const auto one = [&](float v) { return Half(total == 0.f ? 0.f : v / total); };  // no key is seen: 0
  static_cast<Four<Half>*>(out)[at] = {
      {one(sum.values.x), one(sum.values.y), one(sum.values.z), one(sum.values.w)}};
}

// Before the kernel before this one has ended: the barrier completes when the sums of all blocks have
// arrived.
template <int kSize, int kHeads, int kWarps>
__device__ __forceinline__ void begin(SharedSums<kSize, kHeads, kWarps>& sh, const Place& at,
                                      int split_bits) {
  if (at.splits == 1) return;
  if (threadIdx.x == 0) {
    barrier_init(smem_address(&sh.full), 1);
    barrier_init_fence();
    barrier_expect_bytes(smem_address(&sh.full),
                         at.own(split_bits) * at.splits * (kSize / 4 + 1) * sizeof(float4));
  }
  __syncwarp();
  cluster_arrive();
}

// Head h's sink, in thread h. It is computed with at the end, so that nothing waits for it here.
template <class Half>
__device__ __forceinline__ Half load_sink(const void* sinks, const Place& at) {
  return sinks && threadIdx.x < at.heads ? static_cast<const Half*>(sinks)[at.head + threadIdx.x] : Half(0.f);
}

// Adds up what the block's warps have written to `sh`, and writes the results.
template <class Half, int kSize, int kHeads, int kWarps>
__device__ __forceinline__ void finish(SharedSums<kSize, kHeads, kWarps>& sh, const AttentionParams& p,
                                       const Place& at, bool sunk, Half sink) {
  constexpr int kLanes = kSize / 4;  // lanes that have four elements each
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x < kHeads) sh.sinks[threadIdx.x] = float(sink) * kLog2E;
  __syncthreads();
  if (at.splits > 1) cluster_wait();  // all blocks have begun
  for (int h = warp; h < at.heads; h += kWarps) {
    Sum sum = Sum::of_all(&sh.weights[0][h], kHeads, &sh.values[0][h][lane], kHeads * kLanes, kWarps,
                          lane < kLanes);
    if (at.splits == 1) {
      if (sunk) sum.add_sink(sh.sinks[h]);
      if (lane < kLanes) store<Half>(p.out, (at.first + h) * kLanes + lane, sum);
      continue;
    }
    const uint32_t to = h & (at.splits - 1), full = smem_address(&sh.full), row = h - to + at.rank;
    if (lane < kLanes) store_cluster(smem_address(&sh.arrived[row][lane]), full, to, sum.values);
    if (lane == 0)
      store_cluster(smem_address(&sh.arrived_weights[row]), full, to,
                    make_float4(sum.of.most, sum.of.total, 0.f, 0.f));
  }
  if (at.splits == 1 || at.own(p.split_bits) == 0) return;
  barrier_wait(smem_address(&sh.full), 0);
  for (int h = at.rank + warp * at.splits; h < at.heads; h += kWarps * at.splits) {
    const int row = h - at.rank;
    Sum sum = Sum::of_all(reinterpret_cast<const Weights*>(&sh.arrived_weights[row]), 2,
                          &sh.arrived[row][lane], kLanes, at.splits, lane < kLanes);
    if (sunk) sum.add_sink(sh.sinks[h]);
    if (lane < kLanes) store<Half>(p.out, (at.first + h) * kLanes + lane, sum);
  }
}

}  // namespace fp4::sm90::attention
