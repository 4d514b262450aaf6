// Assigns tiles to thread blocks: one warp walks over (group, token tile, weight tile).
//
// Blocks take whole tiles in turn. The tiles of the last full wave and of the rest are split along K, and
// all blocks get equal parts (stream-K; see Shares). Alternatively each block takes its first tile in turn
// and claims the others one by one, because SMs that wait for memory are not equally fast. A group's rows
// are cut into few token tiles of equal width: 300 rows are 160 + 140 and not 256 + 44 (WidthList::cut).
// Within a group the tiles go in bands of token tiles, token tiles fastest, so blocks that run together
// share a band's activations and a few rows of weights in L2.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../common/sm90_layout.h"
#include "interface.h"

namespace fp4::device {

struct Rows {
  RowMode mode;
  const int32_t* group_rows;  // contiguous: cumulative ends [groups]; masked: counts [groups]
  int groups;
  int m;               // all rows; masked: rows of every group
  int tile_width = 0;  // of the token tiles; 0: WidthList::cut chooses it
};

// The problem that is cut into tiles.
struct Tiling {
  Rows rows;
  int columns;      // weight tiles of a group; a cluster's pair counts as one
  int steps;        // of kStepK along K
  int share_below;  // as in Shares; 0: no tile is shared, so tiles need not be counted first
};

struct Tile {
  int group;
  int row;           // the first row in X and in the output
  int rows;          // valid rows
  int width;         // rows computed
  int column;        // index of the weight tile, or of a cluster's pair of them
  int first, steps;  // the part of K: its first step, and how many
};

// A tile, as the warp that walks describes it to the other warps.
struct TileInfo {
  int width;  // 0: no more tiles
  int group, row, rows;
  int column;                       // the first weight row, in the group
  int first, steps, helpers, part;  // as in Tile and TileWalk
};

constexpr int kWarp = 32;
constexpr int kBandTiles = 8;

__device__ __forceinline__ int clamp_rows(int rows, int m) { return max(0, min(rows, m)); }

__host__ __device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Returns a / b. Neither may be negative, and the quotient must be below 2^21. An estimate and a correction
// take a third of the instructions of a division. The number of instructions matters: the start of a walk
// runs only once, so its time is the time to fetch its instructions.
__host__ __device__ __forceinline__ int quotient(int a, int b) {
#ifdef __CUDA_ARCH__
  const int estimate = __float2int_rz(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int rest = a - estimate * b;
  return estimate + (rest >= b) - (rest < 0);
#else
  return a / b;
#endif
}

// How `blocks` (or clusters of them) share `tiles`, each of `steps` steps of K. The blocks take the first
// `whole` tiles in turn. The other tiles, laid end to end, are cut into `parts` equal parts; block b takes
// part parts - 1 - b. The block with a tile's first steps adds the sums of the later steps. It waits for
// these only at its very end, while the other blocks compute them at the start of their parts. They are
// blocks with lower indices, which the hardware starts no later. So a block never waits for one that has no
// multiprocessor yet.
struct Shares {
  // A part of a tile has at least kLeast steps. A tile has at most kMostParts parts, which have at least
  // kSteps steps on average.
  static constexpr int kLeast = 3, kMostParts = 4, kSteps = 6;

  int whole, left = 0, parts = 0, steps, blocks;

  // Shares tiles only if fewer than share_below are left after the last full wave. Unshared, these would take
  // as long as a full wave.
  __host__ __device__ __forceinline__ Shares(int tiles, int steps, int share_below, int blocks)
      : whole(tiles), steps(steps), blocks(blocks) {
    const int rest = tiles - quotient(tiles, blocks) * blocks;
    if (rest == 0 || rest >= share_below) return;
    left = tiles < blocks ? tiles : blocks + rest;
    whole = tiles - left;
    const int most = steps < 2 * kSteps ? 1 : steps < kMostParts * kSteps ? steps / kSteps : kMostParts;
    parts = most * left < blocks ? most * left : blocks;
  }

  // Returns the step at which part i begins, counted over all the tiles left. It is a tile's first step, or
  // at least kLeast steps away from one.
  __host__ __device__ __forceinline__ int begin(int i) const {
    const int step = quotient(left * steps * i, parts), in_tile = step - quotient(step, steps) * steps;
    return in_tile < kLeast ? step - in_tile : steps - in_tile < kLeast ? step - in_tile + steps : step;
  }
};

// The token tiles of a group. All but the last are full.
struct TokenTiles {
  int count, width;
};

// The widths a token tile can have, in falling order.
template <int Most, int... Others>
struct WidthList {
  static constexpr int kMost = Most, kCount = 1 + sizeof...(Others);

  // Returns the smallest width that holds `rows`.
  static __host__ __device__ __forceinline__ int round_up(int rows) {
    int width = Most;
    ((width = rows <= Others ? Others : width), ...);
    return width;
  }

  // Returns the fewest tiles, or one more if this costs less: a tile costs its width and kTileCost tokens
  // more. 4096 rows are 16 x 256 and not 15 x 288.
  static __host__ __device__ __forceinline__ TokenTiles cut(int rows) {
    constexpr int kTileCost = 32;
    TokenTiles few = {ceil_div(rows, Most), 0};
    few.width = round_up(ceil_div(rows, few.count > 0 ? few.count : 1));
    TokenTiles more = {few.count + 1, round_up(ceil_div(rows, few.count + 1))};
    return more.count * (more.width + kTileCost) < few.count * (few.width + kTileCost) ? more : few;
  }
};

// A block's tiles, or a cluster's.
template <class Widths, int kCluster>
class TileWalk {
 public:
  __device__ explicit TileWalk(const Tiling& tiling)
      : tiling_(tiling), rows_(tiling.rows), index_(blockIdx.x / kCluster) {
    if (tiling.share_below == 0) return;
    const Shares shares = share(count_tiles());
    whole_ = shares.whole, left_ = shares.left;
    const int part = shares.parts - 1 - index_;
    if (part >= 0) step_ = shares.begin(part), step_end_ = shares.begin(part + 1);
  }

  // Called by a whole warp; false after the last tile.
  __device__ bool next(Tile& tile) {
    int index = index_;
    tile.first = 0, tile.steps = tiling_.steps;
    if (index >= whole_) {
      if (step_ >= step_end_) return false;
      index = whole_ + quotient(step_, tiling_.steps);
      tile.first = step_ - (index - whole_) * tiling_.steps;
      tile.steps = min(tiling_.steps - tile.first, step_end_ - step_);
      step_ += tile.steps;
    } else {
      index_ += clusters();
    }
    while (index >= chunk_end_) {
      chunk_ += kWarp;
      if (chunk_ >= rows_.groups) return false;
      load_chunk();
    }
    find(index, tile);
    return true;
  }

  // Finds which `part` of the shared tiles was just taken. If it has its tile's first steps, `helpers` is the
  // number of later parts of that tile, whose sums it adds; else 0.
  __device__ void find_part(const Tile& tile, int& part, int& helpers) const {
    part = helpers = 0;
    if (tile.steps == tiling_.steps) return;
    const Shares shares = share(whole_ + left_);
    part = shares.parts - 1 - blockIdx.x / kCluster;
    const int tile_end = step_ - tile.steps + tiling_.steps;
    if (tile.first > 0) return;
    while (part + 1 + helpers < shares.parts && shares.begin(part + 1 + helpers) < tile_end) ++helpers;
  }

  // Sets the tile that next() takes instead of the block's own. It must lie after the last one taken, or
  // restart() was called.
  __device__ void go_to(int index) { index_ = index; }
  __device__ void restart() { chunk_ = -kWarp, chunk_end_ = row_ = count_ = 0; }

  // For use after go_to() and a next() that found no tile: whether go_to()'s index was `distance` behind the
  // last tile.
  __device__ bool passed_by(int distance) const { return index_ - clusters() == chunk_end_ + distance; }

 private:
  static __device__ __forceinline__ int clusters() { return gridDim.x / kCluster; }

  // Counts all tiles of the launch. Each lane takes four groups in a row, so that their loads are under way
  // together and one scan over the lanes is enough.
  __device__ int count_tiles() const {
    if (rows_.mode == RowMode::kDense) return cut(rows_.m).count * tiling_.columns;
    constexpr int kEach = 4;
    const int lane = threadIdx.x % kWarp;
    int tiles = 0, last_end = 0;
    for (int chunk = 0; chunk < rows_.groups; chunk += kEach * kWarp) {
      int end[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int group = chunk + kEach * lane + i;
        end[i] = group < rows_.groups ? clamp_rows(__ldg(rows_.group_rows + group), rows_.m) : 0;
      }
      int begin = 0;
      if (rows_.mode == RowMode::kContiguous) {
#pragma unroll
        for (int i = 1; i < kEach; ++i) end[i] = max(end[i], end[i - 1]);
        const int most = scan_max(end[kEach - 1]), before = __shfl_up_sync(~0u, most, 1);
        begin = max(last_end, lane == 0 ? 0 : before);
        last_end = max(last_end, __shfl_sync(~0u, most, kWarp - 1));
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        tiles += Widths::cut(max(end[i] - begin, 0)).count;
        if (rows_.mode == RowMode::kContiguous) begin = max(begin, end[i]);
      }
    }
    return __reduce_add_sync(~0u, tiles) * tiling_.columns;
  }

  __device__ __forceinline__ Shares share(int tiles) const {
    return Shares(tiles, tiling_.steps, tiling_.share_below, clusters());
  }

  __device__ __forceinline__ TokenTiles cut(int rows) const {
    const int width = rows_.tile_width;
    return width > 0 ? TokenTiles{quotient(rows + width - 1, width), width} : Widths::cut(rows);
  }

  // Returns the largest value of the lanes up to this one.
  static __device__ int scan_max(int value) {
    for (int step = 1; step < kWarp; step *= 2) value = max(value, __shfl_up_sync(~0u, value, step));
    return value;
  }

  // Loads the entry of group_rows for this lane's group, in the chunk of groups that begins at `chunk`.
  __device__ int load_rows(int chunk) const {
    const int group = chunk + threadIdx.x % kWarp;
    return rows_.group_rows != nullptr && group < rows_.groups ? __ldg(rows_.group_rows + group) : 0;
  }

  // Finds that group's first row and number of rows. Ends that decrease or exceed m are clamped.
  __device__ void place(int chunk, int given) {
    const int lane = threadIdx.x % kWarp, group = chunk + lane;
    if (rows_.mode == RowMode::kContiguous) {
      const int last_end = __shfl_sync(~0u, row_ + count_, kWarp - 1);  // where the chunk before ends
      const int end = max(scan_max(clamp_rows(given, rows_.m)), last_end);
      const int before = __shfl_up_sync(~0u, end, 1);
      row_ = lane == 0 ? last_end : before;
      count_ = end - row_;
    } else {
      row_ = group * rows_.m;
      count_ = group >= rows_.groups            ? 0
               : rows_.mode == RowMode::kMasked ? clamp_rows(given, rows_.m)
                                                : rows_.m;
    }
  }

  // Loads the next chunk of groups: lane i takes group chunk_ + i.
  __device__ void load_chunk() {
    const int lane = threadIdx.x % kWarp;
    place(chunk_, load_rows(chunk_));
    const TokenTiles cut = this->cut(count_);
    cut_ = cut.count << kWidthBits | cut.width;
    const int tiles = cut.count * tiling_.columns;
    int sum = tiles;
    for (int step = 1; step < kWarp; step *= 2) {
      int below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    first_ = chunk_end_ + sum - tiles;
    chunk_end_ += __shfl_sync(~0u, sum, kWarp - 1);
  }

  // Finds tile `index`, which is in this chunk.
  __device__ void find(int index, Tile& tile) const {
    const int lane = 31 - __clz(__ballot_sync(~0u, first_ <= index));
    int local = index - __shfl_sync(~0u, first_, lane);
    tile.group = chunk_ + lane;
    const int count = __shfl_sync(~0u, count_, lane);
    const int cut = __shfl_sync(~0u, cut_, lane);
    const TokenTiles tiles = {cut >> kWidthBits, cut & ((1 << kWidthBits) - 1)};
    int band_size = kBandTiles * tiling_.columns;
    int band = quotient(local, band_size);
    local -= band * band_size;
    int band_tiles = min(kBandTiles, tiles.count - band * kBandTiles);
    tile.column = quotient(local, band_tiles);
    int token_tile = band * kBandTiles + local - tile.column * band_tiles;
    tile.row = __shfl_sync(~0u, row_, lane) + token_tile * tiles.width;
    tile.rows = min(tiles.width, count - token_tile * tiles.width);
    tile.width = Widths::round_up(tile.rows);
  }

  static constexpr int kWidthBits = 9;
  static_assert(Widths::kMost < 1 << kWidthBits);

  const Tiling& tiling_;
  const Rows& rows_;
  int index_;                            // of the next tile
  int whole_ = 1 << 30, left_ = 0;       // as in Shares
  int step_ = 0, step_end_ = 0;          // the shared steps that are still to be taken
  int chunk_ = -kWarp, chunk_end_ = 0;   // first group and last tile of the chunk
  int row_ = 0, count_ = 0, first_ = 0;  // this lane's group: first row, rows, first tile
  int cut_ = 0;                          // and its token tiles: count, width
};

// Zeroes the output rows that belong to no group. `row_vectors`: the number of 16-byte vectors in a row.
// `thread`: which of `threads` threads this is.
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

}  // namespace fp4::device
