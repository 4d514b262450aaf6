// Linear layers of few rows: the arguments of a launch, and the sizes that the kernel and its launcher share.
// Needs neither torch nor CUDA.
#pragma once

#include <cstdint>

#include "../common/sm90_layout.h"
#include "interface.h"

namespace fp4::device {

constexpr int kMostLinears = 3;      // weights of a launch
constexpr int kMostLinearRows = 64;  // of x; kMostPreparedRows with a norm or an addend
constexpr int kMostPreparedRows = 16;
constexpr int kLinearWarps = 8, kLinearWarpBits = 3;
constexpr int kMostLinearClusterBits = 3;
constexpr int kLinearDepths[] = {8, 6, 4, 3};

constexpr int kLinearStepK = 64;                    // K of a step of x, and of a weight in 16 bits
constexpr int kLinearSlot = 16 * kLinearStepK * 2;  // bytes of a step of a tile
constexpr int kLinearsHead = 2;                     // barriers, in units of 16 bytes
constexpr int kHalfShared = 113 * 1024;             // of two blocks that fit a multiprocessor of Hopper

struct LinearWeight {
  const void* values = nullptr;  // [n, k] of x's type, or in e4m3
  const void* bias = nullptr;    // [n] of bias_type, or null
  void* out = nullptr;           // [rows, n] of x's type
  const float* scale = nullptr;  // [n], of a weight in e4m3: its products are multiplied by it
  int n = 0;
  int tiles_end = 0;  // the launcher sets it: 16-row tiles of the weights up to and with this one
};

// How a product is divided. A cluster takes `group` tiles at a time, 1 to kLinearWarps, and its
// 2^cluster_bits blocks split K. In a block each warp takes group / kLinearWarps of a tile, which may be the
// end of one tile and the beginning of the next. `clusters`: clusters of the grid; 0: one block a
// multiprocessor.
struct LinearsConfig {
  int cluster_bits = 0, group = 1, clusters = 0;
  int depth = kLinearDepths[0];  // steps of a warp that are in flight: one of kLinearDepths
};

// The warps of a block that multiply parts of the same tile.
struct TileWarps {
  int8_t first = 0, count = 0;
};

struct LinearsParams {
  const void* x = nullptr;            // [rows, k] of `type`
  const void* addend = nullptr;       // like x, added to it first; or null
  void* sum = nullptr;                // [rows, k]: x + addend, if there is an addend
  const void* norm_weight = nullptr;  // [k] of `type`: x is normalised by its root mean square; or null
  void* normed = nullptr;             // [rows, k]: the normalised rows, if they are wanted
  const void* residual = nullptr;     // [rows, n] of `type`, added to the rounded product; one weight alone
  LinearWeight weight[kMostLinears];
  int count = 0, rows = 0, k = 0;  // k: a multiple of kLinearStepK
  float eps = 0;
  DType type = DType::kBFloat16, bias_type = DType::kBFloat16;
  bool early = false;          // the weights and the norm's were there before the previous kernel began
  bool norm_in_float = false;  // the norm rounds after it multiplies by its weight, not before
  bool fp8 = false;            // the weights are in e4m3
  LinearsConfig config;
  // The launcher sets these and all below.
  int tiles = 0, steps = 0, rounds = 0;
  int lane_bits = 0;    // lanes of a fragment: 4 for each column that is held
  bool copied = false;  // the kernel copies x as it is
  int row_bytes = 0;    // of a copied row in shared memory
  int x_at = 0, norm_at = 0, stats_at = 0, sums_at = 0, sums_size = 0;  // in units of 16 bytes
  int slots = 0;                                                        // the most partial sums of a tile
  TileWarps warps[kLinearWarps];                                        // of each tile of a group
  int sums_bytes[1 << kMostLinearClusterBits] = {};  // of a round's partial sums that each block gets

