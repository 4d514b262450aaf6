// Gemv: products of few rows, which rarely share an expert. They are bound by latency.
//
//   out[r, n] as in decode.cuh, or combined:
// out[t, n] = sum_j topk_weights[t, j] * (row t * top_k + j of that)
//
// All activation rows fit the columns of one B operand. They are brought into shared memory once, and the
// weights may come in any order. Row tiles are numbered first over the rows that have an expert, then over N.
// Each block takes consecutive row tiles. Its warps take units in turn: 16 rows of a weight by 256 k. Each
// warp finds the experts by itself and asks for its first unit at once, so between the routing and the
// weights there is no barrier, only about a hundred instructions. The sums of a unit go to shared memory.
// After one barrier each result is added up in a fixed order. If the product is combined, a block takes whole
// columns, with all their rows.
//
// A thread block takes half of a multiprocessor. So the next kernel, if it is of this kind, can begin beside
// it and ask for its weights.
#pragma once

#include <cstdint>

#include "activations.cuh"
#include "launch.cuh"
#include "warp.cuh"

namespace fp4::device {

constexpr int kGemvThreads = 32 * kGemvWarps;

// A lane's part of a unit. A register is loaded for the next unit as soon as it is used.
template <class Words>
struct UnitLoads {
  uint4 codes[kSliceSteps] = {};
  uint32_t scales[kSliceSteps / 2] = {};
  const uint8_t* code_at;
  const uint8_t* scale_at;
  int live;  // how many 64-steps exist

  // Points the loads at `steps` 64-steps, beginning with number `at` among all those of the weights.
  __device__ __forceinline__ void aim(const GemvParams& p, int at, int steps) {
    const int lane = threadIdx.x % 32;
    code_at = p.codes + Words::Layout::slot(lane / 4, lane % 4) * 16 + int64_t(at) * kStepCodes;
    scale_at = p.scales + Words::scales_at(lane) + int64_t(at) * Words::kStepScales;
    live = steps;
  }
  __device__ __forceinline__ void fetch(int j) {
    if (j < live) codes[j] = load_stream(code_at + j * kStepCodes);
  }
  __device__ __forceinline__ void fetch_scales(int j) {
    if (j >= live) return;
    const uint8_t* from = scale_at + j * Words::kStepScales;
    scales[j / 2] = sizeof(typename Words::ScaleBytes) == 4 ? load_stream_word(from) : load_stream_half(from);
  }

  // Multiplies the loaded weights by the fragments of their slice. `lanes`: fragments of half a step.
  // `fragment`: the first that this lane reads.
  __device__ __forceinline__ float4 multiply(const uint4* fragment, int lanes) {
    const Words words;
    float4 sums[2] = {};  // two, because products into one sum wait for each other
    typename Words::Scales scale;
#pragma unroll
    for (int j = 0; j < kSliceSteps; ++j) {
      if (j % 2 == 0) scales[j / 2] = Words::without_flags(scales[j / 2]);
      if (j % Words::kScaleSteps == 0) scale = words.decode_scales(scales[j / 2] >> (16 * (j % 2)));
      uint32_t a[4][4];
      words.dequantize(codes[j], scale, a);
      fetch(j);
      if (j % 2 == 1) fetch_scales(j - 1);
#pragma unroll
      for (int s = 0; s < 2; ++s, fragment += lanes) {
        const uint4 b = *fragment;
        mma<Words::kElement>(sums[0], a[2 * s], b.x, b.y);
        mma<Words::kElement>(sums[1], a[2 * s + 1], b.z, b.w);
      }
    }
    return make_float4(sums[0].x + sums[1].x, sums[0].y + sums[1].y, sums[0].z + sums[1].z,
                       sums[0].w + sums[1].w);
  }
};

// The buffers behind GemvShared. Their sizes depend on the launch.
struct GemvBuffers {
  uint4* fragments;  // [slices][kSliceSteps][2][4 * columns]: the activations as B operands
  float2* sums;      // [tiles][slices][8 g]

  __host__ static int bytes(const GemvParams& p) { return int(sizeof(GemvShared)) + gemv_bytes(p); }
  __device__ GemvBuffers(const GemvParams& p, void* memory) {
    fragments = static_cast<uint4*>(memory);
    sums = reinterpret_cast<float2*>(fragments + gemv_fragments(p));
  }
};

// The expert of each row. Every warp finds it on its own: load() starts the loads, of_row() waits for them.
struct RowExperts {
  static constexpr int kTogether = 4;
  int loaded[kTogether];

