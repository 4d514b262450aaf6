// Divides a product of decode and gemv among warps, and tells whether they can run it. Needs neither torch
// nor CUDA.
#pragma once

#include <optional>

#include "cuda/gpu.h"

namespace fp4::cuda {

using device::Routing;

inline constexpr int kMaxIds = 2048;  // rows up to which decode sorts expert ids itself

// decode: `k_warps` share K in `passes`, `row_warps` tiles of N a step. `ring`: steps between the warps that
// compute and those that add up; `ids`: rows whose ids a block keeps.
struct DecodeConfig {
  int k_warps = 0, row_warps = 0, passes = 0, ring = 4, ids = 0;

  int shared_bytes() const;
  double value(int kp) const;
  DecodeConfig balanced() const;
  bool operator==(const DecodeConfig&) const = default;
};

// The split of so many warps that keeps most of them busy; nothing where no split fits shared memory. `rows`:
// of activations in all.
std::optional<DecodeConfig> decode_warps_for(int rows, int kp, int compute_warps, const Gpu& gpu);

// Expected rows of an expert that has any, under uniform routing.
double rows_per_expert(int rows, int groups);

// The configuration for `rows` activation rows, or nothing where decode cannot run them.
std::optional<DecodeConfig> choose_decode(int rows, int groups, int n, int kp, const Gpu& gpu);

// gemv: each thread block has at most `tiles` row tiles, of `slices` units each.
struct GemvConfig {
  int columns = 0, slices = 0, tiles = 0;

  int units() const { return tiles * slices; }
  int shared_bytes() const;
  bool operator==(const GemvConfig&) const = default;
};

// For `rows` rows, which are `columns` rows of x; nothing where gemv cannot run them, or where they share
// weights, which it would read for each. `combined`: it adds up the experts of a token.
std::optional<GemvConfig> configure_gemv(Routing routing, int rows, int columns, int n, int kp, bool combined,
                                         const Gpu& gpu);

}  // namespace fp4::cuda
