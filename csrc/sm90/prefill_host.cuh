// Host side of the prefill GEMMs: the choice among candidates, tensor maps and launch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "prefill_arguments.cuh"
#include "prefill_kernel.cuh"

namespace fp4::sm90 {

constexpr int kBadArgument = -1, kNoDriver = -2;

using Launch = int (*)(const Problem&, const Maps&, int sms, bool dependent, cudaStream_t);

template <class Config, bool kGated>
int launch_gated(const Problem& problem, const Maps& maps, int sms, bool dependent, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedStorage<Config>);
  static_assert(kBytes <= 232448, "more shared memory than a block of sm_90 can have");
  auto kernel = prefill_kernel<Config, kGated>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const LaunchShape shape = {dim3(sms / Config::Blocks * Config::Blocks), dim3(Config::Threads), kBytes,
                             Config::Blocks};
  return launch_kernel(kernel, shape, dependent, stream, problem, maps);
}

template <class Config>
int launch(const Problem& problem, const Maps& maps, int sms, bool dependent, cudaStream_t stream) {
  return problem.gate.act == Act::kNone ? launch_gated<Config, false>(problem, maps, sms, dependent, stream)
                                        : launch_gated<Config, true>(problem, maps, sms, dependent, stream);
}

// Measured cycles of a kernel at the clock below: a step of 128 K takes base + slope x width, but at least
// full x width, the tensor cores' rate; the rest of a tile tile_base + tile_slope x width.
struct Cost {
  double base, slope, full, tile_base, tile_slope;
};
constexpr double kClock = 1.755e9, kMemoryRate = 4e12, kBytesPerWeight = 0.5625;

struct Candidate {
  const char* name;
  Element element;
  int rows, cluster, splits, store_tokens, tile_scales;
  TokenTiles (*cut)(int rows);
  Cost cost;
  Launch run;
};

// Those of one kernel.
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
          Config::Splits,
          Config::StoreTokens,
          Config::Weights::kTileScales,
          Config::Widths::cut,
          cost,
          launch<Config>};
}

// The tiles of a group of `rows`, as the device cuts it, and their cycles; columns of weights that are read.
struct Load {
  double tiles = 0, cycles = 0, columns = 0;
};

inline void add_group(const Candidate& candidate, int rows, int steps, Load* load) {
  if (rows == 0) return;
  const auto [tiles, width] = candidate.cut(rows);
  const Cost& cost = candidate.cost;
  double step = std::max(cost.base + cost.slope * width, cost.full * width);
  load->tiles += tiles;
  load->cycles += tiles * (steps * step + cost.tile_base + cost.tile_slope * width);
  load->columns += 1;
}

struct Choice {
  int candidate = 0;
  double seconds = 0;
};

// The candidate with the least time for groups of equal expected size: waves of tiles, but no less than the
// weights take to arrive. How full the groups are is known on the device only: as many are taken to be empty
// as when each row draws a group; half of the others one standard deviation below their mean, half above, but
// with few rows for so many groups all equal.
inline Choice choose(const Candidates& candidates, RowMode mode, int groups, int m, int n, int kp, int sms) {
  double mean = mode == RowMode::kContiguous ? static_cast<double>(m) / groups : m;
  double hit = groups, deviation = 0;
  if (mode == RowMode::kContiguous && groups > 1) {
    hit = -std::expm1(-mean) * groups;
    deviation = mean < 2 ? 0 : std::sqrt(mean);
    mean = m / hit;
  }
  Choice best;
  for (int i = 0; i < candidates.count; ++i) {
    const Candidate& candidate = candidates.list[i];
    Load load;
    int steps = ceil_div(kp / kStepK, candidate.splits);
    add_group(candidate, static_cast<int>(std::lround(mean - deviation)), steps, &load);
    add_group(candidate, std::max(1, static_cast<int>(std::lround(mean + deviation))), steps, &load);
    int rows = candidate.rows * candidate.cluster, columns = ceil_div(n, rows);
    double waves = std::ceil(load.tiles / 2 * hit * columns / (sms / (candidate.cluster * candidate.splits)));
    double bytes = load.columns / 2 * hit * columns * rows * kp * kBytesPerWeight;
    double compute = waves * load.cycles / load.tiles / kClock, memory = bytes / kMemoryRate;
    // What the longer of them hides costs a little all the same: it decides where the other is equal.
    double time = std::max(compute, memory) + 0.05 * std::min(compute, memory);
    if (i == 0 || time < best.seconds) best = {i, time};
  }
  return best;
}

// ---- tensor maps ----

