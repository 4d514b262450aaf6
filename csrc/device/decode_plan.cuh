// Arguments of a decode launch, and the row tiles and experts of each block. See decode.cuh.
#pragma once

#include <cstdint>

#include "product.cuh"

namespace fp4::device {

constexpr int kTileUnits = 4;  // units of work in a row tile (see Share)
constexpr int kFewTokens = 2;  // tokens of a chunk whose activations are loaded by FewActivations

// The buffers behind DecodeShared in shared memory. Their sizes depend on the launch.
struct DecodeBuffers {
  uint4* fragments;  // [kBuffers][k_warps][kSliceSteps][2][32]: the activations as B operands
  float4* ring;      // [p.ring][k_warps * row_warps][32]
  float4* sums;      // [pass_tiles][32], if there are several passes
  int (*row_list)[kChunk];
  int* ids;  // expert of each row, if the routing is by id

  __host__ static int bytes(const DecodeParams& p) {
    const bool by_id = p.routing == Routing::kIds32 || p.routing == Routing::kIds64;
    return int(sizeof(DecodeShared)) + decode_bytes(p, by_id ? p.rows : 0);
  }
  __device__ DecodeBuffers(const DecodeParams& p, void* memory, int ring_steps) {
    fragments = static_cast<uint4*>(memory);
    ring = reinterpret_cast<float4*>(fragments + kBuffers * decode_fragments(p));
    sums = ring + ring_steps * decode_stage(p);
    row_list = reinterpret_cast<int (*)[kChunk]>(sums + decode_sums(p));
    ids = &row_list[kMaxSegments][0];
  }
};

// --- the order of a block's work, which compute and reducer warps share ---

// Row tiles of one segment under one K pass: the activations in registers stay the same.
struct Run {
  int segment, pass, begin, end;

  __device__ bool open(const DecodeParams& p, const Segment* segments, int count) {
    if (segment >= count) return false;
    begin = segments[segment].tile_begin;
    close(p, segments);
    return true;
  }
  __device__ bool next(const DecodeParams& p, const Segment* segments, int count) {
    if (++pass < p.passes) return true;
    pass = 0;
    begin = end;
    if (begin < segments[segment].tile_end) {
      close(p, segments);
      return true;
    }
    ++segment;
    return open(p, segments, count);
  }

 private:
  __device__ void close(const DecodeParams& p, const Segment* segments) {
    end = segments[segment].tile_end;
    if (p.passes > 1) end = min(end, begin + pass_tiles(p));
  }
};

// The row tiles of this block, counted over all `chunks`, and the range of chunks that they belong to.
struct Share {
  int tile_begin, tile_end, chunk, segments;

  __device__ Share(const DecodeParams& p, int chunks) {
    const int tiles_n = p.n / kTileRows, block = blockIdx.x, blocks = gridDim.x;
    const int units = chunks * p.chunk_units;
    const int per_chunk = divide_small(blocks, __fdividef(1.f, max(chunks, 1)));
    const float inverse = __fdividef(1.f, per_chunk);
    int last;
    // Give each chunk `per_chunk` blocks, if that takes no longer than equal shares with a change of chunk.
    if (per_chunk > 0 && divide_small(tiles_n + per_chunk - 1, inverse) * kTileUnits * blocks <=
                             units + blocks * p.change_units) {
      chunk = divide_small(block, inverse);
      const int begin = (block - chunk * per_chunk) * tiles_n;
      tile_begin = divide_small(begin, inverse), tile_end = divide_small(begin + tiles_n, inverse);
      last = chunk < chunks && tile_begin < tile_end ? chunk : chunk - 1;
      tile_begin += chunk * tiles_n, tile_end += chunk * tiles_n;
    } else {
      // Else all blocks get equal shares of units. A row tile has kTileUnits. Before the first tile of a
      // chunk come change_units, the cost of a change to this chunk; a block that begins there does not pay
      // it.
      const int each = divide(units, p.grid_mul, p.grid_shift);
      const int more = units - each * blocks, begin = each * block + min(block, more);
      const Place from(p, begin), to(p, begin + each + (block < more));
      chunk = from.chunk, last = to.tile > 0 ? to.chunk : to.chunk - 1;
      tile_begin = from.chunk * tiles_n + from.tile, tile_end = to.chunk * tiles_n + to.tile;
      if (tile_begin == tile_end) last = chunk - 1;
    }
    segments = min(last - chunk + 1, kMaxSegments);
  }

 private:
  struct Place {
    int chunk, tile;

