// The emulator includes this file in place of csrc/sm120/ptx_sm120.cuh, and does what its instructions do.
#pragma once

#include <cstdint>

namespace fp4::sm120 {

inline void copy_16(uint32_t smem, const void* from, bool wanted) {
  if (wanted) emulator::copy(smem, from, 16);
}
inline void copy_4(uint32_t smem, const void* from, bool wanted) {
  if (wanted) emulator::copy(smem, from, 4, 4);
}

inline uint32_t load_shared_2(uint32_t smem) { return device::load_shared<uint16_t>(smem); }

template <bool kNvfp4>
void mma_scaled(float4& d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t sfa, uint32_t sfb) {
  emulator::mma_scaled(&d.x, a, b0, b1, sfa, sfb, kNvfp4);
}

}  // namespace fp4::sm120
