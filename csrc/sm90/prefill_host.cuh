// The host side of the prefill GEMMs: the choice among candidates, tensor maps and launches.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../device/prefill_host.cuh"
#include "../device/tensor_map.cuh"
#include "fitted.h"
#include "prefill_kernel.cuh"

namespace fp4::sm90 {

using Launch = int (*)(const Problem&, const Maps&, int sms, cudaStream_t);

template <class Config, bool kGated>
int launch_gated(const Problem& problem, const Maps& maps, int sms, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedStorage<Config>);
  static_assert(kBytes <= 232448, "more shared memory than a block of sm_90 can have");
  auto kernel = prefill_kernel<Config, kGated>;
  static std::atomic<uint64_t> allowed;
  if (const cudaError_t error = allow_shared(kernel, kBytes, allowed); error != cudaSuccess) return error;
  const LaunchShape shape = {dim3(sms / Config::Cluster * Config::Cluster), dim3(Config::Threads), kBytes,
                             Config::Cluster};
  return launch_kernel(kernel, shape, true, stream, problem, maps);
}

template <class Config>
int launch(const Problem& problem, const Maps& maps, int sms, cudaStream_t stream) {
  return problem.gate.act == Act::kNone ? launch_gated<Config, false>(problem, maps, sms, stream)
                                        : launch_gated<Config, true>(problem, maps, sms, stream);
}

// Measured cycles of a kernel at the clock below. A step of 128 K takes base + slope x width, but at least
// full x width, the tensor cores' rate. The rest of a tile takes tile_base + tile_slope x width.
struct Cost {
  double base, slope, full, tile_base, tile_slope;
};
constexpr double kClock = fitted::clock, kMemoryRate = fitted::memory_rate;

constexpr Cost cost_of(const double (&v)[5]) { return {v[0], v[1], v[2], v[3], v[4]}; }

struct Candidate {
  const char* name;
  Element element;
  int rows, cluster, store_tokens, tile_scales, sum_bytes, flags;
  TokenTiles (*cut)(int rows);
  int (*round_up)(int rows);
  Cost cost;
  Launch run;
};

// The candidates of one kernel.
struct Candidates {
  const Candidate* list;
  int count;
};

template <class Config>
constexpr Candidate candidate(const char* name, const Cost& cost) {
  return {name,
          Config::Weights::kElement,
          Config::Rows,
          Config::Cluster,
          Config::StoreTokens,
          Config::Weights::kTileScales,
          Config::SumBytes,
          Config::Warpgroups * kWarpgroup,
          Config::Widths::cut,
          Config::Widths::round_up,
          cost,
          launch<Config>};
}

struct Size {
  RowMode mode;
  int groups, m, n, kp, sms;
};

// If a tile takes at least this many cycles, the next one is claimed in time.
constexpr double kClaimCycles = fitted::claim_cycles;

// The cycles that sharing a tile costs: for one more part, and for each of a tile's sums that goes through
// memory. If row counts are random, tiles of fewer cycles than kCounted are not shared.
constexpr double kShareCycles = fitted::share_cycles, kShareSum = fitted::share_sum,
                 kCounted = fitted::share_counted;

