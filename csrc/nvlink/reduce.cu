// Each rank sends, for each token of another, the sum over its own experts; the token's rank adds these up.
#include "launch.h"
#include "protocol.cuh"
#include "values.cuh"

namespace fp4::nvlink {
namespace {

// The part of one row, 16 bytes of it a thread.
template <Type type>
struct Parts {  // as they are
  const ReduceParams& p;

  explicit __device__ Parts(const ReduceParams& p) : p(p) {}

  // Whether a row has an expert here; all threads ask for the same row.
  __device__ __forceinline__ bool begin(int64_t row) {
    const int lane = threadIdx.x % 32;
    return __any_sync(~0u, lane < p.top_k && p.ids[row * p.top_k + lane] >= 0);
  }
  __device__ __forceinline__ uint4 at(int64_t row, int column) const {
    const auto* y = static_cast<const uint8_t*>(p.y);
    return *reinterpret_cast<const uint4*>(y + (row * p.columns + column) * (16 / Values<type>::kCount));
  }
};

template <Type type, Type y_type>
struct Experts {  // summed here
  static constexpr int kCount = Values<type>::kCount, kLoads = kCount / Values<y_type>::kCount;
  static constexpr int kAtOnce = kLoads == 1 ? 8 : 4;
  const ReduceParams& p;
  int place = -1;  // of this lane's slot in y
  float weight = 0.f;

  explicit __device__ Experts(const ReduceParams& p) : p(p) {}

