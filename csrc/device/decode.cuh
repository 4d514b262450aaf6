// Decode: grouped products of e2m1 weights, in the layouts sm90 and mma_bf16, with a few rows per expert.
// They are bound by memory.
//
//   out[r, n] = x_scale[r] * global_scale[e] * sum_k code[e, n, k] * block_scale[e, n, k / scale_block] *
//   x[r / a_div, k] (+ bias[e, n])
//
// A work item is a row tile: 16 rows of one expert's weight times up to eight of its activation rows (a
// chunk). Each thread block (one on each SM) takes consecutive row tiles (Share). Inside a block the compute
// warps split K. A warp has its slice of the activations in shared memory as the B operand of mma.sync. It
// streams its slice of one row tile after another from global memory straight into registers, without a
// barrier. The partial sums of a tile go through a ring in shared memory to the reducer warps, which add them
// in a fixed order, apply the epilogue and store. The order is fixed, so the result does not depend on
// timing. The reducer warps also load the activations of the next chunk, or of the next pass over K, while
// the compute warps multiply.
//
// e2m1 times an e4m3 scale has at most six significant bits, so weights are exact in fp16; activations are
// scaled into fp16's range by a power of two for each row and K slice. This loses only bits that a float32
// sum would lose, too.
#pragma once

#include <cstdint>

#include "activations.cuh"
#include "decode_plan.cuh"
#include "launch.cuh"
#include "warp.cuh"

namespace fp4::device {

// A slice of a chunk of any size, loaded by one warp: lane (g, t) takes block t of each 64-step of token g.
// Holds kHeld of these blocks in registers. If the slice has more, most of them are read twice.
template <DType kType, class Words, int kHeld>
struct ChunkActivations {
  static constexpr bool kScaled = kType != DType::kFloat8 && !RowBlock<kType, Words>::kAsTheyAre;

  RowBlock<kType, Words> raw[kHeld];
  int row, k0;
  bool live;
  float up;

  __device__ __forceinline__ void load(const DecodeParams& p, const int* row_list, int count, int k0_) {
    const int g = threadIdx.x % 32 / 4;
    k0 = k0_;
    live = g < count;
    row = live ? divide(row_list[g], p.a_div_mul, p.a_div_shift) : 0;
    if constexpr (kScaled || kHeld == kSliceSteps) load_steps(p, kSliceSteps - kHeld);
  }

  // Returns the factor of token g's sums.
  __device__ __forceinline__ float find_factor(const DecodeParams& p) {
    up = 1.f;
    if constexpr (kType == DType::kFloat8) return live ? p.x_scale[row] : 0.f;
    float down = Words::kFactor;
    if constexpr (kScaled) {
      float amax = 0.f;
#pragma unroll
      for (int first = kSliceSteps - kHeld;; first -= kHeld) {
#pragma unroll
        for (int j = 0; j < kHeld; ++j) amax = fmaxf(amax, raw[j].largest());
        if (first == 0) break;
        load_steps(p, first - kHeld);
      }
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
      const HalfRange range(amax);
      up = range.up, down = range.down;
    }
    return p.x_scale && live ? down * p.x_scale[row] : down;  // each row has a factor
  }

  // Stores the 64-steps in the mask `share`.
  __device__ __forceinline__ void store(const DecodeParams& p, uint4* fragments, uint32_t share) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kSliceSteps; ++j) {
      if (kHeld < kSliceSteps && j % kHeld == 0) load_steps(p, j);
      if (share >> j & 1) raw[j % kHeld].store(fragments, j, lane / 4, lane % 4, up);
    }
  }

 private:
  __device__ __forceinline__ void load_steps(const DecodeParams& p, int first) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) raw[j].load(p, row, k0 + 64 * (first + j), threadIdx.x % 4, live);
  }
};

__device__ __forceinline__ int slice_begin(const DecodeParams& p, int pass, int slice) {
  return (pass * p.k_warps + slice) * kSliceSteps * 64;
}

// True if the compute warps bring the activations of a block's first run into shared memory, each a part of
// its slice: they have nothing else to do yet. With few tokens the reducer warps do it, because they are
// sooner. (In a compute warp, loads of activations also wait for the weights that it asked for: a warp has
// too few scoreboards to wait for them separately.)
__device__ __forceinline__ bool compute_warps_begin(const DecodeShared& sh) {
  return sh.segments[0].count > kFewTokens;
}

