// Grouped GEMM, NVFP4 weights x FP8 activations, for many tokens: out[r, n] = scale[r] * sum_k w[n, k] x[r,
// k].
//
// The operands are swapped: weights are wgmma's A, folded into e4m3 in registers by the warps that multiply
// (so a dequantised weight never touches shared memory), tokens are wgmma's N, up to 256 wide. The table fold
// costs 1.2 instructions a weight, which hides behind the products of the other half step: at 256 tokens the
// tensor cores run at their full FP8 rate.
//
// A persistent block of one producer warpgroup and `Warpgroups` consumer warpgroups:
//   producer warps 0, 2  walk the tiles and copy X and W into a ring of stages of 128 K;
//   producer warp 1      walks them too and leaves each tile's place, token scales and bias to the consumers;
//   producer warp 3      zeroes the output rows of no group;
//   consumers            64 rows of weights each, all tokens of the tile. Each step of 128 K is two half
//   steps with
//                        their own fragments: while one half's products run, the other half is folded. Over
//                        the end of a tile the first half of the next is folded before the epilogue.
// Results leave through shared memory by bulk tensor copies that clip at the group's last row (see
// store_boxes). With Cluster = 2, two blocks take neighbouring weight tiles and each fetches half of X for
// both. With Splits, so many blocks of a cluster share a tile's K, and the first adds the others' sums to its
// own: for so few tiles that multiprocessors would be idle.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "launch.cuh"
#include "prefill_config.cuh"

namespace fp4::sm90 {

// A position in a ring of `Slots` and the parity of its round.
template <int Slots>
struct RingPosition {
  int slot = 0;
  uint32_t round = 0;

  __device__ __forceinline__ RingPosition next() const {
    return slot + 1 == Slots ? RingPosition{0, round ^ 1} : RingPosition{slot + 1, round};
  }
};

template <class Config, bool kGated>
class PrefillBlock {
 public:
  using Shared = SharedStorage<Config>;

  __device__ PrefillBlock(Shared& shared, const Problem& problem, const Maps& maps)
      : shared_(shared),
        problem_(problem),
        maps_(maps),
        rank_(Config::Cluster > 1 ? cluster_rank() : 0),
        split_(Config::Splits > 1 ? cluster_rank() : 0) {}

  __device__ void init_barriers() {
    for (int i = 0; i < Config::Stages; ++i) {
      barrier_init(smem_address(&shared_.full[i]), 2);
      barrier_init(smem_address(&shared_.empty[i]), Config::ConsumerWarps * Config::Cluster);
    }
    for (int i = 0; i < kInfoSlots; ++i) {
      barrier_init(smem_address(&shared_.info_full[i]), kWarpArrivals);
      barrier_init(smem_address(&shared_.info_empty[i]), Config::ConsumerWarps * kWarpArrivals);
    }
    barrier_init(smem_address(&shared_.partial_full), 1);
    barrier_init(smem_address(&shared_.partial_empty), Config::ConsumerWarps);
    barrier_init_fence();
  }

  // Producer warp 0: activations. Each block of a cluster fetches an equal part for all of them, in boxes of
  // powers of two.
  __device__ void copy_activations() {
    auto walk = make_walk();
    RingPosition<Config::Stages> ring;
    Tile tile;
    while (walk.next(tile)) {
      int part = ceil_div(tile.width, kTokenStep * Config::Cluster) * kTokenStep;
      for (int step = first_step(split_); step < first_step(split_ + 1); ++step, ring = ring.next()) {
        barrier_wait(smem_address(&shared_.empty[ring.slot]), ring.round ^ 1);
        if (elect_lane()) {
          uint32_t full = smem_address(&shared_.full[ring.slot]);
          barrier_expect_bytes(full, part * Config::Cluster * kXRowBytes * Config::XTiles);
          int first = part * rank_;
#pragma unroll
          for (int box = kXBoxes - 1; box >= 0; --box) {
            int tokens = kTokenStep << box;
            if (tokens > Config::MaxTokens / Config::Cluster || (part & tokens) == 0) continue;
#pragma unroll
            for (int i = 0; i < Config::XTiles; ++i) {
              uint32_t target =
                  smem_address(shared_.x[ring.slot]) + i * Config::XTileBytes + first * kXRowBytes;
              int k = step * kStepK + i * (kXRowBytes / Config::ElementBytes);
              if constexpr (Config::Cluster > 1) {
                constexpr uint16_t kBlocks = (1 << Config::Cluster) - 1;
                load_box_multicast(target, &maps_.x[box], full, k, tile.row + first, kBlocks);
              } else {
                load_box(target, &maps_.x[box], full, k, tile.row + first);
              }
            }
            first += tokens;
          }
        }
        __syncwarp();
      }
    }
  }

