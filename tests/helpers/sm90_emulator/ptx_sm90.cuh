// What the instructions in csrc/sm90/ptx_sm90.cuh do, for the emulator: takes that file's place.
#pragma once

#include "../device/ptx.cuh"

namespace fp4::sm90 {

using namespace device;

// ---- mbarriers that count bytes, and those of other blocks ----

inline void barrier_init_fence() {}
inline void barrier_arrive_remote(uint32_t barrier, uint32_t rank) {
  emulator::barrier_arrive_remote(barrier, rank);
}
inline void barrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  emulator::barrier_arrive(barrier, bytes);
}

// ---- clusters ----

inline uint32_t cluster_rank() { return emulator::cluster_rank(); }
inline void cluster_arrive() { emulator::cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }
inline void cluster_sync() { cluster_arrive(), cluster_wait(); }
template <class T>
void store_cluster(uint32_t smem, uint32_t barrier, uint32_t rank, const T& value) {
  emulator::store_cluster(smem, barrier, rank, &value, sizeof(T));
}

// ---- a thread's own copies ----

inline void copy_16(uint32_t smem, const void* from, bool there) {
  emulator::copy(smem, from, there ? 16 : 0);
}
inline void copy_16_ahead(uint32_t smem, const void* from) { emulator::copy(smem, from, 16); }

// ---- bulk copies ----

inline void copy_bytes(uint32_t smem, const void* from, int bytes, uint32_t barrier) {
  emulator::load_bytes(smem, from, bytes, barrier);
}

inline void load_box(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x, int y) {
  emulator::load_box(smem, map, barrier, x, y, 1u << emulator::cluster_rank());
}
inline void load_box_multicast(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x, int y,
                               uint16_t blocks) {
  emulator::load_box(smem, map, barrier, x, y, blocks);
}
inline void store_box(const CUtensorMap* map, uint32_t smem, int x, int y, int z) {
  emulator::store_box(map, smem, x, y, z);
}
inline void store_commit() { emulator::store_commit(); }
template <int Pending>
void store_wait_read() {
  emulator::store_wait(Pending);
}
inline void fence_async_proxy() { emulator::fence_async_proxy(); }

// ---- warps and registers ----

template <int Registers>
void register_take() {}
template <int Registers>
void register_give() {}

inline bool elect_lane() {
  emulator::exchange(nullptr, 0);
  return emulator::lane() == 0;
}

// Column i / 4 of the matrix has the lane's result: its halves are in rows 2 (i % 4) and 2 (i % 4) + 1.
inline uint32_t transposed(uint32_t pair) {
  const int lane = emulator::lane(), column = lane / 4, row = lane % 4 * 2;
  uint32_t result = 0;
  emulator::for_each_lane(pair, [&](int i, uint32_t its) {
    for (int half = 0; half < 2; ++half)
      if (i == (row + half) * 4 + column / 2) result |= (its >> column % 2 * 16 & 0xFFFF) << half * 16;
  });
  return result;
}

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::wgmma_commit(); }
template <int Pending>
void wgmma_wait() {
  emulator::wgmma_wait(Pending);
}

template <Element kElement, int Tokens>
struct Wgmma {
  static void run(float* d, const uint32_t* a, uint64_t b_desc, int keep) {
    emulator::wgmma(d, a, b_desc, keep, Tokens, type_of(kElement));
  }
};

}  // namespace fp4::sm90
