// Rows in registers: blocks of sixteen consecutive values. Applies the gate to gate and up values, and
// divides and stores the blocks among the lanes of a warp.
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

  // Every thread its 32 consecutive bytes: the first instruction fetches all sectors of the warp's lines,
  // the second hits them. (8-byte loads of what the layout wants in one place would spare the exchange below,
  // but ask for each line four times, a sector at a time.)
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

// What makes a block of a row: itself, or the two blocks that are gated into one.
template <typename T, bool kGated>
struct SourceBlock {
  RawBlock<T> part[kGated ? 2 : 1];

  // `row`: of x, `width` columns or twice as many; zeros past `width`.
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

// For `rows` rows of `blocks` blocks.
inline RowPlan row_plan(int rows, int blocks) {
  // As many threads as there are blocks while all of their warps fit the GPU's multiprocessors at once: what
  // counts is how long one row takes.
  const int warps = (blocks + 31) / 32;
  if (warps == 1 || (warps <= kMaxRowWarps && rows <= kFewWarps / warps)) return {32 * warps, 1};
  // Else no more than a warp, which needs no barrier, while four blocks a thread hold the row; 16 lanes where
  // 32 would have a last round half idle (768 columns).
  if (blocks <= 48) return {16, 3};
  if (blocks <= 128) return {32, warps};
  const int each = blocks <= 32 * kMaxRowWarps ? 2 : 4;
  return {(blocks + 32 * each - 1) / (32 * each) * 32, each};
}

// --- exchange between lanes, so that whole sectors are stored ---

// Of lanes `step` apart, the lower one's `high` for the higher one's `low`.
struct SwapLanes {
  int lane;
  __device__ __forceinline__ void operator()(uint32_t& low, uint32_t& high, int step) const {
    const bool upper = lane & step;
    const uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, step);
    low = upper ? got : low;
    high = upper ? high : got;
  }
};

// Layout sm90 puts word i (of four codes) of block t of 64 columns 16i + 4t bytes into them. Lane t of a quad
// comes with the four words of block t and goes with word t of the four blocks: 16 bytes, at 16 * its block.
template <typename Word, typename Swap>
__host__ __device__ __forceinline__ void transpose_quad(Word (&w)[4], const Swap& swap) {
  swap(w[0], w[1], 1);
  swap(w[2], w[3], 1);
  swap(w[0], w[2], 2);
  swap(w[1], w[3], 2);
}

// Two lanes with 32 bytes of neighbouring blocks each: then the first 16 of both lie in the even block, the
// others in the odd one.
template <typename Word, typename Swap>
__host__ __device__ __forceinline__ void exchange_halves(Word (&w)[8], const Swap& swap) {
#pragma unroll
  for (int i = 0; i < 4; ++i) swap(w[i], w[4 + i], 1);
}

// The column where the first or second half of those 16-bit values begins, for the lane that took `block`.
__host__ __device__ __forceinline__ int half_column(int block, int half) {
  return (block / 2 * 2 + half) * kRowValues + block % 2 * (kRowValues / 2);
}

}  // namespace fp4::device
