// The words of CUDA that a host compiler does not know, for sources of csrc/device and csrc/sm90 that are
// compiled as C++ (g++ -include): the toolkit's headers have the types and the arithmetic of fp16, bf16 and
// fp8.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "machine.h"

#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __host__
#undef __launch_bounds__
#undef __shared__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static thread_local  // the fibers of a block share a thread

namespace emulator {

// What threadIdx and its like have: objects, since launch configurations have fields of these names.
template <auto kVector, auto kElement>
struct Coordinate {
  operator uint32_t() const { return place().*kVector.*kElement; }
};
template <auto kVector, class V>
struct Coordinates {
  Coordinate<kVector, &V::x> x;
  Coordinate<kVector, &V::y> y;
};

}  // namespace emulator

inline const emulator::Coordinates<&emulator::Place::thread, uint3> threadIdx;
inline const emulator::Coordinates<&emulator::Place::block, uint3> blockIdx;
inline const emulator::Coordinates<&emulator::Place::block_dim, dim3> blockDim;
inline const emulator::Coordinates<&emulator::Place::grid_dim, dim3> gridDim;

template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
using std::isfinite;

// ---- bits ----

namespace emulator {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace emulator

inline float __uint_as_float(uint32_t v) { return emulator::bits_as<float>(v); }
inline float __int_as_float(int v) { return emulator::bits_as<float>(v); }
inline uint32_t __float_as_uint(float v) { return emulator::bits_as<uint32_t>(v); }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __ffs(uint32_t v) { return __builtin_ffs(v); }
inline int __clz(uint32_t v) { return v ? __builtin_clz(v) : 32; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return (uint64_t(high) << 32 | low) >> shift % 32;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
inline half2 __hfma2(half2 a, half2 b, half2 c) {  // rounded once
  const auto one = [](__half x, __half y, __half z) {
    return __double2half(double(__half2float(x)) * __half2float(y) + __half2float(z));
  };
  return {one(a.x, b.x, c.x), one(a.y, b.y, c.y)};
}

#define __expf(x) expf(x)  // <cmath> has the name already

// ---- memory ----

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, T v) {
  *p = v;
}
inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }

// ---- blocks and warps; all lanes take part ----

inline void __syncthreads() { emulator::named_barrier(0, blockDim.x, true); }
inline void __syncwarp() { emulator::exchange(nullptr, 0); }

namespace emulator {

inline int lane() { return place().thread.x % kWarp; }

// f(each lane's value), in the order of the lanes.
template <class T, class F>
void for_each_lane(T mine, const F& f) {
  const Slots slots = exchange(&mine, sizeof(T));
  for (int i = 0; i < kWarp; ++i) {
    T value;
    std::memcpy(&value, slots[i], sizeof(T));
    f(i, value);
  }
}

template <class T>
T shuffle(T mine, int from) {
  const Slots slots = exchange(&mine, sizeof(T));
  T value;
  std::memcpy(&value, slots[from], sizeof(T));
  return value;
}

}  // namespace emulator

template <class T>
T __shfl_sync(uint32_t, T v, int from, int width = 32) {
  return emulator::shuffle(v, emulator::lane() / width * width + from % width);
}
template <class T>
T __shfl_xor_sync(uint32_t, T v, int mask) {
  return emulator::shuffle(v, emulator::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(uint32_t, T v, int by) {
  const int lane = emulator::lane();
  return emulator::shuffle(v, lane < by ? lane : lane - by);
}
inline uint32_t __ballot_sync(uint32_t, bool v) {
  uint32_t all = 0;
  emulator::for_each_lane(v, [&](int i, bool its) { all |= uint32_t(its) << i; });
  return all;
}
inline bool __any_sync(uint32_t mask, bool v) { return __ballot_sync(mask, v) != 0; }
template <class T>
uint32_t __match_any_sync(uint32_t, T v) {
  uint32_t same = 0;
  emulator::for_each_lane(v, [&](int i, T its) { same |= uint32_t(its == v) << i; });
  return same;
}
template <class T>
T __reduce_add_sync(uint32_t, T v) {
  T sum = 0;
  emulator::for_each_lane(v, [&](int, T its) { sum += its; });
  return sum;
}
inline int __reduce_max_sync(uint32_t, int v) {
  int most = v;
  emulator::for_each_lane(v, [&](int, int its) { most = max(most, its); });
  return most;
}
inline int __reduce_or_sync(uint32_t, int v) {
  int all = 0;
  emulator::for_each_lane(v, [&](int, int its) { all |= its; });
  return all;
}

// ---- launches ----

namespace emulator {

template <class... Parameters, class... Arguments>
cudaError_t launch_config(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                          const Arguments&... arguments) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster = config->attrs[i].val.clusterDim.x;
  }
  return launch({config->gridDim, config->blockDim, config->dynamicSmemBytes, cluster},
                [&] { kernel(arguments...); });
}

template <class Kernel>
cudaError_t set_attribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}

template <class Kernel>
cudaError_t max_active_clusters(int* count, Kernel, const cudaLaunchConfig_t*) {
  *count = 1;
  return cudaSuccess;
}

// Reports compute capability 9.0, whose kernels may overlap.
template <class Kernel>
cudaError_t func_attributes(cudaFuncAttributes* attributes, Kernel) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

// A launch ends before the next one begins, so streams have nothing to wait for.
template <class... Arguments>
cudaError_t nothing_to_wait_for(const Arguments&...) {
  return cudaSuccess;
}

}  // namespace emulator

#define cudaEventCreateWithFlags emulator::nothing_to_wait_for
#define cudaEventRecord emulator::nothing_to_wait_for
#define cudaFuncGetAttributes emulator::func_attributes
#define cudaLaunchKernelEx emulator::launch_config
#define cudaFuncSetAttribute emulator::set_attribute
#define cudaOccupancyMaxActiveClusters emulator::max_active_clusters
#define cudaStreamCreateWithFlags emulator::nothing_to_wait_for
#define cudaStreamWaitEvent emulator::nothing_to_wait_for
