// Loads a lane's codes of a step of 128 K from shared memory.
#pragma once

#include "warp.cuh"

namespace fp4::device {

constexpr uint32_t kHalfCodes = 512;  // bytes of 16 weight rows' codes for 64 K

// The codes of a warp's 16 weight rows for the two halves of a step: 16 bytes a lane each.
class LaneCodes {
 public:
  __device__ __forceinline__ void init(uint32_t codes,
                                       int lane) {  // `codes`: address of the warp's, in a stage
    place_ = kept_address(codes + lane * 16, lane);
  }

  __device__ __forceinline__ void load(uint32_t stage) {
    half[0] = load_shared_16(place_ + stage);
    half[1] = load_shared_16(place_ + stage + kHalfCodes);
  }

  uint4 half[2];

 private:
  uint32_t place_;
};

}  // namespace fp4::device