  // Producer warp 2: weights.
  __device__ void copy_weights() {
    auto walk = make_walk();
    RingPosition<Config::Stages> ring;
    Tile tile;
    while (walk.next(tile)) {
      int row_tile = (tile.group * problem_.n + first_column(tile)) / kTileRows;
      for (int step = first_step(split_); step < first_step(split_ + 1); ++step, ring = ring.next()) {
        barrier_wait(smem_address(&shared_.empty[ring.slot]), ring.round ^ 1);
        if (elect_lane()) {
          uint32_t full = smem_address(&shared_.full[ring.slot]);
          barrier_expect_bytes(full, Config::CodeBytes + Config::ScaleBytes);
          load_box(smem_address(shared_.codes[ring.slot]), &maps_.codes, full, step * (kTileCodes / 8),
                   row_tile);
          load_box(smem_address(shared_.scales[ring.slot]), &maps_.scales, full,
                   step * Config::Weights::kTileScales, row_tile);
        }
        __syncwarp();
      }
    }
  }

  // Producer warp 1: what the epilogue needs.
  __device__ void describe_tiles() {
    auto walk = make_walk();
    RingPosition<kInfoSlots> ring;
    int lane = threadIdx.x % kWarp;
    Tile tile;
    bool more = true;
    while (more) {
      more = walk.next(tile);
      barrier_wait(smem_address(&shared_.info_empty[ring.slot]), ring.round ^ 1);
      TileInfo info = {};
      if (more) {
        info = {tile.width, tile.row, tile.rows, first_column(tile)};
        float global = problem_.global_scale == nullptr ? 1.0f : problem_.global_scale[tile.group];
        float factor = Config::Weights::kFactor * global;
#pragma unroll 2
        for (int i = lane; i < tile.rows; i += kWarp) {
          float scale = problem_.x_scale == nullptr ? 1.0f : problem_.x_scale[tile.row + i];
          shared_.token_scale[ring.slot][i] = factor * scale;
        }
        // silu_values divides two tokens by one product: beside an odd last one no chance number, but NaN,
        // which its minima take for the same number always.
        if (kGated && lane == 0 && tile.rows % 2 != 0) {
          shared_.token_scale[ring.slot][tile.rows] = __int_as_float(0x7fffffff);
        }
        int64_t first_bias = static_cast<int64_t>(tile.group) * problem_.n + info.column;
#pragma unroll 1
        for (int i = lane; i < Config::Rows; i += kWarp) {
          shared_.bias[ring.slot][i] = info.column + i < problem_.n ? load_bias(first_bias + i) : 0.0f;
        }
      }
      if (lane == 0) shared_.info[ring.slot] = info;
      barrier_arrive_warp(smem_address(&shared_.info_full[ring.slot]));
      ring = ring.next();
    }
  }

  // Producer warp 3.
  __device__ void zero_rows(int thread, int threads) {
    int columns = kGated ? problem_.n / 2 : problem_.n;
    int row_bytes = columns * (problem_.out_type == DType::kFloat32 ? 4 : 2);
    zero_unused_rows(problem_.rows, static_cast<uint4*>(problem_.out), row_bytes / 16, thread, threads);
  }

  // A consumer warp.
  __device__ __forceinline__ void multiply_tiles() {
    Sums sums;
    int warp = threadIdx.x / kWarp;
    weights_.init(smem_address(shared_.codes) + warp * kTileCodes,
                  smem_address(shared_.scales) + warp * Config::Weights::kTileScales, threadIdx.x % kWarp);
    TileInfo tile = wait_info();
    if (tile.width > 0) {
      wait_stage(false);
      load_weights();
      weights_.template finish<0>(weights_.template prepare<0>(), fragments_[0]);
    }
    while (tile.width > 0) {
      TileInfo next;
      multiply_width(typename Config::Widths(), sums, tile.width, next);
      // No use of a sum moves before the wait.
#pragma unroll
      for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
      // The tile's: that of `next` is taken, too.
      int slot = (info_.slot + kInfoSlots - 2) % kInfoSlots;
      if constexpr (Config::Splits > 1) {
        if (split_ == 0) {
          add_partial(sums, tile.width);
        } else {
          send_partial(sums, tile.width);
        }
      }
      if (split_ == 0) store_tile(sums, tile, slot);
      barrier_arrive_warp(smem_address(&shared_.info_empty[slot]));
      tile = next;
    }
    store_wait_read<0>();
  }

