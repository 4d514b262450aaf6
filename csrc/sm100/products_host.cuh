// The host side of the products of FP4 or e4m3 rows by FP4 weights: the candidates, the choice among them,
// launches.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>

#include "../device/scaled_host.cuh"
#include "../device/tensor_map.cuh"
#include "products_kernel.cuh"

namespace fp4::sm100 {

struct Candidate {
  const char* name;
  int tokens, ctas;
  bool clc;
  int (*launch)(const Maps&, const Problem&, int multiprocessors, cudaStream_t);
};

// Returns how many token tiles all groups have, or more: only the GPU knows the groups. A group has as few
// tiles as possible, or with three tiles and more perhaps one more (WidthList::cut).
inline int most_token_tiles(const ScaledProduct& a, int tokens) {
  if (a.mode != RowMode::kContiguous) return a.groups * (ceil_div(a.m, tokens) + (a.m > 2 * tokens));
  const int filled = std::min(a.groups, a.m);
  return filled + (a.m - filled) / tokens + a.m / (2 * tokens);
}

inline int weight_tiles(const ScaledProduct& a, int ctas) { return ceil_div(a.n, ctas * kRows); }

// Returns whether cluster launch control may pay. A launch then has a cluster for each tile, and one that is
// ready takes the next tile. So it pays where tiles take unequal times and each cluster has several: with
// groups of rows, whose tiles have 16 tokens and more, and with groups along K, which have any number of
// steps. The tiles of a dense product take equal times, and then a fixed distance costs nothing. Masked
// groups may have far fewer tiles than their most rows would fill, and each of the others costs a request.
inline bool clc_pays(const ScaledProduct& a, int tokens, int ctas, int multiprocessors) {
  const bool unequal = a.groups > 1 && (a.mode == RowMode::kContiguous || a.k_ends != nullptr);
  return unequal && most_token_tiles(a, tokens) * weight_tiles(a, ctas) >= 2 * (multiprocessors / ctas);
}

// A block for each multiprocessor, or a pair for two; with cluster launch control one of these for each tile.
template <class Config>
int launch(const Maps& maps, const Problem& all, int multiprocessors, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedStorage<Config>);
  static_assert(kBytes <= kMostShared);
  auto kernel = product_kernel<Config>;
  static std::atomic<uint64_t> allowed;
  if (const cudaError_t error = allow_shared(kernel, kBytes, allowed); error != cudaSuccess) return error;
  Problem problem = all;
  problem.tiling.columns = weight_tiles(all, Config::Ctas);
  const int clusters = Config::Clc ? most_token_tiles(all, Config::MaxTokens) * problem.tiling.columns
                                   : std::max(1, multiprocessors / Config::Ctas);
  const LaunchShape shape = {dim3(clusters * Config::Ctas), dim3(kThreads), kBytes, Config::Ctas};
  return launch_kernel(kernel, shape, false, stream, maps, problem);
}

template <class Config>
constexpr Candidate candidate(const char* name) {
  return {name, Config::MaxTokens, Config::Ctas, Config::Clc, launch<Config>};
}

using Widths224 = WidthList<224, 208, 192, 176, 160, 144, 128, 112, 96, 80, 64, 48, 32, 16>;
using Widths128 = WidthList<128, 112, 96, 80, 64, 48, 32, 16>;

// ProductConfig<formats, groups along K, thread blocks, tokens, stages, widths, cluster launch control>. Each
// fills the shared memory of a multiprocessor. Of the widths, only how a group is cut depends: products have
// as many tokens as a tile. Tiles of at most 32 tokens take equal times, so one of these is enough.
template <Kind kKind, bool kAlongK = false>
constexpr Candidate kCandidates[] = {
    candidate<ProductConfig<kKind, kAlongK, 2, 224, 6, Widths224>>("rows 256, tokens 224, stages 6"),
    candidate<ProductConfig<kKind, kAlongK, 2, 128, 8, Widths128>>("rows 256, tokens 128, stages 8"),
    candidate<ProductConfig<kKind, kAlongK, 1, 32, 9, WidthList<32, 16>>>("rows 128, tokens 32, stages 9"),
    candidate<ProductConfig<kKind, kAlongK, 2, 224, 6, Widths224, true>>(
        "rows 256, tokens 224, stages 6, cluster launch control"),
    candidate<ProductConfig<kKind, kAlongK, 2, 128, 8, Widths128, true>>(
        "rows 256, tokens 128, stages 8, cluster launch control"),
};
constexpr int kCandidateCount = std::size(kCandidates<Kind::kNvfp4>);

