// A warp's arithmetic on a head of queries, keys or values: the norm by the root mean square, and the rotary
// position embedding. A lane has the same part of both halves of the head, which the rotation mixes. Each
// operation rounds where the model rounds.
#pragma once

#include <cstring>
#include <type_traits>

#include "../device/types.cuh"

namespace fp4::sm90 {

template <class Half>
__device__ __forceinline__ float rounded_to(float x) {
  return float(Half(x));
}

// kEach: consecutive values of each half that a lane has. They stay one word or two until they are computed
// with: the compiler would take single values apart, and so wait for them, where they are loaded.
template <int kEach>
using Part = std::conditional_t<kEach == 1, uint16_t, std::conditional_t<kEach == 2, uint32_t, uint2>>;

// A lane's part of a head as it lies in memory.
template <class Half, int kEach>
struct StoredHead {
  Part<kEach> halves[2];

  // Where the lane's part is, of the head number `row` at `from`.
  template <class T>
  __device__ __forceinline__ static auto place(T* from, int64_t row) {
    using Its = std::conditional_t<std::is_const_v<T>, const Part<kEach>, Part<kEach>>;
    return static_cast<Its*>(from) + row * 64 + threadIdx.x % 32;
  }

  __device__ __forceinline__ static StoredHead load(const Part<kEach>* from) { return {from[0], from[32]}; }
  __device__ __forceinline__ static StoredHead load(const void* from, int64_t row) {
    return load(place(from, row));
  }
  __device__ __forceinline__ void store(void* to, int64_t row) const {
    Part<kEach>* const its = place(to, row);
    its[0] = halves[0], its[32] = halves[1];
  }
};

template <class Half, int kEach>
struct Head {
  using Stored = StoredHead<Half, kEach>;
  float x[2][kEach];

  Head() = default;
  __device__ __forceinline__ explicit Head(const Stored& from) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Half values[kEach];
      memcpy(static_cast<void*>(values), &from.halves[h], sizeof(values));
#pragma unroll
      for (int i = 0; i < kEach; ++i) x[h][i] = float(values[i]);
    }
  }

  __device__ __forceinline__ Stored stored() const {
    Stored to;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Half values[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) values[i] = Half(x[h][i]);
      memcpy(&to.halves[h], values, sizeof(values));
    }
    return to;
  }

  __device__ __forceinline__ float squares() const {
    float sum = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += x[h][i] * x[h][i];
    return sum;
  }

  // `sum`: of the squares of the whole head.
  __device__ __forceinline__ Head normed(const Stored& weight, float sum, float eps) const {
    const float scale = rsqrtf(sum / float(64 * kEach) + eps);
    const Head by(weight);
    Head made;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        made.x[h][i] = rounded_to<Half>(by.x[h][i] * rounded_to<Half>(x[h][i] * scale));
    return made;
  }

  __device__ __forceinline__ Head rotated(const Stored& cos, const Stored& sin) const {
    const Head c(cos), s(sin);
    Head made;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float other = h == 0 ? -x[1][i] : x[0][i];
        made.x[h][i] = rounded_to<Half>(x[h][i] * c.x[h][i]) + rounded_to<Half>(other * s.x[h][i]);
      }
    return made;
  }
};

}  // namespace fp4::sm90
