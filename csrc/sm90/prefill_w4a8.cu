// Host side of the prefill GEMM: the candidates, the choice among them, tensor maps and launch.

#include <cstddef>
#include <cstdint>

#include "prefill_kernel.cuh"

namespace fp4::sm90 {
namespace {

constexpr int kBadArgument = -1, kNoDriver = -2;

using Launch = int (*)(const Problem&, const Maps&, int sms, cudaStream_t);

template <class Config>
int launch(const Problem& problem, const Maps& maps, int sms, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedStorage<Config>);
  static_assert(kBytes <= 232448, "more shared memory than a block of sm_90 can have");
  auto kernel = prefill_kernel<Config>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = Config::Cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(sms / Config::Cluster * Config::Cluster);
  config.blockDim = dim3(Config::Threads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, problem, maps);
}

struct Candidate {
  const char* name;
  int rows, tokens, cluster;
  Launch run;
};

template <class Config>
constexpr Candidate candidate(const char* name) {
  return {name, Config::Rows, Config::MaxTokens, Config::Cluster, launch<Config>};
}

// Stages are what fits into shared memory; how many widths a kernel can have, its registers say.
using WideOver = WidthList<288, 256, 208, 160, 128, 64>;
using Wide = WidthList<256, 224, 192, 160, 144, 128, 96, 64>;
using Middle = WidthList<192, 160, 128>;
using MiddleFine = WidthList<176, 144, 112, 64>;
using Narrow = WidthList<96, 80, 64>;
using NarrowFine = WidthList<80, 64, 48, 32>;
using Small = WidthList<64, 32>;

// PrefillConfig<warpgroups, widths, cluster, stages of X, stages of W, store buffers>
constexpr Candidate kCandidates[] = {
    candidate<PrefillConfig<2, WideOver, 2, 4, 6, 1>>("rows 128, tokens 288, cluster 2"),
    candidate<PrefillConfig<2, WideOver, 1, 4, 6, 1>>("rows 128, tokens 288, cluster 1"),
    candidate<PrefillConfig<2, Wide, 2, 4, 6, 2>>("rows 128, tokens 256, cluster 2"),
    candidate<PrefillConfig<3, Middle, 1, 4, 6, 1>>("rows 192, tokens 192, cluster 1"),
    candidate<PrefillConfig<3, MiddleFine, 1, 4, 6, 1>>("rows 192, tokens 176, cluster 1"),
    candidate<PrefillConfig<4, Narrow, 1, 5, 6, 1>>("rows 256, tokens 96, cluster 1"),
    candidate<PrefillConfig<4, NarrowFine, 1, 6, 7, 1>>("rows 256, tokens 80, cluster 1"),
    candidate<PrefillConfig<4, Small, 1, 7, 7, 1>>("rows 256, tokens 64, cluster 1"),
    candidate<PrefillConfig<3, NarrowFine, 1, 7, 9, 1>>("rows 192, tokens 80, cluster 1"),
};
constexpr int kCandidateCount = sizeof(kCandidates) / sizeof(kCandidates[0]);

int choose(RowMode mode, int groups, int m, int n, int kp) {
  int average = mode == RowMode::kContiguous ? m / groups : m;
  if (average > 160) return kp >= 4096 ? 0 : 1;
  return average > 48 ? 3 : 4;
}

// ---- tensor maps ----

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode driver_encode() {
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

bool encode_map(CUtensorMap* map, CUtensorMapDataType type, int rank, void* base, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
  const cuuint32_t ones[3] = {1, 1, 1};
  return driver_encode()(map, type, rank, base, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                         swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool encode_matrix(CUtensorMap* map, CUtensorMapDataType type, int element, const void* base,
                   uint64_t columns, uint64_t rows, uint32_t box_columns, uint32_t box_rows,
                   CUtensorMapSwizzle swizzle) {
  const cuuint64_t sizes[2] = {columns, rows}, strides[1] = {columns * element};
  const cuuint32_t box[2] = {box_columns, box_rows};
  return encode_map(map, type, 2, const_cast<void*>(base), sizes, strides, box, swizzle);
}

// The rows appear twice, so that a copy can end at any row: see PrefillBlock::store_halves.
bool encode_output(CUtensorMap* map, FloatType type, void* out, uint64_t n, uint64_t rows) {
  if (type == FloatType::kFloat32) return true;  // stored without copies
  const uint64_t row_bytes = n * 2;
  const cuuint64_t sizes[3] = {n, kChunkTokens, rows + 1}, strides[2] = {row_bytes, row_bytes};
  const cuuint32_t box[3] = {kMmaRows, kChunkTokens, 1};
  auto data_type =
      type == FloatType::kBfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  void* base = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(out) - kChunkTokens * row_bytes);
  return encode_map(map, data_type, 3, base, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace
}  // namespace fp4::sm90

using namespace fp4::sm90;

extern "C" int fp4_sm90_prefill_w4a8_configs() { return kCandidateCount; }

extern "C" const char* fp4_sm90_prefill_w4a8_config_name(int config) {
  return config >= 0 && config < kCandidateCount ? kCandidates[config].name : "";
}

extern "C" int fp4_sm90_prefill_w4a8_choose(int mode, int groups, int m, int n, int kp) {
  return choose(static_cast<RowMode>(mode), groups, m, n, kp);
}

// Returns 0, a cudaError_t, or a negative number: -1 bad argument, -2 no driver entry for tensor maps.
// All pointers are device pointers, 16-byte aligned; shapes as in the header of prefill_kernel.cuh.
extern "C" int fp4_sm90_prefill_w4a8(const void* x, const float* x_scale, const void* packed,
                                     const void* block_scale, const float* global_scale, const void* bias,
                                     int bias_dtype, const int32_t* group_rows, void* out, int out_dtype,
                                     int mode, int groups, int m, int n, int kp, int config, void* stream) {
  if (mode < 0 || mode > 2 || groups < 1 || m < 0 || n < 64 || n % 64 != 0 || kp < 128 || kp % 128 != 0 ||
      config >= kCandidateCount || (mode == 0 && groups != 1)) {
    return kBadArgument;
  }
  if (m == 0) return 0;
  if (driver_encode() == nullptr) return kNoDriver;
  int device, sms;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  auto row_mode = static_cast<RowMode>(mode);
  if (config < 0) config = choose(row_mode, groups, m, n, kp);
  const Candidate& choice = kCandidates[config];
  Problem problem = {};
  problem.rows = {row_mode, group_rows, groups, m};
  problem.x_scale = x_scale;
  problem.global_scale = global_scale;
  problem.bias = bias;
  problem.bias_type = static_cast<FloatType>(bias_dtype);
  problem.out = out;
  problem.out_type = static_cast<FloatType>(out_dtype);
  problem.n = n;
  problem.steps = kp / kStepK;

  uint64_t rows = static_cast<uint64_t>(m) * (row_mode == RowMode::kMasked ? groups : 1);
  uint64_t weight_tiles = static_cast<uint64_t>(groups) * n / kTileRows;
  uint32_t box_tiles = choice.rows / kTileRows;
  Maps maps;
  bool encoded = true;
  for (int box = 0; box < kXBoxes; ++box) {
    encoded &= encode_matrix(&maps.x[box], CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, x, kp, rows, kStepK,
                             kTokenStep << box, CU_TENSOR_MAP_SWIZZLE_128B);
  }
  encoded =
      encoded &&
      // 8-byte elements, since a box has at most 256 elements in a row
      encode_matrix(&maps.codes, CU_TENSOR_MAP_DATA_TYPE_INT64, 8, packed, problem.steps * (kTileCodes / 8),
                    weight_tiles, kTileCodes / 8, box_tiles, CU_TENSOR_MAP_SWIZZLE_NONE) &&
      encode_matrix(&maps.scales, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, block_scale, problem.steps * kTileScales,
                    weight_tiles, kTileScales, box_tiles, CU_TENSOR_MAP_SWIZZLE_NONE) &&
      encode_output(&maps.out, problem.out_type, out, n, rows);
  if (!encoded) return kBadArgument;
  return choice.run(problem, maps, sms, static_cast<cudaStream_t>(stream));
}