// Makes the map of packed codes or e4m3 [rows, bytes], copied in swizzled boxes of 128 bytes by `box_rows`.
// `unpacks`: the copy puts each 16 codes into 16 bytes, 128 codes into a box.
inline bool encode_codes(CUtensorMap* map, const void* codes, int64_t rows, int bytes, uint32_t box_rows,
                         bool unpacks = false) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(unpacks ? 2 * bytes : bytes),
                               static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(bytes)};
  const cuuint32_t box[2] = {kRowBytes, box_rows}, ones[2] = {1, 1};
  const auto type = unpacks ? CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return driver_encode()(map, type, 2, const_cast<void*>(codes), sizes, strides, box, ones,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Makes the map of the weights' scales, a row for each 128 rows of weights. A box has those of a step.
inline bool encode_scales(CUtensorMap* map, const void* scales, int64_t rows, int blocks, int step_blocks) {
  constexpr int kEach = 8;  // bytes of an element: a box has at most 256
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(blocks * (kBlockBytes / kEach)),
                               static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {sizes[0] * kEach};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(step_blocks * (kBlockBytes / kEach)), 1};
  const cuuint32_t ones[2] = {1, 1};
  return driver_encode()(map, CU_TENSOR_MAP_DATA_TYPE_INT64, 2, const_cast<void*>(scales), sizes, strides,
                         box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Returns 0, a cudaError_t or a LaunchError.
inline int run(const ScaledProduct& a) {
  const bool along_k = a.k_ends != nullptr;
  const int part = along_k ? kBoxK : a.x_fp8 ? 128 : 64;
  if (!is_valid(a, part, along_k ? 4 : 16, kCandidateCount) || (along_k && a.x_fp8)) return kBadArgument;
  if (a.m == 0) return 0;
  CurrentGpu gpu;
  if (const cudaError_t error = current_gpu(gpu); error != cudaSuccess) return error;
  if (gpu.major != 10) return cudaErrorNoKernelImageForDevice;
  if (driver_encode() == nullptr) return kNoDriver;
  Maps maps;
  const int64_t rows = int64_t(a.m) * (a.mode == RowMode::kMasked ? a.groups : 1);
  const int64_t weight_rows = int64_t(along_k ? 1 : a.groups) * a.n;
  const int64_t scale_rows = int64_t(a.groups) * ceil_div(a.n, kRows);
  const int scale_blocks = ceil_div(a.k, a.nvfp4 ? 64 : 128), step_blocks = a.nvfp4 ? 4 : a.x_fp8 ? 1 : 2;
  if (!encode_codes(&maps.codes, a.codes, weight_rows, a.k / 2, kRows, a.x_fp8) ||
      !encode_codes(&maps.x, a.x, rows, a.x_fp8 ? a.k : a.k / 2, kBoxRows) ||
      (!along_k && !encode_scales(&maps.scales, a.scales, scale_rows, scale_blocks, step_blocks)))
    return kBadArgument;
  const Problem problem = {a,
                           {{a.mode, a.group_rows, a.groups, a.m}, 0, ceil_div(a.k, a.x_fp8 ? 128 : 256), 0}};
  const int number = choose(kCandidates<Kind::kNvfp4>, a, [&](const Candidate& one) {
    return !one.clc || clc_pays(a, one.tokens, one.ctas, gpu.multiprocessors);
  });
  const Candidate& chosen = along_k && a.nvfp4 ? kCandidates<Kind::kNvfp4, true>[number]
                            : along_k          ? kCandidates<Kind::kMxfp4, true>[number]
                            : a.nvfp4          ? kCandidates<Kind::kNvfp4>[number]
                            : a.x_fp8          ? kCandidates<Kind::kFp8>[number]
                                               : kCandidates<Kind::kMxfp4>[number];
  return chosen.launch(maps, problem, gpu.multiprocessors, static_cast<cudaStream_t>(a.stream));
}

}  // namespace fp4::sm100