  __device__ __forceinline__ void load(const GemvParams& p, int first_group = 0) {
    const int lane = threadIdx.x % 32;
    if (p.routing == Routing::kOffs) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int group = first_group + 32 * i + lane;
        loaded[i] = group < p.groups ? static_cast<const int*>(p.route)[group] : kGemvRows;
      }
    } else if (p.routing == Routing::kDense || lane >= p.rows) {
      loaded[0] = 0;
    } else if (p.routing == Routing::kIds32) {
      loaded[0] = static_cast<const int*>(p.route)[lane];
    } else {
      const int64_t id = static_cast<const int64_t*>(p.route)[lane];
      loaded[0] = id >= 0 && id < p.groups ? static_cast<int>(id) : -1;
    }
  }

  // Returns in lane r the expert of row r, or -1.
  __device__ __forceinline__ int of_row(const GemvParams& p) {
    const int lane = threadIdx.x % 32;
    int expert = loaded[0];
    if (p.routing == Routing::kOffs) {  // count the groups that end at or before the row
      expert = 0;
#pragma unroll 1
      for (int first = 0;;) {
        uint32_t ended = 0;  // groups that end at or before row r: bits 4r to 4r + 3
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int end = max(loaded[i], 0);
          ended += end < kGemvRows ? 0x11111111u << (4 * end) : 0;
        }
        const uint32_t even = __reduce_add_sync(~0u, ended & 0x0F0F0F0F);
        const uint32_t odd = __reduce_add_sync(~0u, ended >> 4 & 0x0F0F0F0F);
        expert += (lane % 2 ? odd : even) >> (lane / 2 % 4 * 8) & 0xFF;
        first += 32 * kTogether;
        if (first >= p.groups) break;
        load(p, first);
      }
    }
    return lane < p.rows && expert >= 0 && expert < p.groups ? expert : -1;
  }
};

// The place of a unit: its row's number among the rows with an expert, its tile of N and its slice of K.
struct GemvPlace {
  int number, n_tile, slice;
};

// The row tiles of this block, if `rows` rows have an expert.
struct GemvShare {
  int rows, begin, end;
  float rows_inverse;

  __device__ __forceinline__ GemvShare(const GemvParams& p, int rows) : rows(rows) {
    rows_inverse = __fdividef(1.f, max(rows, 1));
    const int tiles_n = p.n / kTileRows, together = p.topk_weights ? rows : 1;
    const int all = p.topk_weights ? tiles_n : tiles_n * rows;
    begin = divide(all * blockIdx.x, p.grid_mul, p.grid_shift) * together;
    end = divide(all * (blockIdx.x + 1), p.grid_mul, p.grid_shift) * together;
  }

  __device__ __forceinline__ int units(const GemvParams& p) const { return (end - begin) * p.slices; }

  // The block's i-th unit.
  __device__ __forceinline__ GemvPlace place(const GemvParams& p, int i) const {
    const int tile = divide_small(i, p.slices_inverse), n_tile = divide_small(begin + tile, rows_inverse);
    return {begin + tile - n_tile * rows, n_tile, i - tile * p.slices};
  }
};

// Adds the slices of rows 2g and 2g + 1 of a row tile.
__device__ __forceinline__ float2 sum_slices(const GemvParams& p, const float2* sums, float scale) {
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll 8
  for (int s = 0; s < p.slices; ++s) {
    const float2 v = sums[8 * s];
    sum.x += v.x, sum.y += v.y;
  }
  return make_float2(sum.x * scale, sum.y * scale);
}

__device__ __forceinline__ float2 bias_at(const GemvParams& p, int expert, int n) {
  const int64_t at = int64_t(expert) * p.n + n;
  return make_float2(load_as_float(p.bias, at, p.bias_type), load_as_float(p.bias, at + 1, p.bias_type));
}

