// Reduce. For each token of another rank, each rank sends the sum over its own experts. The token's rank adds
// these sums up.
#include "launch.h"
#include "protocol.cuh"
#include "values.cuh"

namespace fp4::nvlink {
namespace {

constexpr int kThreads = 256, kWordThreads = 64;

// A token's slots, one in each lane.
struct Slots {
  int id, place;  // the expert's id on this rank, or -1; its place in y
  float weight;
};

// Reads the part of one row, 16 bytes in each thread. All threads of a warp ask for the same row.
template <Type type>
struct Parts {                       // y has finished parts
  static constexpr int kBlocks = 4;  // blocks of a multiprocessor
  const ReduceParams& p;

  explicit __device__ Parts(const ReduceParams& p) : p(p) {}

  __device__ __forceinline__ Slots slots(int64_t row) const {
    const int lane = threadIdx.x % 32;
    return {lane < p.top_k ? p.ids[row * p.top_k + lane] : -1, 0, 0.f};
  }
  __device__ __forceinline__ Slots own_slots(int, int id) const { return {id, 0, 0.f}; }
  __device__ __forceinline__ uint4 at(const Slots&, int64_t row, int column) const {
    const auto* y = static_cast<const uint8_t*>(p.y);
    return *reinterpret_cast<const uint4*>(y + (row * p.columns + column) * (16 / Values<type>::kCount));
  }
};

template <Type type, Type y_type>
struct Experts {  // y has rows of experts, which are summed here
  static constexpr int kCount = Values<type>::kCount, kLoads = kCount / Values<y_type>::kCount;
  static constexpr int kAtOnce = 4, kBlocks = kLoads == 1 ? 4 : 3;
  const ReduceParams& p;

  explicit __device__ Experts(const ReduceParams& p) : p(p) {}

