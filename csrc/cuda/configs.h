// Divides a product among the warps of decode or gemv, and decides whether they can run it. Needs neither
// torch nor CUDA.
#pragma once

#include <optional>

#include "cuda/gpu.h"

namespace fp4::cuda {

using device::Routing;

inline constexpr int kMaxIds = 2048;  // rows up to which decode sorts expert ids itself

// How decode divides a product: `k_warps` warps share K, in `passes` passes, and `row_warps` share N's tiles
// in each step. `ring`: steps between the warps that compute and those that add up. `ids`: rows whose ids a
// block keeps.
struct DecodeConfig {
  int k_warps = 0, row_warps = 0, passes = 0, ring = 4, ids = 0;

  int shared_bytes() const;
  double value(int kp) const;
  DecodeConfig balanced() const;
  bool operator==(const DecodeConfig&) const = default;
};

// Returns the split that keeps the most of `compute_warps` warps busy, or nothing if no split fits shared
// memory. `rows`: activation rows in all.
std::optional<DecodeConfig> decode_warps_for(int rows, int kp, int compute_warps, const Gpu& gpu);

// Returns the expected rows of an expert that has any, if routing is uniform.
double rows_per_expert(int rows, int groups);

// Returns the configuration for `rows` activation rows, or nothing if decode cannot run them.
std::optional<DecodeConfig> choose_decode(int rows, int groups, int n, int kp, const Gpu& gpu);

// How gemv divides a product: each thread block has at most `tiles` row tiles, of `slices` units each.
struct GemvConfig {
  int columns = 0, slices = 0, tiles = 0;

  int units() const { return tiles * slices; }
  int shared_bytes() const;
  bool operator==(const GemvConfig&) const = default;
};

// Returns gemv's configuration for `rows` rows of the output, which read `columns` rows of x. Returns nothing
// if gemv cannot run them, or if they surely share weights: gemv reads these again for each row. `combined`:
// gemv adds up the experts of a token.
std::optional<GemvConfig> configure_gemv(Routing routing, int rows, int columns, int n, int kp, bool combined,
                                         const Gpu& gpu);

}  // namespace fp4::cuda
