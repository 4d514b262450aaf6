// Attention of one token of each sequence over a cache of keys and values. Query heads that share keys are in
// one thread block, up to kMostHeads of them. Half a warp takes two keys at a time and keeps a running sum of
// values for each head. The half warps of a cluster divide the keys, in turn, so that the keys that are seen,
// often the first ones of a long cache, are spread over all. Their sums are added in a fixed order, first in
// the block, then in the cluster. A sink of a head is added last. The interface is plain C, without torch.
#include <cfloat>

#include "../device/attention.h"
#include "../device/launch.cuh"
#include "../device/types.cuh"
#include "ptx_sm90.cuh"

namespace fp4::sm90 {
namespace {

using namespace device;

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kHalves = kThreads / 16;  // half warps of a block
constexpr int kMostHeads = 4, kMostSplits = 8;
constexpr int kTogether = 2;  // keys that half a warp takes at a time
constexpr float kLog2E = 1.4426950408889634f;

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

template <int kSize, int kHeads>
struct Shared {
  float4 values[kHalves][kHeads][kSize / 4];
  float4 arrived[kHeads][kMostSplits][kSize / 4];
  Weights weights[kHalves][kHeads];
  float4 arrived_weights[kHeads][kMostSplits];
  uint64_t full;
};

// ---- heads ----

template <class Half, int kEach>
struct alignas(kEach * 2) Part {
  Half values[kEach];
};

template <class Half>
__device__ __forceinline__ void store(void* out, int64_t at, const Sum& sum) {
  const float total = sum.of.total;
  const auto one = [&](float v) { return Half(total == 0.f ? 0.f : v / total); };  // no key is seen: 0
  static_cast<Part<Half, 4>*>(out)[at] = {
      {one(sum.values.x), one(sum.values.y), one(sum.values.z), one(sum.values.w)}};
}

// The keys that half a warp has loaded.
template <class Half, int kEach>
struct Loaded {
  Part<Half, kEach> k[kTogether], v[kTogether];
  bool seen[kTogether];
};

// The running sums of half a warp: a lane has kEach elements of the values.
template <class Half, int kSize, int kHeads>
struct Running {
  static constexpr int kEach = kSize / 16;
  float q[kHeads][kEach], values[kHeads][kEach];
  Weights of[kHeads];

  __device__ __forceinline__ void add(const Loaded<Half, kEach>& keys) {
    float scores[kTogether][kHeads], v[kTogether][kEach];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      float k[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        k[e] = float(keys.k[i].values[e]);
        v[i][e] = keys.seen[i] ? float(keys.v[i].values[e]) : 0.f;
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float score = 0.f;
#pragma unroll
        for (int e = 0; e < kEach; ++e) score += q[h][e] * k[e];
        scores[i][h] = score;
      }
    }
#pragma unroll
    for (int d = 8; d > 0; d /= 2)
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
#pragma unroll
        for (int h = 0; h < kHeads; ++h) scores[i][h] += __shfl_xor_sync(~0u, scores[i][h], d);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float most = of[h].most;
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (keys.seen[i]) most = fmaxf(most, scores[i][h]);
      const float by = exp2f(of[h].most - most);
      of[h].most = most;
      of[h].total *= by;
#pragma unroll
      for (int e = 0; e < kEach; ++e) values[h][e] *= by;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const float weight = keys.seen[i] ? exp2f(scores[i][h] - most) : 0.f;
        of[h].total += weight;
#pragma unroll
        for (int e = 0; e < kEach; ++e) values[h][e] += weight * v[i][e];
      }
    }
  }
};

// ---- the kernel ----

