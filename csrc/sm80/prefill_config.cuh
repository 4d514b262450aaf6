// What a prefill GEMM by mma.sync is told, the candidates' parameters, and what a block keeps in shared
// memory.
#pragma once

#include <cstdint>

#include "../device/e2m1_mma_bf16.cuh"
#include "../device/gate.cuh"
#include "../device/prefill_schedule.cuh"
#include "../device/types.cuh"
#include "e2m1_to_int8.cuh"

namespace fp4::sm80 {

using namespace device;

constexpr int kXRowBytes = 128;  // of X that is fetched at a time: a part of a step
constexpr int kPiece = 16;       // bytes that a thread copies at a time
constexpr int kInfoSlots = 8;    // tiles that are known: those under way, and one more

struct Problem {
  Tiling tiling;
  const uint8_t* x;  // [rows, k] of 16 bits, or of int8
  const uint8_t* codes;
  const uint8_t* scales;
  const float* x_scale;       // or null: ones
  const float* x_step_scale;  // of int8 rows [steps, x_rows]; x_scale is null
  const float* global_scale;  // or null: ones
  const void* bias;           // or null
  void* out;
  DType bias_type, out_type;
  Gate gate;         // gated: rows 2i and 2i + 1 of the weight are gate i and up i; kSilu, 16-bit results
  int n, k;          // weight rows; columns of X
  int x_rows;        // of all groups
  bool leaves_rest;  // as in PrefillArguments
  // Of tiles that several blocks share: see Shares and PrefillBlock::part_sums.
  float4* part_sums;
  uint64_t* part_flags;
  uint64_t ticket;  // another for every launch, and not to be met in memory by chance
};

// A block of WarpsM x WarpsN warps, each with TilesM x 16 weight rows and 1 / WarpsN of the tokens. Stages:
// steps of weights in shared memory. Blocks: of a multiprocessor, if its shared memory has room.
template <class Words_, int WarpsM_, int WarpsN_, int TilesM_, class Widths_, int Stages_, int Blocks_>
struct PrefillConfig {
  using Words = Words_;
  using Widths = Widths_;
  static constexpr int WarpsM = WarpsM_, WarpsN = WarpsN_, TilesM = TilesM_, Stages = Stages_;
  static constexpr int Blocks = Blocks_;
  static constexpr bool Int8 = Words::kElement == Element::kInt8;
  static constexpr int XBytesEach = Int8 ? 1 : 2;                 // of an element of X
  static constexpr int Parts = kStepK * XBytesEach / kXRowBytes;  // of a step of X
  static constexpr int Threads = kWarp * WarpsM * WarpsN;
  static constexpr int RowTiles = TilesM * WarpsM, Rows = kTileRows * RowTiles;
  static constexpr int MaxTokens = Widths::kMost, WarpTokens = MaxTokens / WarpsN;
  static constexpr int TileScales = sm90_scales(kStepK, Words::kScaleBlock);
  // Where few warps have to hide latencies, a warp loads its first X before a half step's barrier: 16 tokens
  // so many times, for 16 K.
  static constexpr int EarlyPairs = !Int8 && WarpsN == 1 && Threads * Blocks <= 256 ? 2 : 0;
  // X is fetched so many parts ahead, and weights one more.
  static constexpr int Ahead = Parts * (Stages - 1), XSlots = Ahead + 1;
  static constexpr int Pending = Ahead - (EarlyPairs > 0 ? 2 : 1);  // parts that need not have arrived
  static constexpr int XBytes = MaxTokens * kXRowBytes;
  static constexpr int CodeBytes = RowTiles * kTileCodes, ScaleBytes = RowTiles * TileScales;
  static constexpr int SumBytes = MaxTokens * Rows * 4;  // of a part of K
  static_assert(WarpTokens % 16 == 0 && Stages >= 2 && Stages + 2 <= kInfoSlots);
  static_assert(RowTiles * (TileScales / kPiece) <= Threads);
  static_assert(RowTiles * (kTileCodes / kPiece) % Threads == 0);
};

template <class Config, bool kInt8>
struct XScales {};

template <class Config>
struct XScales<Config, true> {
  float x_scale[Config::XSlots][Config::MaxTokens];
  static_assert(sizeof(x_scale) % 128 == 0 && Config::MaxTokens <= Config::Threads);
};

template <class Config>
struct alignas(128) SharedStorage : XScales<Config, Config::Int8> {
  using Walk = TileWalk<typename Config::Widths, 1>;

  uint8_t x[Config::XSlots][Config::XBytes];
  uint8_t codes[Config::Stages][Config::CodeBytes];
  uint8_t scales[Config::Stages][Config::ScaleBytes];
  TileInfo info[kInfoSlots];
  alignas(Walk) uint8_t walks[kWarp][sizeof(Walk)];  // of each lane of the warp that walks
};

}  // namespace fp4::sm80
