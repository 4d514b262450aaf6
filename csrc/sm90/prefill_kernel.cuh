// Grouped GEMM of 4-bit weights for many tokens: out[r, n] = scale[r] * sum_k w[n, k] x[r, k]. Activations
// are fp8 or 16-bit. The template parameters choose the fold, which decodes the weights.
//
// The operands are swapped. Weights are wgmma's A: the warps that multiply fold them in registers, so a
// decoded weight never touches shared memory. Tokens are wgmma's N, up to 256 wide. Folding to e4m3 with a
// table takes 1.2 instructions for each weight. These are hidden behind the products of the other half step:
// at 256 tokens the tensor cores run at their full FP8 rate.
//
// A persistent block of one producer warpgroup and `Warpgroups` consumer warpgroups:
//   producer warp 1      walks the tiles and tells the others, then zeroes the output rows of no group;
//   producer warps 0, 2  copy X and W into a ring of stages of 128 K;
//   producer warp 3      fetches each tile's token scales and bias;
//   consumers            64 rows of weights each, all tokens of the tile. Each step of 128 K is two half
//                        steps with their own fragments: while one half's products run, the other half is
//                        folded. At the end of a tile, the first half of the next tile is folded before the
//                        epilogue.
// Results leave through shared memory (prefill_store.cuh). With Cluster = 2, two blocks take neighbouring
// weight tiles and each fetches half of X for both. Tiles beyond the full waves are split along K and
// shared by all blocks (Shares): each part except a tile's first writes its sums to global memory, and the
// block with the first part adds them.
#pragma once

#include <cstddef>

#include "../device/launch.cuh"
#include "prefill_claims.cuh"
#include "prefill_config.cuh"
#include "prefill_store.cuh"

namespace fp4::sm90 {

// The role of a producer warp.
enum class Role : int { kActivations, kTiles, kWeights, kFactors };

template <class Config, bool kGated>
class PrefillBlock {
 public:
  using Shared = SharedStorage<Config>;

  __device__ PrefillBlock(Shared& shared, const Problem& problem, const Maps& maps)
      : shared_(shared),
        problem_(problem),
        maps_(maps),
        store_(shared, problem, maps),
        rank_(Config::Cluster > 1 ? cluster_rank() : 0) {}

  __device__ void init_barriers() {
    for (int i = 0; i < Config::Stages; ++i) {
      barrier_init(smem_address(&shared_.stages[i].full), 2);
      barrier_init(smem_address(&shared_.stages[i].empty), Config::ConsumerWarps * Config::Cluster);
    }
    for (int i = 0; i < kInfoSlots; ++i) {
      barrier_init(smem_address(&shared_.info_full[i]), 1);
      barrier_init(smem_address(&shared_.info_empty[i]), (Config::ConsumerWarps + 3) * kWarpArrivals);
      barrier_init(smem_address(&shared_.factors_full[i]), kWarpArrivals);
    }
    barrier_init(smem_address(&shared_.next_wanted), 1);
    barrier_init_fence();
  }

  // Producer warps 0 to 2. Each finds the first tile by itself. The cost is fetching the instructions, which
  // the warps share through the instruction cache.
  __device__ void produce(Role role) {
    Walk walk(problem_.tiling);
    for (RingPosition<kInfoSlots> slots;; slots = slots.next()) {
      Tile tile;
      const bool more = walk.next(tile);
      if (role != Role::kTiles) {
        if (more) copy_tiles(role, info_of(tile));
        return;
      }
      tell(slots, more, tile, walk);
      if (problem_.early) wait_previous_kernel();
      if (!more) break;
      if (claims().made()) {
        static_assert(kInfoSlots % 2 == 1);  // then every second tile has an odd sum
        barrier_wait(smem_address(&shared_.next_wanted), (slots.slot + slots.round) & 1);
        walk.go_to(claims().next());
      }
    }
    // Each block's last claim finds no tile. The last of all these closes the claims.
    if (claims().made() && walk.passed_by(gridDim.x - 1)) claims().close();
  }

