// Operations that all lanes of a warp do together.
#pragma once

#include "ptx.cuh"

namespace fp4::device {

// How many arrivals a warp makes at a barrier. compute-sanitizer's racecheck credits an arrival with the
// accesses of the lane that arrives alone, not with those that __syncwarp orders before it; for its sake
// every lane can arrive (tests/scripts/sanitize.py).
#ifdef FP4_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

// Arrives at a barrier as a warp: the accesses of all its lanes come first.
__device__ __forceinline__ void barrier_arrive_warp(uint32_t barrier) {
  __syncwarp();
  if (static_cast<int>(threadIdx.x % 32) < kWarpArrivals) barrier_arrive(barrier);
}

// Returns a value that all lanes share, in a way that tells the compiler so. A loop with this bound can then
// keep its counters, and the arguments of wgmma, in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __reduce_or_sync(~0u, value); }

// Returns `place`, where a lane's values are in a stage. It goes through a shuffle, so that the compiler
// keeps it in a register and does not compute it again in every step.
__device__ __forceinline__ uint32_t kept_address(uint32_t place, int lane) {
  return __shfl_sync(~0u, place, lane);
}

// Returns a constant in a register of each lane. Else the compiler would copy it from a uniform register
// before each use.
__device__ __forceinline__ uint32_t kept_constant(uint32_t value, int lane) {
  return __shfl_sync(~0u, value + lane, lane) - lane;
}

}  // namespace fp4::device
