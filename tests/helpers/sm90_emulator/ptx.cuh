// What the instructions in csrc/device/ptx.cuh do, for the emulator: takes that file's place.
#pragma once

#include <atomic>

#include "types.cuh"

namespace fp4::device {

// ---- launches that overlap: here none do ----

inline void wait_previous_kernel() {}
inline void release_next_kernel() {}

// ---- shared memory ----

#define FP4_DYNAMIC_SHARED(type, alignment, name) \
  auto* const name = reinterpret_cast<type*>(emulator::shared_memory())
inline uint32_t smem_address(const void* pointer) { return emulator::shared_address(pointer); }

// ---- mbarriers ----

inline void barrier_init(uint32_t barrier, uint32_t arrivals) { emulator::barrier_init(barrier, arrivals); }
inline void barrier_arrive(uint32_t barrier) { emulator::barrier_arrive(barrier); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) { emulator::barrier_wait(barrier, parity); }
inline bool barrier_test(uint32_t barrier, uint32_t parity) {
  return emulator::barrier_test(barrier, parity);
}

inline void named_barrier(int id, int threads) { emulator::named_barrier(id, threads, true); }
template <int Id>
void named_barrier(int threads) {
  emulator::named_barrier(Id, threads, true);
}

// ---- flags and counters in global memory ----

inline void store_release(uint64_t* flag, uint64_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline uint64_t load_acquire(const uint64_t* flag) {
  emulator::yield();
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
inline uint64_t add_relaxed(uint64_t* word, uint64_t value) {
  emulator::yield();
  return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}

// ---- loads and stores ----

template <class T>
T load_shared(uint32_t smem) {
  T value;
  std::memcpy(&value, emulator::shared_memory() + smem, sizeof(T));
  return value;
}
inline uint4 load_shared_16(uint32_t smem) { return load_shared<uint4>(smem); }
inline uint2 load_shared_8(uint32_t smem) { return load_shared<uint2>(smem); }
inline uint32_t load_shared_4(uint32_t smem) { return load_shared<uint32_t>(smem); }
inline float2 load_shared_pair(uint32_t smem) { return load_shared<float2>(smem); }

inline uint4 load_stream(const void* p) { return *static_cast<const uint4*>(p); }
inline uint32_t load_stream_word(const void* p) { return *static_cast<const uint32_t*>(p); }
inline uint32_t load_stream_half(const void* p) { return *static_cast<const uint16_t*>(p); }
inline void prefetch_line(const void*) {}
inline void store_16_bytes(void* to, const uint32_t* w) { std::memcpy(to, w, 16); }

// ---- arithmetic ----

inline float approximate_power_of_two(float exponent) { return std::exp2(exponent); }
inline float approximate_inverse(float d) { return 1.f / d; }
inline float max_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }
inline float min_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b); }

// ---- order ----

inline void pin(float&) {}
inline void pin(uint32_t&) {}

// ---- a thread's own copies ----

inline void copy_commit() { emulator::copy_commit(); }
template <int Pending>
void copy_wait() {
  emulator::copy_wait(Pending);
}

// ---- fragments ----

inline void load_matrices(uint32_t smem, uint32_t (&m)[4]) { emulator::load_matrices(smem, m); }

// ---- tensor cores ----

constexpr emulator::Type type_of(Element element) {
  return element == Element::kE4m3      ? emulator::Type::kE4m3
         : element == Element::kFloat16 ? emulator::Type::kFloat16
                                        : emulator::Type::kBFloat16;
}

template <Element kElement>
void mma(float4& d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::mma(&d.x, a, b0, b1, type_of(kElement));
}

}  // namespace fp4::device