// Estimates a launch of a candidate for groups of equal expected size: the time of a block's tiles, but at
// least the time in which the weights arrive.
inline Estimate estimate(const Candidate& candidate, const Size& size, int tile_width) {
  const ExpectedRows expected(size.mode, size.groups, size.m);
  const int steps = size.kp / kStepK;
  const Load load(expected, candidate.cut, tile_width, [&](int width) {
    const Cost& cost = candidate.cost;
    const double step = std::max(cost.base + cost.slope * width, cost.full * width);
    return steps * step + cost.tile_base + cost.tile_slope * width;
  });
  const int rows = candidate.rows * candidate.cluster, columns = ceil_div(size.n, rows);
  const int blocks = size.sms / candidate.cluster;
  const double tiles = std::round(load.tiles / 2 * expected.groups * columns),
               cycles = load.cycles / load.tiles;
  const double tile_bytes = kTileCodes + candidate.tile_scales;
  const double bytes = load.columns / 2 * expected.groups * columns * rows / kTileRows * steps * tile_bytes;
  const double memory = bytes / kMemoryRate * kClock;
  // A full wave takes the cycles of its tiles, or the time in which its weights arrive. A last wave that is
  // not full takes the cycles.
  const double wave = std::max(cycles, memory * blocks / tiles);
  const double share = kShareCycles + kShareSum * candidate.rows * load.width / 2;
  int share_below = std::max(0, static_cast<int>(blocks * (cycles - share) / wave));
  if (expected.by_chance ? cycles < kCounted : Shares(tiles, steps, share_below, blocks).left == 0)
    share_below = 0;
  const Shares shares(tiles, steps, share_below, blocks);
  const double compute = cycles_of(shares, cycles, share);
  // The shorter time is hidden by the longer one, but it still has a small cost. This decides between
  // candidates whose longer times are equal.
  const double time = std::max(compute, memory) + fitted::overlap * std::min(compute, memory);
  // Claiming tiles is better than sharing them if nearly all blocks are busy in the last wave. Somewhat fewer
  // are enough if memory is the limit, because each then has more of its bandwidth.
  const double busy = fitted::claim_busy[cycles < wave ? 0 : 1];
  const bool claims = candidate.cluster == 1 && size.mode != RowMode::kDense && tiles >= 2 * blocks &&
                      cycles > kClaimCycles && std::ceil(tiles / blocks) * blocks < busy * tiles;
  return {time / kClock, claims ? 0 : share_below, tile_width, claims};
}

// Estimates a launch. If the number of rows is known, it may choose another width of token tiles: 4096 rows
// and few weights run faster as 22 x 192, which fill two waves, than as 16 x 256, which fill one and a half.
// Predicted gains under 5 % are noise; ignore them. With many waves the last one does not matter.
inline Estimate estimate(const Candidate& candidate, const Size& size) {
  constexpr double kGain = fitted::width_gain;
  constexpr int kManyWaves = int(fitted::many_waves);
  const Estimate as_cut = estimate(candidate, size, 0);
  if (size.mode != RowMode::kDense) return as_cut;
  Estimate best = as_cut;
  const int most = candidate.round_up(size.m);
  if (ceil_div(size.m, most) * ceil_div(size.n, candidate.rows) > kManyWaves * size.sms) return as_cut;
  for (int width = kTokenStep; width <= most; width += kTokenStep) {
    if (candidate.round_up(width) != width) continue;
    const Estimate here = estimate(candidate, size, width);
    if (here.seconds < std::min(best.seconds, kGain * as_cut.seconds)) best = here;
  }
  return best;
}

// Chooses the candidate `given` or, if that is negative, the one with the least time.
inline Choice choose(const Candidates& candidates, const Size& size, int given = -1) {
  if (given >= 0) return {given, estimate(candidates.list[given], size)};
  Choice best;
  for (int i = 0; i < candidates.count; ++i) {
    const Estimate here = estimate(candidates.list[i], size);
    if (i == 0 || here.seconds < best.estimate.seconds) best = {i, here};
  }
  return best;
}

// ---- tensor maps ----