template <class Half, int kSize, int kHeads>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(const __grid_constant__ AttentionParams p, const void* sinks) {
  constexpr int kEach = kSize / 16, kLanes = kSize / 4;  // lanes that have four elements each
  using Its = Part<Half, kEach>;
  FP4_DYNAMIC_SHARED(uint4, 16, memory);
  auto& sh = *reinterpret_cast<Shared<kSize, kHeads>*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 16, half = threadIdx.x / 16;
  const int splits = 1 << p.split_bits, rank = splits > 1 ? cluster_rank() : 0;
  const int cluster = blockIdx.x >> p.split_bits, part = cluster % p.parts;
  const int kv_head = cluster / p.parts % p.kv_heads, sequence = cluster / p.parts / p.kv_heads;
  const int group = p.q_heads / p.kv_heads, heads = min(kHeads, group - part * kHeads);
  const int64_t first = int64_t(sequence) * p.q_heads + kv_head * group + part * kHeads;  // query head

  // Block h % splits adds up head h. Its barrier completes when the sums of all blocks have arrived.
  const int own = (heads - rank + splits - 1) >> p.split_bits;
  if (splits > 1) {
    if (threadIdx.x == 0) {
      barrier_init(smem_address(&sh.full), 1);
      barrier_init_fence();
      barrier_expect_bytes(smem_address(&sh.full), own * splits * (kLanes + 1) * sizeof(float4));
    }
    __syncwarp();
    cluster_arrive();
  }
  release_next_kernel();
  wait_previous_kernel();

  static_assert(kHeads <= kWarps);  // a warp adds up one head at most
  const float sink = sinks && warp < heads
                         ? float(static_cast<const Half*>(sinks)[kv_head * group + part * kHeads + warp])
                         : 0.f;
  const int step = kHalves * splits, mine = half * splits + rank;
  const int rounds = (p.length + kTogether * step - 1) / (kTogether * step);
  const bool* const mask = p.mask ? p.mask + sequence * p.mask_stride : nullptr;
  const int64_t cache = (int64_t(sequence) * p.kv_heads + kv_head) * p.length;
  const auto* const k = static_cast<const Its*>(p.keys) + cache * 16 + t;
  const auto* const v = static_cast<const Its*>(p.values) + cache * 16 + t;
  // The mask is read two rounds ahead, keys and values one round. Those of the first round do not wait for
  // the mask.
  const auto key_of = [&](int round, int i) { return mine + (round * kTogether + i) * step; };
  const auto seen = [&](int key) { return key < p.length && (mask == nullptr || mask[key]); };
  Loaded<Half, kEach> now, next;
  bool soon[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const int key = key_of(0, i);
    now.seen[i] = seen(key), soon[i] = seen(key_of(1, i));
    now.k[i] = key < p.length ? k[int64_t(key) * 16] : Its{};
    now.v[i] = key < p.length ? v[int64_t(key) * 16] : Its{};
  }
  Running<Half, kSize, kHeads> sums;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const Its q = static_cast<const Its*>(p.q)[(first + min(h, heads - 1)) * 16 + t];
    sums.of[h] = {-FLT_MAX, 0.f};
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      sums.q[h][e] = float(q.values[e]) * (p.scale * kLog2E), sums.values[h][e] = 0.f;
  }
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int key = key_of(round + 1, i);
      next.seen[i] = soon[i], soon[i] = seen(key_of(round + 2, i));
      next.k[i] = next.seen[i] ? k[int64_t(key) * 16] : Its{};
      next.v[i] = next.seen[i] ? v[int64_t(key) * 16] : Its{};
    }
    bool any = false;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) any |= now.seen[i];
    if (__ballot_sync(~0u, any)) sums.add(now);
    now = next;
  }

