// Operations of all lanes of a warp together, and arrays in their registers.
#pragma once

#include "ptx.cuh"

namespace fp4::device {

// What one warp's arrival counts. compute-sanitizer's racecheck credits an arrival with the accesses of the
// lane that arrives alone, not with those that __syncwarp orders before it; for its sake every lane can
// arrive (tests/scripts/sanitize.py).
#ifdef FP4_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

// A warp arrives, with the accesses of all its lanes.
__device__ __forceinline__ void barrier_arrive_warp(uint32_t barrier) {
  __syncwarp();
  if (static_cast<int>(threadIdx.x % 32) < kWarpArrivals) barrier_arrive(barrier);
}

// A value that all lanes have, so that the compiler knows they do: a loop that ends by it can keep its
// counters, and what wgmma is told, in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __reduce_or_sync(~0u, value); }

// Where a lane's values are in a stage. Through a shuffle, so that the compiler keeps it instead of computing
// it again in every step.
__device__ __forceinline__ uint32_t kept_address(uint32_t place, int lane) {
  return __shfl_sync(~0u, place, lane);
}

// A constant as a register of each lane, which the compiler would else copy from a uniform one before each
// use.
__device__ __forceinline__ uint32_t kept_constant(uint32_t value, int lane) {
  return __shfl_sync(~0u, value + lane, lane) - lane;
}

}  // namespace fp4::device
