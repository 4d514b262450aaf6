// Grouped GEMM by mma.sync, 4-bit weights of layout mma_bf16 x bf16 or fp16 activations, for many tokens, on
// every GPU from sm_80 on: out[r, n] = scale[r] * sum_k w[n, k] x[r, k].
//
// The operands are swapped: weights are operand A of mma.m16n8k16, made in registers by the warps that
// multiply, so that no decoded weight touches shared memory; tokens are N. A warp has 16 to 64 weight rows
// and up to 128 tokens: each fragment of weights, which costs some 12 instructions, is used for all of them.
//
// A block is persistent, and all of its warps do the same. X comes in half steps of 64 K, weights in steps of
// 128, by cp.async into two rings; each half step begins with a barrier, before which its X has arrived and
// after which what the half step before read is overwritten. Weights arrive a half step earlier than X: their
// codes are in registers, and the first fragments made, before the barrier. Copies run ahead over the ends of
// tiles, so the next tile's are under way while the sums of one are stored.
//
// One warp walks over the tiles and tells the others through shared memory (TileInfo). What is more than full
// waves of tiles is shared out in parts of K (Shares): each part but a tile's first leaves its sums in global
// memory for the block that has that one.
#pragma once

#include <new>

#include "prefill_config.cuh"
#include "prefill_store.cuh"
#include "ptx_sm80.cuh"

namespace fp4::sm80 {

template <class Config, bool kGated>
class PrefillBlock {
 public:
  using Shared = SharedStorage<Config>;

  __device__ __forceinline__ PrefillBlock(Shared& shared, const Problem& problem)
      : shared_(shared), problem_(problem) {}