#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (t == 0) sh.weights[half][h] = sums.of[h];
#pragma unroll
    for (int e = 0; e < kEach; e += 4)
      sh.values[half][h][t * (kEach / 4) + e / 4] =
          make_float4(sums.values[h][e], sums.values[h][e + 1], sums.values[h][e + 2], sums.values[h][e + 3]);
  }
  __syncthreads();
  if (splits > 1) cluster_wait();  // all blocks have begun
  for (int h = warp; h < heads; h += kWarps) {
    Sum sum = Sum::of_all(&sh.weights[0][h], kHeads, &sh.values[0][h][lane], kHeads * kLanes, kHalves,
                          lane < kLanes);
    if (splits == 1) {
      if (sinks) sum.add_sink(sink * kLog2E);
      if (lane < kLanes) store<Half>(p.out, (first + h) * kLanes + lane, sum);
      continue;
    }
    const uint32_t to = h & (splits - 1), full = smem_address(&sh.full);
    if (lane < kLanes) store_cluster(smem_address(&sh.arrived[h][rank][lane]), full, to, sum.values);
    if (lane == 0)
      store_cluster(smem_address(&sh.arrived_weights[h][rank]), full, to,
                    make_float4(sum.of.most, sum.of.total, 0.f, 0.f));
  }
  if (splits == 1 || own == 0) return;
  barrier_wait(smem_address(&sh.full), 0);
  for (int h = warp; h < heads; h += kWarps) {
    if ((h & (splits - 1)) != rank) continue;
    Sum sum = Sum::of_all(reinterpret_cast<const Weights*>(sh.arrived_weights[h]), 2, &sh.arrived[h][0][lane],
                          kLanes, splits, lane < kLanes);
    if (sinks) sum.add_sink(sink * kLog2E);
    if (lane < kLanes) store<Half>(p.out, (first + h) * kLanes + lane, sum);
  }
}

template <class Half, int kSize, int kHeads>
int launch(AttentionParams p, const void* sinks, int sms, cudaStream_t stream) {
  p.parts = (p.q_heads / p.kv_heads + kHeads - 1) / kHeads;
  const int64_t clusters = int64_t(p.sequences) * p.kv_heads * p.parts;
  // As many blocks as the GPU runs at once, if each half warp still has keys.
  p.split_bits = 0;
  while ((2 << p.split_bits) <= kMostSplits && clusters << (p.split_bits + 1) <= 2 * sms &&
         p.length >= kHalves * kTogether << p.split_bits)
    ++p.split_bits;
  if (clusters << p.split_bits > INT32_MAX) return cudaErrorInvalidValue;
  const unsigned splits = 1 << p.split_bits;
  const LaunchShape shape = {dim3(unsigned(clusters) * splits), dim3(kThreads), sizeof(Shared<kSize, kHeads>),
                             splits, true};
  return launch_kernel(attention_kernel<Half, kSize, kHeads>, shape, true, stream, p, sinks);
}

template <class Half>
int launch_size(const AttentionParams& p, const void* sinks, int sms, cudaStream_t stream) {
  const bool one = p.q_heads == p.kv_heads;
  if (p.size == 64)
    return one ? launch<Half, 64, 1>(p, sinks, sms, stream)
               : launch<Half, 64, kMostHeads>(p, sinks, sms, stream);
  if (p.size != 128) return cudaErrorInvalidValue;
  return one ? launch<Half, 128, 1>(p, sinks, sms, stream)
             : launch<Half, 128, kMostHeads>(p, sinks, sms, stream);
}

}  // namespace
}  // namespace fp4::sm90

// `sinks`, [q_heads] in the type of q: a logit more for each head, which no key has; or null.
extern "C" int fp4_kernel_attention_with_sinks(const fp4::device::AttentionParams* params, const void* sinks,
                                               int sms, void* stream) {
  using namespace fp4::sm90;
  auto* s = static_cast<cudaStream_t>(stream);
  return params->type == DType::kBFloat16 ? launch_size<__nv_bfloat16>(*params, sinks, sms, s)
                                          : launch_size<__half>(*params, sinks, sms, s);
}

extern "C" int fp4_kernel_attention(const fp4::device::AttentionParams* params, int sms, void* stream) {
  return fp4_kernel_attention_with_sinks(params, nullptr, sms, stream);
}