  // Whether this block has a part of K: of less than 128 for each, not all have.
  __device__ bool takes_part() const {
    return Config::Splits == 1 || first_step(split_) < first_step(split_ + 1);
  }

 private:
  using Sums = float[Config::MaxTokens / 2];

  // Where a part of K begins; the first is as long as any.
  __device__ __forceinline__ int first_step(int split) const {
    return ceil_div(split * problem_.steps, Config::Splits);
  }

  __device__ TileWalk<typename Config::Widths> make_walk() {
    int columns = ceil_div(problem_.n, Config::Rows * Config::Cluster);
    return {problem_.rows, columns, static_cast<int>(blockIdx.x) / Config::Blocks,
            static_cast<int>(gridDim.x) / Config::Blocks};
  }

  __device__ int first_column(const Tile& tile) const {
    return (tile.column * Config::Cluster + rank_) * Config::Rows;
  }

  __device__ float load_bias(int64_t i) const {
    if (problem_.bias == nullptr) return 0.0f;
    switch (problem_.bias_type) {
      case DType::kFloat32:
        return static_cast<const float*>(problem_.bias)[i];
      case DType::kBFloat16:
        return __bfloat162float(static_cast<const __nv_bfloat16*>(problem_.bias)[i]);
      default:
        return __half2float(static_cast<const __half*>(problem_.bias)[i]);
    }
  }

  // ---- consumers ----

  // Waits for the current stage unless an earlier test found it there.
  __device__ __forceinline__ void wait_stage(bool ready) {
    if (!ready) barrier_wait(smem_address(&shared_.full[ring_.slot]), ring_.round);
  }

  __device__ __forceinline__ void release_stage(int slot) {
    int lane = threadIdx.x % kWarp;
    if constexpr (Config::Cluster > 1) {
      if (lane < Config::Cluster) barrier_arrive_remote(smem_address(&shared_.empty[slot]), lane);
    } else {
      if (elect_lane()) barrier_arrive(smem_address(&shared_.empty[slot]));
    }
  }

  // The info of the next tile in the walk; its slot is given back by store_tile.
  __device__ __forceinline__ TileInfo wait_info() {
    barrier_wait(smem_address(&shared_.info_full[info_.slot]), info_.round);
    TileInfo info = shared_.info[info_.slot];
    info_ = info_.next();
    return info;
  }

  __device__ __forceinline__ void load_weights() {
    weights_.load(ring_.slot * Config::CodeBytes, ring_.slot * Config::ScaleBytes);
  }

  // Starts the products of a half step (64 K), each with one instruction for the first 256 tokens and one for
  // the rest.
  template <int Tokens, int Half>
  __device__ __forceinline__ void issue_half(Sums& sums, int keep) {
    constexpr int kFirst = Tokens < kMmaTokens ? Tokens : kMmaTokens;
    constexpr int kRestOffset = kMmaTokens * kXRowBytes / 16;
    constexpr int kHalfOffset = Config::XTiles == 1 ? kXRowBytes / 2 : Config::XTileBytes;
    uint32_t x = swizzled_base(smem_address(shared_.x)) +
                 static_cast<uint32_t>(ring_.slot) * (Config::XBytes / 16) + Half * kHalfOffset / 16;
#pragma unroll
    for (uint32_t& fragment : fragments_[Half])
      asm volatile("" : "+r"(fragment));  // all before the first starts
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::Weights::kInstructions; ++i) {
      const uint32_t* fragment = fragments_[Half] + 4 * i;
      uint32_t x_i = x + i * kDescriptorStep;
      int keep_i = i == 0 ? keep : 1;
      Config::template Mma<kFirst>::run(sums, fragment, swizzled_descriptor(x_i), keep_i);
      if constexpr (Tokens > kFirst) {
        Config::template Mma<Tokens - kFirst>::run(sums + kFirst / 2, fragment,
                                                   swizzled_descriptor(x_i + kRestOffset), keep_i);
      }
    }
    wgmma_commit();
  }