  __device__ __forceinline__ Slots slots(int64_t row) const {
    const int lane = threadIdx.x % 32;
    if (lane >= p.top_k) return {-1, 0, 0.f};
    const int64_t i = row * p.top_k + lane;
    return {p.ids[i], place(i), p.weights[i]};
  }
  // The slots of this rank's token t. `id` is the expert of this lane's slot if it is on this rank, else -1.
  __device__ __forceinline__ Slots own_slots(int t, int id) const {
    const int lane = threadIdx.x % 32;
    if (lane >= p.top_k) return {-1, 0, 0.f};
    const int64_t i = int64_t(t) * p.top_k + lane;
    return {id, place(int64_t(p.space.rank) * p.tokens * p.top_k + i),
            load_float(p.own_weights, p.weight_type, i)};
  }
  __device__ __forceinline__ uint4 at(const Slots& mine, int64_t, int column) const {
    float sum[kCount] = {};
    for (uint32_t left = __ballot_sync(~0u, mine.id >= 0); left != 0;) {
      uint4 u[kAtOnce][kLoads];
      int lanes[kAtOnce];  // lanes of the next slots that have an expert here
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j, left &= left - 1) {
        lanes[j] = 31 - __clz(left & -left);  // -1: there are no more
        const int place = __shfl_sync(~0u, mine.place, lanes[j] & 31);
        if (lanes[j] < 0) continue;
        const auto* from = static_cast<const uint8_t*>(p.y) +
                           (int64_t(place) * p.columns + column) * (16 / Values<y_type>::kCount);
#pragma unroll
        for (int l = 0; l < kLoads; ++l) u[j][l] = reinterpret_cast<const uint4*>(from)[l];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float w = __shfl_sync(~0u, mine.weight, lanes[j] & 31);
        if (lanes[j] < 0) continue;
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

 private:
  __device__ __forceinline__ int place(int64_t i) const {
    return p.position != nullptr ? p.position[i] : int(i);
  }
};

// This rank's token t: its slots on this rank, and the ranks that send a part of it, which are those with one
// of its experts. Nothing that gather received is read here. A rank that has all parts of its tokens goes on,
// and its next gather may have another number of tokens and write over the place of this one.
struct Own {
  uint32_t from = 0;
  Slots slots = {-1, 0, 0.f};

  template <class Source>
  __device__ __forceinline__ void load(const ReduceParams& p, const Source& source, int t) {
    const int lane = threadIdx.x % 32, me = p.space.rank;
    const int64_t id =
        lane < p.top_k ? load_id(p.own_ids, p.ids64, int64_t(t) * p.top_k + lane, p.experts) : -1;
    const int rank = id >= 0 ? owner(p.experts, p.space.ranks, id) : -1;
    slots = source.own_slots(t, rank == me ? int(id) : -1);
    from = __reduce_or_sync(~0u, rank >= 0 ? 1u << rank : 0u);
  }
};

// The work of a block at a time: with plain data all columns of a token, with words some columns of a token.
struct Piece {
  int t, column;  // in units of 16 bytes
};

// Even blocks send parts to the other ranks, odd blocks add up the parts that arrive. Links and memory are
// then busy at the same time, and a rank computes its own part while those of the others are on their way. A
// block's tokens are grouped into slots, in the same way as those of the block beside it. With plain data
// each slot has a flag.
template <class Source, Type type, bool kWords>
__global__ void __launch_bounds__(kWords ? kWordThreads : kThreads, kWords ? 8 : Source::kBlocks)
    reduce(const __grid_constant__ ReduceParams p) {
  constexpr int kCount = Values<type>::kCount;
  const Call call(p.space, kReduce, p.signature, p.early);
  const int me = p.space.rank, ranks = p.space.ranks;
  const int units = p.columns / kCount;  // units of a token
  const Source source(p);
  const int teams = gridDim.x / 2, team = blockIdx.x / 2;
  const bool sends = blockIdx.x % 2 == 0;
  const int across = kWords ? (units + int(blockDim.x) - 1) / int(blockDim.x) : 1;
  const int step = across * int(blockDim.x);
  const int pieces = p.tokens * across, turns = (pieces + teams - 1) / teams;
  // Setting a flag waits for all earlier stores, so a slot has more than one token.
  const int most = kWords ? 1 : min(p.turns, kSlots / teams), each = max(2, (turns + most - 1) / most);
  const auto piece = [&](int turn) {
    const int i = turn * teams + team;
    return Piece{i / across, i % across * int(blockDim.x) + int(threadIdx.x)};
  };
  // Calls f for the columns of a piece. All threads of a warp go through the loop together.
  const auto columns = [&](const Piece& at, const auto& f) {
    const int warp = at.column - at.column % 32;
    for (int first = warp; first < units; first += step) f(first + at.column % 32);
  };
  const auto slot_of = [&](int turn) { return turn / each * teams + team; };
  const auto ends_slot = [&](int turn) { return (turn + 1) % each == 0 || turn + 1 == turns; };

  const auto begin = [&] {  // called after the first loads of data that is already there
    if (p.early) call.wait_previous();
    call.begin();
  };

  if (sends) {
    const auto row = [&](int turn, int r) { return int64_t(r) * p.tokens + piece(turn).t; };
    const auto is_one = [&](int turn) { return turn < turns && piece(turn).t < p.tokens; };
    const int other = me == 0 ? 1 : 0;  // the first of the other ranks
    Slots next = is_one(0) ? source.slots(row(0, other)) : Slots{-1, 0, 0.f};
    begin();
    for (int turn = 0; turn < turns; ++turn) {
      if (is_one(turn)) {
        const Piece at = piece(turn);
        for (int r = other; r < ranks;) {
          const Slots now = next;
          const int after = r + 1 == me ? r + 2 : r + 1;
          if (after < ranks) {  // these loads run while the rows of this one are read
            next = source.slots(row(turn, after));
          } else if (is_one(turn + 1)) {
            next = source.slots(row(turn + 1, other));
          }
          if (__any_sync(~0u, now.id >= 0)) {
            columns(at, [&](int c) {
              const uint4 u = source.at(now, row(turn, r), min(c, units - 1) * kCount);
              if (c >= units) return;
              const int64_t i = int64_t(at.t) * units + c;
              if constexpr (kWords) {
                call.store_words(r, 2 * i, u);
              } else {
                *reinterpret_cast<uint4*>(call.part(r, me, 16 * i)) = u;
              }
            });
          }
          r = after;
        }
      }
      if (!ends_slot(turn)) continue;
      if constexpr (!kWords) {
        call.send_flags(slot_of(turn));
      } else if (ranks > 2) {
        call.send_flags_alone(slot_of(turn));
      }
    }
  } else {
    const auto row = [&](int turn) { return int64_t(me) * p.tokens + piece(turn).t; };
    const auto is_one = [&](int turn) { return turn < turns && piece(turn).t < p.own; };
    Own next;
    if (is_one(0)) next.load(p, source, piece(0).t);
    begin();
    bool waited = kWords && ranks == 2;
    const auto arrived = [&](int turn) {
      if (waited) return;
      call.wait_flags(slot_of(turn));
      waited = true;
    };
    for (int turn = 0; turn < turns; ++turn) {
      const Own now = next;
      if (is_one(turn + 1)) next.load(p, source, piece(turn + 1).t);
      if (is_one(turn)) {
        const Piece at = piece(turn);
        columns(at, [&](int c) {
          const int within = min(c, units - 1);
          const int64_t i = int64_t(at.t) * units + within;
          uint4 own = make_uint4(0, 0, 0, 0);
          if (now.from >> me & 1) own = source.at(now.slots, row(turn), within * kCount);
          arrived(turn);
          float sum[kCount] = {};
          for (int r = 0; r < ranks; ++r) {
            if (!(now.from >> r & 1)) continue;
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
        });
      }
      if (ends_slot(turn)) {
        arrived(turn);
        waited = kWords && ranks == 2;
      }
    }
  }
  call.end();
}

template <class Source, Type type>
int start(const ReduceParams& p, void* stream) {
  const int units = p.columns / Values<type>::kCount;
  if (p.words) {
    const int64_t pieces = int64_t(p.tokens) * ((units + kWordThreads - 1) / kWordThreads);
    return launch(reduce<Source, type, true>, 2 * at_most(pieces, p.blocks / 2), kWordThreads, stream, p);
  }
  const int times = (units + kThreads - 1) / kThreads, threads = (units + 32 * times - 1) / (32 * times) * 32;
  return launch(reduce<Source, type, false>, 2 * at_most(p.tokens, p.blocks / 2), threads, stream, p);
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