// Stores the product of each row. Eight threads (g) take a row tile.
__device__ __forceinline__ void store_rows(const GemvParams& p, const GemvShared& sh, const float2* sums,
                                           const GemvShare& share) {
  const int g = threadIdx.x % 8;
  for (int i = threadIdx.x / 8; i < share.end - share.begin; i += kGemvThreads / 8) {
    const GemvPlace place = share.place(p, i * p.slices);
    const int row = sh.row[place.number], n = place.n_tile * kTileRows + 2 * g;
    float2 v = sum_slices(p, sums + i * p.slices * 8 + g, sh.scale[row]);
    if (p.bias) {
      const float2 bias = bias_at(p, sh.expert[row], n);
      v.x += bias.x, v.y += bias.y;
    }
    store_product(p, row, n, v.x, v.y);
  }
  if (share.rows == p.rows) return;
  for (int r = blockIdx.x; r < p.rows; r += gridDim.x) {
    if (sh.expert[r] < 0) clear_row(p, r, threadIdx.x, kGemvThreads);
  }
}

// Stores the combined product of each token. The lanes of a warp take eight of its slots at a time, for four
// g.
__device__ __forceinline__ void store_combined(const GemvParams& p, const GemvShared& sh, const float2* sums,
                                               const GemvShare& share) {
  const int lane = threadIdx.x % 32, tiles_n = p.n / kTileRows;
  const int first_n = divide(tiles_n * blockIdx.x, p.grid_mul, p.grid_shift);
  const int results = (divide(tiles_n * (blockIdx.x + 1), p.grid_mul, p.grid_shift) - first_n) * p.tokens;
  for (int i = threadIdx.x / 32; i < 2 * results; i += kGemvWarps) {
    const int n_tile = divide_small(i / 2, p.tokens_inverse), token = i / 2 - n_tile * p.tokens;
    const int g = i % 2 * 4 + lane % 4, n = (first_n + n_tile) * kTileRows + 2 * g;
    float2 sum = make_float2(0.f, 0.f);
    for (int number = lane / 4; number < share.rows; number += 8) {
      const int row = sh.row[number];
      if (row / p.top_k != token) continue;
      float2 v = sum_slices(p, sums + (n_tile * share.rows + number) * p.slices * 8 + g, sh.scale[row]);
      if (p.bias) {
        const float2 bias = bias_at(p, sh.expert[row], n);
        v.x += bias.x, v.y += bias.y;
      }
      sum.x += sh.weight[row] * v.x, sum.y += sh.weight[row] * v.y;
    }
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, d);
      sum.y += __shfl_xor_sync(~0u, sum.y, d);
    }
    if (lane < 4) store_product(p, token, n, sum.x, sum.y);
  }
}

// Brings x from memory into fragments. Each half of a warp takes kHeld slices of rows at a time.
template <DType kType, class Words>
struct GemvActivations {
  static constexpr int kHeld = 2, kTogether = kGemvThreads / 16;
  FewActivations<kType, Words> held[kHeld];
  int first = 0;

  __device__ __forceinline__ void load(const GemvParams& p) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * kTogether >= p.slices * p.columns) break;
      const Item item(p, first + i * kTogether);
      held[i].load(p, item.column, item.live, item.slice * kSliceSteps * 64);
    }
  }

  // Stores what was loaded, then loads and stores the rest.
  __device__ __forceinline__ void store(const GemvParams& p, GemvShared& sh, uint4* fragments) {
    const int lanes = 4 * p.columns;
#pragma unroll 1
    for (;;) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (first + i * kTogether >= p.slices * p.columns) break;
        const Item item(p, first + i * kTogether);
        const float factor = held[i].find_factor();
        if (!item.live) continue;
        if (threadIdx.x % 16 == 0) sh.factors[item.slice][item.column] = factor;
        held[i].store(fragments + item.slice * kSliceSteps * 2 * lanes, item.column, lanes);
      }
      first += kHeld * kTogether;
      if (first >= p.slices * p.columns) break;
      load(p);
    }
  }

 private:
  struct Item {
    int slice, column;
    bool live;

    __device__ __forceinline__ Item(const GemvParams& p, int first) {
      const int item = first + threadIdx.x / 16;
      column = divide_small(item, p.slices_inverse), slice = item - column * p.slices;
      live = column < p.columns;
    }
  };
};

