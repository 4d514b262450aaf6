// Weights of linear layers of few rows: how a warp copies a step of K of 16 rows to its slot of shared
// memory, and multiplies it as operand A. A slot has 128 bytes of each row.
#pragma once

#include <cstdint>

#include "../device/e4m3.cuh"
#include "../device/linears.h"
#include "../device/types.cuh"
#include "ptx_sm90.cuh"

namespace fp4::sm90 {

using namespace device;

// Copies of weights [n, k] with kBytes bytes a value. A slot is ordered such that the same 16 bytes of eight
// rows (all even or all odd) are in different banks.
template <int kBytes>
struct WeightCopies {
  static constexpr int kSteps = 128 / (kLinearStepK * kBytes);  // steps of x in a step of the weight

  const uint8_t* from;  // this lane's 16 bytes of the first four rows
  int last;             // last row, counted from the lane's first
  int k;                // K of these bytes
  static __device__ __forceinline__ WeightCopies at(const LinearsParams& p, const LinearWeight& w, int tile,
                                                    int step) {
    const int lane = threadIdx.x % 32, row = lane / 8, at = step * 128 + lane % 8 * 16;
    const int last = w.n - 1 - tile * 16;
    const auto* rows = static_cast<const uint8_t*>(w.values) + int64_t(tile) * 16 * p.k * kBytes;
    return {rows + int64_t(min(row, last)) * p.k * kBytes + at, last - row, at / kBytes};
  }
  __device__ __forceinline__ void advance() { from += 128, k += 128 / kBytes; }

  __device__ __forceinline__ void fetch(const LinearsParams& p, uint32_t slot) const {
    const int lane = threadIdx.x % 32;
    // A weight may end in the middle of the last step. There x is zero, and any numbers will do.
    const uint8_t* const from = kSteps > 1 && k >= p.k ? this->from - kLinearStepK * kBytes : this->from;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t to = slot + (lane / 8 + 4 * i) * 128 + (lane % 8 ^ (lane / 16 + 2 * i)) * 16;
      copy_16_ahead(to, from + int64_t(max(min(4 * i, last), 0)) * (p.k * kBytes));
    }
  }
};

// Loads the 16 bytes number 2i and 2i + 1 of each row of a slot. a[0], a[1]: number 2i of the even and of the
// odd rows; a[2], a[3]: number 2i + 1. A lane has four bytes of each.
__device__ __forceinline__ void load_slot(uint32_t slot, int i, uint32_t (&a)[4]) {
  const int lane = threadIdx.x % 32;  // the lane's row: the even rows are rows 0 to 7 of the operand
  const uint32_t row = slot + (lane % 8 * 2 + lane / 8 % 2) * 128;
  load_matrices(row + ((2 * i + lane / 16) ^ lane % 8) * 16, a);
}

// Weights in 16 bits.
template <Element kElement_>
struct PlainWeights {
  static constexpr Element kElement = kElement_;
  static constexpr bool kScaled = false;
  using Copies = WeightCopies<2>;

  // Returns fragments of x: word t of each goes to lane t of a quad. v: 32 values of a row.
  static __device__ __forceinline__ void arrange(const uint4 (&v)[4], uint4 (&fragments)[4]) {
    fragments[0] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
    fragments[1] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
    fragments[2] = make_uint4(v[0].z, v[1].z, v[2].z, v[3].z);
    fragments[3] = make_uint4(v[0].w, v[1].w, v[2].w, v[3].w);
  }

  // Returns the offset at which a lane begins to read rows that are copied as they are.
  static __device__ __forceinline__ int copied_at(int row_bytes) {
    return threadIdx.x % 8 * row_bytes + threadIdx.x % 32 / 8 * 16;
  }
  static __device__ __forceinline__ uint4 load_copied(const uint8_t* at) {
    uint32_t b[4];
    load_matrices(smem_address(at), b);
    return make_uint4(b[0], b[1], b[2], b[3]);
  }

  // Multiplies a slot. rows.load<kColumns>(c, h): what this lane multiplies of eight rows of x, and of 32 of
  // K. kChains: sums of each column, so that as many products do not wait for one another.
  template <int kColumns, int kChains, class Rows>
  static __device__ __forceinline__ void multiply(uint32_t slot, const Rows& rows,
                                                  float4 (&sums)[kColumns * kChains]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t a[2][4];
#pragma unroll
      for (int s = 0; s < 2; ++s) load_slot(slot, 2 * h + s, a[s]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const uint4 b = rows.template load<kColumns>(c, h);
        mma<kElement>(sums[c * kChains + 2 * h % kChains], a[0], b.x, b.y);
        mma<kElement>(sums[c * kChains + (2 * h + 1) % kChains], a[1], b.z, b.w);
      }
    }
  }
};

// Weights in e4m3, which are converted exactly to the type of x. A lane has four consecutive values of each
// 16 of K; the product of 16 K takes them in two pairs, and those of x in the same order.
template <Element kElement_>
struct Fp8Weights {
  static constexpr Element kElement = kElement_;
  static constexpr bool kScaled = true;  // each row has a scale
  using Copies = WeightCopies<1>;

  static __device__ __forceinline__ void arrange(const uint4 (&v)[4], uint4 (&fragments)[4]) {
    fragments[0] = make_uint4(v[0].x, v[0].y, v[2].x, v[2].y);
    fragments[1] = make_uint4(v[0].z, v[0].w, v[2].z, v[2].w);
    fragments[2] = make_uint4(v[1].x, v[1].y, v[3].x, v[3].y);
    fragments[3] = make_uint4(v[1].z, v[1].w, v[3].z, v[3].w);
  }

  static __device__ __forceinline__ uint32_t converted(uint32_t two) {
    const half2 v = e4m3_pair(two);
    if constexpr (kElement == Element::kFloat16) return reinterpret_cast<const uint32_t&>(v);
    const __nv_bfloat162 w = __float22bfloat162_rn(__half22float2(v));
    return reinterpret_cast<const uint32_t&>(w);
  }

  static __device__ __forceinline__ int copied_at(int row_bytes) {
    return threadIdx.x % 32 / 4 * row_bytes + threadIdx.x % 4 * 8;
  }
  static __device__ __forceinline__ uint4 load_copied(const uint8_t* at) {
    const uint2 a = *reinterpret_cast<const uint2*>(at), b = *reinterpret_cast<const uint2*>(at + 32);
    return make_uint4(a.x, a.y, b.x, b.y);
  }

  template <int kColumns, int kChains, class Rows>
  static __device__ __forceinline__ void multiply(uint32_t slot, const Rows& rows,
                                                  float4 (&sums)[kColumns * kChains]) {
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      uint32_t w[4], a[2][4];
      load_slot(slot, h, w);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint32_t even = w[2 * s], odd = w[2 * s + 1];
        a[s][0] = converted(even), a[s][1] = converted(odd);
        a[s][2] = converted(even >> 16), a[s][3] = converted(odd >> 16);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const uint4 b = rows.template load<kColumns>(c, h);
        mma<kElement>(sums[c * kChains + 2 * h % kChains], a[0], b.x, b.y);
        mma<kElement>(sums[c * kChains + (2 * h + 1) % kChains], a[1], b.z, b.w);
      }
    }
  }
};

}  // namespace fp4::sm90
