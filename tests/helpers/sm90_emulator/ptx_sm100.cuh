// The emulator includes this file in place of csrc/sm100/ptx_sm100.cuh, and does what its instructions do.
#pragma once

#include <cstdint>

namespace fp4::sm100 {

template <int kCtas>
uint32_t leading_barrier(uint32_t barrier) {
  return kCtas == 2 ? emulator::leading_barrier(barrier) : barrier;
}
template <int kCtas>
void load_box(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x, int y) {
  emulator::load_box_of_group(smem, map, barrier, x, y, kCtas);
}
inline void store_shared_16(uint32_t smem, const uint4& v) { emulator::store_shared(smem, &v, sizeof(v)); }

inline void barrier_expect_bytes_remote(uint32_t barrier, uint32_t rank, uint32_t bytes) {
  emulator::barrier_arrive_remote(barrier, rank, bytes);
}
inline void try_cancel(uint32_t smem, uint32_t barrier) { emulator::try_cancel(smem, barrier); }
inline bool query_cancel(uint32_t smem, uint32_t& first_block) {
  return emulator::query_cancel(smem, first_block);
}

template <int kCtas>
void tensor_allocate(uint32_t smem, uint32_t columns) {
  emulator::tensor_allocate(smem, columns, kCtas);
}
template <int kCtas>
void tensor_free(uint32_t address, uint32_t columns) {
  emulator::tensor_free(address, columns, kCtas);
}
inline void tensor_fence_before() { emulator::tensor_fence_before(); }
inline void tensor_fence_after() { emulator::tensor_fence_after(); }
inline void tensor_load(uint32_t address, uint32_t (&r)[16]) { emulator::tensor_load(address, r, 16); }
inline void tensor_load_wait(uint32_t (&)[16]) { emulator::tensor_load_wait(); }

template <int kCtas>
void tensor_copy(uint32_t address, uint64_t descriptor) {
  emulator::tensor_copy(address, descriptor, kCtas);
}
template <int kCtas, int kPart, int kScaleBlock>
void tensor_multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales,
                     uint32_t b_scales, bool keep) {
  using Kind = emulator::TensorKind;
  constexpr Kind kKind = kPart == 32         ? Kind::kMxf8f6f4
                         : kScaleBlock == 16 ? Kind::kMxf4Nvf4By16
                                             : Kind::kMxf4Nvf4By32;
  emulator::tensor_multiply({d, instruction, a_scales, b_scales, a, b, keep, kKind, kCtas});
}
template <int kCtas>
void tensor_commit(uint32_t barrier, uint16_t blocks) {
  emulator::tensor_commit(barrier, kCtas, blocks);
}

}  // namespace fp4::sm100
