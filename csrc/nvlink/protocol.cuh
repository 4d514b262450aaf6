// One call of all ranks: its epoch, the ranks that have begun it, and waits with a timeout.
#pragma once

#include "interface.h"
#include "memory.cuh"

namespace fp4::nvlink {

// The epoch after e. Memory is initialised with 0, so 0 is not an epoch. After the largest number, which is
// odd, comes 2: odd and even epochs alternate.
__device__ __forceinline__ uint32_t epoch_after(uint32_t e) { return e + 1 == 0 ? 2 : e + 1; }

struct Call {
  const Workspace& space;
  Kind kind;
  uint32_t signature, epoch, parity;

  // early: the kernel before this one began only after the previous call had ended, so the counters of that
  // call can be read at once. The caller then calls wait_previous() itself.
  __device__ Call(const Workspace& w, Kind kind, uint32_t signature, bool early = false)
      : space(w), kind(kind), signature(signature) {
    if (!early) wait_previous();
    epoch = epoch_after(uint32_t(*static_cast<volatile int32_t*>(w.counters)));
    parity = epoch & 1;
  }

  // Waits for the previous kernel, and lets the next one begin. This is safe, because the next kernel waits
  // for the results of this call that it reads.
  __device__ __forceinline__ void wait_previous() const {
    wait_previous_kernel();
    release_next_kernel();
  }

  // --- places ---

  __device__ uint64_t* header(int at, int from) const {
    return reinterpret_cast<uint64_t*>(space.base[at] + space.headers) + parity * kMaxRanks + from;
  }
  __device__ uint32_t* flag(int at, int from, int slot) const {
    return reinterpret_cast<uint32_t*>(space.base[at] + space.flags) + (parity * kMaxRanks + from) * kSlots +
           slot;
  }
  __device__ uint8_t* word(int at, int from, int64_t i) const {
    return space.base[at] + space.words + (parity * space.ranks + from) * space.word_stride + i * 16;
  }
  __device__ uint8_t* part(int at, int from, int64_t byte) const {
    return space.base[at] + space.parts + (parity * space.ranks + from) * space.part_stride + byte;
  }

  // --- waits ---

  [[noreturn]] __device__ void fail(Reason reason, int rank, uint32_t theirs) const {
    if (atomicAdd(space.counters + 2, 1) == 0) {
      volatile Failure* f = space.failure;
      f->kind = kind;
      f->rank = rank;
      f->epoch = epoch;
      f->theirs = theirs;
      f->ours = signature;
      __threadfence_system();
      f->reason = reason;
    }
    abort_kernel();
    __builtin_unreachable();
  }

  // Waits until ready() is true, for something that `rank` sends.
  template <class Ready>
  __device__ __forceinline__ void wait(int rank, const Ready& ready) const {
    if (ready()) return;
    const int64_t start = nanoseconds();
    for (uint32_t tries = 1; !ready(); ++tries) {
      keep_waiting();
      if (tries % 256 == 0 && nanoseconds() - start > space.patience) fail(kLate, rank, 0);
    }
  }

  __device__ __forceinline__ void wait_flag(int from, int slot) const {
    const uint32_t* p = flag(space.rank, from, slot);
    wait(from, [&] { return load_acquire(p) == epoch; });
  }

  __device__ __forceinline__ uint2 wait_word(int from, int64_t i) const {
    const uint8_t* p = word(space.rank, from, i);
    uint4 v;
    wait(from, [&] {
      v = load_word(p);
      return v.y == epoch && v.w == epoch;
    });
    return make_uint2(v.x, v.z);
  }

  // Sends 16 bytes in two words.
  __device__ __forceinline__ void store_words(int to, int64_t i, const uint4& u) const {
    store_word(word(to, space.rank, i), make_uint2(u.x, u.y), epoch);
    store_word(word(to, space.rank, i + 1), make_uint2(u.z, u.w), epoch);
  }
  __device__ __forceinline__ uint4 wait_words(int from, int64_t i) const {
    const uint2 a = wait_word(from, i), b = wait_word(from, i + 1);
    return make_uint4(a.x, a.y, b.x, b.y);
  }

  // Sets this slot's flag on the other ranks. Once they see it, everything that this block stored for them
  // before is visible.
  __device__ __forceinline__ void send_flags(int slot) const {
    __syncthreads();
    const int r = threadIdx.x;
    if (r < space.ranks && r != space.rank) store_release(flag(r, space.rank, slot), epoch);
  }
  // Tells the others that this block has read what gather received. What this block stored for them may
  // become visible later than the flag.
  __device__ __forceinline__ void send_flags_alone(int slot) const {
    __syncthreads();
    const int r = threadIdx.x;
    if (r < space.ranks && r != space.rank) store_relaxed(flag(r, space.rank, slot), epoch);
  }
  __device__ __forceinline__ void wait_flags(int slot) const {
    const int r = threadIdx.x;
    if (r < space.ranks && r != space.rank) wait_flag(r, slot);
    __syncthreads();
  }

  // --- begin and end ---

  // The first block tells the other ranks that this rank has begun.
  __device__ __forceinline__ void begin() const {
    const int r = threadIdx.x;
    if (blockIdx.x == 0 && r < space.ranks && r != space.rank)
      store_relaxed(header(r, space.rank), uint64_t(signature) << 32 | epoch);
  }

  // Waits until all other ranks have begun. The last block to end counts the epoch.
  __device__ __forceinline__ void end() const {
    const int r = threadIdx.x;
    if (blockIdx.x == 0 && r < space.ranks && r != space.rank) {
      const uint64_t* p = header(space.rank, r);
      uint64_t v;
      wait(r, [&] { return uint32_t(v = load_relaxed(p)) == epoch; });
      if (uint32_t(v >> 32) != signature) fail(kDiffers, r, uint32_t(v >> 32));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      if (atomicAdd(space.counters + 1, 1) == int(gridDim.x) - 1) {
        space.counters[1] = 0;
        *static_cast<volatile int32_t*>(space.counters) = int32_t(epoch);
      }
    }
  }
};

// The first expert of rank r.
__device__ __forceinline__ int64_t first_expert(int experts, int ranks, int r) {
  return int64_t(experts) * r / ranks;
}

// The rank that has the expert `id`, which is in [0, experts).
__device__ __forceinline__ int owner(int experts, int ranks, int64_t id) {
  return int(((id + 1) * ranks - 1) / experts);
}

// The expert id of a token's slot, or -1 if it is not in [0, experts).
__device__ __forceinline__ int64_t load_id(const void* ids, int ids64, int64_t i, int experts) {
  const int64_t id = ids64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
  return id >= 0 && id < experts ? id : -1;
}

}  // namespace fp4::nvlink
