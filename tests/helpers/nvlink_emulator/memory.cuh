// In the place of csrc/nvlink/memory.cuh: what GPUs of a node see of each other's memory, between threads of
// the host. Order is stronger here than between GPUs.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>
#include <thread>

#include "block.h"

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

namespace fp4::nvlink {

// A rank whose wait is over goes on at once, or later than the others need for their next call.
inline void dawdle() {
  static thread_local std::minstd_rand random(std::random_device{}());
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
}

inline void store_release(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline uint32_t load_acquire(const uint32_t* p) {
  const uint32_t v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  dawdle();
  return v;
}
inline void store_relaxed(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void store_relaxed(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline uint64_t load_relaxed(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

inline void store_word(void* p, uint2 data, uint32_t flag) {
  auto* to = static_cast<uint64_t*>(p);
  __atomic_store_n(to, uint64_t(flag) << 32 | data.x, __ATOMIC_RELAXED);
  __atomic_store_n(to + 1, uint64_t(flag) << 32 | data.y, __ATOMIC_RELAXED);
}
inline uint4 load_word(const void* p) {
  const auto* from = static_cast<const uint64_t*>(p);
  const uint64_t a = __atomic_load_n(from, __ATOMIC_RELAXED), b = __atomic_load_n(from + 1, __ATOMIC_RELAXED);
  return make_uint4(uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32));
}
inline uint4 load_data(const void* p) { return *static_cast<const uint4*>(p); }

inline int64_t nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
inline void wait_previous_kernel() {}
inline void release_next_kernel() {}
// It ends by its own patience, not by the emulator's, which knows nothing of other ranks.
inline void keep_waiting() {
  emulator::block->progressed();
  std::this_thread::yield();
  emulator::yield();
}

// The launch ends with an error; this fiber never goes on.
[[noreturn]] inline void abort_kernel() {
  emulator::block->fail("gave up waiting");
  for (;;) emulator::yield();
}

}  // namespace fp4::nvlink