  // Producer warp 3.
  __device__ void fetch_factors() {
    bool opens = claims().made() && blockIdx.x == 0;
    for (RingPosition<kInfoSlots> slots;; slots = slots.next()) {
      const TileInfo& tile = wait_tile(slots);
      if (tile.width == 0) break;
      if (opens) claims().open();
      opens = false;
      if (tile.first == 0) fetch_factors(tile, shared_.token_scale[slots.slot], shared_.bias[slots.slot]);
      barrier_arrive_warp(smem_address(&shared_.factors_full[slots.slot]));
      barrier_arrive_warp(smem_address(&shared_.info_empty[slots.slot]));
    }
  }

  __device__ void zero_rows(int thread, int threads) {
    if (problem_.leaves_rest) return;
    int columns = kGated ? problem_.n / 2 : problem_.n;
    int row_bytes = columns * (problem_.out_type == DType::kFloat32 ? 4 : 2);
    zero_unused_rows(problem_.tiling.rows, static_cast<uint4*>(problem_.out), row_bytes / 16, thread,
                     threads);
  }

  // The work of a consumer warp.
  __device__ __forceinline__ void multiply_tiles() {
    Sums sums;
    int warp = threadIdx.x / kWarp;
    weights_.init(offsetof(StageOf, codes) + warp * kTileCodes,
                  offsetof(StageOf, scales) + warp * Config::Weights::kTileScales, threadIdx.x % kWarp);
    at_ = {smem_address(shared_.stages), swizzled_base(smem_address(shared_.x)), 0};
    TileSize tile = wait_info();
    if (tile.width > 0) {
      wait_stage(false);
      load_weights();
      weights_.template finish<0>(weights_.template prepare<0>(), fragments_[0]);
    }
    while (tile.width > 0) {
      TileSize next;
      multiply_width(typename Config::Widths(), sums, tile, next);
      // Keeps the compiler from using a sum before the wait.
#pragma unroll
      for (float& sum : sums) pin(sum);
      const RingPosition<kInfoSlots> at = info_.two_before();  // the tile's; that of `next` is taken, too
      const TileInfo& info = shared_.info[at.slot];
      if (info.first > 0) {
        send_sums(sums, info);
      } else {
        add_sums(sums, info);
        barrier_wait(smem_address(&shared_.factors_full[at.slot]), at.round);
        store_.store(sums, info, at.slot);
      }
      barrier_arrive_warp(smem_address(&shared_.info_empty[at.slot]));
      tile = next;
    }
    store_.end();
  }

 private:
  using Walk = TileWalk<typename Config::Widths, Config::Cluster>;
  using Sums = float[Config::MaxTokens / 2];
  // True if the kernel has few registers to spare: the sums, the first half's fragments, and the second
  // half's for the loop of each width take most of a consumer's.
  static constexpr bool kFewRegisters =
      10 * (Config::MaxTokens / 2 + 4 * Config::Weights::kInstructions * (1 + Config::Widths::kCount)) >
      7 * Config::ConsumerRegisters;

  // ---- producers ----

  // Copies X. Each block of a cluster fetches an equal part for all of them, in boxes of powers of two rows.
  __device__ __forceinline__ void copy_activations(int slot, int step, int row, int width) {
    const int part = ceil_div(width, kTokenStep * Config::Cluster) * kTokenStep;
    uint32_t full = smem_address(&shared_.stages[slot].full);
    barrier_expect_bytes(full, part * Config::Cluster * kXRowBytes * Config::XTiles);
    int first = part * rank_;
#pragma unroll
    for (int box = kXBoxes - 1; box >= 0; --box) {
      int tokens = kTokenStep << box;
      if (tokens > Config::MaxTokens / Config::Cluster || (part & tokens) == 0) continue;
#pragma unroll
      for (int i = 0; i < Config::XTiles; ++i) {
        uint32_t target = smem_address(shared_.x[slot]) + i * Config::XTileBytes + first * kXRowBytes;
        int k = step * kStepK + i * (kXRowBytes / Config::ElementBytes);
        if constexpr (Config::Cluster > 1) {
          constexpr uint16_t kBlocks = (1 << Config::Cluster) - 1;
          load_box_multicast(target, &maps_.x[box], full, k, row + first, kBlocks);
        } else {
          load_box(target, &maps_.x[box], full, k, row + first);
        }
      }
      first += tokens;
    }
  }

