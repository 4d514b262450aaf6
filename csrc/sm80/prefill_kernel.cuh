// Grouped GEMM with mma.sync for many tokens, on every GPU from sm_80 on: 4-bit weights of layout mma_bf16 x
// bf16, fp16 or int8 activations. out[r, n] = scale[r] * sum_k w[n, k] x[r, k].
//
// The operands are swapped: weights are operand A of mma.m16n8k16 (for int8 k32), and tokens are N. The warps
// that multiply decode weights into registers, so no decoded weight touches shared memory. A warp has 16 to
// 64 weight rows and up to 128 tokens, and uses each fragment of weights for all of its tokens
// (prefill_products.cuh, prefill_int8.cuh).
//
// A block is persistent, and all of its warps do the same work. cp.async copies X and weights into two rings.
// X comes in parts of 128 bytes a row: half steps of 64 K, or for int8 whole steps of 128. Weights come in
// steps of 128. Each part begins with a barrier. Its X has arrived before the barrier; after it, the data of
// the part before may be overwritten. Weights arrive one part earlier than X: before the barrier their codes
// are in registers, and the first fragments are decoded. Copies run ahead past the ends of tiles, so those of
// the next tile are in flight while the sums of a tile are stored.
//
// One warp walks over the tiles and tells the other warps through shared memory (TileInfo). Tiles beyond full
// waves are split into parts of K that the blocks share (Shares). The block of a tile's first part adds up
// all of its parts; the other parts leave their sums in global memory for that block.
#pragma once

#include <new>
#include <type_traits>

#include "prefill_int8.cuh"
#include "prefill_products.cuh"
#include "prefill_store.cuh"

namespace fp4::sm80 {

template <class Config, bool kGated>
class PrefillBlock {
 public:
  using Shared = SharedStorage<Config>;

  __device__ __forceinline__ PrefillBlock(Shared& shared, const Problem& problem)
      : shared_(shared), problem_(problem), products_(shared) {}

  __device__ __forceinline__ void run() {
    products_.keep_constants();
    if (walks()) new (&walk()) Walk(problem_.tiling);
    begin_copies();
    TileSize tile = size_of(0);
    if (tile.width > 0) {
      products_.begin();
      for (int slot = 0; tile.width > 0; tile = size_of(slot)) {
        if (walks()) tell((slot + Config::Stages) % kInfoSlots);
        Sums sums = {};
        multiply(typename Config::Widths(), sums, tile);
        const TileInfo& info = shared_.info[slot];
        if (info.first > 0) {
          send_sums(sums, info);
        } else {
          add_sums(sums, info);
          store_tile<Config, kGated>(problem_, info, sums);
        }
        slot = next_slot(slot);
      }
    }
    copy_wait<0>();
    if (problem_.leaves_rest) return;
    const int columns = kGated ? problem_.n / 2 : problem_.n;
    const int row_bytes = columns * (problem_.out_type == DType::kFloat32 ? 4 : 2);
    zero_unused_rows(problem_.tiling.rows, static_cast<uint4*>(problem_.out), row_bytes / 16,
                     blockIdx.x * Config::Threads + threadIdx.x, gridDim.x * Config::Threads);
  }

 private:
  using Walk = typename Shared::Walk;
  using Products = std::conditional_t<Config::Int8, Int8Products<Config>, HalfProducts<Config>>;
  using Sums = WarpSums<Config>;

  // ---- tiles ----

  struct TileSize {
    int width, steps;
  };

  static __device__ __forceinline__ bool walks() { return threadIdx.x < kWarp; }
  __device__ __forceinline__ Walk& walk() {
    return reinterpret_cast<Walk&>(shared_.walks[threadIdx.x % kWarp]);
  }
  static __device__ __forceinline__ int next_slot(int slot) { return (slot + 1) % kInfoSlots; }

  __device__ __forceinline__ TileSize size_of(int slot) const {
    return {shared_.info[slot].width, shared_.info[slot].steps};
  }

  // Writes the next tile of the walk to shared memory, or one of width 0 after the last.
  __device__ __forceinline__ void tell(int slot) {
    Tile tile;
    const bool more = walk().next(tile);
    TileInfo info = {};
    if (more) {
      info = {tile.width, tile.group, tile.row, tile.rows, tile.column * Config::Rows,
              tile.first, tile.steps, 0,        0};
      walk().find_part(tile, info.part, info.helpers);
    }
    if (threadIdx.x == 0) shared_.info[slot] = info;
  }

  // ---- copies ----