  // K that a warp takes at a time: 128 bytes of each row of a weight.
  constexpr FP4_BOTH int step_k() const { return fp8 ? 2 * kLinearStepK : kLinearStepK; }
  constexpr int most_rows() const { return norm_weight || addend ? kMostPreparedRows : kMostLinearRows; }
};

// Returns the number of eights of rows that the kernel is compiled for: 1, 2, 4 or 8.
constexpr FP4_BOTH int linear_columns(int rows) {
  return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8;
}

// Completes a launch on a GPU of `sms` multiprocessors. Returns its bytes of shared memory.
inline int complete_linears(LinearsParams& p, int sms) {
  const auto parts = [](int a, int b) { return (a + b - 1) / b; };
  p.tiles = 0;
  for (int i = 0; i < kMostLinears; ++i) {
    if (i < p.count) p.tiles += parts(p.weight[i].n, 16);
    p.weight[i].tiles_end = p.tiles;
  }
  const int blocks = 1 << p.config.cluster_bits, group = p.config.group;
  const int columns = linear_columns(p.rows);
  p.steps = parts(p.k, p.step_k());
  p.lane_bits = 2;
  while (p.lane_bits < 5 && p.rows > 1 << (p.lane_bits - 2)) ++p.lane_bits;
  const int steps = parts(p.steps, blocks) * (p.step_k() / kLinearStepK);
  p.copied = p.rows > kMostPreparedRows;
  // Rows begin in different banks: 16 bytes apart for matrices of 16-bit values, 32 for 8 bytes a lane.
  p.row_bytes = steps * kLinearStepK * 2 + (p.fp8 ? 32 : 16);
  p.slots = 0;
  for (int tile = 0; tile < group; ++tile) {
    const int first = kLinearWarps * tile / group, count = parts(kLinearWarps * (tile + 1), group) - first;
    p.warps[tile] = {int8_t(first), int8_t(count)};
    if (p.slots < count * blocks) p.slots = count * blocks;
  }
  p.x_at = kLinearsHead + kLinearWarps * p.config.depth * kLinearSlot / 16;
  p.norm_at = p.x_at + (p.copied ? columns * 8 * p.row_bytes / 16
                                 : steps * columns * (kLinearStepK / 32) << p.lane_bits);
  p.stats_at = p.norm_at + (p.norm_weight ? steps * kLinearStepK / 8 : 0);
  p.sums_at = p.stats_at + (p.norm_weight ? blocks * kLinearWarps * 2 : 0);
  p.sums_size = p.slots > 1 ? parts(group * columns, blocks) * p.slots * 32 : 0;

  const int groups = parts(p.tiles, group), fixed = p.config.clusters;
  const auto shared_with = [&](int clusters) {
    p.config.clusters = clusters < groups ? clusters : groups;
    p.rounds = parts(groups, p.config.clusters);
    return 16 * (p.sums_at + p.sums_size * (p.rounds > 1 ? 2 : 1));
  };
  const int shared = shared_with(fixed > 0 ? fixed : sms / blocks);
  // All blocks of a cluster are in one part of the chip (GPC), and not all parts have the same number of
  // multiprocessors. If a block has a multiprocessor for itself, some clusters of four or eight would wait
  // for others to end. Seen on an H200: 30 clusters of four run at once, and 32 do not.
  const bool alone = columns == 8 || shared > kHalfShared;
  return fixed > 0 || !alone || blocks <= 2 ? shared : shared_with(sms * 7 / 8 / blocks);
}

// Counts the bytes of partial sums that each block gets. complete_linears comes first.
inline void count_sums(LinearsParams& p) {
  const int blocks = 1 << p.config.cluster_bits, columns = linear_columns(p.rows);
  for (int& bytes : p.sums_bytes) bytes = 0;
  for (int i = 0; i < p.config.group * columns; ++i)
    p.sums_bytes[i % blocks] += p.warps[i / columns].count * blocks * 32 * 16;
}

}  // namespace fp4::device

extern "C" {
int fp4_kernel_linears(const fp4::device::LinearsParams* params, int sms, void* stream);
}
