// The host side of the products of FP4 rows by FP4 weights: the candidates, the choice among them, launches.
#pragma once

#include <atomic>
#include <cstdint>
#include <iterator>

#include "../device/scaled_host.cuh"
#include "scaled_kernel.cuh"

namespace fp4::sm120 {

struct Candidate {
  const char* name;
  int tokens, rows, shared_bytes;
  int (*launch)(const Problem&, int blocks, cudaStream_t);
};

template <class Config>
int launch(const Problem& problem, int blocks, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedStorage<Config>);
  static_assert(kBytes <= kMostShared);
  auto kernel = scaled_kernel<Config>;
  static std::atomic<uint64_t> allowed;
  if (const cudaError_t error = allow_shared(kernel, kBytes, allowed); error != cudaSuccess) return error;
  const LaunchShape shape = {dim3(blocks), dim3(Config::Threads), kBytes, 1, true};
  return launch_kernel(kernel, shape, false, stream, problem);
}

template <class Config>
constexpr Candidate candidate(const char* name) {
  return {name, Config::MaxTokens, Config::Rows, sizeof(SharedStorage<Config>), launch<Config>};
}

// ScaledConfig<nvfp4, warps (rows), warps (tokens), row tiles of a warp, widths, stages>, in falling order of
// their tokens. Each fills the shared memory of a multiprocessor.
template <bool kNvfp4>
constexpr Candidate kCandidates[] = {
    candidate<ScaledConfig<kNvfp4, 4, 2, 2, WidthList<128, 96, 64>, 2>>("rows 128, tokens 128, stages 2"),
    candidate<ScaledConfig<kNvfp4, 4, 2, 2, WidthList<64, 32>, 3>>("rows 128, tokens 64, stages 3"),
    candidate<ScaledConfig<kNvfp4, 8, 1, 1, WidthList<32>, 4>>("rows 128, tokens 32, stages 4"),
    candidate<ScaledConfig<kNvfp4, 8, 1, 1, WidthList<16>, 4>>("rows 128, tokens 16, stages 4"),
};
constexpr int kCandidateCount = std::size(kCandidates<true>);

// Returns 0, a cudaError_t or a LaunchError.
inline int run(const ScaledArguments& a) {
  if (!is_valid(a, kPart, 4, kCandidateCount) || a.x_fp8 || a.k_ends != nullptr || a.a_div < 1 ||
      (a.sorted_rows != nullptr && a.mode != RowMode::kContiguous))
    return kBadArgument;
  if (a.m == 0) return 0;
  CurrentGpu gpu;
  if (const cudaError_t error = current_gpu(gpu); error != cudaSuccess) return error;
  if (gpu.major != 12) return cudaErrorNoKernelImageForDevice;
  const int number = choose(kCandidates<true>, a, [](const Candidate&) { return true; });
  const Candidate& chosen = a.nvfp4 ? kCandidates<true>[number] : kCandidates<false>[number];
  const Problem problem = {
      a, {{a.mode, a.group_rows, a.groups, a.m}, ceil_div(a.n, chosen.rows), ceil_div(a.k, kStep), 0}};
  return chosen.launch(problem, gpu.multiprocessors, static_cast<cudaStream_t>(a.stream));
}

}  // namespace fp4::sm120