  // All K of a tile. Enters with the first half step folded, and leaves so for the next tile, if any.
  template <int Tokens>
  __device__ __forceinline__ void multiply(Sums& sums, TileInfo& next) {
    const int steps = first_step(split_ + 1) - first_step(split_);
    for (int step = 0;; ++step) {
      issue_half<Tokens, 0>(sums, step > 0);
      auto second = weights_.template prepare<1>();
      auto ring_next = ring_.next();
      bool ready = barrier_test(smem_address(&shared_.full[ring_next.slot]), ring_next.round);
      wgmma_wait<1>();  // the last step's second half: its stage is read, its fragments are free
      if (step > 0) release_stage(previous_);
      weights_.template finish<1>(second, fragments_[1]);
      issue_half<Tokens, 1>(sums, 1);
      previous_ = ring_.slot;
      ring_ = ring_next;
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

  // Runs the instance that is as wide as the tile.
  template <int... Widths>
  __device__ __forceinline__ void multiply_width(WidthList<Widths...>, Sums& sums, int width,
                                                 TileInfo& next) {
    ((width == Widths ? (multiply<Widths>(sums, next), true) : false) || ...);
  }

  // A float4 of each thread for eight tokens.
  static constexpr int kPartialStride = Config::Warpgroups * kWarpgroup;

  // Of another block than the first: its sums to the first.
  __device__ __forceinline__ void send_partial(const Sums& sums, int width) {
    barrier_wait(smem_address(&shared_.partial_empty), partial_round_ ^ 1);
    const uint32_t full = remote_address(smem_address(&shared_.partial_full), 0);
    const float4* mine =
        shared_.partial + (split_ - 1) * (Config::MaxTokens / 8) * kPartialStride + threadIdx.x;
    const uint32_t to = remote_address(smem_address(mine), 0);
#pragma unroll
    for (int i = 0; i < Config::MaxTokens / 8; ++i) {
      if (8 * i < width) store_remote(to + i * kPartialStride * sizeof(float4), sums + 4 * i, full);
    }
    partial_round_ ^= 1;
  }

  // Of the first: adds those of the others, in their order. (An acquire of the whole cluster would empty L1
  // besides, which these sums do not pass.)
  __device__ __forceinline__ void add_partial(Sums& sums, int width) {
    const uint32_t full = smem_address(&shared_.partial_full);
    if (threadIdx.x == 0) {
      const int others = min(Config::Splits, problem_.steps) - 1;
      barrier_expect_bytes(full, others * width * Config::Rows * sizeof(float));
    }
    barrier_wait(full, partial_round_);
    int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int split = 1; split < Config::Splits; ++split) {
      if (first_step(split) == first_step(split + 1)) continue;
      const float4* from =
          shared_.partial + (split - 1) * (Config::MaxTokens / 8) * kPartialStride + threadIdx.x;
#pragma unroll
      for (int i = 0; i < Config::MaxTokens / 8; ++i) {
        if (8 * i >= width) continue;
        const float4 sum = from[i * kPartialStride];
        sums[4 * i] += sum.x, sums[4 * i + 1] += sum.y, sums[4 * i + 2] += sum.z, sums[4 * i + 3] += sum.w;
      }
    }
    __syncwarp();
    if (lane > 0 && lane < Config::Splits) barrier_arrive_remote(smem_address(&shared_.partial_empty), lane);
    partial_round_ ^= 1;
  }

  __device__ __forceinline__ void store_tile(Sums& sums, const TileInfo& tile, int slot) {
    const float* token_scale = shared_.token_scale[slot];
    int row = threadIdx.x / 4 * 2;  // and the next
    float2 bias = *reinterpret_cast<const float2*>(shared_.bias[slot] + row);
    int column = tile.column + threadIdx.x / kWarpgroup * kMmaRows;
    if (column < problem_.n) {
      switch (problem_.out_type) {
        case DType::kFloat32:
          if constexpr (!kGated) store_float32(sums, tile, token_scale, bias, tile.column + row);
          break;
        case DType::kBFloat16:
          store_rows<__nv_bfloat162>(sums, tile, token_scale, bias, column);
          break;
        default:
          store_rows<__half2>(sums, tile, token_scale, bias, column);
      }
    }
  }

  template <class Pair>
  __device__ __forceinline__ void store_rows(const float* sums, const TileInfo& tile,
                                             const float* token_scale, float2 bias, int column) {
    if constexpr (!kGated) {
      store_halves<Pair>(sums, tile, token_scale, bias, column);
    } else if (problem_.gate.limit > 0.0f) {
      store_gated<Pair, true>(sums, tile, token_scale, bias, column / 2);
    } else {
      store_gated<Pair, false>(sums, tile, token_scale, bias, column / 2);
    }
  }

  // All tokens x 64 weight rows of 16-bit results, StoreTokens tokens at a time.
  template <class Pair>
  __device__ __forceinline__ void store_halves(const float* sums, const TileInfo& tile,
                                               const float* token_scale, float2 bias, int column) {
    int warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    // Token 8 j + 2 t + e, weight rows 16 warp + 2 g and the next; 16-byte pieces swizzled by the token.
    int piece = 2 * warp + g / 4;
    int even = 2 * t * 128 + ((piece ^ (2 * t)) * 16) + g % 4 * 4;
    int odd = (2 * t + 1) * 128 + ((piece ^ (2 * t + 1)) * 16) + g % 4 * 4;
    store_boxes<Config::StoreTokens, 2>(
        tile, column, token_scale, [&](int token, const float2(&scale)[2], uint8_t* rows) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float* d = sums + token / 2 + 4 * j;
            float2 one = make_float2(d[0] * scale[j].x + bias.x, d[2] * scale[j].x + bias.y);
            float2 two = make_float2(d[1] * scale[j].y + bias.x, d[3] * scale[j].y + bias.y);
            *reinterpret_cast<uint32_t*>(rows + j * 1024 + even) = round_pair<Pair>(one);
            *reinterpret_cast<uint32_t*>(rows + j * 1024 + odd) = round_pair<Pair>(two);
          }
        });
  }

  // The same for a gated activation, whose gate and up are two rows of one lane: 32 columns, and so twice as
  // many tokens at a time.
  template <class Pair, bool kLimited>
  __device__ __forceinline__ void store_gated(const float* sums, const TileInfo& tile,
                                              const float* token_scale, float2 bias, int column) {
    int warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    constexpr int kEights = Config::MaxTokens % 32 == 0 ? 4 : 2;
    // Token 8 j + 2 t + e, column 8 warp + g; 16-byte pieces swizzled by t.
    int place = 2 * t * 64 + (warp ^ t) * 16 + g * 2;
    store_boxes<2 * Config::StoreTokens, kEights>(
        tile, column, token_scale, [&](int token, const float2(&scale)[kEights], uint8_t* rows) {
          float2 gate[kEights], up[kEights];
#pragma unroll
          for (int j = 0; j < kEights; ++j) {
            const float* d = sums + token / 2 + 4 * j;
            gate[j] = make_float2(d[0] * scale[j].x + bias.x, d[1] * scale[j].y + bias.x);
            up[j] = make_float2(d[2] * scale[j].x + bias.y, d[3] * scale[j].y + bias.y);
          }
          silu_values<kLimited>(problem_.gate, gate, up);
#pragma unroll
          for (int j = 0; j < kEights; ++j) {
            uint32_t pair = round_pair<Pair>(up[j]);
            *reinterpret_cast<uint16_t*>(rows + j * 512 + place) = static_cast<uint16_t>(pair);
            *reinterpret_cast<uint16_t*>(rows + j * 512 + place + 64) = static_cast<uint16_t>(pair >> 16);
          }
        });
  }

  // Puts all tokens of the tile through two buffers of `kTokens` rows. store(token, the scales of this lane's
  // pairs of tokens, where the row of `token` goes) fills kEights x 8 rows. The map of the output has the
  // rows twice, as y and z: row r0 + i is (y, z) = (kTokens - count + i, r0 + count), and y ends at kTokens,
  // so exactly `count` rows are written.
  template <int kTokens, int kEights, class Store>
  __device__ __forceinline__ void store_boxes(const TileInfo& tile, int column, const float* token_scale,
                                              const Store& store) {
    constexpr int kBatch = 8 * kEights, kRowBytes = Config::StoreBytes / kTokens;
    static_assert(kTokens % kBatch == 0 && Config::MaxTokens % kBatch == 0);
    int warpgroup = threadIdx.x / kWarpgroup;
    bool leader = threadIdx.x % kWarpgroup == 0;
#pragma unroll
    for (int first = 0; first < Config::MaxTokens; first += kTokens) {
      if (first >= tile.rows) break;
      uint8_t* buffer = shared_.store[warpgroup][store_buffer_];
#pragma unroll
      for (int token = first; token < first + kTokens && token < Config::MaxTokens; token += kBatch) {
        float2 scales[kEights];  // read before the stores, which the compiler thinks could change them
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          scales[j] = *reinterpret_cast<const float2*>(token_scale + token + 8 * j + threadIdx.x % 4 * 2);
        }
        store(token, scales, buffer + (token - first) * kRowBytes);
      }
      fence_async_proxy();
      if (leader) store_wait_read<0>();  // so that after the barrier the other buffer is free
      named_barrier(1 + warpgroup, kWarpgroup);
      if (leader) {
        int count = min(kTokens, tile.rows - first);
        store_box(&maps_.out, smem_address(buffer), column, kTokens - count, tile.row + first + count);
        store_commit();
      }
      store_buffer_ ^= 1;
    }
  }

  template <class Pair>
  static __device__ __forceinline__ uint32_t round_pair(float2 values) {
    Pair pair;
    if constexpr (std::is_same_v<Pair, __half2>) {
      pair = __float22half2_rn(values);
    } else {
      pair = __float22bfloat162_rn(values);
    }
    return *reinterpret_cast<uint32_t*>(&pair);
  }

  __device__ __forceinline__ void store_float32(const float* sums, const TileInfo& tile,
                                                const float* token_scale, float2 bias, int column) {
    int lane = threadIdx.x % kWarp;
    float* out = static_cast<float*>(problem_.out) + static_cast<int64_t>(tile.row) * problem_.n + column;
#pragma unroll
    for (int i = 0; i < Config::MaxTokens / 4; ++i) {  // token 8 j + 2 t + e
      int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
      const float* d = sums + i / 2 * 4 + i % 2;
      if (token < tile.rows) {
        float scale = token_scale[token];
        *reinterpret_cast<float2*>(out + static_cast<int64_t>(token) * problem_.n) =
            make_float2(d[0] * scale + bias.x, d[2] * scale + bias.y);
      }
    }
  }

  Shared& shared_;
  const Problem& problem_;
  const Maps& maps_;
  uint32_t rank_;   // among the blocks that share X
  uint32_t split_;  // among those that share K
  RingPosition<Config::Stages> ring_;
  RingPosition<kInfoSlots> info_;
  int previous_ = 0;  // the stage whose products may still run
  typename Config::Weights weights_;
  typename Config::Weights::Fragments fragments_[2];
  int store_buffer_ = 0;
  uint32_t partial_round_ = 0;
};

