// The arguments of a product of FP4 rows by FP4 weights, the candidates' parameters, and the shared memory of
// a block.
#pragma once

#include "../device/prefill_schedule.cuh"
#include "../device/types.cuh"
#include "scaled.h"

namespace fp4::sm120 {

using namespace device;

constexpr int kStep = 256;  // K of a step: rows of 128 bytes of codes
constexpr int kPart = 64;   // K of an instruction
constexpr int kRowBytes = kStep / 2;
constexpr int kPiece = 16;       // bytes of one copy of a thread
constexpr int kScaleBytes = 16;  // room in shared memory for a row's scales of a step
constexpr int kInfoSlots = 8;    // tiles that are known: those in flight, and two more
constexpr int kMostShared = 101376;

struct Problem : ScaledArguments {
  Tiling tiling;
};

// A block has WarpsM x WarpsN warps. Each has TilesM x 16 weight rows and 1 / WarpsN of the tokens. Stages:
// the steps that fit in shared memory.
template <bool kNvfp4, int WarpsM_, int WarpsN_, int TilesM_, class Widths_, int Stages_>
struct ScaledConfig {
  using Widths = Widths_;
  static constexpr bool Nvfp4 = kNvfp4;
  static constexpr int WarpsM = WarpsM_, WarpsN = WarpsN_, TilesM = TilesM_, Stages = Stages_;
  static constexpr int Threads = kWarp * WarpsM * WarpsN, Rows = 16 * TilesM * WarpsM;
  static constexpr int MaxTokens = Widths::kMost, Eights = MaxTokens / WarpsN / 8;
  static constexpr int ScaleBlock = kNvfp4 ? 16 : 32, StepScales = kStep / ScaleBlock;  // of a row
  // If K is an odd multiple of 64, every other row of mxfp4's scales begins in the middle of a word.
  static constexpr int ScaleWords = kNvfp4 ? 4 : 3;
  static_assert(MaxTokens % (16 * WarpsN) == 0 && Stages >= 2 && Stages + 1 < kInfoSlots);
};

template <class Config>
struct alignas(128) SharedStorage {
  using Walk = TileWalk<typename Config::Widths, 1>;

  uint8_t x[Config::Stages][Config::MaxTokens * kRowBytes];
  uint8_t codes[Config::Stages][Config::Rows * kRowBytes];
  uint8_t x_scales[Config::Stages][Config::MaxTokens * kScaleBytes];
  uint8_t scales[Config::Stages][Config::Rows * kScaleBytes];
  TileInfo info[kInfoSlots];
  int source[kInfoSlots][Config::MaxTokens];         // rows of X
  alignas(Walk) uint8_t walks[kWarp][sizeof(Walk)];  // one walk for each lane of the warp that walks
};

}  // namespace fp4::sm120