  __device__ __forceinline__ bool begin(int64_t row) {
    const int lane = threadIdx.x % 32;
    place = -1;
    if (lane < p.top_k) {
      const int64_t i = row * p.top_k + lane;
      const int id = p.ids[i];
      place = p.position != nullptr ? p.position[i] : int(i);  // under way beside the id
      weight = p.weights[i];
      if (id < 0) place = -1;
    }
    return __any_sync(~0u, place >= 0);
  }
  __device__ __forceinline__ uint4 at(int64_t, int column) const {
    float sum[kCount] = {};
    for (int first = 0; first < p.top_k; first += kAtOnce) {
      uint4 u[kAtOnce][kLoads];
      int places[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        places[j] = __shfl_sync(~0u, place, first + j);
        if (places[j] < 0) continue;
        const auto* from = static_cast<const uint8_t*>(p.y) +
                           (int64_t(places[j]) * p.columns + column) * (16 / Values<y_type>::kCount);
#pragma unroll
        for (int l = 0; l < kLoads; ++l) u[j][l] = reinterpret_cast<const uint4*>(from)[l];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float w = __shfl_sync(~0u, weight, first + j);
        if (places[j] < 0) continue;
#pragma unroll
        for (int l = 0; l < kLoads; ++l) {
          float part[Values<y_type>::kCount] = {};
          Values<y_type>::add(part, u[j][l], w);
#pragma unroll
          for (int q = 0; q < Values<y_type>::kCount; ++q) sum[l * Values<y_type>::kCount + q] += part[q];
        }
      }
    }
    return Values<type>::pack(sum);
  }
};

// The expert of this lane's slot of my token t, or -1.
__device__ __forceinline__ int64_t expert_of(const ReduceParams& p, int t) {
  const int lane = threadIdx.x % 32;
  return lane < p.top_k ? load_id(p.own_ids, p.ids64, int64_t(t) * p.top_k + lane, p.experts) : -1;
}

// The ranks that send a part of a token: those that have one of its experts.
__device__ __forceinline__ uint32_t senders(const ReduceParams& p, int64_t id) {
  return __reduce_or_sync(~0u, id >= 0 ? 1u << owner(p.experts, p.space.ranks, id) : 0u);
}

// The grid's blocks take pieces in turn: rows for all columns, or with words (row, some columns).
template <class Source, Type type, bool kWords>
__global__ void __launch_bounds__(512) reduce(const __grid_constant__ ReduceParams p) {
  constexpr int kCount = Values<type>::kCount;
  const Call call(p.space, kReduce, p.signature);
  call.begin();
  const int me = p.space.rank, ranks = p.space.ranks;
  const int units = p.columns / kCount;  // of a row
  Source source(p);
  const int across = kWords ? (units + int(blockDim.x) - 1) / int(blockDim.x) : 1;
  // Columns from c0 on; all threads of a warp go through the loops together.
  const auto push = [&](int t, int c0, int step) {
    for (int r = 0; r < ranks; ++r) {
      if (r == me) continue;
      const int64_t row = int64_t(r) * p.tokens + t;
      if (!source.begin(row)) continue;
      for (int base = c0; base < units; base += step) {
        const int c = base + int(threadIdx.x);
        const uint4 u = source.at(row, min(c, units - 1) * kCount);
        if (c >= units) continue;
        const int64_t i = int64_t(t) * units + c;
        if constexpr (kWords) {
          call.store_words(r, 2 * i, u);
        } else {
          *reinterpret_cast<uint4*>(call.part(r, me, 16 * i)) = u;
        }
      }
    }
  };
  // arrived(): waits for the others' parts, which are on their way while this rank's own is made.
  const auto pull = [&](int t, int c0, int step, const auto& arrived) {
    if (t >= p.own) return;
    const int64_t id = expert_of(p, t);
    const int64_t row = int64_t(me) * p.tokens + t;
    source.begin(row);
    const uint32_t from = senders(p, id);
    for (int base = c0; base < units; base += step) {
      const int c = base + int(threadIdx.x), within = min(c, units - 1);
      const int64_t i = int64_t(t) * units + within;
      uint4 own = make_uint4(0, 0, 0, 0);
      if (from >> me & 1) own = source.at(row, within * kCount);
      arrived();
      float sum[kCount] = {};
      for (int r = 0; r < ranks; ++r) {
        if (!(from >> r & 1)) continue;
        uint4 u;
        if (r == me) {
          u = own;
        } else if constexpr (kWords) {
          u = call.wait_words(r, 2 * i);
        } else {
          u = load_data(call.part(me, r, 16 * i));
        }
        Values<type>::add(sum, u, 1.f);
      }
      if (c < units) static_cast<uint4*>(p.out)[i] = Values<type>::pack(sum);
    }
  };
  if constexpr (kWords) {
    const int pieces = p.tokens * across, step = across * int(blockDim.x);
    for (int i = blockIdx.x; i < pieces; i += gridDim.x) push(i / across, i % across * int(blockDim.x), step);
    for (int i = blockIdx.x; i < pieces; i += gridDim.x)
      pull(i / across, i % across * int(blockDim.x), step, [] {});  // each word says whether it is there
  } else {
    // A slot is the rows of one turn; what the others send of one is added while the next is on its way.
    const int turns = (p.tokens + int(gridDim.x) - 1) / int(gridDim.x);
    const int most = min(p.turns, kSlots / int(gridDim.x));
    const int rows = (turns + most - 1) / most;  // turns of a slot
    const int slots = (turns + rows - 1) / rows;
    const auto each = [&](int slot, const auto& f) {
      for (int turn = slot * rows; turn < min((slot + 1) * rows, turns); ++turn) {
        const int t = turn * int(gridDim.x) + int(blockIdx.x);
        if (t < p.tokens) f(t);
      }
    };
    const auto number = [&](int slot) { return slot * int(gridDim.x) + int(blockIdx.x); };
    for (int slot = 0; slot <= slots; ++slot) {
      if (slot < slots) {
        each(slot, [&](int t) { push(t, 0, int(blockDim.x)); });
        call.send_flags(number(slot));
      }
      if (slot == 0) continue;
      bool waited = false;
      const auto arrived = [&] {
        if (!waited) call.wait_flags(number(slot - 1));
        waited = true;
      };
      each(slot - 1, [&](int t) { pull(t, 0, int(blockDim.x), arrived); });
      arrived();
    }
  }
  call.end();
}

template <class Source, Type type>
int start(const ReduceParams& p, void* stream) {
  const int units = p.columns / Values<type>::kCount;
  if (p.words) {
    constexpr int kThreads = 64;
    const int64_t pieces = int64_t(p.tokens) * ((units + kThreads - 1) / kThreads);
    return launch(reduce<Source, type, true>, at_most(pieces, p.blocks), kThreads, stream, p);
  }
  const int times = (units + 511) / 512, threads = (units + 32 * times - 1) / (32 * times) * 32;
  return launch(reduce<Source, type, false>, at_most(p.tokens, p.blocks), threads, stream, p);
}

template <Type type>
int start(const ReduceParams& p, void* stream) {
  if (!p.fused) return start<Parts<type>, type>(p, stream);
  if constexpr (type != kFloat32) {
    if (p.y_type == kBFloat16) return start<Experts<type, kBFloat16>, type>(p, stream);
    if (p.y_type == kFloat32) return start<Experts<type, kFloat32>, type>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace fp4::nvlink

extern "C" int fp4_nvlink_reduce(const fp4::nvlink::ReduceParams* p, void* stream) {
  using namespace fp4::nvlink;
  if (p->type == kBFloat16) return start<kBFloat16>(*p, stream);
  if (p->type == kFloat16) return start<kFloat16>(*p, stream);
  return start<kFloat32>(*p, stream);
}