// Reducer warps write the activations of run `index` to shared memory as B fragments. Except for the first
// run, they do so while the compute warps compute the run before.
template <DType kType, class Words, int kHeld>
__device__ __forceinline__ void prepare(const DecodeParams& p, DecodeShared& sh, const DecodeBuffers& buffers,
                                        const Run& run, uint32_t index) {
  constexpr int kTogether = 4;  // slices that are loaded at once if there are few tokens
  const int lane = threadIdx.x % 32, which = threadIdx.x / 32 % kReduceWarps, buffer = index % kBuffers;
  const int count = sh.segments[run.segment].count;
  const int* const row_list = buffers.row_list[run.segment];
  uint4* const fragments = buffers.fragments + buffer * decode_fragments(p);
  constexpr int kSlice = kSliceSteps * 64;
  if (count <= kFewTokens) {
    const int token = lane / 16;
    const bool live = token < count;
    const int row = live ? divide(row_list[token], p.a_div_mul, p.a_div_shift) : 0;
    for (int first = which; first < p.k_warps; first += kTogether * kReduceWarps) {
      FewActivations<kType, Words> few[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        few[i].load(p, row, live, slice_begin(p, run.pass, first + i * kReduceWarps));
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int slice = first + i * kReduceWarps;
        if (slice >= p.k_warps) break;
        const float factor = few[i].find_factor();
        if (lane % 16 == 0) sh.factors[buffer][slice][token] = factor;
        if (live) few[i].store(fragments + slice * kSlice, token);
      }
    }
  } else if (index > 0) {
    for (int slice = which; slice < p.k_warps; slice += kReduceWarps) {
      ChunkActivations<kType, Words, kHeld> chunk;
      chunk.load(p, row_list, count, slice_begin(p, run.pass, slice));
      const float factor = chunk.find_factor(p);
      if (lane % 4 == 0) sh.factors[buffer][slice][lane / 4] = factor;
      chunk.store(p, fragments + slice * kSlice, ~0u);
    }
  }
  barrier_arrive_warp(smem_address(&sh.ready[buffer]));
}

// A compute warp's part of each step: its row tile, its slice of K, and the 64-steps of the slice whose
// activations it converts for all warps of that slice.
struct WarpPlace {
  int row_warp, slice;
  uint32_t share = 0;

  __device__ __forceinline__ explicit WarpPlace(const DecodeParams& p) {
    const int warp = threadIdx.x / 32;
    row_warp = divide_small(warp, p.k_warps_inverse), slice = warp - row_warp * p.k_warps;
    for (int j = 0, r = 0; j < kSliceSteps; ++j, r = r + 1 < p.row_warps ? r + 1 : 0)
      share |= (r == row_warp) << j;
  }
};

// One compute warp: it multiplies its K slice of one row tile after another. Four 64-steps are always in
// flight: as soon as a register is dequantised, it is loaded again for the next tile.
template <DType kType, class Words, int kRing, int kHeld>
__device__ __forceinline__ void compute(const DecodeParams& p, DecodeShared& sh, const DecodeBuffers& buffers,
                                        const WarpPlace& place, int segments) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_warp = place.row_warp, slice = place.slice;
  const uint32_t share = place.share;
  const int k_steps = p.kp / 64, tiles_n = p.n / kTileRows;

  Run run{}, ahead{};
  bool more = run.open(p, sh.segments, segments);
  bool more_ahead = ahead.open(p, sh.segments, segments);
  if (!more) {
    if (p.early) wait_previous_kernel();
    return;
  }

  uint4 codes[kSliceSteps];
  uint32_t scales[kSliceSteps / 2] = {};