// `promotion`: the least that L2 fetches. Only scales use it: codes would arrive 4 to 7 % more slowly
// (docs/kernels.md, "How fast weights can arrive").
inline bool encode_map(CUtensorMap* map, CUtensorMapDataType type, int rank, void* base,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                       CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_NONE) {
  const cuuint32_t ones[3] = {1, 1, 1};
  return driver_encode()(map, type, rank, base, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                         swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

inline bool encode_matrix(CUtensorMap* map, CUtensorMapDataType type, int element, const void* base,
                          uint64_t columns, uint64_t rows, uint32_t box_columns, uint32_t box_rows,
                          CUtensorMapSwizzle swizzle,
                          CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_NONE) {
  const cuuint64_t sizes[2] = {columns, rows}, strides[1] = {columns * element};
  const cuuint32_t box[2] = {box_columns, box_rows};
  return encode_map(map, type, 2, const_cast<void*>(base), sizes, strides, box, swizzle, promotion);
}

// The map has the rows twice, so that a copy can end at any row: see TileStore::store_boxes.
inline bool encode_output(CUtensorMap* map, DType type, bool gated, void* out, uint64_t n, uint64_t rows,
                          uint32_t store_tokens) {
  if (type == DType::kFloat32) return true;  // float32 results are stored without copies
  if (gated) n /= 2, store_tokens *= 2;
  const uint64_t row_bytes = n * 2;
  const cuuint64_t sizes[3] = {n, store_tokens, rows + 1}, strides[2] = {row_bytes, row_bytes};
  const cuuint32_t columns = gated ? kMmaRows / 2 : kMmaRows, box[3] = {columns, store_tokens, 1};
  auto data_type =
      type == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  void* base = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(out) - store_tokens * row_bytes);
  return encode_map(map, data_type, 3, base, sizes, strides, box,
                    gated ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

// ---- tiles that blocks share ----

constexpr int kWord = sizeof(uint64_t);

// The scratch memory of a part of a tile.
inline int64_t part_bytes(const Candidate& candidate) {
  return candidate.sum_bytes + candidate.flags * kWord;
}

// The most scratch memory that a launch needs: a part for each block, and the word with which tiles are
// claimed.
inline int64_t workspace_bytes(const Candidates& candidates, int sms) {
  int64_t bytes = 0;
  for (int i = 0; i < candidates.count; ++i) bytes = std::max(bytes, sms * part_bytes(candidates.list[i]));
  return bytes + kWord;
}

// Returns 0, a cudaError_t or a LaunchError.
inline int run(const Candidates& candidates, const PrefillArguments& a) {
  const bool wide = candidates.list[0].element != Element::kE4m3;  // a copy does not interpret the values
  const auto x_type = wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const int x_bytes = wide ? 2 : 1;
  if (!is_valid(a, x_bytes, candidates.count)) return kBadArgument;
  if (a.m == 0) return 0;
  if (driver_encode() == nullptr) return kNoDriver;
  int device, sms;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  const Size size = {a.mode, a.groups, a.m, a.n, a.kp, sms};
  const Choice chosen = choose(candidates, size, a.config);
  const Candidate& choice = candidates.list[chosen.candidate];
  auto problem = describe<Problem>(a, chosen.estimate, choice.rows * choice.cluster, choice.sum_bytes, sms);
  if (chosen.estimate.claims) {  // the word behind all parts
    auto* const parts = static_cast<uint8_t*>(a.workspace);
    problem.claimed = reinterpret_cast<uint64_t*>(parts + sms * part_bytes(choice));
  }
  problem.early = a.early;

  const int steps = problem.tiling.steps;
  uint64_t rows = static_cast<uint64_t>(a.m) * (a.mode == RowMode::kMasked ? a.groups : 1);
  uint64_t weight_tiles = static_cast<uint64_t>(a.groups) * a.n / kTileRows;
  uint32_t box_tiles = choice.rows / kTileRows;
  Maps maps;
  bool encoded = true;
  for (int box = 0; box < kXBoxes; ++box) {
    encoded &= encode_matrix(&maps.x[box], x_type, x_bytes, a.x, a.k, rows, kXRowBytes / x_bytes,
                             kTokenStep << box, CU_TENSOR_MAP_SWIZZLE_128B);
  }
  // Codes are copied as 8-byte elements, because a box has at most 256 elements in a row. A step's scales of
  // a row tile are at most 128 bytes; with promotion, memory also brings those of the next steps.
  encoded = encoded &&
            encode_matrix(&maps.codes, CU_TENSOR_MAP_DATA_TYPE_INT64, 8, a.codes, steps * (kTileCodes / 8),
                          weight_tiles, kTileCodes / 8, box_tiles, CU_TENSOR_MAP_SWIZZLE_NONE) &&
            encode_matrix(&maps.scales, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.scales,
                          steps * choice.tile_scales, weight_tiles, choice.tile_scales, box_tiles,
                          CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B) &&
            encode_output(&maps.out, problem.out_type, a.gate.act != Act::kNone, a.out, a.n, rows,
                          choice.store_tokens);
  if (!encoded) return kBadArgument;
  return choice.run(problem, maps, sms, static_cast<cudaStream_t>(a.stream));
}

// The candidates of each kernel, defined in its own file. b32: one scale for 32 K instead of 16.
Candidates w4a8_candidates();
Candidates w4a8_b32_candidates();
Candidates half_candidates();
Candidates half_b32_candidates();
Candidates bf16_candidates();
Candidates bf16_b32_candidates();
Candidates int4_candidates();
Candidates int4_g64_candidates();
Candidates int4_g32_candidates();

}  // namespace fp4::sm90
