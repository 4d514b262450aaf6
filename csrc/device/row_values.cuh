// Holds rows in registers, in blocks of sixteen consecutive values. Applies the gate to gate and up values,
// assigns blocks to lanes, and exchanges values between lanes before they are stored.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "gate.cuh"

namespace fp4::device {

constexpr int kRowValues = 16;  // a block: what a thread takes at a time

// --- blocks ---

// A block as it lies in memory.
template <typename T>
struct RawBlock {
  static constexpr int kWords = kRowValues * sizeof(T) / 4;
  uint32_t w[kWords];

  // Every thread loads consecutive bytes, 32 of 16-bit values. The first instruction fetches all sectors of
  // the warp's lines, and the second finds them in the cache. (8-byte loads in the layout's order would need
  // no exchange between lanes, but would ask for each line four times, a sector at a time.)
  __device__ __forceinline__ void load(const T* from, bool inside) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 u = inside ? reinterpret_cast<const uint4*>(from)[i / 4] : make_uint4(0, 0, 0, 0);
      w[i] = u.x, w[i + 1] = u.y, w[i + 2] = u.z, w[i + 3] = u.w;
    }
  }

  __device__ __forceinline__ float value(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(w[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 ? w[i / 2] & 0xFFFF0000u : w[i / 2] << 16);
    } else {
      const auto pair = reinterpret_cast<const half2&>(w[i / 2]);
      return __half2float(i % 2 ? __high2half(pair) : __low2half(pair));
    }
  }
};

// The source of a block of a row: the block itself, or the two blocks that the gate combines.
template <typename T, bool kGated>
struct SourceBlock {
  RawBlock<T> part[kGated ? 2 : 1];

  // `row`: a row of x, of `width` columns, or of twice as many if gated. Blocks past `width` are zeros.
  __device__ __forceinline__ void load(const T* row, bool interleaved, int width, int k) {
    const bool inside = k < width;
    part[0].load(row + (kGated && interleaved ? 2 * k : k), inside);
    if constexpr (kGated) part[1].load(row + (interleaved ? 2 * k + kRowValues : width + k), inside);
  }

  __device__ __forceinline__ void values(const Gate& gate, bool interleaved, int width, int k,
                                         float (&v)[kRowValues]) const {
    if constexpr (!kGated) {
#pragma unroll
      for (int j = 0; j < kRowValues; ++j) v[j] = part[0].value(j);
    } else if (k >= width) {  // zeros would take the slow way through gate_values
#pragma unroll
      for (float& f : v) f = 0.f;
    } else {
      constexpr int kHalf = kRowValues / 2;  // at a time, to need fewer registers
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float g[kHalf], u[kHalf], out[kHalf];
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
          g[j] = interleaved ? part[h].value(2 * j) : part[0].value(h * kHalf + j);
          u[j] = interleaved ? part[h].value(2 * j + 1) : part[1].value(h * kHalf + j);
        }
        gate_values(gate, g, u, out);
#pragma unroll
        for (int j = 0; j < kHalf; ++j) v[h * kHalf + j] = out[j];
      }
    }
  }
};

template <typename T>
__device__ __forceinline__ void pack_values(const float (&v)[kRowValues], uint32_t (&w)[kRowValues / 2]) {
#pragma unroll
  for (int j = 0; j < kRowValues; j += 2) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      reinterpret_cast<__nv_bfloat162&>(w[j / 2]) = __floats2bfloat162_rn(v[j], v[j + 1]);
    } else {
      reinterpret_cast<half2&>(w[j / 2]) = __floats2half2_rn(v[j], v[j + 1]);
    }
  }
}

// --- which lanes take which blocks ---

// `lanes` threads share a row: 16 or 32 of a warp, or, where there are more, a whole thread block. Lane l
// takes blocks l, l + lanes, ..: `blocks` of them.
struct RowPlan {
  int lanes, blocks;
};

constexpr int kRowThreads = 128;  // in a thread block, where rows share it
constexpr int kMaxRowWarps = 16;
constexpr int kFewWarps = 132 * 32;

// Chooses the plan for `rows` rows of `blocks` blocks.
inline RowPlan row_plan(int rows, int blocks) {
  // A row gets one thread for each block if the warps of all rows fit the GPU's multiprocessors at once: then
  // the time of a single row counts.
  const int warps = (blocks + 31) / 32;
  if (warps == 1 || (warps <= kMaxRowWarps && rows <= kFewWarps / warps)) return {32 * warps, 1};
  // Else a row gets at most a warp, which needs no barrier, if four blocks a thread hold the row. Rows of up
  // to 768 columns get 16 lanes, because 32 would be half idle in the last round.
  if (blocks <= 48) return {16, 3};
  if (blocks <= 128) return {32, warps};
  const int each = blocks <= 32 * kMaxRowWarps ? 2 : 4;
  return {(blocks + 32 * each - 1) / (32 * each) * 32, each};
}

// --- exchange between lanes, so that whole sectors are stored ---

// For two lanes that are `step` apart: swaps the lower lane's `high` and the higher lane's `low`.
struct SwapLanes {
  int lane;
  __device__ __forceinline__ void operator()(uint32_t& low, uint32_t& high, int step) const {
    const bool upper = lane & step;
    const uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, step);
    low = upper ? got : low;
    high = upper ? high : got;
  }
};

// Layout sm90 puts word i (four values) of block t at byte 16i + 4t of its 64 columns. Lane t of a quad comes
// with the four words of block t. It leaves with word t of all four blocks: 16 consecutive bytes, from byte
// 16t on.
template <typename Word, typename Swap>
__host__ __device__ __forceinline__ void transpose_quad(Word (&w)[4], const Swap& swap) {
  swap(w[0], w[1], 1);
  swap(w[2], w[3], 1);
  swap(w[0], w[2], 2);
  swap(w[1], w[3], 2);
}

// Two lanes come with neighbouring blocks of 32 bytes each. They leave with 16 bytes of the even block,
// followed by 16 bytes of the odd one.
template <typename Word, typename Swap>
__host__ __device__ __forceinline__ void exchange_halves(Word (&w)[8], const Swap& swap) {
#pragma unroll
  for (int i = 0; i < 4; ++i) swap(w[i], w[4 + i], 1);
}

// Returns the column where the first (`half` 0) or second half of these 16-bit values begins, for the lane
// that took `block`.
__host__ __device__ __forceinline__ int half_column(int block, int half) {
  return (block / 2 * 2 + half) * kRowValues + block % 2 * (kRowValues / 2);
}

}  // namespace fp4::device
