// Runs experts in host memory, with slots on the GPU for the experts in use. The GPU itself decides which
// experts a call needs, which of them have a slot, and which slots the other experts are copied to. The host
// reads nothing, so CUDA graphs can replay a call with other routings.
//
// There are three kernels. `plan` (one thread block) reads the routing and the state of the cache. `fetch`
// copies experts without a slot from mapped host memory. `assign` replaces experts' ids by slots' numbers. If
// a call needs more experts than there are slots, it has several rounds, each with a fetch, an assign and a
// product.
#include <algorithm>
#include <cstdint>

#include "launch.cuh"
#include "ptx.cuh"
#include "slots.h"

namespace fp4::device {
namespace {

constexpr int kMostThreads = 1024;  // of `plan`, which has one for each expert and one for each slot
constexpr int kWarps = kMostThreads / 32;
constexpr int kIdsAtOnce = 8;     // loads of a thread under way together
constexpr uint32_t kEmpty = ~0u;  // the age of a slot without an expert

__device__ __forceinline__ int read_id(const SlotPlan& p, int pair) {
  const int64_t id = p.wide ? static_cast<const int64_t*>(p.ids)[pair] : static_cast<const int*>(p.ids)[pair];
  return id >= 0 && id < p.experts ? int(id) : -1;
}

// The experts that a call needs are ordered: experts with a slot first, then the others, each by number. A
// round takes the next experts of this order, one for each slot. In the first round, experts with a slot keep
// it. The others get the slots whose experts were not used for the longest time: empty slots first, and for
// equal ages the lower number. In later rounds, the position of an expert in the order gives its slot. With
// `halves`, each round becomes two: one for the slots below slots / 2, and one for the other slots.
__global__ void __launch_bounds__(kMostThreads) plan_kernel(const SlotPlan p, const bool halves) {
  __shared__ int wanted[kMostThreads];    // by expert
  __shared__ uint32_t age[kMostThreads];  // by slot; 0: its expert is wanted
  __shared__ uint8_t occupied[kMostThreads], taken[kMostThreads];
  __shared__ int victims[kMostThreads];  // slots that may be taken, oldest first
  __shared__ int totals[kWarps];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, warps = blockDim.x / 32;
  int* slot_of = p.state;                                             // [experts]
  auto* last_use = reinterpret_cast<uint32_t*>(p.state + p.experts);  // [slots]
  auto* counters = reinterpret_cast<uint32_t*>(p.state + p.experts + p.slots);
  const uint32_t now = counters[kSlotClock] + 1;

  wanted[tid] = occupied[tid] = taken[tid] = 0;
  __syncthreads();
  for (int first = tid; first < p.pairs; first += kIdsAtOnce * blockDim.x) {
    int ids[kIdsAtOnce];
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      const int pair = first + i * int(blockDim.x);
      ids[i] = pair < p.pairs ? read_id(p, pair) : -1;
    }
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i)
      if (ids[i] >= 0) wanted[ids[i]] = 1;
  }
  int slot = tid < p.experts ? slot_of[tid] : -1;
  if (slot < 0 || slot >= p.slots) slot = -1;
  if (slot >= 0) occupied[slot] = 1;
  __syncthreads();
  const bool want = tid < p.experts && wanted[tid] != 0, hit = want && slot >= 0, miss = want && slot < 0;
  if (tid < p.slots) age[tid] = occupied[tid] ? max(1u, now - last_use[tid]) : kEmpty;

  // Exclusive sums over the experts before this one: hits in the lower half of a word, misses in the upper.
  const int mine = int(hit) + (int(miss) << 16);
  int scan = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, scan, d);
    if (lane >= d) scan += other;
  }
  if (lane == 31) totals[warp] = scan;
  __syncthreads();
  int before = scan - mine, all = 0;
  for (int w = 0; w < warps; ++w) {
    if (w < warp) before += totals[w];
    all += totals[w];
  }
  const int hits = all & 0xFFFF, misses = all >> 16, total = hits + misses;
  const int first_misses = min(misses, p.slots - hits);  // that the first round takes
  const int nth_miss = before >> 16, order = hit ? before & 0xFFFF : hits + nth_miss;
  const int turn = order / p.slots;  // a round, or two if `halves`
  if (hit) age[slot] = 0;
  __syncthreads();
  if (tid < p.slots && age[tid] != 0) {
    const uint32_t own = age[tid];
    int older = 0;
    for (int s = 0; s < p.slots; ++s) older += int(age[s] > own || (age[s] == own && s < tid));
    victims[older] = tid;
  }
  __syncthreads();

  for (int r = tid; r < p.rounds; r += blockDim.x) {
    int count = r == 0 ? first_misses : max(0, min(p.slots, total - r * p.slots));
    if (halves) count = 0;  // counted below
    p.fetches[r * (1 + 2 * p.slots)] = count;
  }
  __syncthreads();
  int to = slot;
  if (miss) {
    to = turn == 0 ? victims[nth_miss] : order % p.slots;
    if (turn == 0) taken[to] = 1;
  }
  const int round = halves ? 2 * turn + int(to >= p.slots / 2) : turn;
  if (miss) {
    int* fetch = p.fetches + round * (1 + 2 * p.slots);
    const int at = halves ? atomicAdd(fetch, 1) : turn == 0 ? nth_miss : to;
    fetch[1 + 2 * at] = tid;
    fetch[2 + 2 * at] = to;
  }
  __syncthreads();

  if (tid < p.experts) {
    p.place[tid] = want ? round * p.slots + to : -1;
    if (want) {
      // Does a later round put another expert there?
      const bool stays = turn == 0 ? p.slots + to >= total : order + p.slots >= total;
      slot_of[tid] = stays ? to : -1;
      if (stays) last_use[to] = now;
    } else {
      slot_of[tid] = slot >= 0 && !taken[slot] ? slot : -1;
    }
  }
  if (tid == 0) {
    counters[kSlotClock] = now;
    counters[kSlotWanted] += total;
    counters[kSlotFetched] += misses;
  }
}

