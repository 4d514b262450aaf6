// A model of what a Hopper GPU does with the kernels of csrc/device and csrc/sm90, for machines without one:
// right results for right kernels, and wrong ones or a deadlock for many wrong ones. It knows no time, and no
// cache.
//
// A thread of a kernel is a fiber; the fibers of a block share a thread of the host, the blocks of a cluster
// run in threads of their own. A fiber runs until it waits: for the other lanes of its warp (exchange), for a
// barrier, for flags in global memory. Which warp goes on then is drawn by chance, and so is when the copy
// engine brings a box, and whether the products that wgmma starts read their operands at once or as late as
// they may. Shared memory begins as NaN.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulator {

// ---- where the calling fiber is ----

struct Place {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
const Place& place();

// ---- shared memory and barriers ----

uint8_t* shared_memory();
uint32_t shared_address(const void* pointer);  // in bytes from shared_memory()

void barrier_init(uint32_t barrier, uint32_t arrivals);
void barrier_arrive(uint32_t barrier, uint32_t expected_bytes = 0);
void barrier_arrive_remote(uint32_t barrier, uint32_t rank, uint32_t expected_bytes = 0);
void barrier_wait(uint32_t barrier, uint32_t parity);
bool barrier_test(uint32_t barrier, uint32_t parity);

// bar.sync, or bar.arrive, which does not wait.
void named_barrier(int id, int threads, bool waits);

uint32_t cluster_rank();
void cluster_arrive();
void cluster_wait();

// Into the shared memory of a block of the cluster, whose barrier is told.
void store_cluster(uint32_t address, uint32_t barrier, uint32_t rank, const void* from, uint32_t size);

// Cluster launch control. The response comes later, to each block of the cluster or only to this one.
void try_cancel(uint32_t smem, uint32_t barrier, bool multicast = true);
bool query_cancel(uint32_t smem, uint32_t& first_block);

// Lets other fibers run: for loops that wait for memory.
void yield();

// ---- warps ----

constexpr int kWarp = 32;
constexpr size_t kSlot = 32;  // bytes that a lane shows the others

using Slots = const uint8_t (*)[kSlot];

// All lanes come, each with `size` bytes; the last one to come runs `last` before any goes on. What they
// brought can be read until the lane's next exchange but one.
Slots exchange(const void* value, size_t size, void (*last)(Slots) = nullptr);

// ---- tensor cores ----

enum class Type { kE4m3, kFloat16, kBFloat16 };

// mma.sync.m16n8k16. d: four floats.
void mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, Type type);

// mma.sync.m16n8k32 of int8. d: four integers.
void mma_int8(int* d, const uint32_t* a, uint32_t b0, uint32_t b1);

// mma.sync.m16n8k64 of e2m1 with block scales, of which only the lanes that the instruction reads count: four
// e4m3 without a sign, or two e8m0. d: four floats. The sum is exact, and rounded once.
void mma_scaled(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, uint32_t sfa, uint32_t sfb, bool e4m3);

// ldmatrix.x4.
void load_matrices(uint32_t address, uint32_t (&m)[4]);

// wgmma.mma_async.m64n{tokens}, A from registers, B in rows of 128 bytes, swizzled. a and d are used until
// the wait that says that the products are over.
void wgmma(float* d, const uint32_t* a, uint64_t descriptor, int keep, int tokens, Type type);
void wgmma_commit();
void wgmma_wait(int pending);

// ---- tensor memory, and tensor cores that one thread feeds (tcgen05) ----

// tcgen05.mma's kinds with block scales: of K 64, with four or two scales, or of K 32 with one.
enum class TensorKind : uint8_t { kMxf4Nvf4By16, kMxf4Nvf4By32, kMxf8f6f4 };

// ctas: as in the instructions' .cta_group. A pair is an even block of a cluster and the next one.
struct TensorProduct {
  uint32_t d, instruction, a_scales, b_scales;
  uint64_t a, b;
  bool keep;
  TensorKind kind;
  int ctas;
};

void tensor_allocate(uint32_t smem, uint32_t columns, int ctas);
void tensor_free(uint32_t address, uint32_t columns, int ctas);
void tensor_fence_before();
void tensor_fence_after();
void tensor_load(uint32_t address, uint32_t* r, int columns);
void tensor_load_wait();
void tensor_copy(uint32_t address, uint64_t descriptor, int ctas);
void tensor_multiply(const TensorProduct& product);
void tensor_commit(uint32_t barrier, int ctas, uint32_t blocks);

// A store that other engines see after fence_async_proxy.
void store_shared(uint32_t smem, const void* from, uint32_t bytes);
void fence_async_proxy();

// ---- the copy engine ----

void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, uint32_t blocks);
void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
// With .cta_group: for two CTAs, the barrier may be leading_barrier's.
void load_box_of_group(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int ctas);
uint32_t leading_barrier(uint32_t barrier);  // the address of the even block's
void store_box(const CUtensorMap* map, uint32_t from, int x, int y, int z);
void store_commit();
void store_wait(int pending);

// A thread's own copies of 16 bytes.
void copy(uint32_t to, const void* from, int bytes, uint32_t size = 16);
void copy_commit();
void copy_wait(int pending);

// ---- launches, which have ended when they return ----

struct Shape {
  dim3 grid, block;
  size_t shared;
  unsigned cluster;
};
cudaError_t launch(const Shape& shape, const std::function<void()>& kernel);

// What the order of events is drawn from; of blocks that run at the same time the host has a say, too.
void set_seed(uint32_t value);

// How long a launch may come no further before that counts as a deadlock.
void set_patience(int seconds);

}  // namespace emulator
