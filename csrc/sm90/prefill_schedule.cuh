// Which tiles a block computes: a static walk over (group, token tile, weight tile), done by one warp.
//
// A group's rows are cut into few token tiles and those made equally wide, so that 300 rows are 160 + 140 and
// not 256 + 44 (WidthList::cut). Within a group the tiles go in bands of token tiles, token tiles fastest:
// blocks that run together share a band's activations and a few rows of weights in L2.
#pragma once

#include "ptx.cuh"

namespace fp4::sm90 {

enum class RowMode : int { kDense = 0, kContiguous = 1, kMasked = 2 };

struct Rows {
  RowMode mode;
  const int32_t* group_rows;  // contiguous: cumulative ends [groups]; masked: counts [groups]
  int groups;
  int m;  // all rows, or rows of every group where masked
};

struct Tile {
  int group;
  int row;     // the first row in X and in the output
  int rows;    // valid rows
  int width;   // rows computed
  int column;  // index of the weight tile (of a cluster's pair of them)
};

constexpr int kWarp = 32;
constexpr int kBandTiles = 8;

__device__ __forceinline__ int clamp_rows(int rows, int m) { return max(0, min(rows, m)); }

__host__ __device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The token tiles of a group: all but the last are full.
struct TokenTiles {
  int count, width;
};

// The widths a token tile can have, in falling order.
template <int Most, int... Others>
struct WidthList {
  static constexpr int kMost = Most;

  // The least of them that holds `rows`.
  static __host__ __device__ __forceinline__ int round_up(int rows) {
    int width = Most;
    ((width = rows <= Others ? Others : width), ...);
    return width;
  }

  // The fewest tiles, or one more where that computes so many fewer tokens as a tile costs by itself: 4096
  // rows are 16 x 256 and not 15 x 288.
  static __host__ __device__ __forceinline__ TokenTiles cut(int rows) {
    constexpr int kTileCost = 32;
    TokenTiles few = {ceil_div(rows, Most), 0};
    few.width = round_up(ceil_div(rows, few.count > 0 ? few.count : 1));
    TokenTiles more = {few.count + 1, round_up(ceil_div(rows, few.count + 1))};
    return more.count * (more.width + kTileCost) < few.count * (few.width + kTileCost) ? more : few;
  }
};

template <class Widths>
class TileWalk {
 public:
  __device__ TileWalk(const Rows& rows, int columns, int first, int stride)
      : rows_(rows), columns_(columns), index_(first), stride_(stride) {}

  // Called by a whole warp; false after the last tile.
  __device__ bool next(Tile& tile) {
    while (index_ >= chunk_end_) {
      chunk_ += kWarp;
      if (chunk_ >= rows_.groups) return false;
      load_chunk();
    }
    int local = index_ - chunk_begin_;
    int lane = 31 - __clz(__ballot_sync(~0u, first_ <= local));
    local -= __shfl_sync(~0u, first_, lane);
    tile.group = chunk_ + lane;
    int count = __shfl_sync(~0u, count_, lane);
    TokenTiles tiles = Widths::cut(count);
    int band_size = kBandTiles * columns_;
    int band = local / band_size;
    local -= band * band_size;
    int band_tiles = min(kBandTiles, tiles.count - band * kBandTiles);
    tile.column = local / band_tiles;
    int token_tile = band * kBandTiles + local - tile.column * band_tiles;
    tile.row = __shfl_sync(~0u, row_, lane) + token_tile * tiles.width;
    tile.rows = min(tiles.width, count - token_tile * tiles.width);
    tile.width = Widths::round_up(tile.rows);
    index_ += stride_;
    return true;
  }

 private:
  // Lane i takes group chunk_ + i. Ends that decrease or pass m are clamped, never trusted.
  __device__ void load_chunk() {
    int lane = threadIdx.x % kWarp, group = chunk_ + lane;
    bool valid = group < rows_.groups;
    if (rows_.mode == RowMode::kContiguous) {
      int end = valid ? clamp_rows(rows_.group_rows[group], rows_.m) : 0;
      for (int step = 1; step < kWarp; step *= 2) end = max(end, __shfl_up_sync(~0u, end, step));
      end = max(end, last_end_);
      int before = __shfl_up_sync(~0u, end, 1);
      row_ = lane == 0 ? last_end_ : before;
      count_ = end - row_;
      last_end_ = __shfl_sync(~0u, end, kWarp - 1);
    } else {
      row_ = group * rows_.m;
      count_ = !valid                           ? 0
               : rows_.mode == RowMode::kMasked ? clamp_rows(rows_.group_rows[group], rows_.m)
                                                : rows_.m;
    }
    int tiles = Widths::cut(count_).count * columns_;
    int sum = tiles;
    for (int step = 1; step < kWarp; step *= 2) {
      int below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    first_ = sum - tiles;
    chunk_begin_ = chunk_end_;
    chunk_end_ += __shfl_sync(~0u, sum, kWarp - 1);
  }

  Rows rows_;
  int columns_, index_, stride_;
  int chunk_ = -kWarp, chunk_begin_ = 0, chunk_end_ = 0;  // groups and tiles of the chunk
  int last_end_ = 0;
  int row_ = 0, count_ = 0, first_ = 0;  // this lane's group: first row, rows, first tile in the chunk
};

// Zeroes the output rows that belong to no group. `row_vectors` is a row's 16-byte vectors; thread of
// `threads`.
__device__ __forceinline__ void zero_unused_rows(const Rows& rows, uint4* out, int row_vectors, int thread,
                                                 int threads) {
  auto zero = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * row_vectors + thread; i < end * row_vectors; i += threads)
      out[i] = make_uint4(0, 0, 0, 0);
  };
  if (rows.mode == RowMode::kContiguous) {
    int last = 0;
    for (int g = threadIdx.x % kWarp; g < rows.groups; g += kWarp)
      last = max(last, clamp_rows(rows.group_rows[g], rows.m));
    zero(__reduce_max_sync(~0u, last), rows.m);
  } else if (rows.mode == RowMode::kMasked) {
    for (int64_t g = 0; g < rows.groups; ++g)
      zero(g * rows.m + clamp_rows(rows.group_rows[g], rows.m), (g + 1) * rows.m);
  }
}

}  // namespace fp4::sm90