constexpr int kFetchThreads = 256;
constexpr int kAtOnce = 4;  // loads of a thread under way together
constexpr int kChunk = kFetchThreads * kAtOnce * 16;

__device__ __forceinline__ uint4 load_once(const uint4* p) { return load_stream(p); }
template <class T>
__device__ __forceinline__ T load_once(const T* p) {
  return *p;
}

template <class T>
__device__ __forceinline__ void copy(const uint8_t* from, uint8_t* to, int bytes) {
  const auto* source = reinterpret_cast<const T*>(from);
  auto* target = reinterpret_cast<T*>(to);
  const int n = bytes / int(sizeof(T));
  for (int first = threadIdx.x; first < n; first += kAtOnce * kFetchThreads) {
    T v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * kFetchThreads < n) v[i] = load_once(source + first + i * kFetchThreads);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * kFetchThreads < n) target[first + i * kFetchThreads] = v[i];
  }
}

// Thread blocks take chunks of all experts of the round in turn.
__global__ void __launch_bounds__(kFetchThreads)
    fetch_kernel(const SlotParts parts, const int* fetch, const int chunks) {
  const int count = fetch[0];
  const int64_t end = int64_t(count) * chunks;
  for (int64_t at = blockIdx.x; at < end; at += gridDim.x) {
    const int item = int(at / chunks);
    const int expert = fetch[1 + 2 * item], slot = fetch[2 + 2 * item];
    int64_t offset = at % chunks;  // in chunks of this expert, then of the part
    SlotPart part;
    bool found = false;
#pragma unroll
    for (int i = 0; i < kMaxSlotParts; ++i) {
      const int64_t its = (parts.part[i].bytes + kChunk - 1) / kChunk;
      if (!found && offset < its) {
        part = parts.part[i];
        found = true;
      }
      if (!found) offset -= its;
    }
    const int64_t begin = offset * kChunk;
    const auto* from = part.host + expert * part.bytes + begin;
    auto* to = part.slots + slot * part.bytes + begin;
    const int bytes = int(min(part.bytes - begin, int64_t(kChunk)));
    const uint64_t any = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) | bytes;
    if (any % 16 == 0) {
      copy<uint4>(from, to, bytes);
    } else if (any % 4 == 0) {
      copy<uint32_t>(from, to, bytes);
    } else {
      copy<uint8_t>(from, to, bytes);
    }
  }
}

constexpr int kCollectThreads = 128;

// Rows of a round's experts go to where their pair is.
__global__ void __launch_bounds__(kCollectThreads)
    collect_kernel(const int* ids, const int* position, const uint8_t* made, uint8_t* rows,
                   const int64_t bytes) {
  const int pair = blockIdx.x;
  if (ids[pair] < 0) return;
  const uint8_t* from = made + int64_t(position != nullptr ? position[pair] : pair) * bytes;
  uint8_t* to = rows + int64_t(pair) * bytes;
  if (bytes % 16 == 0) {
    for (int64_t i = threadIdx.x; i < bytes / 16; i += kCollectThreads)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  } else {
    for (int64_t i = threadIdx.x; i < bytes / 2; i += kCollectThreads)
      reinterpret_cast<uint16_t*>(to)[i] = reinterpret_cast<const uint16_t*>(from)[i];
  }
}

// A second stream of each thread of the host, and an event, on each device. They live as long as the process.
struct Side {
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
};
constexpr int kMostDevices = 64;
thread_local Side sides[kMostDevices];

cudaError_t find_side(Side*& side) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && device >= kMostDevices) error = cudaErrorInvalidDevice;
  if (error != cudaSuccess) return error;
  side = &sides[device];
  if (side->event == nullptr) error = cudaEventCreateWithFlags(&side->event, cudaEventDisableTiming);
  if (error == cudaSuccess && side->stream == nullptr)
    error = cudaStreamCreateWithFlags(&side->stream, cudaStreamNonBlocking);
  return error;
}

