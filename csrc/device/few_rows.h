// Sizes of decode and gemv: the part of a product that a thread block takes, and its shared memory. The
// kernels and the planner (csrc/cuda/configs.cpp, which needs no CUDA) use the same numbers.
#pragma once

#include <cstdint>

#include "../common/sm90_layout.h"

namespace fp4::device {

constexpr int kChunk = 8;                  // activation rows that share an instruction's weights
constexpr int kSliceSteps = 4;             // 64-steps of K that a warp takes at a time
constexpr int kStepCodes = 512;            // bytes of 16 rows by 64 k
constexpr int kSliceK = 64 * kSliceSteps;  // K that a warp takes in a pass

// ---- decode ----

constexpr int kFewComputeWarps = 16,
              kManyComputeWarps = 24;  // compute warps of a block, at most, in its two sizes
constexpr int kReduceWarps = 4;        // in addition to these
constexpr int kMaxGroups = 640;        // one thread a group in plan()
constexpr int kMaxSegments = 32;       // chunks that one block may touch
constexpr int kMostSlices = 32;
constexpr int kBuffers = 2;  // a run's activations and the next one's

// Steps in the ring between the compute and the reducer warps. The short ring is for GPUs with little shared
// memory.
constexpr int kLongRing = 4, kShortRing = 2;

struct Segment {
  int expert;
  int first;  // its first row, as a sorted position
  int count;  // activation rows
  int rank;   // routing by id: rows of this expert in earlier chunks
  int tile_begin, tile_end;
};

struct alignas(16) DecodeShared {
  uint64_t full[kLongRing], empty[kLongRing];
  uint64_t ready[kBuffers];                      // the activations of a run
  float factors[kBuffers][kMostSlices][kChunk];  // factor of the sums, for each slice and token
  Segment segments[kMaxSegments];
  int warp_totals[32];
  int counts[kMaxGroups];
};

// `p` below is a launch's DecodeParams or the planner's DecodeConfig; for gemv it is GemvParams or
// GemvConfig.

// Sizes of the buffers behind DecodeShared, in vectors of 16 bytes. decode_fragments: the activations of a
// run, as B operands. decode_stage: the sums of a step of the ring. decode_sums: the sums of pass_tiles row
// tiles, which are kept between passes over K; a short ring has fewer of them.
template <class P>
constexpr FP4_BOTH int decode_fragments(const P& p) {
  return p.k_warps * kSliceSteps * 64;
}
template <class P>
constexpr FP4_BOTH int decode_stage(const P& p) {
  return p.k_warps * p.row_warps * 32;
}
template <class P>
constexpr FP4_BOTH int pass_tiles(const P& p) {
  return 8 * p.ring;
}
template <class P>
constexpr FP4_BOTH int decode_sums(const P& p) {
  return p.passes > 1 ? pass_tiles(p) * 32 : 0;
}

// Returns the bytes of all these, of the rows of each segment, and of the experts of `ids` rows.
template <class P>
constexpr int decode_bytes(const P& p, int ids) {
  const int vectors = kBuffers * decode_fragments(p) + p.ring * decode_stage(p) + decode_sums(p);
  return 16 * vectors + kMaxSegments * kChunk * 4 + 4 * ids;
}

// ---- gemv ----

constexpr int kGemvWarps = 12;
constexpr int kGemvRows = 8;     // at most
constexpr int kGemvSlices = 64;  // of K, at most
constexpr int kGemvUnits = 32;   // of a warp, at most

struct alignas(16) GemvShared {
  float factors[kGemvSlices][kChunk];  // factor of the sums, for each slice and column
  int row[32];                         // the rows that have an expert, in order
  int expert[32];                      // of each row
  float scale[32], weight[32];
  int lists[kGemvWarps][kGemvRows];
};

// Sizes of the buffers behind GemvShared. gemv_fragments: the activations as B operands, in vectors of 16
// bytes. gemv_sums: pairs of sums.
template <class P>
constexpr FP4_BOTH int gemv_fragments(const P& p) {
  return p.slices * kSliceSteps * 2 * 4 * p.columns;
}
template <class P>
constexpr FP4_BOTH int gemv_sums(const P& p) {
  return p.tiles * p.slices * 8;
}
template <class P>
constexpr int gemv_bytes(const P& p) {
  return 16 * gemv_fragments(p) + 8 * gemv_sums(p);
}

}  // namespace fp4::device
