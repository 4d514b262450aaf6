// A block of a launch, which is what the parts of the emulator share.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "machine.h"

namespace emulator {

constexpr int kNamedBarriers = 16;

struct Product {
  float* d;
  const uint32_t* a;
  uint64_t descriptor;
  int keep, tokens;
  Type type;
};

struct Store {
  const CUtensorMap* map;
  uint32_t from;
  int x, y, z;
};

// cp.async: of 16 bytes, those behind the first `bytes` are zeros.
struct Copy {
  uint32_t to;
  const void* from;
  int bytes;  // that are read; the rest of `size` become zeros
  uint32_t size;
};

struct Load {
  const CUtensorMap* map;  // null: `bytes` from `from`, to the same block
  uint32_t to, barrier;
  int x, y;
  uint32_t blocks;
  int ctas = 1;  // as in .cta_group
  const void* from = nullptr;
  uint32_t bytes = 0;
};

// What clusterlaunchcontrol.try_cancel writes; programs may not know its bits.
struct Response {
  static constexpr uint32_t kCome = 0x5EED0000;
  uint32_t come, cancelled, first_block, unused;
};
static_assert(sizeof(Response) == 16);

// A response on its way to a block of the cluster.
struct Answer {
  Response response;
  uint32_t to, barrier, rank;
};

constexpr uint32_t kOfEvenBlock = 1u << 31;  // in the address of a barrier

// A copy to tensor memory, a product, or a commit, whose barrier is `d` in each of `blocks`.
struct TensorWork {
  enum Kind { kCopy, kMultiply, kCommit } kind;
  uint32_t d, instruction, a_scales, b_scales;
  uint64_t a, b;
  bool keep;
  TensorKind product;
  uint8_t ctas, blocks;
};

struct TensorLoad {
  uint32_t address;
  uint32_t* to;
  int columns;
};

constexpr int kLanes = 128, kTensorColumns = 512;

class TensorMemory {
 public:
  uint32_t* at(uint32_t address, uint32_t lane, uint32_t column);  // null beyond what is allocated
  void allocate(uint32_t columns, int ctas);
  void free() { allocated_ = 0; }
  uint32_t allocated() const { return allocated_; }
  int ctas() const { return ctas_; }

 private:
  uint32_t allocated_ = 0;
  int ctas_ = 0;
  uint32_t cells_[kLanes][kTensorColumns];
};

// An operand of a product. k_first: its values are [K][rows], and not [rows][K].
struct Operand {
  uint64_t descriptor;
  uint32_t scales;
  int first_scale;
  TensorKind kind;
  uint32_t type;
  int rows;
  bool k_first;
};

// Until *counter is not `seen`; with none, until the barrier's phase of that parity is over.
struct Waiting {
  const uint64_t* counter = nullptr;
  uint64_t seen = 0;
  bool barrier = false;
  uint32_t address = 0, parity = 0;
};

struct Warp {
  uint64_t exchanges = 0;
  int arrived = 0, size = 0, live = 0, first = 0;
  std::pair<size_t, void (*)(Slots)> meets;  // what the lanes that have come called exchange with
  alignas(16) uint8_t slots[2][kWarp][kSlot];
  bool progress = false;
};

struct Lane {
  uint3 thread;
  Warp* warp = nullptr;
  Waiting waiting;
  bool begun = false, ended = false;
  jmp_buf here;
  char* stack = nullptr;
  std::deque<Product> products;
  std::deque<int> product_groups;  // products of each that was committed
  int uncommitted = 0;
  uint64_t cluster_phase = 0;  // of the cluster's barrier, where this thread arrived last
  std::deque<std::vector<Store>> store_groups;
  std::vector<Store> stores;
  std::deque<std::vector<Copy>> copy_groups;
  std::vector<Copy> copies;
  std::vector<TensorLoad> tensor_loads;
  bool fenced = true;        // tcgen05 may follow the last wait
  bool tensor_read = false;  // tensor memory was read after the last fence before an arrival
  bool stored = false;       // shared memory was written by store_shared after the last fence
  bool queried = false;      // a response was read after the last fence
};

// An mbarrier, in its eight bytes of shared memory.
struct Barrier {
  uint64_t phase : 1, pending : 12, expected : 12;
  int64_t bytes : 39;
};
static_assert(sizeof(Barrier) == 8);

class Block;

// The clusters of a launch that have not started.
class Pending {
 public:
  explicit Pending(uint32_t clusters);
  bool take_first(uint32_t& cluster);
  bool take_last(uint32_t& cluster);

