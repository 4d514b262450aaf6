// Converts a lane's share of a weight to and from layouts sm90 and mma_bf16 (common/sm90_layout.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "../common/sm90_layout.h"

namespace fp4::device {

constexpr int kStep = 128, kBlocks = 4;

// The part of the weights that a thread takes: one lane of 16 rows by 128 k of the layout. i counts over
// (tile of all matrices, step, lane).
template <class Bits>
struct LanePlace {
  Sm90Lane lane;
  int64_t row;  // the even one, over all matrices
  int k, t, scale_block;

  __host__ __device__ LanePlace(int64_t i, int kp, int scale_block) : scale_block(scale_block) {
    const int64_t tile_step = i >> 5, tile = tile_step / (kp / kStep);
    const int step = int(tile_step - tile * (kp / kStep)), g = int(i) >> 2 & 7;
    t = int(i) & 3;
    lane = sm90_lane<Bits>(tile, step, kp / kStep, g, t, scale_block);
    row = tile * 16 + 2 * g;
    k = step * kStep;
  }

  __host__ __device__ int64_t row_of(int number) const { return row + number % 2; }
  __host__ __device__ int k_of(int number) const { return k + 16 * Bits::block_of(t, number / 2); }
  __host__ __device__ int64_t scale_of(int number) const {
    return lane.scales + Bits::scale_at(Bits::block_of(t, number / 2), number % 2, scale_block);
  }
  // Returns whether this is the first of the blocks that share a scale.
  __host__ __device__ bool first(int number) const { return k_of(number) % scale_block == 0; }
};

// Packs lane i from plain codes [rows, k / 2] and e4m3 scales [rows, ceil(k / scale_block)]. Rows count over
// all matrices.
template <class Bits>
__host__ __device__ void pack_lane(int64_t i, const uint8_t* packed, const uint8_t* scales, int k, int kp,
                                   int scale_block, uint8_t* to_packed, uint8_t* to_scales) {
  const LanePlace<Bits> at(i, kp, scale_block);
  const int row_scales = (k + scale_block - 1) / scale_block;
  uint64_t words[kBlocks] = {};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    uint64_t codes = 0;
    uint8_t scale = 0;
    if (at.k_of(b) < k) {
      codes = *reinterpret_cast<const uint64_t*>(packed + at.row_of(b) * (k / 2) + at.k_of(b) / 2);
      scale = scales[at.row_of(b) * row_scales + at.k_of(b) / scale_block];
    }
    const uint8_t held = Bits::encode_scale(scale);
    if (held == 0) codes = 0;
    if (at.first(b)) to_scales[at.scale_of(b)] = held;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int bit = 0; bit < 4; ++bit) {
        words[Bits::word(b, j)] |= (codes >> (4 * j + bit) & 1) << Bits::bit(b, j, bit);
      }
    }
  }
#pragma unroll
  for (int w = 0; w < kBlocks; ++w) *reinterpret_cast<uint64_t*>(to_packed + at.lane.word(w)) = words[w];
}

template <typename T>
__host__ __device__ T convert(float v);
template <>
inline __host__ __device__ float convert(float v) {
  return v;
}
template <>
inline __host__ __device__ __nv_bfloat16 convert(float v) {
  return __float2bfloat16_rn(v);
}
template <>
inline __host__ __device__ __half convert(float v) {
  return __float2half_rn(v);
}

// Dequantises lane i to values [rows, kp] = (code * scale) * factor, rounded once. n: rows of a matrix.
template <class Bits, typename T>
__host__ __device__ void dequantize_lane(int64_t i, const uint8_t* packed, const uint8_t* scales,
                                         const float* global_scale, int64_t n, int kp, int scale_block,
                                         T* out) {
  const LanePlace<Bits> at(i, kp, scale_block);
  uint64_t words[kBlocks];
#pragma unroll
  for (int w = 0; w < kBlocks; ++w) words[w] = *reinterpret_cast<const uint64_t*>(packed + at.lane.word(w));
  const float factor = global_scale[at.row / n];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    __nv_fp8_e4m3 scale;
    scale.__x = Bits::decode_scale(scales[at.scale_of(b)]);
    alignas(16) T v[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const uint64_t word = words[Bits::word(b, j)];
      uint32_t m = 0;
#pragma unroll
      for (int bit = 0; bit < 3; ++bit) m |= (word >> Bits::bit(b, j, bit) & 1) << bit;
      // Arithmetic instead of a table in memory: e2m1 is 0.5 * m below 2, else (2 + m % 2) * 2^(m / 2 - 2).
      const float magnitude = m < 4 ? 0.5f * m : (2 + (m & 1)) * (m < 6 ? 1.f : 2.f);
      const float value = magnitude * float(scale);
      const bool negative = word >> Bits::bit(b, j, 3) & 1;
      if constexpr (sizeof(T) == 8) {
        v[j] = (negative ? -double(value) : double(value)) * factor;
      } else {
        v[j] = convert<T>((negative ? -value : value) * factor);
      }
    }
    auto* to = reinterpret_cast<uint4*>(out + at.row_of(b) * kp + at.k_of(b));
#pragma unroll
    for (int j = 0; j < int(sizeof(v) / 16); ++j) to[j] = reinterpret_cast<const uint4*>(v)[j];
  }
}

}  // namespace fp4::device