  __device__ __forceinline__ void copy_weights(int slot, int step, int row_tile) {
    uint32_t full = smem_address(&shared_.stages[slot].full);
    barrier_expect_bytes(full, Config::CodeBytes + Config::ScaleBytes);
    load_box(smem_address(shared_.stages[slot].codes), &maps_.codes, full, step * (kTileCodes / 8), row_tile);
    load_box(smem_address(shared_.stages[slot].scales), &maps_.scales, full,
             step * Config::Weights::kTileScales, row_tile);
  }

  __device__ __forceinline__ TileInfo info_of(const Tile& tile) const {
    return {tile.width, tile.group, tile.row, tile.rows, first_column(tile), tile.first, tile.steps};
  }

  // Tells all warps the place of a tile, once they no longer need the slot's last tile. Width 0 means that
  // there are no more.
  __device__ __forceinline__ void tell(const RingPosition<kInfoSlots>& slots, bool more, const Tile& tile,
                                       const Walk& walk) {
    barrier_wait(smem_address(&shared_.info_empty[slots.slot]), slots.round ^ 1);
    if (threadIdx.x % kWarp == 0) {
      TileInfo& info = shared_.info[slots.slot];
      if (more) {
        info = info_of(tile);
        walk.find_part(tile, info.part, info.helpers);
      } else {
        info.width = 0;
      }
      barrier_arrive(smem_address(&shared_.info_full[slots.slot]));
    }
    __syncwarp();
  }

  __device__ __forceinline__ const TileInfo& wait_tile(const RingPosition<kInfoSlots>& slots) {
    barrier_wait(smem_address(&shared_.info_full[slots.slot]), slots.round);
    return shared_.info[slots.slot];
  }

  // Copies tiles, beginning with `tile`. That tile is also told through the slots.
  __device__ __forceinline__ void copy_tiles(Role role, TileInfo tile) {
    RingPosition<Config::Stages> ring;
    RingPosition<kInfoSlots> slots;
    while (true) {
      const int end = tile.first + tile.steps, wanted = max(end - kClaimSteps, tile.first);
#pragma unroll 1
      for (int step = tile.first; step < end; ++step, ring = ring.next()) {
        if (claims().made() && role == Role::kWeights && step == wanted && elect_lane()) {
          barrier_arrive(smem_address(&shared_.next_wanted));
        }
        barrier_wait(smem_address(&shared_.stages[ring.slot].empty), ring.round ^ 1);
        if (elect_lane()) {
          if (role == Role::kWeights) {
            copy_weights(ring.slot, step, (tile.group * problem_.n + tile.column) / kTileRows);
          } else {
            copy_activations(ring.slot, step, tile.row, tile.width);
          }
        }
        __syncwarp();
      }
      barrier_arrive_warp(smem_address(&shared_.info_empty[slots.slot]));
      slots = slots.next();
      tile = wait_tile(slots);
      if (tile.width == 0) break;
    }
  }

