// Loads rows of activations as B operands of mma.sync, whose columns are the rows. A warp brings a slice from
// global memory into fragments in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "e2m1_mma_bf16.cuh"
#include "e2m1_sm90.cuh"
#include "family.cuh"
#include "product.cuh"

namespace fp4::device {

// One lane's share of an activation row in one 64-step: the 16 logical k of its scale block. Words: how the
// weights that these rows meet are decoded (HalfWords or MmaWords).
template <DType kType, class Words>
struct RowBlock {
  static constexpr bool kAsTheyAre = std::is_same_v<typename Words::Layout, MmaBf16>;
  static_assert(!kAsTheyAre ||
                kType == (Words::kElement == Element::kBFloat16 ? DType::kBFloat16 : DType::kFloat16));
  uint32_t w[kType == DType::kFloat8 ? 4 : 8];

  __device__ void load(const ProductParams& p, int row, int k0, int t, bool live) {
#pragma unroll
    for (uint32_t& v : w) v = 0;
    if constexpr (kType == DType::kFloat8) {
      if (live && k0 < p.kp) {  // the layout's order: the four words of this lane lie 16 bytes apart
        const auto* x =
            reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(p.x) + int64_t(row) * p.kp + k0);
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = x[4 * i + t];
      }
    } else if (live && k0 + 16 * t < p.k) {
      const auto* x = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.x) + int64_t(row) * p.k +
                                                     k0 + 16 * t);
      const uint4 a = x[0], b = x[1];
      w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
    }
  }

  __device__ float largest() const {
    if constexpr (kType == DType::kBFloat16) {
      __nv_bfloat162 m = __habs2(reinterpret_cast<const __nv_bfloat162&>(w[0]));
#pragma unroll
      for (int i = 1; i < 8; ++i) m = __hmax2_nan(m, __habs2(reinterpret_cast<const __nv_bfloat162&>(w[i])));
      return fmaxf(__low2float(m), __high2float(m));
    } else {
      half2 m = __habs2(reinterpret_cast<const half2&>(w[0]));
#pragma unroll
      for (int i = 1; i < 8; ++i) m = __hmax2_nan(m, __habs2(reinterpret_cast<const half2&>(w[i])));
      return fmaxf(__low2float(m), __high2float(m));
    }
  }

  // Returns four consecutive values, times `scale`, as the pairs (0, 2) and (1, 3), like the weights'
  // fragments.
  __host__ __device__ uint2 pairs(int i, float scale) const {
    float2 lo, hi;
    if constexpr (kType == DType::kFloat8) {
      lo = __half22float2(e4m3_pair(w[i]));
      hi = __half22float2(e4m3_pair(w[i] >> 16));
    } else if constexpr (kType == DType::kBFloat16) {
      lo = make_float2(__uint_as_float(w[2 * i] << 16), __uint_as_float(w[2 * i] & 0xFFFF0000));
      hi = make_float2(__uint_as_float(w[2 * i + 1] << 16), __uint_as_float(w[2 * i + 1] & 0xFFFF0000));
    } else {
      lo = __half22float2(reinterpret_cast<const half2&>(w[2 * i]));
      hi = __half22float2(reinterpret_cast<const half2&>(w[2 * i + 1]));
    }
    const half2 even = __floats2half2_rn(lo.x * scale, hi.x * scale),
                odd = __floats2half2_rn(lo.y * scale, hi.y * scale);
    return make_uint2(reinterpret_cast<const uint32_t&>(even), reinterpret_cast<const uint32_t&>(odd));
  }

  // Stores all 16 values in the B fragments of their slice, as block t of 64-step `step`, for token g.
  // `lanes`: four for each token that the fragments have room for.
  __host__ __device__ void store(uint4* fragments, int step, int g, int t, float scale,
                                 int lanes = 4 * kChunk) const {
    if constexpr (kAsTheyAre) {
      // MmaBf16: this is block t % 2 of lane 2 (step % 2) + t / 2. Vector i of that lane has values 2i, 2i +
      // 1, 2i + 8 and 2i + 9 of both its blocks.
      auto* to =
          reinterpret_cast<uint2*>(fragments + step / 2 * 4 * lanes + 4 * g + step % 2 * 2 + t / 2) + t % 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) to[2 * lanes * i] = make_uint2(w[i], w[i + 4]);
    } else {
      uint4* to = fragments + step * 2 * lanes + 4 * g + t;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint2 a = pairs(2 * h, scale), b = pairs(2 * h + 1, scale);
        to[lanes * h] = make_uint4(a.x, a.y, b.x, b.y);
      }
    }
  }
};