    __device__ __forceinline__ Place(const DecodeParams& p, int unit)
        : chunk(divide(unit, p.chunk_mul, p.chunk_shift)),
          tile(uint32_t(max(unit - chunk * p.chunk_units - p.change_units, 0)) / kTileUnits) {}
  };
};

constexpr int kFewRows = 16;  // with more rows the shuffles take longer than the barriers that they save

// plan() for at most kFewRows rows by id: every warp sorts them in registers, so one barrier is enough.
__device__ __forceinline__ int plan_few(const DecodeParams& p, DecodeShared& sh,
                                        const DecodeBuffers& buffers) {
  const int lane = threadIdx.x % 32, tiles_n = p.n / kTileRows;
  int64_t id = -1;
  if (lane < p.rows) {
    id = p.routing == Routing::kIds64 ? static_cast<const int64_t*>(p.route)[lane]
                                      : static_cast<const int*>(p.route)[lane];
  }
  const bool valid = id >= 0 && id < p.groups;
  const int expert = valid ? static_cast<int>(id) : -1;
  const uint32_t same = __match_any_sync(~0u, expert);
  const int count = __popc(same), rank = __popc(same & ((1u << lane) - 1));
  const int chunks = valid && rank == 0 ? (count + kChunk - 1) / kChunk : 0;
  const Share share(p, __reduce_add_sync(~0u, chunks));
  int chunk = rank / kChunk;  // this row's chunk; the chunks of lower experts come first
#pragma unroll 8
  for (int j = 0; j < p.rows; ++j) {
    const int other = __shfl_sync(~0u, expert, j), its = __shfl_sync(~0u, chunks, j);
    chunk += other < expert ? its : 0;
  }
  const int segment = chunk - share.chunk;
  if (threadIdx.x < 32) {
    if (lane < p.rows) buffers.ids[lane] = expert;
    if (valid && segment >= 0 && segment < share.segments) {
      buffers.row_list[segment][rank % kChunk] = lane;
      if (rank % kChunk == 0) {
        sh.segments[segment] = Segment{expert,
                                       rank,
                                       min(count - rank, kChunk),
                                       rank,
                                       max(share.tile_begin - chunk * tiles_n, 0),
                                       min(share.tile_end - chunk * tiles_n, tiles_n)};
      }
    }
  }
  __syncthreads();
  return share.segments;
}

// Finds the block's segments and returns their number. All threads call it; it ends with a barrier.
template <int kWarps>
__device__ __forceinline__ int plan(const DecodeParams& p, DecodeShared& sh, const DecodeBuffers& buffers) {
  static_assert(32 * kWarps >= kMaxGroups);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int tiles_n = p.n / kTileRows;
  const bool by_id = p.routing == Routing::kIds32 || p.routing == Routing::kIds64;
  if (by_id && p.rows <= kFewRows) return plan_few(p, sh, buffers);
  int first = 0, count = 0;
  if (by_id) {
    if (tid < kMaxGroups) sh.counts[tid] = 0;
    __syncthreads();
    for (int r = tid; r < p.rows; r += 32 * kWarps) {
      const int64_t id = p.routing == Routing::kIds64 ? static_cast<const int64_t*>(p.route)[r]
                                                      : static_cast<const int*>(p.route)[r];
      const bool valid = id >= 0 && id < p.groups;
      buffers.ids[r] = valid ? static_cast<int>(id) : -1;
      if (valid) atomicAdd(&sh.counts[id], 1);
    }
    __syncthreads();
    count = tid < kMaxGroups ? sh.counts[tid] : 0;
  } else if (tid < p.groups) {
    const int* ends = static_cast<const int*>(p.route);
    if (p.routing == Routing::kOffs) {
      const int end = ends[tid], begin = tid ? ends[tid - 1] : 0;
      first = min(max(begin, 0), p.rows);
      count = max(min(end, p.rows) - first, 0);
    } else if (p.routing == Routing::kMasked) {
      first = tid * p.max_m;
      count = min(max(ends[tid], 0), p.max_m);
    } else {
      count = p.rows;
    }
  }
  const int chunks = (count + kChunk - 1) / kChunk;
  int scan = chunks;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, scan, d);
    if (lane >= d) scan += other;
  }
  if (lane == 31) sh.warp_totals[warp] = scan;
  __syncthreads();
  int mine = scan - chunks, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int t = sh.warp_totals[w];
    mine += w < warp ? t : 0;
    total += t;
  }
  const Share share(p, total);
  const int c0 = share.chunk, segments = share.segments;
  for (int i = max(c0 - mine, 0); i < chunks && mine + i < c0 + segments; ++i) {
    const int c = mine + i, done = i * kChunk;
    sh.segments[c - c0] = Segment{tid,
                                  first + done,
                                  min(count - done, kChunk),
                                  done,
                                  max(share.tile_begin - c * tiles_n, 0),
                                  min(share.tile_end - c * tiles_n, tiles_n)};
  }
  __syncthreads();
  for (int s = warp; s < segments; s += kWarps) {
    const Segment seg = sh.segments[s];
    if (by_id) {
      int found = -seg.rank;
      for (int r = 0; r < p.rows && found < seg.count; r += 32) {
        const bool hit = r + lane < p.rows && buffers.ids[r + lane] == seg.expert;
        const uint32_t hits = __ballot_sync(~0u, hit);
        const int at = found + __popc(hits & ((1u << lane) - 1));
        if (hit && at >= 0 && at < seg.count) buffers.row_list[s][at] = r + lane;
        found += __popc(hits);
      }
    } else if (lane < seg.count) {
      const int at = seg.first + lane;
      buffers.row_list[s][lane] = p.sorted_rows ? p.sorted_rows[at] : at;
    }
  }
  __syncthreads();
  return segments;
}

// Writes zeros to the output rows that belong to no expert.
__device__ __forceinline__ void clear_rows(const DecodeParams& p, const DecodeBuffers& buffers) {
  const int end = p.routing == Routing::kOffs ? max(static_cast<const int*>(p.route)[p.groups - 1], 0) : 0;
  for (int r = blockIdx.x; r < p.rows; r += gridDim.x) {
    bool clear = false;
    int row = r;
    if (p.routing == Routing::kOffs) {
      clear = r >= end;
      if (clear && p.sorted_rows) row = p.sorted_rows[r];
    } else if (p.routing == Routing::kMasked) {
      clear = r % p.max_m >= static_cast<const int*>(p.route)[r / p.max_m];
    } else if (p.routing != Routing::kDense) {
      clear = buffers.ids[r] < 0;
    }
    if (clear) clear_row(p, row, threadIdx.x % (32 * kReduceWarps), 32 * kReduceWarps);
  }
}

}  // namespace fp4::device
