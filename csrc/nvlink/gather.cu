// Gather. Each token is sent once to each rank that has one of its experts. Its rank and its number determine
// its place there.
#include "launch.h"
#include "protocol.cuh"
#include "values.cuh"

namespace fp4::nvlink {
namespace {

constexpr int kThreads = 512, kWordThreads = 256;
constexpr int kAtOnce = 8;  // loads that a lane has in flight together

// Writes received ids and weights of row r * tokens + t to this rank's buffer.
struct Received {
  const GatherParams& p;
  uint8_t* mine;

  explicit __device__ Received(const GatherParams& p) : p(p), mine(p.space.base[p.space.rank]) {}

  __device__ void slot(int64_t row, int j, int64_t id, float weight) const {
    const int me = p.space.rank, ranks = p.space.ranks;
    const bool here = id >= 0 && owner(p.experts, ranks, id) == me;
    const int64_t at = row * p.top_k + j;
    reinterpret_cast<int32_t*>(mine + p.space.ids)[at] =
        here ? int32_t(id - first_expert(p.experts, ranks, me)) : -1;
    reinterpret_cast<float*>(mine + p.space.weights)[at] = weight;
  }
};

// Piece i of a token: eight bytes of its row, or, after the row, the id and weight of a slot.
__device__ __forceinline__ uint2 piece(const GatherParams& p, int t, int i) {
  if (t >= p.own) return make_uint2(i < p.row_bytes / 8 ? 0 : ~0u, 0);
  if (i < p.row_bytes / 8) return reinterpret_cast<const uint2*>(p.x + int64_t(t) * p.row_bytes)[i];
  const int64_t at = int64_t(t) * p.top_k + i - p.row_bytes / 8;
  return make_uint2(uint32_t(load_id(p.ids, p.ids64, at, p.experts)),
                    __float_as_uint(load_float(p.weights, p.weight_type, at)));
}

__global__ void __launch_bounds__(kWordThreads) gather_words(const __grid_constant__ GatherParams p) {
  const Call call(p.space, kGather, p.signature);
  call.begin();
  const int me = p.space.rank, ranks = p.space.ranks;
  const int pieces = p.row_bytes / 8 + p.top_k, total = p.tokens * pieces, stride = gridDim.x * blockDim.x;
  const Received received(p);
  const auto put = [&](int r, int i, const uint2& v) {
    const int64_t row = int64_t(r) * p.tokens + i / pieces;
    const int c = i % pieces;
    if (c < p.row_bytes / 8) {
      reinterpret_cast<uint2*>(received.mine + p.space.rows + row * p.row_bytes)[c] = v;
    } else {
      received.slot(row, c - p.row_bytes / 8, int32_t(v.x), __uint_as_float(v.y));
    }
  };
  const int first = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = first; i < total; i += stride) {
    const uint2 v = piece(p, i / pieces, i % pieces);
    for (int r = 0; r < ranks; ++r)
      if (r != me) store_word(call.word(r, me, i), v, call.epoch);
    put(me, i, v);
  }
  for (int r = 0; r < ranks; ++r) {
    if (r == me) continue;
    for (int i = first; i < total; i += stride) put(r, i, call.wait_word(r, i));
  }
  call.end();
}

// Each warp sends a token.
__global__ void __launch_bounds__(kThreads) gather_rows(const __grid_constant__ GatherParams p) {
  const Call call(p.space, kGather, p.signature);
  call.begin();
  const int me = p.space.rank, ranks = p.space.ranks, lane = threadIdx.x % 32;
  const int warps = gridDim.x * (kThreads / 32), n = p.row_bytes / 16;
  for (int t = blockIdx.x + threadIdx.x / 32 * gridDim.x; t < p.tokens; t += warps) {
    const uint4* from = reinterpret_cast<const uint4*>(p.x + int64_t(t) * p.row_bytes);
    uint4 v[kAtOnce];  // the first loads of the row are in flight while the ids are read
    const auto load = [&](int i) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (t < p.own && i + 32 * j < n) v[j] = from[i + 32 * j];
    };
    load(lane);
    const bool has = lane < p.top_k && t < p.own;
    const int64_t at = int64_t(t) * p.top_k + lane, row = int64_t(me) * p.tokens + t;
    const int64_t id = has ? load_id(p.ids, p.ids64, at, p.experts) : -1;
    const float weight = has ? load_float(p.weights, p.weight_type, at) : 0.f;
    const int to = id >= 0 ? owner(p.experts, ranks, id) : -1;
    uint32_t needed = 0;
    for (int r = 0; r < ranks; ++r) {
      if (__any_sync(~0u, to == r)) needed |= 1u << r;
      if (lane < p.top_k) {
        const int64_t place = row * p.top_k + lane;
        reinterpret_cast<int32_t*>(p.space.base[r] + p.space.ids)[place] =
            to == r ? int32_t(id - first_expert(p.experts, ranks, r)) : -1;
        reinterpret_cast<float*>(p.space.base[r] + p.space.weights)[place] = weight;
      }
      if (p.factor != nullptr && lane == 0 && t < p.own)
        reinterpret_cast<float*>(p.space.base[r] + p.space.factors)[row] = p.factor[t];
    }
    if (needed == 0) continue;
    for (int i = lane; i < n; i += 32 * kAtOnce) {
      if (i != lane) load(i);
      for (int r = 0; r < ranks; ++r) {
        if (!(needed >> r & 1)) continue;
        uint4* to_rows = reinterpret_cast<uint4*>(p.space.base[r] + p.space.rows) + row * n;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (i + 32 * j < n) to_rows[i + 32 * j] = v[j];
      }
    }
  }
  call.send_flags(blockIdx.x);
  call.wait_flags(blockIdx.x);
  call.end();
}

}  // namespace
}  // namespace fp4::nvlink

extern "C" int fp4_nvlink_gather(const fp4::nvlink::GatherParams* p, void* stream) {
  using namespace fp4::nvlink;
  if (p->words) {
    const int64_t pieces = int64_t(p->tokens) * (p->row_bytes / 8 + p->top_k);
    return launch(gather_words, at_most((pieces + kWordThreads - 1) / kWordThreads, p->blocks), kWordThreads,
                  stream, *p);
  }
  return launch(gather_rows, at_most(p->tokens, p->blocks), kThreads, stream, *p);
}