// Two powers of two: `up` scales values so that the exponent of `largest` becomes 14, which fits fp16; `down`
// undoes this.
struct HalfRange {
  float up, down;

  __device__ __forceinline__ explicit HalfRange(float largest) {
    const int exponent = max(int(__float_as_uint(largest) >> 23), 15);
    up = __uint_as_float(uint32_t(268 - exponent) << 23);
    down = __uint_as_float(uint32_t(exponent - 14) << 23);
  }
};

// A slice of one row, loaded by half a warp: each lane takes one block of one 64-step. (ChunkActivations
// loads a slice of eight rows with a warp.) Columns of the fragments without a row are not written, because
// nothing reads their sums.
template <DType kType, class Words>
struct FewActivations {
  RowBlock<kType, Words> raw;
  float given, up;

  // Loads the slice from k0 on. `live`: whether this row exists.
  __device__ __forceinline__ void load(const ProductParams& p, int row, bool live, int k0) {
    const int lane = threadIdx.x % 32;
    raw.load(p, row, k0 + 64 * (lane / 4 % kSliceSteps), lane % 4, live);
    given = p.x_scale && live ? p.x_scale[row] : 1.f;  // each row has a factor
  }

  // Returns the factor of the slice's sums: it undoes `up`, and includes the row's own factor.
  __device__ __forceinline__ float find_factor() {
    up = 1.f;
    if constexpr (kType == DType::kFloat8 || RowBlock<kType, Words>::kAsTheyAre) {
      return Words::kFactor * given;
    } else {
      float amax = raw.largest();
#pragma unroll
      for (int d = 1; d < 16; d *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, d));
      const HalfRange range(amax);
      up = range.up;
      return range.down * given;
    }
  }

  // Writes the slice to column g of the fragments.
  __device__ __forceinline__ void store(uint4* fragments, int g, int lanes = 4 * kChunk) const {
    const int lane = threadIdx.x % 32;
    raw.store(fragments, lane / 4 % kSliceSteps, g, lane % 4, up, lanes);
  }
};

// --- launches: the template arguments of a kernel ---

template <DType kType>
using TypeTag = std::integral_constant<DType, kType>;

// Calls launch(TypeTag, Words()) for the types that `p` names, and returns its result.
template <int kScaleBlock, class Launch>
int launch_of_block(const ProductParams& p, const Launch& launch) {
  if (p.bf16_words) {
    if (p.x_type == DType::kBFloat16) return launch(TypeTag<DType::kBFloat16>(), Bf16Words<kScaleBlock>());
    if constexpr (!kHopper) {
      if (p.x_type == DType::kFloat16) return launch(TypeTag<DType::kFloat16>(), Fp16Words<kScaleBlock>());
    }
    return cudaErrorInvalidValue;
  }
  if constexpr (kHopper) {
    using Words = HalfWords<kScaleBlock>;
    switch (p.x_type) {
      case DType::kBFloat16:
        return launch(TypeTag<DType::kBFloat16>(), Words());
      case DType::kFloat16:
        return launch(TypeTag<DType::kFloat16>(), Words());
      case DType::kFloat8:
        return launch(TypeTag<DType::kFloat8>(), Words());
      default:
        break;
    }
  }
  return cudaErrorInvalidValue;
}

template <class Launch>
int launch_of_types(const ProductParams& p, const Launch& launch) {
  switch (p.scale_block) {
    case 16:
      return launch_of_block<16>(p, launch);
    case 32:
      return launch_of_block<32>(p, launch);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fp4::device
