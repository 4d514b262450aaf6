// Host side that all prefill GEMMs share: the sizes of groups that the choice of a candidate assumes, and the
// arguments of a launch. Each family adds its own: csrc/sm90/prefill_host.cuh and csrc/sm80/prefill_host.cuh.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <random>

#include "launch.cuh"
#include "prefill_schedule.cuh"

namespace fp4::device {

// ---- the model of a launch's time ----

// The expected number of groups that have rows, and how many rows these have. Only the device knows the true
// numbers, so the model assumes that each row draws a group at random. Some groups then stay empty. Of the
// others, half have one standard deviation less than their mean, and half one more. If there are fewer than
// two rows a group, all have the mean.
struct ExpectedRows {
  bool by_chance;
  double groups, mean, deviation = 0;

  ExpectedRows(RowMode mode, int all_groups, int m)
      : by_chance(mode == RowMode::kContiguous && all_groups > 1),
        groups(all_groups),
        mean(mode == RowMode::kContiguous ? static_cast<double>(m) / all_groups : m) {
    if (!by_chance) return;
    groups = -std::expm1(-mean) * all_groups;
    deviation = mean < 2 ? 0 : std::sqrt(mean);
    mean = m / groups;
  }

  int few() const { return static_cast<int>(std::lround(mean - deviation)); }
  int many() const { return std::max(1, static_cast<int>(std::lround(mean + deviation))); }
};

// The work of two groups, one with few rows and one with many: the number of their tiles, the cycles and the
// widths of these, and how often a column of weights is read. The tiles are those that the device cuts, or
// tiles of `tile_width` if that is not 0.
struct Load {
  double tiles = 0, cycles = 0, columns = 0, width = 0;

  template <class TileCycles>
  Load(const ExpectedRows& rows, TokenTiles (*cut)(int), int tile_width, const TileCycles& tile_cycles) {
    for (const int group : {rows.few(), rows.many()}) {
      if (group == 0) continue;
      const auto [count, each] =
          tile_width > 0 ? TokenTiles{ceil_div(group, tile_width), tile_width} : cut(group);
      tiles += count;
      cycles += count * tile_cycles(each);
      columns += 1;
      width += each;
    }
  }
};

// Returns the cycles of a launch whose tiles take `cycles` each. Adding one part of a shared tile costs
// `share`.
inline double cycles_of(const Shares& shares, double cycles, double share) {
  double all = std::ceil(double(shares.whole) / shares.blocks) * cycles;
  if (shares.left > 0) {
    const double pieces = double(shares.parts) / shares.left;  // of a tile; the first adds the others' sums
    all += cycles / pieces + share * std::max(1.0, pieces - 1);
  }
  return all;
}

// ---- launches ----

// Returns whether the kernels can run this launch. `x_bytes`: bytes of an element of x.
inline bool is_valid(const PrefillArguments& a, int x_bytes, int candidates) {
  const bool gated = a.gate.act != Act::kNone;
  if (gated && (a.out_type == DType::kFloat32 || a.gate.act != Act::kSilu)) return false;
  return a.groups >= 1 && a.m >= 0 && a.n >= 64 && a.n % 64 == 0 && a.kp >= kStepK && a.kp % kStepK == 0 &&
         a.k >= 1 && a.k <= a.kp && a.k * x_bytes % 16 == 0 && a.config < candidates &&
         (a.mode != RowMode::kDense || a.groups == 1);
}

// Returns another number each time, also across processes (splitmix64 from a random start).
inline uint64_t next_ticket() {
  static std::atomic<uint64_t> state = uint64_t(std::random_device()()) << 32 | std::random_device()();
  uint64_t z = state += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

// Fills the fields that every kernel's Problem has. `rows`: weight rows of a tile. `sum_bytes`: bytes of a
// block's partial sums of a tile. The workspace holds the sums of all `blocks`, then their flags.
template <class Problem>
Problem describe(const PrefillArguments& a, const Estimate& estimate, int rows, int sum_bytes, int blocks) {
  Problem problem = {};
  problem.tiling = {{a.mode, a.group_rows, a.groups, a.m, estimate.tile_width},
                    ceil_div(a.n, rows),
                    a.kp / kStepK,
                    a.whole_tiles ? 0 : estimate.share_below};
  problem.x_scale = a.x_scale;
  problem.global_scale = a.global_scale;
  problem.bias = a.bias;
  problem.bias_type = a.bias_type;
  problem.out = a.out;
  problem.out_type = a.out_type;
  problem.gate = a.gate;
  problem.leaves_rest = a.leaves_rest;
  problem.n = a.n;
  auto* const workspace = static_cast<uint8_t*>(a.workspace);
  problem.part_sums = reinterpret_cast<float4*>(workspace);
  problem.part_flags = reinterpret_cast<uint64_t*>(workspace + int64_t(blocks) * sum_bytes);
  problem.ticket = next_ticket();
  return problem;
}

}  // namespace fp4::device
