// Finds the part of the operands that a tile multiplies, and the scales of groups along K.
//
// With groups along K, a tile's steps begin where its group begins, or 16 K before: boxes of the copy engine
// begin at multiples of 16 bytes, which are 32 K. Other boxes are an illegal instruction. Codes of other
// groups that a step has must count as nothing, so the bytes of their scales become 0, in both operands. This
// is 0 in ue4m3. In ue8m0 it is 2^-127: such products are below 2^-243, and float32 rounds them to 0.
#pragma once

#include "products_config.cuh"
#include "ptx_sm100.cuh"

namespace fp4::sm100 {

constexpr int kBoxK = 32;  // a box begins at a multiple of it

struct ProductTile : Tile {
  int x_row;           // the first row in X
  int weights;         // the group whose weights these are
  int k_begin, k_end;  // the range of K
  int k_copied;        // where its steps begin
};

__device__ __forceinline__ int end_along_k(const Problem& problem, int group) {
  return max(0, min(__ldg(problem.k_ends + group), problem.k));
}

// Finds the rest of a tile that the walk found.
template <class Config>
__device__ __forceinline__ void place(const Problem& problem, ProductTile& tile) {
  tile.x_row = tile.row, tile.weights = tile.group, tile.k_begin = tile.k_copied = 0;
  tile.k_end = problem.k;
  if constexpr (Config::AlongK) {
    // All groups have the same rows and the same weights.
    tile.x_row -= tile.group * problem.m, tile.weights = 0;
    const int begin = tile.group == 0 ? 0 : end_along_k(problem, tile.group - 1);
    tile.k_begin = begin / Config::ScaleBlock * Config::ScaleBlock;
    tile.k_end = ceil_div(end_along_k(problem, tile.group), Config::ScaleBlock) * Config::ScaleBlock;
    tile.k_copied = tile.k_begin / kBoxK * kBoxK;
    tile.steps = tile.k_end > tile.k_begin ? ceil_div(tile.k_end - tile.k_copied, Config::Step) : 0;
  }
}

// Tensor cores read ue4m3, without a sign. A scale that has one becomes NaN. ue8m0 has no sign.
template <class Config>
__device__ __forceinline__ uint32_t without_signs(uint32_t word) {
  if constexpr (!Config::Nvfp4) return word;
  const uint32_t signs = word & 0x80808080u;
  return (word & 0x7F7F7F7Fu) | (signs - (signs >> 7));
}

// Returns a word whose lowest `bytes` bytes are ones.
__device__ __forceinline__ uint32_t lowest(int bytes) {
  return bytes >= 4 ? ~0u : bytes <= 0 ? 0u : (1u << 8 * bytes) - 1;
}

// The scales of a step, of four rows for each lane: rows lane, lane + 32, lane + 64 and lane + 96 of a block.
// They may begin inside of a word, so they lie in one word more than they fill.
template <class Config>
struct ScalesAlongK {
  static constexpr int kWords = Config::Step / Config::ScaleBlock / 4;
  uint32_t row[4][kWords + 1];

  // `first`: the first scale of the step. Rows and words that do not exist are zeros.
  __device__ __forceinline__ void load(const uint8_t* scales, int row_bytes, int64_t first_row, int rows,
                                       int first) {
    const int begin = first / 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int number = i * kWarp + threadIdx.x % kWarp;
      const auto* const words =
          reinterpret_cast<const unsigned*>(scales + (first_row + number) * row_bytes + begin);
#pragma unroll
      for (int word = 0; word <= kWords; ++word) {
        row[i][word] = 0;
        if (number < rows && begin + 4 * word < row_bytes) row[i][word] = __ldg(words + word);
      }
    }
  }

  // Writes the scales of each row to blocks of 512 bytes, one for each word. Only those from `begin` to `end`
  // count, and the others become zero bytes.
  __device__ __forceinline__ void store(uint32_t blocks, int first, int begin, int end) const {
    const uint32_t to = blocks + threadIdx.x % kWarp * 16, shift = first % 4 * 8;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint32_t mask = lowest(end - 4 * word) & ~lowest(begin - 4 * word);
      uint32_t found[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t scales = __funnelshift_r(row[i][word], row[i][word + 1], shift);
        found[i] = without_signs<Config>(scales & mask);
      }
      store_shared_16(to + word * kBlockBytes, make_uint4(found[0], found[1], found[2], found[3]));
    }
  }
};

}  // namespace fp4::sm100