  __device__ __forceinline__ void run() {
    const int lane = threadIdx.x % kWarp;
    words_.keep_constants(lane);
    if (walks()) new (&walk()) Walk(problem_.tiling);
    begin_copies();
    TileSize tile = size_of(0);
    if (tile.width > 0) {
      begin_fragments();
      for (int slot = 0; tile.width > 0; tile = size_of(slot)) {
        if (walks()) tell((slot + Config::Stages) % kInfoSlots);
        Sums sums = {};
        multiply_width(typename Config::Widths(), sums, tile);
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
  using Words = typename Config::Words;
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
    int row_tiles = 0;          // of the weight from the tile's first on
    int row_tile = 0;           // the tile's first and its step, counted over all of the layout
    int x_slot = 0, stage = 0;  // where it goes
  };

  __device__ __forceinline__ void aim() {
    const TileInfo& info = shared_.info[cursor_.slot];
    cursor_.steps = info.steps;
    cursor_.rows = cursor_.row_tiles = 0;
    if (info.width == 0) return;
    const int row = threadIdx.x / kXPieces, piece = threadIdx.x % kXPieces;
    const int from = info.first * (kStepK * 2) + piece * kPiece;
    cursor_.x = problem_.x + (info.row + row) * (int64_t(problem_.k) * 2) + from;
    cursor_.x_left = problem_.k * 2 - from;
    cursor_.rows = info.rows - row;
    cursor_.row_tiles = (problem_.n - info.column) / kTileRows;
    cursor_.row_tile =
        (info.group * (problem_.n / kTileRows) + info.column / kTileRows) * problem_.tiling.steps +
        info.first;
  }

  // X of a half step.
  __device__ __forceinline__ void copy_x() {
    const int row = threadIdx.x / kXPieces, piece = threadIdx.x % kXPieces;
    const uint32_t to =
        smem_address(shared_.x[cursor_.x_slot]) + row * kXRowBytes + ((piece ^ row) % kXPieces) * kPiece;
    const int pass_bytes = kXPass * 2 * problem_.k;
#pragma unroll
    for (int i = 0; i < ceil_div(Config::MaxTokens, kXPass); ++i) {
      const bool wanted = (i + 1) * kXPass <= Config::MaxTokens || i * kXPass + row < Config::MaxTokens;
      copy_16(to + i * kXPass * kXRowBytes, cursor_.x + int64_t(i) * pass_bytes, wanted,
              i * kXPass < cursor_.rows && cursor_.x_left > 0);
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

  // What the half step `Ahead` after this one needs (kHalf: which half of its step they are), and after the
  // second half the weights of the step that follows.
  template <int kHalf>
  __device__ __forceinline__ void copy_half() {
    copy_x();
    if constexpr (kHalf == 1) {
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
        copy_half<1>();
      }
      if (i + 1 < Config::Stages) copy_half<0>();
    }
  }

  // ---- products ----

  static __device__ __forceinline__ int warp_m() { return threadIdx.x / kWarp % Config::WarpsM; }
  static __device__ __forceinline__ int warp_n() { return threadIdx.x / kWarp / Config::WarpsM; }

  // Of a warp's rows and 64 K: a lane's codes and the bytes of its scales.
  struct Raw {
    uint2 codes[Config::TilesM][2];
    uint32_t scales[Config::TilesM][2];
  };
  // Of 32 K: operands A of two products for each 16 rows.
  using Fragments = uint32_t[Config::TilesM][2][4];

  // `kHalf` of the step in `stage`.
  template <int kHalf>
  __device__ __forceinline__ void load_raw(int stage) {
    using Layout = MmaBf16;
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const uint32_t codes = smem_address(shared_.codes[stage]) + warp_m() * Config::TilesM * kTileCodes +
                           t / 2 * 512 + t % 2 * 8,
                   scales = smem_address(shared_.scales[stage]) +
                            warp_m() * Config::TilesM * Config::TileScales + g * (Config::TileScales / 8);
    constexpr int kNext = 16 * (Layout::slot(0, 2) - Layout::slot(0, 0));
#pragma unroll
    for (int m = 0; m < Config::TilesM; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        raw_.codes[m][i] = load_shared_8(codes + Layout::slot(g, i) * 16 + m * kTileCodes + kHalf * kNext);
      if constexpr (Config::TileScales == 128) {
        const uint2 both = load_shared_8(scales + m * Config::TileScales + kHalf * 8);
        raw_.scales[m][0] = both.x, raw_.scales[m][1] = both.y;
      } else {
        raw_.scales[m][0] = load_shared_4(scales + m * Config::TileScales + kHalf * 4);
      }
    }
  }

  // The `i`-th 32 K of what was loaded.
  template <int i>
  __device__ __forceinline__ void decode(Fragments& fragments) {
#pragma unroll
    for (int m = 0; m < Config::TilesM; ++m) {
      typename Words::Scales scales;
      if constexpr (Config::TileScales == 128) {
        scales = words_.decode_scales(raw_.scales[m][i]);
      } else {
        scales = words_.template decode_scales<2 * i>(raw_.scales[m][0]);
      }
      const uint2 word = raw_.codes[m][i];
      Words::dequantize(word.x, word.y, scales, fragments[m]);
    }
  }

  // The products of 32 K: `i`-th of the half step whose X begins at `x`, for this lane (see x_row).
  template <int Width, int i>
  __device__ __forceinline__ void multiply_32(Sums& sums, const Fragments& fragments, uint32_t x) {
    static_assert(Width % (16 * Config::WarpsN) == 0);
    constexpr int kPairs = Width / Config::WarpsN / 16;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t at = x ^ ((2 * i + c) * 2 * kPiece);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        uint32_t b[4];
        if (i == 0 && c == 0 && p < Config::EarlyPairs) {
#pragma unroll
          for (int j = 0; j < 4; ++j) b[j] = early_[p][j];
        } else {
          load_matrices(at + p * 16 * kXRowBytes, b);
        }
#pragma unroll
        for (int m = 0; m < Config::TilesM; ++m) {
          mma<Words::kElement>(sums.tile[m][2 * p], fragments[m][c], b[0], b[1]);
          mma<Words::kElement>(sums.tile[m][2 * p + 1], fragments[m][c], b[2], b[3]);
        }
      }
    }
  }

  // Where this lane reads a fragment of X: token l % 8 of eight of 16, and 8 of 16 K, swizzled.
  template <int Width>
  __device__ __forceinline__ uint32_t x_place() const {
    const int lane = threadIdx.x % kWarp, token = lane / 16 * 8 + lane % 8;
    return (warp_n() * (Width / Config::WarpsN) + token) * kXRowBytes +
           ((lane / 8 % 2) ^ (lane % 8)) * kPiece;
  }

  template <int Width, int kHalf>
  __device__ __forceinline__ void half_step(Sums& sums) {
    copy_wait<Config::Pending>();
    __syncthreads();
    copy_half<kHalf>();
    const uint32_t x = smem_address(shared_.x[x_slot_]) + x_place<Width>();
    Fragments second;
    decode<1>(second);
    multiply_32<Width, 0>(sums, first_, x);
    if constexpr (kHalf == 1) stage_ = stage_ + 1 == Config::Stages ? 0 : stage_ + 1;
    load_raw<1 - kHalf>(stage_);
    decode<0>(first_);
    multiply_32<Width, 1>(sums, second, x);
    x_slot_ = x_slot_ + 1 == Config::XSlots ? 0 : x_slot_ + 1;
    load_early();
  }

  // What the next half step multiplies first.
  __device__ __forceinline__ void load_early() {
    const uint32_t x = smem_address(shared_.x[x_slot_]) + x_place<Config::MaxTokens>();
#pragma unroll
    for (int p = 0; p < Config::EarlyPairs; ++p) load_matrices(x + p * 16 * kXRowBytes, early_[p]);
  }

  // The first half step's weights; past the last tile they are what lies in shared memory, for nobody.
  __device__ __forceinline__ void begin_fragments() {
    copy_wait<Config::Pending>();
    __syncthreads();
    load_raw<0>(0);
    decode<0>(first_);
    load_early();
  }

  template <int Width>
  __device__ __forceinline__ void multiply(Sums& sums, int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      half_step<Width, 0>(sums);
      half_step<Width, 1>(sums);
    }
  }

  // Runs the loop for tiles so wide.
  template <int Width, int... Others>
  __device__ __forceinline__ void multiply_width(WidthList<Width, Others...>, Sums& sums, TileSize tile) {
    if (sizeof...(Others) == 0 || tile.width == Width) {
      multiply<Width>(sums, tile.steps);
    } else if constexpr (sizeof...(Others) > 0) {
      multiply_width(WidthList<Others...>(), sums, tile);
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
  Words words_;
  Cursor cursor_;
  Raw raw_;
  Fragments first_;  // of the next 32 K
  uint32_t early_[Config::EarlyPairs > 0 ? Config::EarlyPairs : 1][4];
  int x_slot_ = 0, stage_ = 0;
};

template <class Config, bool kGated>
__global__ void __launch_bounds__(Config::Threads, Config::Blocks)
    prefill_kernel(const __grid_constant__ Problem problem) {
  FP4_DYNAMIC_SHARED(uint8_t, 128, memory);
  PrefillBlock<Config, kGated>(*reinterpret_cast<SharedStorage<Config>*>(memory), problem).run();
}

}  // namespace fp4::sm80
