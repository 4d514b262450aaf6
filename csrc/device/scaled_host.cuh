// Host side that products of FP4 rows by FP4 weights have in common (csrc/sm100, csrc/sm120).
#pragma once

#include <algorithm>
#include <cstddef>

#include "prefill_host.cuh"
#include "scaled.h"

namespace fp4::device {

// Returns whether the kernels can run this launch. `part`: K of an instruction. `scale_bytes`: rows of scales
// begin at multiples of it.
inline bool is_valid(const ScaledProduct& a, int part, int scale_bytes, int candidates) {
  const bool has_scales =
      a.x_scale_bytes >= ceil_div(a.k, a.nvfp4 ? 16 : 32) && a.x_scale_bytes % scale_bytes == 0;
  const bool has_groups = a.k_ends != nullptr         ? a.mode == RowMode::kDense && a.bias == nullptr
                          : a.mode == RowMode::kDense ? a.groups == 1
                                                      : a.group_rows != nullptr;
  return a.groups >= 1 && a.m >= 0 && a.n >= 1 && (a.n % 8 == 0 || a.k_ends != nullptr) && a.k >= part &&
         a.k % part == 0 && (has_scales || (a.x_fp8 && a.x_scales == nullptr)) && !(a.x_fp8 && a.nvfp4) &&
         a.config < candidates && has_groups;
}

// Returns the number of the candidate that the caller wants, or of the one with the fewest tokens that hold a
// group of the expected size; of those with as many, the last. `suits` says which candidates it may be. The
// first one always is, and has the most tokens. Nothing was measured.
template <class Candidate, size_t kCount, class Suits>
int choose(const Candidate (&candidates)[kCount], const ScaledProduct& a, const Suits& suits) {
  if (a.config >= 0) return a.config;
  const int rows = std::min(ExpectedRows(a.mode, a.groups, a.m).many(), candidates[0].tokens);
  int found = 0;
  for (int i = 1; i < static_cast<int>(kCount); ++i) {
    const int tokens = candidates[i].tokens;
    if (tokens >= rows && tokens <= candidates[found].tokens && suits(candidates[i])) found = i;
  }
  return found;
}

}  // namespace fp4::device