  static constexpr int kXPieces = kXRowBytes / kPiece, kXPass = Config::Threads / kXPieces;
  static constexpr int kCodePieces = kTileCodes / kPiece, kCodePass = Config::Threads / kCodePieces;
  static constexpr int kScalePieces = Config::TileScales / kPiece;

  // The data that is fetched next: this thread's part of it.
  struct Cursor {
    int slot = 0;    // slot of its TileInfo, whose width is 0 after the last tile
    int steps = 0;   // steps of the tile that are still to be fetched, including this one
    int x_left = 0;  // bytes of the row of X from this thread's first one on
    int rows = 0;    // rows of X from this thread's row on
    const uint8_t* x = nullptr;
    const float* x_scale = nullptr;  // for int8: the scale of the row with this thread's number
    int row_tiles = 0;               // row tiles of the weight from the tile's first one on
    int row_tile = 0;                // index of the first row tile and the step in the whole layout
    int x_slot = 0, stage = 0;       // destination
  };

  __device__ __forceinline__ void aim() {
    const TileInfo& info = shared_.info[cursor_.slot];
    cursor_.steps = info.steps;
    cursor_.rows = cursor_.row_tiles = 0;
    if (info.width == 0) return;
    const int row = threadIdx.x / kXPieces, piece = threadIdx.x % kXPieces;
    constexpr int kBytes = Config::XBytesEach;
    const int from = info.first * (kStepK * kBytes) + piece * kPiece;
    cursor_.x = problem_.x + (info.row + row) * (int64_t(problem_.k) * kBytes) + from;
    cursor_.x_left = problem_.k * kBytes - from;
    if constexpr (Config::Int8)
      cursor_.x_scale =
          problem_.x_step_scale + int64_t(info.first) * problem_.x_rows + info.row + threadIdx.x;
    cursor_.rows = info.rows - row;
    cursor_.row_tiles = (problem_.n - info.column) / kTileRows;
    cursor_.row_tile =
        (info.group * (problem_.n / kTileRows) + info.column / kTileRows) * problem_.tiling.steps +
        info.first;
  }

  // Copies X for a part.
  __device__ __forceinline__ void copy_x() {
    const int row = threadIdx.x / kXPieces, piece = threadIdx.x % kXPieces;
    const uint32_t to =
        smem_address(shared_.x[cursor_.x_slot]) + row * kXRowBytes + ((piece ^ row) % kXPieces) * kPiece;
    const int pass_bytes = kXPass * Config::XBytesEach * problem_.k;
#pragma unroll
    for (int i = 0; i < ceil_div(Config::MaxTokens, kXPass); ++i) {
      const bool wanted = (i + 1) * kXPass <= Config::MaxTokens || i * kXPass + row < Config::MaxTokens;
      copy_16(to + i * kXPass * kXRowBytes, cursor_.x + int64_t(i) * pass_bytes, wanted,
              i * kXPass < cursor_.rows && cursor_.x_left > 0);
    }
    if constexpr (Config::Int8) {
      copy_4(smem_address(shared_.x_scale[cursor_.x_slot] + threadIdx.x), cursor_.x_scale,
             threadIdx.x < Config::MaxTokens, threadIdx.x < cursor_.rows + row);
      cursor_.x_scale += problem_.x_rows;
    }
    cursor_.x += kXRowBytes;
    cursor_.x_left -= kXRowBytes;
    cursor_.x_slot = cursor_.x_slot + 1 == Config::XSlots ? 0 : cursor_.x_slot + 1;
  }

  // Copies the weights of a step.
  __device__ __forceinline__ void copy_weights() {
    const int stage = cursor_.stage, steps = problem_.tiling.steps;
    const uint32_t codes = smem_address(shared_.codes[stage]) + threadIdx.x * kPiece;
#pragma unroll
    for (int i = 0; i < Config::RowTiles / kCodePass; ++i) {
      const int tile = threadIdx.x / kCodePieces + i * kCodePass;
      copy_16_ahead(codes + i * kCodePass * kTileCodes,
                    problem_.codes + int64_t(cursor_.row_tile + tile * steps) * kTileCodes +
                        threadIdx.x % kCodePieces * kPiece,
                    tile < cursor_.row_tiles);
    }
    const int tile = threadIdx.x / kScalePieces;
    copy_16_ahead(smem_address(shared_.scales[stage]) + threadIdx.x * kPiece,
                  problem_.scales + int64_t(cursor_.row_tile + tile * steps) * Config::TileScales +
                      threadIdx.x % kScalePieces * kPiece,
                  tile < min(cursor_.row_tiles, Config::RowTiles));
    ++cursor_.row_tile;
    cursor_.stage = stage + 1 == Config::Stages ? 0 : stage + 1;
  }