template <class Config, bool kGated>
__global__ void __launch_bounds__(Config::Threads, 1)
    prefill_kernel(const __grid_constant__ Problem problem, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(memory);
  release_next_kernel();
  PrefillBlock<Config, kGated> block(shared, problem, maps);
  if (threadIdx.x == 0) block.init_barriers();
  __syncthreads();
  if constexpr (Config::Blocks > 1) cluster_sync();

  if (threadIdx.x >= Config::Warpgroups * kWarpgroup) {
    if constexpr (Config::MovesRegisters) register_give<Config::ProducerRegisters>();
    // All but the weights and the routing. Results are stored only after activations have come.
    if (threadIdx.x / kWarp % 4 != 2) wait_previous_kernel();
    switch (threadIdx.x / kWarp % 4) {
      case 0:
        block.copy_activations();
        break;
      case 1:
        if (block.takes_part()) block.describe_tiles();
        break;
      case 2:
        block.copy_weights();
        break;
      default:
        block.zero_rows(blockIdx.x * kWarp + threadIdx.x % kWarp, gridDim.x * kWarp);
    }
  } else {
    if constexpr (Config::MovesRegisters) register_take<Config::ConsumerRegisters>();
    if (block.takes_part()) block.multiply_tiles();
  }
  // A block stays until its peers send nothing more to its shared memory.
  if constexpr (Config::Blocks > 1) cluster_sync();
}

}  // namespace fp4::sm90