  // Fetches what the epilogue needs. This takes long, because weights are being fetched already and the
  // memory is busy.
  __device__ __forceinline__ void fetch_factors(const TileInfo& tile, float* token_scale, float* bias) {
    const int lane = threadIdx.x % kWarp;
    float global = problem_.global_scale == nullptr ? 1.0f : problem_.global_scale[tile.group];
    float factor = Config::Weights::kFactor * global;
#pragma unroll 2
    for (int i = lane; i < tile.rows; i += kWarp) {
      float scale = problem_.x_scale == nullptr ? 1.0f : problem_.x_scale[tile.row + i];
      token_scale[i] = factor * scale;
    }
    // silu_values divides two tokens with one product. An odd last token is paired with NaN and not with a
    // random number, because its minima always treat NaN as the same number.
    if (kGated && lane == 0 && tile.rows % 2 != 0) token_scale[tile.rows] = __int_as_float(0x7fffffff);
    int64_t first_bias = static_cast<int64_t>(tile.group) * problem_.n + tile.column;
#pragma unroll 1
    for (int i = lane; i < Config::Rows; i += kWarp) {
      const bool has_one = problem_.bias != nullptr && tile.column + i < problem_.n;
      bias[i] = has_one ? load_as_float(problem_.bias, first_bias + i, problem_.bias_type) : 0.0f;
    }
  }

  // The next tile is claimed when this many steps of a tile are still to be fetched, because a claim takes a
  // microsecond or two.
  static constexpr int kClaimSteps = 8;

  __device__ __forceinline__ TileClaims claims() const {
    return TileClaims(Config::Cluster == 1 ? problem_.claimed : nullptr, problem_.ticket);
  }

  __device__ int first_column(const Tile& tile) const {
    return (tile.column * Config::Cluster + rank_) * Config::Rows;
  }

  // ---- consumers ----

  using StageOf = Stage<Config>;

  // The place of a stage: its address, the address of its X in the form of swizzled_base(), and the parity of
  // its round. Additions keep them up to date, so they stay in uniform registers, which loads and barriers
  // accept beside a lane's own registers.
  struct StagePosition {
    uint32_t stage, x, round;
  };

  __device__ __forceinline__ StagePosition after(const StagePosition& at) const {
    const bool last = at.stage == smem_address(&shared_.stages[Config::Stages - 1]);
    constexpr uint32_t kStage = sizeof(StageOf), kX = Config::XBytes / 16, kBack = Config::Stages - 1;
    return {at.stage + (last ? -kBack * kStage : kStage), at.x + (last ? -kBack * kX : kX), at.round ^ last};
  }

  // Waits for the current stage, unless an earlier test has found it full.
  __device__ __forceinline__ void wait_stage(bool ready) {
    if (!ready) barrier_wait(at_.stage + offsetof(StageOf, full), at_.round);
  }

  __device__ __forceinline__ void release_stage(uint32_t stage) {
    const uint32_t empty = stage + offsetof(StageOf, empty);
    int lane = threadIdx.x % kWarp;
    if constexpr (Config::Cluster > 1) {
      if (lane < Config::Cluster) barrier_arrive_remote(empty, lane);
    } else {
      if (elect_lane()) barrier_arrive(empty);
    }
  }

  // This holds what the products must know about a tile. Consumers have no registers for more.
  struct TileSize {
    int width, steps;
  };

  // Waits for the next tile of the walk. Its info stays until multiply_tiles releases it.
  __device__ __forceinline__ TileSize wait_info() {
    barrier_wait(smem_address(&shared_.info_full[info_.slot]), info_.round);
    const TileInfo& info = shared_.info[info_.slot];
    info_ = info_.next();
    return {info.width, info.steps};
  }

  __device__ __forceinline__ void load_weights() { weights_.load(at_.stage); }

  // Additions to a descriptor use all 64 bits. If it were put together from halves, ptxas would move the
  // upper half into its register before each product.
  template <int Tokens>
  static __device__ __forceinline__ void issue_products(float* sums,
                                                        const typename Config::Weights::Fragments& fragments,
                                                        uint32_t x, int keep) {
    uint64_t descriptor = swizzled_descriptor(x);
#pragma unroll
    for (int i = 0; i < Config::Weights::kInstructions; ++i, descriptor += kDescriptorStep) {
      Config::template Mma<Tokens>::run(sums, fragments + 4 * i, descriptor, i == 0 ? keep : 1);
    }
  }

