// The host side of the prefill GEMMs with mma.sync: the choice among candidates, and launches.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "../device/prefill_host.cuh"
#include "fitted.h"
#include "prefill_kernel.cuh"

namespace fp4::sm80 {

// The properties of a GPU that the choice uses.
struct Device {
  int sms;
  int block_shared, sm_shared;  // the most bytes of shared memory of a block, and of a multiprocessor
  double clock;                 // Hz
  double mma_cycles;            // cycles of a tensor core for one mma.m16n8k16
  double memory_rate;           // bytes a second
};

using Launch = int (*)(const Problem&, int blocks, cudaStream_t);

template <class Config, bool kGated>
int launch_gated(const Problem& problem, int blocks, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedStorage<Config>);
  auto kernel = prefill_kernel<Config, kGated>;
  static std::atomic<uint64_t> allowed;
  if (const cudaError_t error = allow_shared(kernel, kBytes, allowed); error != cudaSuccess) return error;
  const LaunchShape shape = {dim3(blocks), dim3(Config::Threads), kBytes, 1, true};
  return launch_kernel(kernel, shape, false, stream, problem);
}

template <class Config>
int launch(const Problem& problem, int blocks, cudaStream_t stream) {
  return problem.gate.act == Act::kNone ? launch_gated<Config, false>(problem, blocks, stream)
                                        : launch_gated<Config, true>(problem, blocks, stream);
}

struct Candidate {
  const char* name;
  int warps_m, warps_n, tiles_m, stages, blocks;
  int shared_bytes, sum_bytes, tile_scales;
  bool int8;
  TokenTiles (*cut)(int rows);
  int (*round_up)(int rows);
  Launch run;

  constexpr int warps() const { return warps_m * warps_n; }
  constexpr int rows() const { return warps_m * tiles_m * kTileRows; }
  constexpr int threads() const { return warps() * kWarp; }
};

struct Candidates {
  const Candidate* list;
  int count;
};

template <class Config>
constexpr Candidate candidate(const char* name) {
  return {name,
          Config::WarpsM,
          Config::WarpsN,
          Config::TilesM,
          Config::Stages,
          Config::Blocks,
          sizeof(SharedStorage<Config>),
          Config::SumBytes,
          Config::TileScales,
          Config::Int8,
          Config::Widths::cut,
          Config::Widths::round_up,
          launch<Config>};
}

// The number of blocks of a candidate that a multiprocessor holds, or 0 if none fits. The system keeps 1 KB
// for each block.
inline int blocks_of(const Candidate& candidate, const Device& device) {
  if (candidate.shared_bytes > device.block_shared) return 0;
  return std::clamp(device.sm_shared / (candidate.shared_bytes + 1024), 1, candidate.blocks);
}

struct Size {
  RowMode mode;
  int groups, m, n, kp;
};

// Fitted to times on an H100 (docs/kernels.md). The cycles are those of a multiprocessor, which all of its
// blocks share:
//   kDecode, kFixed  instructions of a warp to decode the operands A of 16 rows by 32 K; other instructions
//   of
//                    a half step
//   kBusy, kBeside   a half step takes kBusy times the larger of its tensor cores' work and its instructions,
//                    plus kBeside times the smaller
//   kBarrier         start of a half step, which other blocks of the multiprocessor hide
//   kTile, kStore    cost of a tile, and of each 16 x 8 sums of a warp
//   kLatency         seconds from a copy's request to its arrival when memory is busy
//   kLaunch          seconds of a launch
constexpr double kDecode = fitted::decode, kFixed = fitted::fixed, kBusy = fitted::busy,
                 kBeside = fitted::beside, kBarrier = fitted::barrier, kTile = fitted::tile,
                 kStore = fitted::store, kLatency = fitted::latency, kLaunch = fitted::launch;

// Cycles of a half step of 64 K, if all blocks of the multiprocessor do the same. An int8 product takes the
// time of a bf16 product with half as many K on all GPUs except GeForce cards, which need half of that time.
// Decoding int8 weights takes twice the instructions, and int8 sums take three instructions each for 128 K
// (counted, not fitted).
inline double half_step_cycles(const Candidate& c, int width, const Device& device, int blocks) {
  const double eights = double(width) / c.warps_n / 8, mmas = (c.int8 ? 2 : 4) * c.tiles_m * eights;
  double instructions = mmas + 2 * c.tiles_m * kDecode + 2 * eights + kFixed;
  if (c.int8) instructions += 2 * c.tiles_m * kDecode + 6 * c.tiles_m * eights;
  const double tensor = mmas * device.mma_cycles;
  const double warp = kBusy * std::max(tensor, instructions) + kBeside * std::min(tensor, instructions);
  return warp * c.warps() / 4 + kBarrier / blocks;
}

