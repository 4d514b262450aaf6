// The arguments of a prefill GEMM with mma.sync, the candidates' parameters, and the shared memory of a
// block.
#pragma once

#include <cstdint>

#include "../device/e2m1_mma_bf16.cuh"
#include "../device/gate.cuh"
#include "../device/prefill_schedule.cuh"
#include "../device/types.cuh"
#include "e2m1_to_int8.cuh"

namespace fp4::sm80 {

using namespace device;

constexpr int kXRowBytes = 128;  // bytes of a row of X that are fetched at a time: a part of a step
constexpr int kPiece = 16;       // bytes of one copy of a thread
constexpr int kInfoSlots = 8;    // tiles that are known: those in flight, and one more

struct Problem {
  Tiling tiling;
  const uint8_t* x;  // [rows, k] of 16 bits, or of int8
  const uint8_t* codes;
  const uint8_t* scales;
  const float* x_scale;       // or null: ones
  const float* x_step_scale;  // for int8 rows [steps, x_rows]; x_scale is null then
  const float* global_scale;  // or null: ones
  const void* bias;           // or null
  void* out;
  DType bias_type, out_type;
  Gate gate;         // gated: rows 2i and 2i + 1 of the weight are gate i and up i; kSilu, 16-bit results
  int n, k;          // weight rows; columns of X
  int x_rows;        // rows of all groups
  bool leaves_rest;  // as in PrefillArguments
  // For tiles that several blocks share: see Shares and PrefillBlock::part_sums.
  float4* part_sums;
  uint64_t* part_flags;
  uint64_t ticket;  // different for every launch, and unlikely to be in memory by chance
};

// A block has WarpsM x WarpsN warps. Each has TilesM x 16 weight rows and 1 / WarpsN of the tokens. Stages:
// the steps of weights that fit in shared memory. Blocks: blocks on a multiprocessor, if its shared memory
// has room.
template <class Words_, int WarpsM_, int WarpsN_, int TilesM_, class Widths_, int Stages_, int Blocks_>
struct PrefillConfig {
  using Words = Words_;
  using Widths = Widths_;
  static constexpr int WarpsM = WarpsM_, WarpsN = WarpsN_, TilesM = TilesM_, Stages = Stages_;
  static constexpr int Blocks = Blocks_;
  static constexpr bool Int8 = Words::kElement == Element::kInt8;
  static constexpr int XBytesEach = Int8 ? 1 : 2;                 // bytes of an element of X
  static constexpr int Parts = kStepK * XBytesEach / kXRowBytes;  // parts of a step of X
  static constexpr int Threads = kWarp * WarpsM * WarpsN;
  static constexpr int RowTiles = TilesM * WarpsM, Rows = kTileRows * RowTiles;
  static constexpr int MaxTokens = Widths::kMost, WarpTokens = MaxTokens / WarpsN;
  static constexpr int TileScales = sm90_scales(kStepK, Words::kScaleBlock);
  // If few warps must hide latencies, a warp loads its first X before the barrier of a half step: this many
  // times 16 tokens, for 16 K.
  static constexpr int EarlyPairs = !Int8 && WarpsN == 1 && Threads * Blocks <= 256 ? 2 : 0;
  // X is fetched `Ahead` parts ahead, and weights one part more.
  static constexpr int Ahead = Parts * (Stages - 1), XSlots = Ahead + 1;
  static constexpr int Pending = Ahead - (EarlyPairs > 0 ? 2 : 1);  // parts that need not have arrived
  static constexpr int XBytes = MaxTokens * kXRowBytes;
  static constexpr int CodeBytes = RowTiles * kTileCodes, ScaleBytes = RowTiles * TileScales;
  static constexpr int SumBytes = MaxTokens * Rows * 4;  // sums of a part of K
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
  alignas(Walk) uint8_t walks[kWarp][sizeof(Walk)];  // one walk for each lane of the warp that walks
};

}  // namespace fp4::sm80