// Makes `after` wait for the work that was given to `before` so far.
cudaError_t order(cudaStream_t before, cudaStream_t after, cudaEvent_t event) {
  const cudaError_t error = cudaEventRecord(event, before);
  return error != cudaSuccess ? error : cudaStreamWaitEvent(after, event, 0);
}

constexpr int kAssignThreads = 256;

__global__ void __launch_bounds__(kAssignThreads) assign_kernel(const SlotPlan p, const int round, int* to) {
  wait_previous_kernel();
  release_next_kernel();
  const int pair = blockIdx.x * kAssignThreads + threadIdx.x;
  if (pair >= p.pairs) return;
  const int id = read_id(p, pair), place = id >= 0 ? p.place[id] : -1;
  to[pair] = place >= 0 && place / p.slots == round ? place % p.slots : -1;
}

// Not `dependent`, because the call before uses the memory that this kernel writes until that call has ended.
int launch_plan(const SlotPlan& plan, bool halves, void* stream) {
  const int most = std::max(plan.experts, plan.slots);
  if (most > kMostThreads || plan.slots < 1 || plan.rounds < 1) return cudaErrorInvalidValue;
  const int least = plan.pairs > 4096 ? kMostThreads : 128;
  const int threads = std::max(least, (most + 31) / 32 * 32);
  return launch_kernel(plan_kernel, {dim3(1), dim3(threads)}, false, static_cast<cudaStream_t>(stream), plan,
                       halves);
}

}  // namespace
}  // namespace fp4::device

using namespace fp4::device;

extern "C" int fp4_kernel_slots_plan(const SlotPlan* plan, void* stream) {
  return launch_plan(*plan, false, stream);
}

// The same with twice as many rounds: for the slots below slots / 2, and for the others. So one half can be
// filled while the other half is multiplied.
extern "C" int fp4_kernel_slots_plan_halves(const SlotPlan* plan, void* stream) {
  return launch_plan(*plan, true, stream);
}

// Copies the experts of a round as planned. Then writes to ids [pairs] the slots of the experts of that
// round, or -1 for experts of other rounds and for ids that belong to no expert. The product after it may
// read weights before it waits for the kernel before it. That kernel is `assign`, so `assign` begins only
// when `fetch` has ended. If `blocks` is 0, nothing is copied; if `ids` is null, no slots are written.
extern "C" int fp4_kernel_slots_fetch(const SlotPlan* plan, const SlotParts* parts, int round, int* ids,
                                      int blocks, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  int64_t chunks = 0;
  for (const SlotPart& part : parts->part) chunks += (part.bytes + kChunk - 1) / kChunk;
  const int* fetch = plan->fetches + int64_t(round) * (1 + 2 * plan->slots);
  if (chunks > 0 && blocks > 0) {
    const int error = launch_kernel(fetch_kernel, {dim3(blocks), dim3(kFetchThreads)}, false, s, *parts,
                                    fetch, int(chunks));
    if (error != 0) return error;
  }
  if (plan->pairs == 0 || ids == nullptr) return 0;
  return launch_kernel(assign_kernel,
                       {dim3((plan->pairs + kAssignThreads - 1) / kAssignThreads), dim3(kAssignThreads)},
                       false, s, *plan, round, ids);
}

// Copies rows of `made` [.., bytes] to `rows` [pairs, bytes], where ids [pairs] name an expert; the row of a
// pair is position[pair], or `pair` if there are no positions.
extern "C" int fp4_kernel_slots_collect(const int* ids, const int* position, const void* made, void* rows,
                                        int pairs, int64_t bytes, void* stream) {
  if (pairs == 0 || bytes == 0) return 0;
  return launch_kernel(collect_kernel, {dim3(pairs), dim3(kCollectThreads)}, false,
                       static_cast<cudaStream_t>(stream), ids, position, static_cast<const uint8_t*>(made),
                       static_cast<uint8_t*>(rows), bytes);
}

// Returns this thread's second stream of the current device. It waits for the work that was given to `stream`
// so far.
extern "C" int fp4_kernel_side_fork(void* stream, void** side) {
  Side* mine = nullptr;
  cudaError_t error = find_side(mine);
  if (error == cudaSuccess) error = order(static_cast<cudaStream_t>(stream), mine->stream, mine->event);
  if (error == cudaSuccess) *side = mine->stream;
  return error;
}

// Makes `stream` wait for the work that was given to the second stream so far.
extern "C" int fp4_kernel_side_join(void* stream) {
  Side* mine = nullptr;
  const cudaError_t error = find_side(mine);
  return error != cudaSuccess ? error : order(mine->stream, static_cast<cudaStream_t>(stream), mine->event);
}