inline double tile_cycles(const Candidate& c, int width, int steps, const Device& device, int blocks) {
  const double sums = double(c.tiles_m) * width / c.warps_n / 8 * c.warps();
  return 2 * steps * half_step_cycles(c, width, device, blocks) + kTile / blocks + kStore * sums;
}

// The cycles that sharing a tile costs: for one more part, and for each of a tile's sums that goes through
// memory.
constexpr double kShareCycles = fitted::share_cycles, kShareSum = fitted::share_sum;

// The share of the smaller of compute and memory time that the larger one does not hide.
constexpr double kBoth = fitted::both;

// Estimates a launch of a candidate that fits, for groups of equal expected size.
inline Estimate estimate(const Candidate& c, const Size& size, const Device& device, int tile_width) {
  const ExpectedRows rows(size.mode, size.groups, size.m);
  const int steps = size.kp / kStepK, each = blocks_of(c, device), blocks = each * device.sms;
  const Load load(rows, c.cut, tile_width,
                  [&](int width) { return tile_cycles(c, width, steps, device, each); });
  const int columns = ceil_div(size.n, c.rows());
  const double tiles = std::round(load.tiles / 2 * rows.groups * columns);
  const double cycles = load.cycles / load.tiles * each;  // of a tile while the other blocks run, too
  const double step_bytes = double(c.rows()) / kTileRows * (kTileCodes + c.tile_scales);
  const double bytes = load.columns / 2 * rows.groups * columns * steps * step_bytes;
  const double on_the_way = blocks * (c.stages - 1) * step_bytes;
  const double memory = bytes / std::min(device.memory_rate, on_the_way / kLatency) * device.clock;
  const double wave = std::max(cycles, memory * blocks / tiles);
  const double share = kShareCycles + kShareSum * c.rows() * load.width / 2;
  int share_below = std::max(0, static_cast<int>(blocks * (cycles - share) / wave));
  if (Shares(tiles, steps, share_below, blocks).left == 0) share_below = 0;
  const Shares shares(tiles, steps, share_below, blocks);
  const double compute = cycles_of(shares, cycles, share);
  const double time = std::max(compute, memory) + kBoth * std::min(compute, memory);
  return {kLaunch + time / device.clock, share_below, tile_width, false};
}

// Chooses the candidate `given` or, if that is negative, the one with the least time. Chooses none (-1) if
// none fits.
inline Choice choose(const Candidates& candidates, const Size& size, const Device& device, int given = -1) {
  Choice best;
  best.candidate = -1;
  for (int i = 0; i < candidates.count; ++i) {
    const Candidate& candidate = candidates.list[i];
    if ((given >= 0 && i != given) || blocks_of(candidate, device) == 0) continue;
    const Estimate here = estimate(candidate, size, device, 0);
    if (best.candidate < 0 || here.seconds < best.estimate.seconds) best = {i, here};
  }
  return best;
}

// ---- tiles that blocks share ----

constexpr int kWord = sizeof(uint64_t);

inline int64_t part_bytes(const Candidate& candidate) {
  return candidate.sum_bytes + candidate.threads() * kWord;
}

// The most scratch memory that a launch needs: one part for each block.
inline int64_t workspace_bytes(const Candidates& candidates, int sms) {
  int64_t bytes = 0;
  for (int i = 0; i < candidates.count; ++i)
    bytes = std::max(bytes, sms * candidates.list[i].blocks * part_bytes(candidates.list[i]));
  return bytes;
}

// Returns 0, a cudaError_t or a LaunchError.
inline int run(const Candidates& candidates, const PrefillArguments& a, const Device& device) {
  const bool int8 = candidates.count > 0 && candidates.list[0].int8;
  if (!is_valid(a, int8 ? 1 : 2, candidates.count)) return kBadArgument;
  if (a.m == 0) return 0;
  const Choice choice = choose(candidates, {a.mode, a.groups, a.m, a.n, a.kp}, device, a.config);
  if (choice.candidate < 0) return kTooLittleShared;
  const Candidate& chosen = candidates.list[choice.candidate];
  const int blocks = device.sms * blocks_of(chosen, device);
  auto problem = describe<Problem>(a, choice.estimate, chosen.rows(), chosen.sum_bytes, blocks);
  problem.x = static_cast<const uint8_t*>(a.x);
  problem.codes = static_cast<const uint8_t*>(a.codes);
  problem.scales = static_cast<const uint8_t*>(a.scales);
  problem.k = a.k;
  problem.x_rows = a.mode == RowMode::kMasked ? a.groups * a.m : a.m;
  if (int8) std::swap(problem.x_scale, problem.x_step_scale);
  return chosen.run(problem, blocks, static_cast<cudaStream_t>(a.stream));
}

}  // namespace fp4::sm80
