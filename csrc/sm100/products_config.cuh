// Defines the parts of a product of FP4 or e4m3 rows by FP4 weights: its arguments, the candidates'
// parameters, the shared and tensor memory of a block, and the words that describe operands to the tensor
// cores.
#pragma once

#include <cuda.h>

#include "../device/prefill_schedule.cuh"
#include "../device/types.cuh"
#include "products.h"

namespace fp4::sm100 {

using namespace device;

constexpr int kRows = 128;        // weight rows of a block's part of a tile
constexpr int kRowBytes = 128;    // of a row in shared memory, in a step
constexpr int kParts = 4;         // instructions of a step, each of 32 of these bytes
constexpr int kBoxRows = 16;      // rows of X that one copy brings
constexpr int kEachTokens = 16;   // the tensor cores compute this many tokens or a multiple
constexpr int kBlockBytes = 512;  // scales of 128 rows, four of each
constexpr int kBlockColumns = 4;  // columns of tensor memory for these scales
constexpr int kColumns = 512;     // of tensor memory: all that there are
constexpr int kBuffers = 2;       // of sums
constexpr int kResponses = 4;     // of cluster launch control that a block holds
constexpr int kMostShared = 232448;

// Warps: one copies, one starts the products, two arrange scales of X, four store results.
constexpr int kCopyWarp = 0, kProductWarp = 1, kScaleWarp = 2, kScaleWarps = 2, kStoreWarp = 4;
constexpr int kStoreThreads = 4 * kWarp, kThreads = kStoreWarp * kWarp + kStoreThreads;

struct Problem : ScaledProduct {
  Tiling tiling;
};

// The tensor maps from which the copy engine reads.
struct Maps {
  CUtensorMap codes, x, scales;
};

// Formats of the rows and the weights. kFp8: e4m3 rows by mxfp4 weights. Their tensor cores take a code of
// four bits in a container of eight: 16 codes are 8 bytes, and 8 bytes of nothing follow.
enum class Kind { kMxfp4, kNvfp4, kFp8 };

// AlongK: groups lie along K. Ctas: the thread blocks that share a tile, one or two. Two are a cluster. Each
// has 128 weight rows, and half of the tokens in shared memory. MaxTokens: of a tile. Stages: the steps that
// fit in shared memory. Clc: cluster launch control hands out the tiles.
template <Kind kKind, bool kAlongK, int Ctas_, int MaxTokens_, int Stages_, class Widths_, bool kClc = false>
struct ProductConfig {
  using Widths = Widths_;
  static constexpr bool AlongK = kAlongK, Clc = kClc;
  static constexpr Kind Formats = kKind;
  static constexpr bool Nvfp4 = kKind == Kind::kNvfp4, Fp8 = kKind == Kind::kFp8;
  static constexpr int ScaleBlock = Nvfp4 ? 16 : 32;
  static constexpr int Part = Fp8 ? 32 : 64;  // K of an instruction
  static constexpr int Step = kParts * Part;
  static constexpr int PartScales = Part / ScaleBlock;
  static constexpr int BlockParts = 4 / PartScales;  // parts whose scales a block has
  static constexpr int StepBlocks = kParts / BlockParts;
  static constexpr int Ctas = Ctas_, MaxTokens = MaxTokens_, Stages = Stages_;
  static constexpr int Blocks = ceil_div(MaxTokens, 128);  // of scales of X side by side
  // Columns of tensor memory: two buffers of sums, then the scales of a step.
  static constexpr int ScaleColumn = kBuffers * MaxTokens;
  static constexpr int XScaleColumn = ScaleColumn + StepBlocks * kBlockColumns;
  static_assert(Ctas == 1 || Ctas == 2);
  static_assert(MaxTokens % (Ctas * kBoxRows) == 0 && Widths::kMost == MaxTokens);
  static_assert(XScaleColumn + StepBlocks * kBlockColumns * Blocks <= kColumns);
};

template <class Config>
struct alignas(1024) SharedStorage {
  uint8_t codes[Config::Stages][kRows * kRowBytes];
  uint8_t x[Config::Stages][Config::MaxTokens / Config::Ctas * kRowBytes];
  uint8_t scales[Config::Stages][Config::StepBlocks * kBlockBytes];
  uint8_t x_scales[Config::Stages][Config::Blocks * Config::StepBlocks * kBlockBytes];
  uint4 responses[kResponses];
  uint64_t responses_full[kResponses], responses_empty[kResponses];
  uint64_t full[Config::Stages], empty[Config::Stages];
  uint64_t sums_full[kBuffers], sums_empty[kBuffers];
  uint32_t columns;  // the address of the tensor memory
};

// A place in a ring of `kSize`, and which time it is used: 0 or 1 in turn.
template <int kSize>
struct Ring {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++index == kSize) index = 0, parity ^= 1;
  }
};

// ---- words for the tensor cores (PTX ISA: "Shared memory descriptor", "Instruction descriptor") ----

constexpr uint64_t kDescriptorVersion = uint64_t(1) << 46;
constexpr uint64_t kSwizzle128 = uint64_t(2) << 61;
constexpr uint64_t kLeading = uint64_t(1) << 16;  // the other stride, which no operand here has

__host__ __device__ __forceinline__ constexpr uint64_t stride_between_eight_rows(uint32_t bytes) {
  return uint64_t(bytes >> 4) << 32;
}

// Rows of 128 bytes, swizzled. Eight of them are 1024 bytes. An instruction takes 32 bytes of each row.
__device__ __forceinline__ uint64_t codes_descriptor(uint32_t smem) {
  return kDescriptorVersion | kSwizzle128 | stride_between_eight_rows(8 * kRowBytes) | kLeading |
         (smem & 0x3FFFF) >> 4;
}

// A block of scales: 32 rows of 16 bytes, one after the other.
__device__ __forceinline__ uint64_t scales_descriptor(uint32_t smem) {
  return kDescriptorVersion | stride_between_eight_rows(8 * 16) | kLeading | (smem & 0x3FFFF) >> 4;
}

// e2m1 by e2m1 or e4m3, scales of ue4m3 (nvfp4) or ue8m0 (others), 128 rows of each block by `tokens`. With
// e4m3 the types of operands have other numbers: e2m1 is 5, e4m3 is 0.
template <Kind kKind, int kCtas>
__device__ __forceinline__ uint32_t instruction_descriptor(int tokens) {
  constexpr uint32_t kE2m1A = 1 << 7, kE2m1B = 1 << 10, kRowsOfA = kCtas * kRows / 128 << 27;
  constexpr uint32_t kUe8m0 = 1 << 23;
  constexpr uint32_t kTypes = kKind == Kind::kFp8 ? 5 << 7 : kE2m1A | kE2m1B;
  return kTypes | kRowsOfA | (kKind == Kind::kNvfp4 ? 0 : kUe8m0) | static_cast<uint32_t>(tokens / 8) << 17;
}

// Added to it: which of a word's four scales is the first that the instruction reads, of A and of B.
__device__ __forceinline__ uint32_t first_scale(uint32_t scale) { return scale << 29 | scale << 4; }

constexpr uint64_t kNextPart = kRowBytes / kParts / 16;  // added to a descriptor of codes

}  // namespace fp4::sm100