  // Starts the products of a half step (64 K), beginning with the first 256 tokens.
  template <int Tokens, int Half>
  __device__ __forceinline__ void issue_half(Sums& sums, int keep) {
    constexpr int kFirst = Tokens < kMmaTokens ? Tokens : kMmaTokens;
    constexpr int kRestOffset = kMmaTokens * kXRowBytes / 16;
    constexpr int kHalfOffset = Config::XTiles == 1 ? kXRowBytes / 2 : Config::XTileBytes;
    const uint32_t x = at_.x + Half * kHalfOffset / 16;
    // All fragments are written before the first product starts.
#pragma unroll
    for (uint32_t& fragment : fragments_[Half]) pin(fragment);
    wgmma_fence();
    issue_products<kFirst>(sums, fragments_[Half], x, keep);
    if constexpr (Tokens > kFirst) {
      issue_products<Tokens - kFirst>(sums + kFirst / 2, fragments_[Half], x + kRestOffset, keep);
    }
    wgmma_commit();
  }

  // This is never called, but ptxas does not know that. The call makes the second half's fragments live from
  // one tile to the next, so they have the same registers in the loops of all widths. Without it, ptxas uses
  // other registers in each loop, and the epilogue, which has only the remaining ones, waits and spills. The
  // place of the call also keeps ptxas from moving folding between the products before it. Kernels with
  // enough registers are faster without it.
  __device__ __forceinline__ void spill_fragments() {
    auto* sink = reinterpret_cast<volatile uint32_t*>(shared_.store);
#pragma unroll
    for (uint32_t fragment : fragments_[1]) *sink = fragment;
  }

  // Multiplies all K of a tile. The first half step is already folded at the start. At the end, that of the
  // next tile is folded, if there is one.
  template <int Tokens>
  __device__ __forceinline__ void multiply(Sums& sums, int steps, TileSize& next) {
    for (int step = 0;; ++step) {
      issue_half<Tokens, 0>(sums, step > 0);
      if (kFewRegisters && step > steps) spill_fragments();
      auto second = weights_.template prepare<1>();
      const StagePosition next_at = after(at_);
      bool ready = barrier_test(next_at.stage + offsetof(StageOf, full), next_at.round);
      wgmma_wait<1>();  // the second half of the last step is done: its stage is read, its fragments are free
      if (step > 0) release_stage(previous_);
      weights_.template finish<1>(second, fragments_[1]);
      issue_half<Tokens, 1>(sums, 1);
      previous_ = at_.stage;
      at_ = next_at;
      bool last = step + 1 == steps;
      if (last) {
        next = wait_info();
        if (next.width == 0) break;
      }
      wait_stage(ready);
      load_weights();
      auto first = weights_.template prepare<0>();
      wgmma_wait<1>();
      weights_.template finish<0>(first, fragments_[0]);
      if (last) break;
    }
    wgmma_wait<0>();
    release_stage(previous_);
  }

  // Runs the loop that is compiled for this width of tile.
  template <int Width, int... Others>
  __device__ __forceinline__ void multiply_width(WidthList<Width, Others...>, Sums& sums, TileSize tile,
                                                 TileSize& next) {
    if (sizeof...(Others) == 0 || tile.width == Width) {
      multiply<Width>(sums, tile.steps, next);
    } else if constexpr (sizeof...(Others) > 0) {
      multiply_width(WidthList<Others...>(), sums, tile, next);
    }
  }

  // The sums of a part of K in global memory: for each thread a float4 for every eight tokens, and a flag.
  // The thread sets its flag to the launch's ticket after it has written its sums. The thread with the same
  // number in the block that adds them clears the flag, because a later launch may have the same ticket (the
  // next replay of a CUDA graph). No thread waits for the other threads of its warp: with a __syncwarp here,
  // ptxas would no longer keep the descriptors of the products uniform.
  static constexpr int kConsumers = Config::Warpgroups * kWarpgroup;

  __device__ __forceinline__ float4* part_sums(int part) const {
    return problem_.part_sums + (part * Config::Cluster + rank_) * (Config::SumBytes / 16) + threadIdx.x;
  }

