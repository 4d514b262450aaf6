// Grouped GEMM by mma.sync, 4-bit weights of layout mma_bf16 x bf16, fp16 or int8 activations, for many
// tokens, on every GPU from sm_80 on: out[r, n] = scale[r] * sum_k w[n, k] x[r, k].
//
// The operands are swapped: weights are operand A of mma.m16n8k16 or, of int8, k32, made in registers by the
// warps that multiply, so that no decoded weight touches shared memory; tokens are N. A warp has 16 to 64
// weight rows and up to 128 tokens: each fragment of weights is used for all of them (prefill_products.cuh,
// prefill_int8.cuh).
//
// A block is persistent, and all of its warps do the same. X comes in parts of 128 bytes a row, which are
// half steps of 64 K, or of int8 steps of 128; weights come in steps of 128, by cp.async into two rings. Each
// part begins with a barrier, before which its X has arrived and after which what the part before read is
// overwritten. Weights arrive a part earlier than X: their codes are in registers, and the first fragments
// made, before the barrier. Copies run ahead over the ends of tiles, so the next tile's are under way while
// the sums of one are stored.
//
// One warp walks over the tiles and tells the others through shared memory (TileInfo). What is more than full
// waves of tiles is shared out in parts of K (Shares): each part but a tile's first leaves its sums in global
// memory for the block that has that one.
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

  // The next tile of the walk; of width 0 after the last.
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

  // What is fetched next, as this thread's part of it.
  struct Cursor {
    int slot = 0;    // of its TileInfo; its width is 0 after the last tile
    int steps = 0;   // yet to fetch of the tile, this one's included
    int x_left = 0;  // bytes of a row of X from this thread's on
    int rows = 0;    // of X from this thread's on
    const uint8_t* x = nullptr;
    const float* x_scale = nullptr;  // of int8: of the thread's number's row
    int row_tiles = 0;               // of the weight from the tile's first on
    int row_tile = 0;                // the tile's first and its step, counted over all of the layout
    int x_slot = 0, stage = 0;       // where it goes
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

  // X of a part.
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

  // Weights of a step.
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

  // What the part `Ahead` after this one needs (kPart: which of its step they are), and after the last part
  // the weights of the step that follows.
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

  // The walk is as many tiles ahead of the products as there are stages, so that copies know theirs even if
  // each tile has one step.
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

  // Runs the loop for tiles so wide.
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

  // The sums of a part of K in global memory: of each thread a float4 for eight tokens of 16 rows, and a
  // flag. The thread that has written its sums raises it with the launch's ticket; the same one of the block
  // that adds them lowers it again, for a launch with the same ticket (a CUDA graph's next replay).
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

  // In the order of K, whenever they come.
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