template <DType kType, class Words>
__global__ void __launch_bounds__(kGemvThreads, 2) gemv_kernel(const __grid_constant__ GemvParams p) {
  FP4_DYNAMIC_SHARED(uint8_t, 16, memory);
  auto& sh = *reinterpret_cast<GemvShared*>(memory);
  const GemvBuffers buffers(p, memory + sizeof(GemvShared));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  GemvActivations<kType, Words> activations;
  RowExperts experts;
  if (!p.early) wait_previous_kernel();
  experts.load(p);
  if (!p.early) activations.load(p);  // before the weights, so that they arrive first
  // First assume that all rows have an expert. This is usually true, and the warp need not wait for the
  // routing.
  GemvShare share(p, p.rows);
  GemvPlace first = share.place(p, warp + kGemvWarps * lane);
  const int expert = experts.of_row(p);
  const uint32_t live = __ballot_sync(~0u, expert >= 0);
  int row = lane;  // row number `lane` among the rows that have an expert
  if (__popc(live) < p.rows) {
    share = GemvShare(p, __popc(live));
    first = share.place(p, warp + kGemvWarps * lane);
    if (expert >= 0) sh.lists[warp][__popc(live & ((1u << lane) - 1))] = lane;
    __syncwarp();
    row = lane < share.rows ? sh.lists[warp][lane] : 0;
  }

  // Lane j describes the warp's j-th unit. `ats` is the number of its first 64-step among all 64-steps of the
  // weights. `whats` is its slice, and from bit 8 on the column of its row.
  const int units = share.units(p), k_steps = p.kp / 64;
  const int of_row = share.rows < p.rows ? __shfl_sync(~0u, row, first.number) : first.number;
  const int tile = __shfl_sync(~0u, expert, of_row) * (p.n / kTileRows) + first.n_tile;
  const int ats = tile * k_steps + first.slice * kSliceSteps;
  const int whats = first.slice | divide(of_row, p.a_div_mul, p.a_div_shift) << 8;
  UnitLoads<Words> loads;
  // Points the loads at the warp's j-th unit. Returns its `what`.
  const auto aim = [&](int j) {
    const int at = __shfl_sync(~0u, ats, j), what = __shfl_sync(~0u, whats, j);
    loads.aim(p, at, warp + kGemvWarps * j < units ? k_steps - (what & 0xFF) * kSliceSteps : 0);
    return what;
  };
  int next = aim(0);
#pragma unroll
  for (int j = 0; j < kSliceSteps; ++j) {
    loads.fetch(j);
    if (j % 2 == 0) loads.fetch_scales(j);
  }
  if (p.early) {
    for (int j = 1; warp + kGemvWarps * j < units; ++j) {  // prefetch what is loaded later
      const int at = __shfl_sync(~0u, ats, j), slice = __shfl_sync(~0u, whats, j) & 0xFF;
      const int steps = min(kSliceSteps, k_steps - slice * kSliceSteps), byte = lane * 128;
      if (byte < steps * kStepCodes) prefetch_line(p.codes + int64_t(at) * kStepCodes + byte);
      if (byte < steps * Words::kStepScales)
        prefetch_line(p.scales + int64_t(at) * Words::kStepScales + byte);
    }
    wait_previous_kernel();
    activations.load(p);
  }
  release_next_kernel();
  float scale = 0.f, weight = 0.f;
  if (warp == 0) {
    if (expert >= 0) scale = p.global_scale[expert];
    if (p.topk_weights && lane < p.rows) weight = load_as_float(p.topk_weights, lane, p.weight_type);
  }
  activations.store(p, sh, buffers.fragments);
  __syncthreads();

  const int lanes = 4 * p.columns, slice_fragments = kSliceSteps * 2 * lanes;
  const uint4* const fragments = buffers.fragments + 4 * min(lane / 4, p.columns - 1) + lane % 4;
  for (int j = 1, i = warp; i < units; ++j, i += kGemvWarps) {
    const int slice = next & 0xFF, column = next >> 8;
    next = aim(j);
    const float4 sum = loads.multiply(fragments + slice * slice_fragments, lanes);
    if (column / 2 != lane % 4) continue;
    const float factor = sh.factors[slice][column];
    buffers.sums[i * 8 + lane / 4] = column % 2 ? make_float2(sum.y * factor, sum.w * factor)
                                                : make_float2(sum.x * factor, sum.z * factor);
  }
  if (warp == 0)
    sh.row[lane] = row, sh.expert[lane] = expert, sh.scale[lane] = scale, sh.weight[lane] = weight;
  __syncthreads();
  if (p.topk_weights) {
    store_combined(p, sh, buffers.sums, share);
  } else {
    store_rows(p, sh, buffers.sums, share);
  }
}

}  // namespace fp4::device
