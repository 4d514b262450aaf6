// Arguments of a prefill GEMM, parameters of the candidates, and the layout of a block's shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../device/gate.cuh"
#include "../device/prefill_schedule.cuh"
#include "../device/types.cuh"
#include "../device/warp.cuh"
#include "ptx_sm90.cuh"

namespace fp4::sm90 {

using namespace device;

constexpr int kTokenStep = 16;  // X is copied in multiples of this many rows
constexpr int kXBoxes = 5;      // a copy of X brings 16, 32, 64, 128 or 256 rows
constexpr int kWarpgroup = 128;
constexpr int kMmaRows = 64;     // weight rows of a wgmma
constexpr int kXRowBytes = 128;  // bytes of a row of X in shared memory, swizzled
constexpr int kMmaTokens = 256;  // most tokens of a wgmma
constexpr int kInfoSlots = 3;    // tiles: one stored, one multiplied, one fetched
constexpr int kStoreBuffers = 2;

// The matrix has K-major rows of 128 bytes with a 128-byte swizzle; groups of eight rows are 1024 bytes
// apart. `low` is swizzled_base() of the matrix plus distances in units of 16 bytes. K advances by 32 bytes.
__device__ __forceinline__ uint32_t swizzled_base(uint32_t smem) { return 1u << 16 | smem >> 4; }

__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t low) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = uint64_t(1024 >> 4) << 32;
  return kSwizzle128 | kEightRows | low;
}

constexpr int kDescriptorStep = 2;  // 32 bytes of K

// A position in a ring of `Slots` and the parity of its round.
template <int Slots>
struct RingPosition {
  int slot = 0;
  uint32_t round = 0;

  __device__ __forceinline__ RingPosition next() const {
    return slot + 1 == Slots ? RingPosition{0, round ^ 1} : RingPosition{slot + 1, round};
  }
  __device__ __forceinline__ RingPosition two_before() const {
    return slot < 2 ? RingPosition{slot + Slots - 2, round ^ 1} : RingPosition{slot - 2, round};
  }
};

struct Problem {
  Tiling tiling;
  const float* x_scale;       // or null: ones
  const float* global_scale;  // or null: ones
  const void* bias;           // or null
  DType bias_type;
  void* out;
  DType out_type;
  Gate gate;         // gated: rows 2i and 2i + 1 of the weight are gate i and up i; kSilu, 16-bit results
  int n;             // weight rows
  bool early;        // weights and routing were written before the previous kernel of the stream began
  bool leaves_rest;  // as in PrefillArguments
  // For tiles that several blocks share: see Shares and PrefillBlock::part_sums.
  float4* part_sums;
  uint64_t* part_flags;
  uint64_t ticket;    // different for every launch, and unlikely to be in memory by chance
  uint64_t* claimed;  // word to claim tiles with (see TileClaims), or null
};

struct Maps {
  CUtensorMap x[kXBoxes], codes, scales, out;
};

// Weights_: the class with which a warp decodes its rows to operand A (FoldedWeights, HalfWeights,
// Bf16Weights, Int4Weights). Widths_: the WidthList of the token tiles.
template <class Weights_, int Warpgroups_, class Widths_, int Cluster_, int Stages_>
struct PrefillConfig {
  using Weights = Weights_;
  template <int Tokens>
  using Mma = Wgmma<Weights::kElement, Tokens>;
  using Widths = Widths_;
  static constexpr int Warpgroups = Warpgroups_, MaxTokens = Widths::kMost, Cluster = Cluster_;
  static constexpr int Stages = Stages_;
  static constexpr int Rows = Warpgroups * kMmaRows;
  static constexpr int ConsumerWarps = Warpgroups * 4;
  static constexpr int Threads = (Warpgroups + 1) * kWarpgroup;
  // A block starts with equally many registers in each thread. The producers give most of theirs to the
  // consumers. With one consumer warpgroup every thread already has as many registers as it can have.
  static constexpr bool MovesRegisters = Warpgroups > 1;
  static constexpr int BirthRegisters = 65536 / Threads / 8 * 8;
  static constexpr int ProducerRegisters = Warpgroups == 2 ? 40 : 32;
  static constexpr int ConsumerRegisters =
      MovesRegisters ? (BirthRegisters + (BirthRegisters - ProducerRegisters) / Warpgroups) / 8 * 8 : 240;
  static constexpr int StoreTokens = Warpgroups == 2 ? 64 : 32;  // rows of the output in one copy
  static constexpr int StoreBytes = StoreTokens * kMmaRows * 2;
  static constexpr int ElementBytes = Weights::kElement == Element::kE4m3 ? 1 : 2;
  static constexpr int XTiles =
      kStepK * ElementBytes / kXRowBytes;  // K of a stage is cut into rows of 128 bytes
  static constexpr int XTileBytes = MaxTokens * kXRowBytes;
  static constexpr int XBytes = XTiles * XTileBytes;
  static constexpr int CodeBytes = Rows / kTileRows * kTileCodes;
  static constexpr int ScaleBytes = Rows / kTileRows * Weights::kTileScales;
  static constexpr int SumBytes = MaxTokens * Rows * 4;  // sums of a part of K
};

// The data of a step except X, which needs a larger alignment. Consumers reach all of it from one address.
template <class Config>
struct alignas(128) Stage {
  uint8_t codes[Config::CodeBytes];
  uint8_t scales[Config::ScaleBytes];
  uint64_t full, empty;
};

template <class Config>
struct alignas(1024) SharedStorage {
  uint8_t x[Config::Stages][Config::XBytes];
  uint8_t store[Config::Warpgroups][kStoreBuffers][Config::StoreBytes];
  Stage<Config> stages[Config::Stages];
  float token_scale[kInfoSlots][Config::MaxTokens];
  float bias[kInfoSlots][Config::Rows];
  TileInfo info[kInfoSlots];
  uint64_t info_full[kInfoSlots], info_empty[kInfoSlots];
  uint64_t factors_full[kInfoSlots];  // token_scale and bias
  uint64_t next_wanted;               // someone wants the next tile to be claimed
};

}  // namespace fp4::sm90
