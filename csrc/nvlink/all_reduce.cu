// All-reduce. All ranks get the same bits, because each rank adds the parts of all ranks in the order of the
// ranks.
#include "launch.h"
#include "protocol.cuh"
#include "values.cuh"

namespace fp4::nvlink {
namespace {

constexpr int kThreads = 512, kWordThreads = 128;

// The sum of a unit over all ranks. `own` is this rank's unit, `from(r)` the unit that rank r sent.
template <Type type, class From>
__device__ __forceinline__ uint4 total(const AllReduceParams& p, const uint4& own, const From& from) {
  float sum[Values<type>::kCount] = {};
  for (int r = 0; r < p.space.ranks; ++r) Values<type>::add(sum, r == p.space.rank ? own : from(r), 1.f);
  return Values<type>::pack(sum);
}

template <Type type>
__global__ void __launch_bounds__(kWordThreads) all_reduce_words(const __grid_constant__ AllReduceParams p) {
  const Call call(p.space, kAllReduce, p.signature);
  call.begin();
  const int me = p.space.rank, ranks = p.space.ranks;
  const auto* x = static_cast<const uint4*>(p.x);
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = first; i < p.units; i += stride)
    for (int r = 0; r < ranks; ++r)
      if (r != me) call.store_words(r, 2 * i, x[i]);
  for (int64_t i = first; i < p.units; i += stride)
    static_cast<uint4*>(p.out)[i] = total<type>(p, x[i], [&](int r) { return call.wait_words(r, 2 * i); });
  call.end();
}

// Divides the units into slots. All ranks have the same slots.
struct Slots {
  int64_t units, each;
  int count;

  __device__ Slots(int64_t units, int blocks, int turns) : units(units) {
    const int64_t wanted = (units + kThreads - 1) / kThreads;
    const int most = min(turns, kSlots / 2 / blocks);
    count = int(min((wanted + blocks - 1) / blocks, int64_t(most))) * blocks;
    each = (units + count - 1) / count;
  }
  __device__ int64_t begin(int slot) const { return min(slot * each, units); }
};

template <Type type>
__global__ void __launch_bounds__(kThreads) all_reduce_flags(const __grid_constant__ AllReduceParams p) {
  const Call call(p.space, kAllReduce, p.signature);
  call.begin();
  const int me = p.space.rank, ranks = p.space.ranks, blocks = gridDim.x;
  const auto* x = static_cast<const uint4*>(p.x);
  auto* out = static_cast<uint4*>(p.out);
  const Slots slots(p.units, blocks, p.turns);
  for (int slot = blockIdx.x; slot < slots.count + blocks; slot += blocks) {
    if (slot < slots.count) {
      const int64_t end = slots.begin(slot + 1);
      for (int64_t i = slots.begin(slot) + threadIdx.x; i < end; i += kThreads) {
        const uint4 u = x[i];
        for (int r = 0; r < ranks; ++r)
          if (r != me) *reinterpret_cast<uint4*>(call.part(r, me, 16 * i)) = u;
      }
      call.send_flags(slot);
    }
    const int before = slot - blocks;
    if (before < 0) continue;
    call.wait_flags(before);
    const int64_t end = slots.begin(before + 1);
    for (int64_t i = slots.begin(before) + threadIdx.x; i < end; i += kThreads)
      out[i] = total<type>(p, x[i], [&](int r) { return load_data(call.part(me, r, 16 * i)); });
  }
  call.end();
}

// Reduces in two steps: each rank adds up its share of a slot, then sends the sum to the others.
template <Type type>
__global__ void __launch_bounds__(kThreads) all_reduce_twice(const __grid_constant__ AllReduceParams p) {
  const Call call(p.space, kAllReduce, p.signature);
  call.begin();
  const int me = p.space.rank, ranks = p.space.ranks, blocks = gridDim.x;
  const auto* x = static_cast<const uint4*>(p.x);
  auto* out = static_cast<uint4*>(p.out);
  const Slots slots(p.units, blocks, p.turns);
  const auto share = [&](int slot, int r) {
    const int64_t begin = slots.begin(slot), n = slots.begin(slot + 1) - begin;
    return begin + n * r / ranks;
  };
  for (int slot = blockIdx.x; slot < slots.count; slot += blocks) {
    for (int r = 0; r < ranks; ++r) {
      if (r == me) continue;
      for (int64_t i = share(slot, r) + threadIdx.x; i < share(slot, r + 1); i += kThreads)
        *reinterpret_cast<uint4*>(call.part(r, me, 16 * i)) = x[i];
    }
    call.send_flags(slot);
    call.wait_flags(slot);
    // A rank writes its sum to the place in the receiver's buffer where it would send its own part of that
    // share. Nobody else uses that place: only the sum's owner reads parts of that share.
    for (int64_t i = share(slot, me) + threadIdx.x; i < share(slot, me + 1); i += kThreads) {
      const uint4 u = total<type>(p, x[i], [&](int r) { return load_data(call.part(me, r, 16 * i)); });
      out[i] = u;
      for (int r = 0; r < ranks; ++r)
        if (r != me) *reinterpret_cast<uint4*>(call.part(r, me, 16 * i)) = u;
    }
    call.send_flags(kSlots / 2 + slot);
    call.wait_flags(kSlots / 2 + slot);
    for (int r = 0; r < ranks; ++r) {
      if (r == me) continue;
      for (int64_t i = share(slot, r) + threadIdx.x; i < share(slot, r + 1); i += kThreads)
        out[i] = load_data(call.part(me, r, 16 * i));
    }
  }
  call.end();
}

template <Type type>
int start(const AllReduceParams& p, void* stream) {
  if (p.words)
    return launch(all_reduce_words<type>, at_most((p.units + kWordThreads - 1) / kWordThreads, p.blocks),
                  kWordThreads, stream, p);
  const int blocks = at_most((p.units + kThreads - 1) / kThreads, p.blocks);
  return launch(p.two_steps ? all_reduce_twice<type> : all_reduce_flags<type>, blocks, kThreads, stream, p);
}

}  // namespace
}  // namespace fp4::nvlink

extern "C" int fp4_nvlink_all_reduce(const fp4::nvlink::AllReduceParams* p, void* stream) {
  using namespace fp4::nvlink;
  if (p->type == kBFloat16) return start<kBFloat16>(*p, stream);
  if (p->type == kFloat16) return start<kFloat16>(*p, stream);
  return start<kFloat32>(*p, stream);
}

extern "C" int fp4_nvlink_sizes(int which) {
  using namespace fp4::nvlink;
  const int sizes[] = {sizeof(Workspace), sizeof(GatherParams), sizeof(ReduceParams), sizeof(AllReduceParams),
                       sizeof(Failure)};
  return which >= 0 && which < 5 ? sizes[which] : -1;
}
