// The host side of the products of FP4 or e4m3 rows by FP4 weights: the candidates, the choice among them,
// launches.
#pragma once

#include <atomic>
#include <cstdint>
#include <iterator>

#include "../device/scaled_host.cuh"
#include "../device/tensor_map.cuh"
#include "products_kernel.cuh"

namespace fp4::sm100 {

struct Candidate {
  const char* name;
  int tokens;
  int (*launch)(const CUtensorMap& codes, const CUtensorMap& x, const Problem&, int blocks, cudaStream_t);
};

template <class Config>
int launch(const CUtensorMap& codes, const CUtensorMap& x, const Problem& problem, int blocks,
           cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedStorage<Config>);
  static_assert(kBytes <= kMostShared);
  auto kernel = product_kernel<Config>;
  static std::atomic<uint64_t> allowed;
  if (const cudaError_t error = allow_shared(kernel, kBytes, allowed); error != cudaSuccess) return error;
  return launch_kernel(kernel, {dim3(blocks), dim3(kThreads), kBytes}, false, stream, codes, x, problem);
}

// ProductConfig<formats, tokens, stages, widths>, in falling order of their tokens. Each fills the shared
// memory of a multiprocessor. Of the widths, only how a group is cut depends: products have as many tokens as
// a tile.
template <Kind kKind>
constexpr Candidate kCandidates[] = {
    {"rows 128, tokens 192, stages 4", 192,
     launch<ProductConfig<kKind, 192, 4, WidthList<192, 176, 160, 144, 128, 112, 96, 80, 64, 48, 32, 16>>>},
    {"rows 128, tokens 128, stages 6", 128,
     launch<ProductConfig<kKind, 128, 6, WidthList<128, 112, 96, 80, 64, 48, 32, 16>>>},
    {"rows 128, tokens 32, stages 9", 32, launch<ProductConfig<kKind, 32, 9, WidthList<32, 16>>>},
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

// Returns 0, a cudaError_t or a LaunchError.
inline int run(const ScaledProduct& a) {
  if (!is_valid(a, a.x_fp8 ? 128 : 64, 16, kCandidateCount)) return kBadArgument;
  if (a.m == 0) return 0;
  CurrentGpu gpu;
  if (const cudaError_t error = current_gpu(gpu); error != cudaSuccess) return error;
  if (gpu.major != 10) return cudaErrorNoKernelImageForDevice;
  if (driver_encode() == nullptr) return kNoDriver;
  CUtensorMap codes, x;
  const int64_t rows = int64_t(a.m) * (a.mode == RowMode::kMasked ? a.groups : 1);
  if (!encode_codes(&codes, a.codes, int64_t(a.groups) * a.n, a.k / 2, kRows, a.x_fp8) ||
      !encode_codes(&x, a.x, rows, a.x_fp8 ? a.k : a.k / 2, kBoxRows))
    return kBadArgument;
  const Problem problem = {
      a,
      {{a.mode, a.group_rows, a.groups, a.m}, ceil_div(a.n, kRows), ceil_div(a.k, a.x_fp8 ? 128 : 256), 0}};
  const int number = choose(kCandidates<Kind::kNvfp4>, a);
  const Candidate& chosen = a.nvfp4   ? kCandidates<Kind::kNvfp4>[number]
                            : a.x_fp8 ? kCandidates<Kind::kFp8>[number]
                                      : kCandidates<Kind::kMxfp4>[number];
  return chosen.launch(codes, x, problem, gpu.multiprocessors, static_cast<cudaStream_t>(a.stream));
}

}  // namespace fp4::sm100