#pragma unroll
  for (uint4& c : codes) c = make_uint4(0, 0, 0, 0);
  const uint8_t* code_at = nullptr;  // this lane's part of the tile ahead
  const uint8_t* scale_at = nullptr;
  int live = 0;            // 64-steps of that tile to load
  int steps_ahead = 0;     // steps left in the run ahead, that tile's included
  bool last_live = false;  // whether this warp has a tile in the last of these steps
  const int64_t stride = int64_t(p.row_warps) * k_steps;
  auto aim = [&] {  // points the loads at the first tile of the run ahead
    live = 0;
    if (!more_ahead) return;
    const int rows = ahead.end - ahead.begin;
    steps_ahead = divide_small(rows + p.row_warps - 1, p.row_warps_inverse);
    last_live = row_warp < rows - (steps_ahead - 1) * p.row_warps;
    const int k_step = (ahead.pass * p.k_warps + slice) * kSliceSteps;
    const int64_t tile = int64_t(sh.segments[ahead.segment].expert) * tiles_n + ahead.begin + row_warp;
    code_at = p.codes + (tile * k_steps + k_step) * kStepCodes + Words::Layout::slot(lane / 4, lane % 4) * 16;
    scale_at = p.scales + (tile * k_steps + k_step) * Words::kStepScales + Words::scales_at(lane);
    live = row_warp < rows ? k_steps - k_step : 0;
  };
  auto advance = [&] {
    code_at += stride * kStepCodes;
    scale_at += stride * Words::kStepScales;
    if (--steps_ahead > 1) return;
    if (steps_ahead == 1) {  // the last step may have fewer tiles than row warps
      if (!last_live) live = 0;
    } else {
      more_ahead = more_ahead && ahead.next(p, sh.segments, segments);
      aim();
    }
  };
  auto fetch = [&](int j) {
    if (j < live) codes[j] = load_stream(code_at + j * kStepCodes);
  };
  auto fetch_scales = [&](int j) {
    if (j >= live) return;
    const uint8_t* from = scale_at + j * Words::kStepScales;
    scales[j / 2] = sizeof(typename Words::ScaleBytes) == 4 ? load_stream_word(from) : load_stream_half(from);
  };
  aim();
#pragma unroll
  for (int j = 0; j < kSliceSteps; ++j) {
    fetch(j);
    if (j % 2 == 0) fetch_scales(j);
  }
  advance();
  if (p.early) wait_previous_kernel();

  const Words words;
  float4* const ring = buffers.ring + warp * 32 + lane;
  const int stage_size = decode_stage(p);
  uint32_t step = 0;
  for (uint32_t index = 0; more; ++index) {
    const int buffer = index % kBuffers;
    uint4* const slice_fragments =
        buffers.fragments + buffer * decode_fragments(p) + slice * kSliceSteps * 64;
    const uint4* const fragments = slice_fragments + lane;
    float2 factor;  // of this lane's two tokens
    if (index == 0 && compute_warps_begin(sh)) {
      ChunkActivations<kType, Words, kHeld> chunk;
      chunk.load(p, buffers.row_list[0], sh.segments[0].count, slice_begin(p, 0, slice));
      const float down = chunk.find_factor(p);
      chunk.store(p, slice_fragments, share);
      factor.x = __shfl_sync(~0u, down, 8 * (lane % 4));
      factor.y = __shfl_sync(~0u, down, 8 * (lane % 4) + 4);
      named_barrier<1>(32 * p.k_warps * p.row_warps);
    } else {
      barrier_wait(smem_address(&sh.ready[buffer]), index / kBuffers & 1);
      factor = *reinterpret_cast<const float2*>(&sh.factors[buffer][slice][2 * (lane % 4)]);
    }
    for (int left = run.end - run.begin; left > 0; left -= p.row_warps) {
      float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
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
        for (int s = 0; s < 2; ++s) {
          const uint4 b = fragments[j * 64 + 32 * s];
          mma<Words::kElement>(acc, a[2 * s], b.x, b.y);
          mma<Words::kElement>(acc, a[2 * s + 1], b.z, b.w);
        }
      }
      advance();
      const uint32_t stage = step % kRing;
      barrier_wait(smem_address(&sh.empty[stage]), (step / kRing + 1) & 1);
      ring[stage * stage_size] =
          make_float4(acc.x * factor.x, acc.y * factor.y, acc.z * factor.x, acc.w * factor.y);
      barrier_arrive_warp(smem_address(&sh.full[stage]));
      ++step;
    }
    more = run.next(p, sh.segments, segments);
  }
}

// Applies the epilogue to one row tile and stores it: lane (g, t) holds rows 2g, 2g + 1 of the weight for
// tokens 2t, 2t + 1.
__device__ __forceinline__ void finish(const DecodeParams& p, const DecodeShared& sh,
                                       const DecodeBuffers& buffers, int segment, int tile, float scale,
                                       const float4& sum) {
  const int lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
  const Segment& seg = sh.segments[segment];
  const int n = tile * kTileRows + 2 * g;
  float bias0 = 0.f, bias1 = 0.f;
  if (p.bias) {
    const int64_t at = int64_t(seg.expert) * p.n + n;
    bias0 = load_as_float(p.bias, at, p.bias_type);
    bias1 = load_as_float(p.bias, at + 1, p.bias_type);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (2 * t + i >= seg.count) continue;
    const int64_t row = buffers.row_list[segment][2 * t + i];
    store_product(p, row, n, (i ? sum.y : sum.x) * scale + bias0, (i ? sum.w : sum.z) * scale + bias1);
  }
}

