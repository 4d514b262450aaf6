// Replaces csrc/sm80/ptx_sm80.cuh in the emulator: the same functions, in C++.
#pragma once

#include <cstdint>

namespace fp4::sm80 {

inline void copy_16(uint32_t smem, const void* from, bool wanted, bool there) {
  if (wanted) emulator::copy(smem, from, there ? 16 : 0);
}
inline void copy_4(uint32_t smem, const void* from, bool wanted, bool there) {
  if (wanted) emulator::copy(smem, from, there ? 4 : 0, 4);
}
inline void copy_16_ahead(uint32_t smem, const void* from, bool wanted) {
  if (wanted) emulator::copy(smem, from, 16);
}

inline void mma_int8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::mma_int8(d, a, b0, b1);
}

}  // namespace fp4::sm80