using Encode = decltype(&cuTensorMapEncodeTiled);

inline Encode driver_encode() {
  static Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                         cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function)
                                                                         : nullptr;
  }();
  return encode;
}

inline bool encode_map(CUtensorMap* map, CUtensorMapDataType type, int rank, void* base,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                       CUtensorMapSwizzle swizzle) {
  const cuuint32_t ones[3] = {1, 1, 1};
  return driver_encode()(map, type, rank, base, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                         swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

inline bool encode_matrix(CUtensorMap* map, CUtensorMapDataType type, int element, const void* base,
                          uint64_t columns, uint64_t rows, uint32_t box_columns, uint32_t box_rows,
                          CUtensorMapSwizzle swizzle) {
  const cuuint64_t sizes[2] = {columns, rows}, strides[1] = {columns * element};
  const cuuint32_t box[2] = {box_columns, box_rows};
  return encode_map(map, type, 2, const_cast<void*>(base), sizes, strides, box, swizzle);
}

// The rows appear twice, so that a copy can end at any row: see PrefillBlock::store_boxes.
inline bool encode_output(CUtensorMap* map, DType type, bool gated, void* out, uint64_t n, uint64_t rows,
                          uint32_t store_tokens) {
  if (type == DType::kFloat32) return true;  // stored without copies
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

// Returns 0, a cudaError_t, or a negative number: -1 bad argument, -2 no driver entry for tensor maps.
inline int run(const Candidates& candidates, const PrefillArguments& a) {
  bool gated = a.gate.act != Act::kNone;
  if (gated && (a.out_type == DType::kFloat32 || a.gate.act != Act::kSilu)) return kBadArgument;
  const bool half = candidates.list[0].element == Element::kFloat16;
  const auto x_type = half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const int x_bytes = half ? 2 : 1;
  if (a.groups < 1 || a.m < 0 || a.n < 64 || a.n % 64 != 0 || a.kp < 128 || a.kp % 128 != 0 ||
      a.config >= candidates.count || (a.mode == RowMode::kDense && a.groups != 1)) {
    return kBadArgument;
  }
  if (a.m == 0) return 0;
  if (driver_encode() == nullptr) return kNoDriver;
  int device, sms;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  int config = a.config >= 0 ? a.config : choose(candidates, a.mode, a.groups, a.m, a.n, a.kp, sms).candidate;
  const Candidate& choice = candidates.list[config];
  Problem problem = {};
  problem.rows = {a.mode, a.group_rows, a.groups, a.m};
  problem.x_scale = a.x_scale;
  problem.global_scale = a.global_scale;
  problem.bias = a.bias;
  problem.bias_type = a.bias_type;
  problem.out = a.out;
  problem.out_type = a.out_type;
  problem.gate = a.gate;
  problem.n = a.n;
  problem.steps = a.kp / kStepK;

  uint64_t rows = static_cast<uint64_t>(a.m) * (a.mode == RowMode::kMasked ? a.groups : 1);
  uint64_t weight_tiles = static_cast<uint64_t>(a.groups) * a.n / kTileRows;
  uint32_t box_tiles = choice.rows / kTileRows;
  Maps maps;
  bool encoded = true;
  for (int box = 0; box < kXBoxes; ++box) {
    encoded &= encode_matrix(&maps.x[box], x_type, x_bytes, a.x, a.kp, rows, kXRowBytes / x_bytes,
                             kTokenStep << box, CU_TENSOR_MAP_SWIZZLE_128B);
  }
  // Codes in 8-byte elements, since a box has at most 256 elements in a row.
  encoded =
      encoded &&
      encode_matrix(&maps.codes, CU_TENSOR_MAP_DATA_TYPE_INT64, 8, a.codes, problem.steps * (kTileCodes / 8),
                    weight_tiles, kTileCodes / 8, box_tiles, CU_TENSOR_MAP_SWIZZLE_NONE) &&
      encode_matrix(&maps.scales, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.scales,
                    problem.steps * choice.tile_scales, weight_tiles, choice.tile_scales, box_tiles,
                    CU_TENSOR_MAP_SWIZZLE_NONE) &&
      encode_output(&maps.out, problem.out_type, gated, a.out, a.n, rows, choice.store_tokens);
  if (!encoded) return kBadArgument;
  return choice.run(problem, maps, sms, a.early, a.stream);
}

// Of each kernel, in its file.
Candidates w4a8_candidates();
Candidates half_candidates();
Candidates int4_candidates();
Candidates int4_g64_candidates();
Candidates int4_g32_candidates();

}  // namespace fp4::sm90