  // Copies what the part `Ahead` parts later needs. kPart is the part's number in its step. After the last
  // part of a step it also copies the weights of the next step.
  template <int kPart>
  __device__ __forceinline__ void copy_part() {
    copy_x();
    if constexpr (kPart + 1 == Config::Parts) {
      if (--cursor_.steps == 0) {
        cursor_.slot = next_slot(cursor_.slot);
        aim();
      }
      copy_weights();
    }
    copy_commit();
  }

  // The walk is as many tiles ahead of the products as there are stages, so copies know their tile even if
  // each tile has only one step.
  __device__ __forceinline__ void begin_copies() {
#pragma unroll 1
    for (int i = 0; i < Config::Stages; ++i) {
      if (walks()) tell(i);
      __syncthreads();
      if (i == 0) {
        aim();
        copy_weights();
      } else {
        copy_part<Config::Parts - 1>();
      }
      if constexpr (Config::Parts == 2)
        if (i + 1 < Config::Stages) copy_part<0>();
    }
  }

  // Runs the loop that is compiled for this width of tile.
  template <int Width, int... Others>
  __device__ __forceinline__ void multiply(WidthList<Width, Others...>, Sums& sums, TileSize tile) {
    if (sizeof...(Others) == 0 || tile.width == Width) {
#pragma unroll 1
      for (int step = 0; step < tile.steps; ++step)
        products_.template step<Width>(sums, [&](auto part) { copy_part<part.value>(); });
    } else if constexpr (sizeof...(Others) > 0) {
      multiply(WidthList<Others...>(), sums, tile);
    }
  }

  // ---- parts of K ----

  // The sums of a part of K in global memory: for each thread a float4 for every eight tokens of 16 rows, and
  // a flag. The thread sets its flag to the launch's ticket after it has written its sums. The thread with
  // the same number in the block that adds them clears the flag, because a later launch may have the same
  // ticket (the next replay of a CUDA graph).
  __device__ __forceinline__ float4* part_sums(int part) const {
    return problem_.part_sums + part * (Config::SumBytes / 16) + threadIdx.x;
  }
  __device__ __forceinline__ uint64_t* part_flag(int part) const {
    return problem_.part_flags + part * Config::Threads + threadIdx.x;
  }

  __device__ __forceinline__ void send_sums(const Sums& sums, const TileInfo& tile) {
    float4* to = part_sums(tile.part);
    const int tokens = tile.width / Config::WarpsN;
#pragma unroll
    for (int j = 0; j < Sums::kEights; ++j) {
      if (8 * j >= tokens) break;
#pragma unroll
      for (int m = 0; m < Config::TilesM; ++m)
        __stcg(to + (j * Config::TilesM + m) * Config::Threads, sums.tile[m][j]);
    }
    store_release(part_flag(tile.part), problem_.ticket);
  }

  // Adds the sums of the other parts in the order of K, in whatever order they arrive.
  __device__ __forceinline__ void add_sums(Sums& sums, const TileInfo& tile) {
    const int tokens = tile.width / Config::WarpsN;
#pragma unroll 1
    for (int helper = 1; helper <= tile.helpers; ++helper) {
      uint64_t* flag = part_flag(tile.part + helper);
      while (load_acquire(flag) != problem_.ticket) {
      }
      *flag = 0;
      const float4* from = part_sums(tile.part + helper);
#pragma unroll
      for (int j = 0; j < Sums::kEights; ++j) {
        if (8 * j >= tokens) break;
#pragma unroll
        for (int m = 0; m < Config::TilesM; ++m) {
          const float4 more = __ldcg(from + (j * Config::TilesM + m) * Config::Threads);
          float4& sum = sums.tile[m][j];
          sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
      }
    }
  }

  Shared& shared_;
  const Problem& problem_;
  Cursor cursor_;
  Products products_;
};

template <class Config, bool kGated>
__global__ void __launch_bounds__(Config::Threads, Config::Blocks)
    prefill_kernel(const __grid_constant__ Problem problem) {
  FP4_DYNAMIC_SHARED(uint8_t, 128, memory);
  PrefillBlock<Config, kGated>(*reinterpret_cast<SharedStorage<Config>*>(memory), problem).run();
}

}  // namespace fp4::sm80