  __device__ __forceinline__ uint64_t* part_flag(int part) const {
    return problem_.part_flags + (part * Config::Cluster + rank_) * kConsumers + threadIdx.x;
  }

  static constexpr int kSumVectors = Config::MaxTokens / 8;

  __device__ __forceinline__ void send_sums(const Sums& sums, const TileInfo& tile) {
    float4* to = part_sums(tile.part);
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
      if (8 * i >= tile.width) break;
      __stcg(to + i * kConsumers,
             make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    }
    store_release(part_flag(tile.part), problem_.ticket);
  }

  // Adds the sums of the other parts in the order of K, in whatever order they arrive. Several are read at a
  // time to overlap their latencies. The last of these may be past the tile's width, where nobody uses the
  // sums.
  __device__ __forceinline__ void add_sums(Sums& sums, const TileInfo& tile) {
#pragma unroll 1
    for (int helper = 1; helper <= tile.helpers; ++helper) {
      constexpr int kAtOnce = 4;
      uint64_t* flag = part_flag(tile.part + helper);
      while (load_acquire(flag) != problem_.ticket) {
      }
      *flag = 0;
      const float4* from = part_sums(tile.part + helper);
#pragma unroll
      for (int first = 0; first < kSumVectors; first += kAtOnce) {
        if (8 * first >= tile.width) break;
        float4 more[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce && first + i < kSumVectors; ++i) {
          more[i] = __ldcg(from + (first + i) * kConsumers);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce && first + i < kSumVectors; ++i) {
          float* sum = sums + 4 * (first + i);
          sum[0] += more[i].x, sum[1] += more[i].y, sum[2] += more[i].z, sum[3] += more[i].w;
        }
      }
    }
  }

  Shared& shared_;
  const Problem& problem_;
  const Maps& maps_;
  TileStore<Config, kGated> store_;
  uint32_t rank_;     // rank among the blocks that share X
  StagePosition at_;  // the current stage
  RingPosition<kInfoSlots> info_;
  uint32_t previous_ = 0;  // the stage whose products may still run
  typename Config::Weights weights_;
  typename Config::Weights::Fragments fragments_[2] = {};
};

template <class Config, bool kGated>
__global__ void __launch_bounds__(Config::Threads, 1)
    prefill_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Maps maps) {
  FP4_DYNAMIC_SHARED(uint8_t, 1024, memory);
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(memory);
  release_next_kernel();
  PrefillBlock<Config, kGated> block(shared, problem, maps);
  if (threadIdx.x == 0) block.init_barriers();
  __syncthreads();
  if constexpr (Config::Cluster > 1) cluster_sync();

  if (threadIdx.x >= Config::Warpgroups * kWarpgroup) {
    if constexpr (Config::MovesRegisters) register_give<Config::ProducerRegisters>();
    const auto role = static_cast<Role>(uniform(threadIdx.x / kWarp % 4));
    // Only the warps that fetch X and factors must wait: results are stored only after activations have
    // arrived.
    const bool needs_weights = role == Role::kWeights || role == Role::kTiles;
    if (!needs_weights || !problem.early) wait_previous_kernel();
    if (role == Role::kFactors) {
      block.fetch_factors();
    } else {
      block.produce(role);
      if (role == Role::kTiles) block.zero_rows(blockIdx.x * kWarp + threadIdx.x % kWarp, gridDim.x * kWarp);
    }
  } else {
    // After a setmaxnreg, which all warps of a warpgroup execute together, ptxas keeps the loop counters and
    // wgmma's arguments in uniform registers. For this reason there is one even if there are no registers to
    // take.
    if constexpr (Config::MovesRegisters) {
      register_take<Config::ConsumerRegisters>();
    } else {
      register_give<Config::ConsumerRegisters>();
    }
    block.multiply_tiles();
  }
  // A block must not end while its peers may still write to its shared memory.
  if constexpr (Config::Cluster > 1) cluster_sync();
}

}  // namespace fp4::sm90