 private:
  std::mutex mutex_;
  std::deque<uint32_t> clusters_;
};

struct Cluster {
  Pending& pending;
  std::vector<Block*> blocks;
  std::mutex mutex;  // of all mbarriers
  uint64_t syncs = 0, synced = 0;
};

// Of a launch: counted whenever something that a fiber may wait for has come about.
struct Progress {
  std::atomic<uint64_t> count{0};
  std::atomic<bool> failed{false};
};

// Of a block's fibers. They are kept: fresh pages cost more than most kernels.
class Stacks {
 public:
  Stacks();
  ~Stacks();
  char* of(size_t lane) const;

 private:
  char* memory_;
};

class Block {
 public:
  Block(const Shape& shape, const std::function<void()>& kernel, Cluster& cluster, uint32_t rank, uint3 index,
        Progress& progress, uint32_t seed);
  void run();

  Barrier& barrier(uint32_t address) { return *reinterpret_cast<Barrier*>(memory_ + address); }
  void arrive(uint32_t address, uint32_t expected_bytes);
  void complete_bytes(uint32_t address, uint32_t bytes);
  bool over(uint32_t address, uint32_t parity);

  uint8_t* memory() { return memory_; }
  bool holds(uint64_t address, uint64_t bytes) const { return address + bytes <= shared_bytes_; }
  void progressed() { ++progress_.count; }
  bool has_work() const { return !loads_.empty() || !tensor_work_.empty() || !answers_.empty(); }
  void fail(const char* what);
  bool chance(uint32_t in) { return random_() % in == 0; }
  void wait(const Waiting& waiting);
  void store(const Store& store);
  void copy(const Copy& copy);
  Block& paired(int rank) { return *cluster_.blocks[(rank_ & ~1) + rank]; }
  void run_tensor_work();

  Place place_;
  Cluster& cluster_;
  uint32_t rank_;
  Lane* lane_ = nullptr;  // that runs
  std::vector<Load> loads_;
  std::vector<Answer> answers_;
  bool refused_ = false;  // a thread has read that no cluster was cancelled
  std::deque<TensorWork> tensor_work_;
  Lane* tensor_thread_ = nullptr;  // that starts it
  TensorMemory tensor_;
  std::atomic<bool> ended_{false};
  bool late_;  // operands and results of the asynchronous units are touched as late as they may be
  struct {
    int arrived = 0;
    uint64_t times = 0;
  } named_[kNamedBarriers];

 private:
  static void enter();
  void resume(Lane& lane);
  bool ready(Lane& lane);
  bool step(Warp& warp);
  void load(size_t which);
  void answer(size_t which);
  void run_something();
  void run_copy(const TensorWork& work, Block& to);
  void run_multiply(const TensorWork& work);
  bool read_operand(const Operand& operand, Block& codes, Block& scales, int first_row, int rows,
                    std::vector<double>& to);

  const std::function<void()>& kernel_;
  Progress& progress_;
  std::mt19937 random_;
  size_t shared_bytes_;
  std::unique_ptr<uint8_t[]> held_;
  uint8_t* memory_;
  std::vector<Warp> warps_;
  std::vector<Lane> lanes_;
  Stacks stacks_;
  ucontext_t begin_;
  jmp_buf scheduler_;
};

// Where the byte of an address in shared memory is if rows are swizzled over 128 or 64 bytes (else 0).
inline uint32_t swizzled(uint32_t address, uint32_t swizzle) {
  if (swizzle == 128) return address ^ (address >> 7 & 7) << 4;
  if (swizzle == 64) return address ^ (address >> 7 & 3) << 4;
  return address;
}

extern thread_local Block* block;  // that this thread of the host runs

}  // namespace emulator