// One reducer warp: adds the partial sums of its row tiles over the K slices, in their order.
template <DType kType, class Words, int kRing, int kHeld>
__device__ __forceinline__ void reduce(const DecodeParams& p, DecodeShared& sh, const DecodeBuffers& buffers,
                                       int segments) {
  const int lane = threadIdx.x % 32, which = threadIdx.x / 32 % kReduceWarps;
  const int stage_size = decode_stage(p);
  Run run{};
  bool more = run.open(p, sh.segments, segments);
  uint32_t count = 0;
  if (more) prepare<kType, Words, kHeld>(p, sh, buffers, run, 0);
  clear_rows(p, buffers);
  for (uint32_t index = 0; more; ++index) {
    Run ahead = run;
    if (ahead.next(p, sh.segments, segments)) prepare<kType, Words, kHeld>(p, sh, buffers, ahead, index + 1);
    const float scale = p.global_scale[sh.segments[run.segment].expert];
    const int rows = run.end - run.begin;
    for (int step = 0; step < rows; step += p.row_warps, ++count) {
      const uint32_t stage = count % kRing;
      barrier_wait(smem_address(&sh.full[stage]), (count / kRing) & 1);
      for (int r = (which - step) & (kReduceWarps - 1); r < min(p.row_warps, rows - step);
           r += kReduceWarps) {
        const float4* from = buffers.ring + stage * stage_size + r * p.k_warps * 32 + lane;
        float4* kept = buffers.sums + (step + r) * 32 + lane;
        float4 sum = run.pass ? *kept : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
        for (int w = 0; w < p.k_warps; ++w) {
          const float4 v = from[w * 32];
          sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        if (run.pass + 1 == p.passes) {
          finish(p, sh, buffers, run.segment, run.begin + step + r, scale, sum);
        } else {
          *kept = sum;
        }
      }
      barrier_arrive_warp(smem_address(&sh.empty[stage]));
    }
    more = run.next(p, sh.segments, segments);
  }
}

// More compute warps hide more memory latency, but they start later and have fewer registers each.
template <DType kType, class Words, int kComputeWarps, int kRing>
__global__ void __launch_bounds__(32 * (kComputeWarps + kReduceWarps), 1)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  constexpr bool kRoom =
      kComputeWarps == kFewComputeWarps || kType == DType::kFloat8;  // registers for a whole slice
  constexpr int kReduceHeld = kRoom ? kSliceSteps : Words::kElement == Element::kBFloat16 ? 2 : 1;
  FP4_DYNAMIC_SHARED(uint8_t, 16, memory);
  auto& sh = *reinterpret_cast<DecodeShared*>(memory);
  const DecodeBuffers buffers(p, memory + sizeof(DecodeShared), kRing);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 32 * (kComputeWarps + kReduceWarps - 1)) {  // in a warp that has least to do in plan()
    for (int i = 0; i < kRing; ++i) {
      barrier_init(smem_address(&sh.full[i]), p.k_warps * p.row_warps * kWarpArrivals);
      barrier_init(smem_address(&sh.empty[i]), kReduceWarps * kWarpArrivals);
    }
    for (uint64_t& ready : sh.ready) barrier_init(smem_address(&ready), kReduceWarps * kWarpArrivals);
  }
  const WarpPlace place(p);
  if (!p.early) wait_previous_kernel();
  const int segments = plan<kComputeWarps + kReduceWarps>(p, sh, buffers);
  if (!p.early) release_next_kernel();
  if (warp >= kComputeWarps) {
    if (p.early) wait_previous_kernel();
    reduce<kType, Words, kRing, kReduceHeld>(p, sh, buffers, segments);
  } else if (warp < p.k_warps * p.row_warps) {
    compute<kType, Words, kRing, kRoom ? kSliceSteps : 1>(p, sh, buffers, place, segments);
  } else if (p.early) {
    wait_previous_kernel();
  }
  if (p.early) release_next_kernel();
}

}  // namespace fp4::device
