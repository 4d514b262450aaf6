// The router of a decoding step in one launch: the norm of few rows, their product with the router's weight,
// and the choice of experts. One cluster has all of it, so nothing waits for another kernel between the
// product and the choice. The interface is plain C, without torch.
//
// The eight blocks split K. In a block, each tile of 16 experts has a warp or two, which request their whole
// part of the weight at once. The partial sums of a tile go to one block, which adds them in a fixed order
// (linears.cuh does the same). The logits of a row, rounded, go to one block, which chooses its experts.
#include "../device/router.h"
#include "choose_experts.cuh"
#include "linears.cuh"

namespace fp4::sm90 {
namespace {

// These barriers complete when the sums of the norm, of the block's tile, and the block's logits have
// arrived.
struct alignas(16) RouterShared {
  uint64_t stats, sums, logits;
};
static_assert(sizeof(RouterShared) == 16 * kLinearsHead);

template <class Weights>
__global__ void __launch_bounds__(kLinearThreads, 2)
    router_kernel(const __grid_constant__ RouterParams params) {
  using H = Half<Weights::kElement>;
  const LinearsParams& p = params.product;
  FP4_DYNAMIC_SHARED(uint4, 16, memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = cluster_rank();
  const int cluster_bits = kMostLinearClusterBits, blocks = 1 << cluster_bits;
  const int tile = warp % p.config.group, k_warp = warp / p.config.group;
  const int k_warps = kLinearWarps / p.config.group, slots = blocks * k_warps;
  // first and count are the block's steps of K; begin and own are the warp's among these.
  const int first = p.steps * rank >> cluster_bits;
  const int count = (p.steps * (rank + 1) >> cluster_bits) - first;
  const int begin = count * k_warp / k_warps, own = count * (k_warp + 1) / k_warps - begin;
  const bool has_column = lane % 4 * 2 < p.rows;  // the lane's sums belong to rows that exist

  auto& sh = *reinterpret_cast<RouterShared*>(memory);
  const uint32_t stats_full = smem_address(&sh.stats), sums_full = smem_address(&sh.sums),
                 logits_full = smem_address(&sh.logits);
  if (threadIdx.x == 0) {
    for (const uint32_t barrier : {stats_full, sums_full, logits_full}) barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect_bytes(stats_full, blocks << (kLinearWarpBits + p.lane_bits));
    barrier_expect_bytes(sums_full, slots * 8 * ((p.rows + 1) / 2) * sizeof(float4));
    barrier_expect_bytes(logits_full, (p.weight[0].n + 1) / 2 * sizeof(float));
  }
  __syncwarp();
  cluster_arrive();

  const LinearRows<Weights, 1> x(p, memory + p.x_at, first, count);
  uint4* const norm = memory + p.norm_at;
  const uint32_t ring = smem_address(memory + kLinearsHead) + warp * p.config.depth * kLinearSlot;
  const auto request = [&] {
    if (tile < p.tiles && own > 0) {
      typename Weights::Copies from = Weights::Copies::at(p, p.weight[0], tile, first + begin);
      for (int i = 0; i < own; ++i, from.advance()) from.fetch(p, ring + i * kLinearSlot);
    }
    copy_commit();
  };
  if (!p.early) wait_previous_kernel();
  if (p.norm_weight) x.bring_norm(p, norm);
  copy_commit();
  if (p.early) {
    request();
    wait_previous_kernel();
  }
  release_next_kernel();
  const LinearWeight& w = p.weight[0];
  const int n = rank * 16 + lane / 4 * 2;  // the lane's first expert, if it is in warp 0
  float2 bias = make_float2(0.f, 0.f);
  if (warp == 0 && n < w.n) bias = linear_bias(p, w, n);
  x.load(p, p.sum);
  if (!p.early) request();
  copy_wait<1>();  // the norm's weight has arrived

  cluster_wait();  // all blocks have begun
  float scale = 1.f;
  if (p.norm_weight) scale = x.norm_scale(p, reinterpret_cast<float*>(memory + p.stats_at), stats_full, rank);
  __syncthreads();
  x.finish(p, scale, p.norm_weight ? norm : nullptr, p.normed);
  __syncthreads();
  copy_wait<0>();
  __syncwarp();

  float4* const sums = reinterpret_cast<float4*>(memory + p.sums_at);  // [slots][32]
  if (tile < p.tiles) {
    PreparedRow row = x.of_lane(p);
    row.advance(begin);
    float4 acc[4] = {};
    for (int i = 0; i < own; ++i, row.advance(1))
      Weights::template multiply<1, 4>(ring + i * kLinearSlot, row, acc);
    for (int i = 1; i < 4; ++i)
      acc[0].x += acc[i].x, acc[0].y += acc[i].y, acc[0].z += acc[i].z, acc[0].w += acc[i].w;
    float4* const to = sums + (rank * k_warps + k_warp) * 32 + lane;
    if (has_column) store_cluster(smem_address(to), sums_full, tile, acc[0]);
  }
  if (warp > 0) return;

  auto* const logits = reinterpret_cast<typename H::One*>(sums + slots * 32);  // [kMostRouted]
  if (rank < p.tiles) {
    barrier_wait(sums_full, 0);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int s = 0; s < slots; ++s) {
      const float4 v = sums[s * 32 + lane];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const float values[2][2] = {{sum.x, sum.z}, {sum.y, sum.w}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = lane % 4 * 2 + i;
      if (n >= w.n || m >= p.rows) continue;
      const float a = values[i][0] + bias.x, b = values[i][1] + bias.y;
      const typename H::Two pair = H::pair(a, b);
      store_cluster(smem_address(logits + n), logits_full, m, reinterpret_cast<const float&>(pair));
      store_pair<Weights>(p, w, m, n, a, b);
    }
    __syncwarp();
  }
  if (rank >= p.rows) return;
  barrier_wait(logits_full, 0);
  choose_experts<kMostRouted / 32, true>(params.choice, rank, [&](int e) { return H::to_float(logits[e]); });
}

template <class Weights>
int launch(RouterParams& r, int sms, cudaStream_t stream) {
  auto* kernel = router_kernel<Weights>;
  Launching now;
  if (const cudaError_t error = launching(now); error != cudaSuccess) return error;
  const int shared = complete_router(r, sms);
  if (shared > now.shared_bytes || r.product.config.depth > kMostRouterDepth) return cudaErrorInvalidValue;
  static std::atomic<uint64_t> allowed;
  if (const cudaError_t error = allow_shared(kernel, now.shared_bytes, allowed); error != cudaSuccess)
    return error;
  const unsigned blocks = 1 << kMostLinearClusterBits;
  const LaunchShape shape = {dim3(blocks), dim3(kLinearThreads), size_t(shared), blocks, true};
  return launch_kernel(kernel, shape, true, stream, r);
}

}  // namespace
}  // namespace fp4::sm90

extern "C" int fp4_kernel_router(const fp4::device::RouterParams* params, int sms, void* stream) {
  using namespace fp4::sm90;
  RouterParams r = *params;
  const LinearsParams& p = r.product;
  const TopExpertsParams& choice = r.choice;
  if (p.rows < 1 || p.rows > kMostRouterRows || p.count != 1 || p.k % kLinearStepK != 0)
    return cudaErrorInvalidValue;
  if (p.residual || choice.experts != p.weight[0].n || choice.experts > kMostRouted)
    return cudaErrorInvalidValue;
  if (choice.k < 1 || choice.k > choice.experts || choice.k > kMostChosen) return cudaErrorInvalidValue;
  auto* s = static_cast<cudaStream_t>(stream);
  return p.type == DType::kBFloat16 ? launch<PlainWeights<Element::kBFloat16>>(r, sms, s)
                                    : launch<PlainWeights<Element::kFloat16>>(r, sms, s);
}
