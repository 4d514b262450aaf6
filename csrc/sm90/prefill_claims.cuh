// Lets thread blocks claim tiles while a launch runs.
#pragma once

#include <cstdint>

#include "../device/warp.cuh"
#include "ptx_sm90.cuh"

namespace fp4::sm90 {

using namespace device;

// Blocks claim all tiles except each block's first. A word in global memory holds the launch's mark (once
// block 0 has its first tile) and the number of claims. Each block's last claim finds no tile. After the last
// of these the word is zero again, because a later launch may have the same ticket (the next replay of a CUDA
// graph). Whole warps call these functions.
class TileClaims {
 public:
  // `word`: null if blocks claim nothing. `ticket`: different for every launch.
  __device__ __forceinline__ TileClaims(uint64_t* word, uint64_t ticket)
      : word_(word), mark_(ticket >> kCountBits << kCountBits) {}

  __device__ __forceinline__ bool made() const { return word_ != nullptr; }

  __device__ __forceinline__ void open() const {
    if (threadIdx.x % 32 == 0) store_release(word_, mark_);
  }

  // Claims a tile and returns its index, which may be past the last tile.
  __device__ __forceinline__ int next() const {
    uint64_t word = 0;
    if (threadIdx.x % 32 == 0) {
      do {
        word = add_relaxed(word_, 1);
      } while ((word ^ mark_) >> kCountBits != 0);
    }
    return __shfl_sync(~0u, static_cast<int>(word & ((1 << kCountBits) - 1)), 0) + gridDim.x;
  }

  __device__ __forceinline__ void close() const {
    if (threadIdx.x % 32 == 0) store_release(word_, 0);
  }

 private:
  static constexpr int kCountBits = 24;

  uint64_t* word_;
  uint64_t mark_;
};

}  // namespace fp4::sm90
