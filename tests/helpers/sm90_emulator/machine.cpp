// Fibers, blocks, barriers and launches.
#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <thread>

#include "block.h"

namespace emulator {

thread_local Block* block;

namespace {

constexpr size_t kStackBytes = 128 * 1024, kMostThreads = 1024, kMostShared = 227 * 1024;

std::vector<char*>& unused_stacks() {
  static std::vector<char*> all;
  return all;
}

std::mutex stacks_mutex;

std::atomic<uint32_t> seed;     // of the next block's order of events
std::atomic<int> patience{30};  // seconds without any progress
std::atomic<int> requests{0};   // of cluster launch control

uint32_t next_seed() { return seed += 0x9E3779B9; }

}  // namespace

Stacks::Stacks() {
  const std::lock_guard<std::mutex> lock(stacks_mutex);
  if (!unused_stacks().empty()) {
    memory_ = unused_stacks().back();
    unused_stacks().pop_back();
    return;
  }
  void* fresh = mmap(nullptr, kMostThreads * kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (fresh == MAP_FAILED) std::abort();
  memory_ = static_cast<char*>(fresh);
}

Stacks::~Stacks() {
  const std::lock_guard<std::mutex> lock(stacks_mutex);
  unused_stacks().push_back(memory_);
}

char* Stacks::of(size_t lane) const { return memory_ + lane * kStackBytes; }

// ---- blocks ----

Block::Block(const Shape& shape, const std::function<void()>& kernel, Cluster& cluster, uint32_t rank,
             uint3 index, Progress& progress, uint32_t seed)
    : place_{{}, index, shape.block, shape.grid},
      cluster_(cluster),
      rank_(rank),
      kernel_(kernel),
      progress_(progress),
      random_(seed),
      shared_bytes_(shape.shared),
      held_(new uint8_t[shape.shared + 2048]) {
  late_ = chance(2);
  memory_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(held_.get()) + 1023) / 1024 * 1024);
  std::memset(memory_, 0xFF, shared_bytes_);
  const int threads = shape.block.x;
  warps_.resize((threads + kWarp - 1) / kWarp);
  lanes_.resize(threads);
  for (int i = 0; i < threads; ++i) {
    lanes_[i].thread = make_uint3(i, 0, 0);
    lanes_[i].warp = &warps_[i / kWarp];
    lanes_[i].stack = stacks_.of(i);
    ++warps_[i / kWarp].size;
    warps_[i / kWarp].first = i / kWarp * kWarp;
  }
  for (Warp& warp : warps_) warp.live = warp.size;
}

void Block::fail(const char* what) {
  if (!progress_.failed.exchange(true)) {
    std::fprintf(stderr, "emulator: block (%u, %u), thread %u: %s\n", place_.block.x, place_.block.y,
                 lane_ ? lane_->thread.x : 0, what);
  }
}

void Block::enter() {
  Block& b = *block;
  b.kernel_();
  Lane& lane = *b.lane_;
  if (!lane.products.empty()) b.fail("ends before its products");
  if (!lane.store_groups.empty() || !lane.stores.empty()) b.fail("ends before its stores have read");
  lane.ended = true;
  --lane.warp->live;
  b.progressed();
  _longjmp(b.scheduler_, 1);
}

// Until the fiber waits or ends.
void Block::resume(Lane& lane) {
  lane_ = &lane;
  place_.thread = lane.thread;
  if (_setjmp(scheduler_) == 0) {
    if (lane.begun) _longjmp(lane.here, 1);
    lane.begun = true;
    getcontext(&begin_);
    begin_.uc_stack.ss_sp = lane.stack;
    begin_.uc_stack.ss_size = kStackBytes;
    begin_.uc_link = nullptr;
    makecontext(&begin_, &Block::enter, 0);
    setcontext(&begin_);
  }
  lane_ = nullptr;
}

__attribute__((noinline)) void Block::wait(const Waiting& waiting) {
  lane_->waiting = waiting;
  if (_setjmp(lane_->here) == 0) _longjmp(scheduler_, 1);
}

bool Block::ready(Lane& lane) {
  if (lane.ended) return false;
  if (lane.waiting.counter != nullptr) return *lane.waiting.counter != lane.waiting.seen;
  if (lane.waiting.barrier) return over(lane.waiting.address, lane.waiting.parity);
  return true;
}

// Each lane that need not wait goes on until it must. Whether the warp as a whole came any further.
bool Block::step(Warp& warp) {
  warp.progress = false;
  const bool backwards = chance(4);
  for (int i = 0; i < warp.size; ++i) {
    Lane& lane = lanes_[warp.first + (backwards ? warp.size - 1 - i : i)];
    if (ready(lane)) resume(lane);
  }
  return warp.progress;
}

// A load, a response, or the oldest work of the tensor cores.
void Block::run_something() {
  if (!answers_.empty() && (chance(2) || (loads_.empty() && tensor_work_.empty()))) {
    answer(random_() % answers_.size());
  } else if (tensor_work_.empty() || (!loads_.empty() && chance(2))) {
    load(random_() % loads_.size());
  } else {
    run_tensor_work();
  }
}

void Block::run() {
  block = this;
  std::vector<Warp*> order;
  for (Warp& warp : warps_) order.push_back(&warp);
  uint64_t seen = ~uint64_t(0);
  auto since = std::chrono::steady_clock::now();
  while (!progress_.failed) {
    std::shuffle(order.begin(), order.end(), random_);
    bool live = false;
    const uint64_t before = progress_.count;
    for (Warp* warp : order) {
      if (warp->live == 0) continue;
      live = true;
      while (step(*warp) && !chance(8)) {
        if (has_work() && chance(4)) run_something();
      }
      if (has_work() && chance(4)) run_something();
    }
    if (!live) break;
    if (progress_.count != before) continue;
    if (has_work()) {
      run_something();
      continue;
    }
    std::this_thread::yield();
    const auto now = std::chrono::steady_clock::now();
    if (progress_.count != seen) {
      seen = progress_.count;
      since = now;
    } else if (now - since > std::chrono::seconds(patience)) {
      lane_ = nullptr;
      fail("deadlock");
    }
  }
  if (!progress_.failed && !loads_.empty()) fail("the block ends before what it loads has come");
  if (!progress_.failed && !answers_.empty()) fail("the block ends before a response has come");
  if (!progress_.failed && !tensor_work_.empty()) fail("the block ends before its tensor cores are ready");
  if (!progress_.failed && tensor_.allocated() != 0) fail("the block ends with tensor memory");
  ended_ = true;
  block = nullptr;
}

// ---- mbarriers ----

static void check_phase(Barrier& barrier, Block& owner) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.expected;
  owner.progressed();
}

void Block::arrive(uint32_t address, uint32_t expected_bytes) {
  const std::lock_guard<std::mutex> lock(cluster_.mutex);
  Barrier& b = barrier(address);
  if (b.pending == 0) fail("more arrivals than the barrier expects");
  b.bytes += expected_bytes;
  b.pending -= 1;
  check_phase(b, *this);
}

void Block::complete_bytes(uint32_t address, uint32_t bytes) {
  const std::lock_guard<std::mutex> lock(cluster_.mutex);
  Barrier& b = barrier(address);
  b.bytes -= bytes;
  check_phase(b, *this);
}

bool Block::over(uint32_t address, uint32_t parity) {
  const std::lock_guard<std::mutex> lock(cluster_.mutex);
  return barrier(address).phase != (parity & 1);
}

// ---- what fibers call ----

const Place& place() { return block->place_; }

uint8_t* shared_memory() { return block->memory(); }

uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - block->memory());
}

void barrier_init(uint32_t barrier, uint32_t arrivals) {
  block->barrier(barrier) = Barrier{0, arrivals, arrivals, 0};
}

static void check_arrival() {
  const Lane& lane = *block->lane_;
  if (lane.tensor_read) block->fail("no fence between a load of tensor memory and an arrival");
  if (!lane.tensor_loads.empty()) block->fail("arrives before its loads of tensor memory are over");
  if (lane.stored) block->fail("no fence between stores for other engines and an arrival");
  if (lane.queried) block->fail("no fence between a read response and an arrival");
}

void barrier_arrive(uint32_t barrier, uint32_t expected_bytes) {
  check_arrival();
  block->arrive(barrier, expected_bytes);
}

void barrier_arrive_remote(uint32_t barrier, uint32_t rank, uint32_t expected_bytes) {
  check_arrival();
  Block& other = *block->cluster_.blocks[rank];
  if (other.ended_) block->fail("arrives at a block that has ended");
  other.arrive(barrier, expected_bytes);
}

void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!block->over(barrier, parity)) block->wait({nullptr, 0, true, barrier, parity});
  block->lane_->fenced = false;
}

bool barrier_test(uint32_t barrier, uint32_t parity) { return block->over(barrier, parity); }

void named_barrier(int id, int threads, bool waits) {
  auto& named = block->named_[id];
  if (++named.arrived == threads) {
    named.arrived = 0;
    ++named.times;
    block->progressed();
    block->lane_->warp->progress = true;
  } else if (waits) {
    block->wait({&named.times, named.times});
  }
}

uint32_t cluster_rank() { return block->rank_; }

void cluster_arrive() {
  Cluster& cluster = block->cluster_;
  const uint64_t all = cluster.blocks.size() * block->place_.block_dim.x;
  const std::lock_guard<std::mutex> lock(cluster.mutex);
  block->lane_->cluster_phase = cluster.syncs++ / all;
  cluster.synced = cluster.syncs / all;
  block->progressed();
}

void cluster_wait() {
  Cluster& cluster = block->cluster_;
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(cluster.mutex);
      if (cluster.synced > block->lane_->cluster_phase) return;
    }
    yield();
  }
}

void store_cluster(uint32_t address, uint32_t barrier, uint32_t rank, const void* from, uint32_t size) {
  Block& other = *block->cluster_.blocks[rank];
  if (other.ended_) block->fail("stores into a block that has ended");
  if (!other.holds(address, size)) block->fail("stores beyond a block's shared memory");
  std::memcpy(other.memory() + address, from, size);
  other.complete_bytes(barrier, size);
}

// ---- cluster launch control ----

Pending::Pending(uint32_t clusters) : clusters_(clusters) {
  std::iota(clusters_.begin(), clusters_.end(), 0);
}

bool Pending::take_first(uint32_t& cluster) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (clusters_.empty()) return false;
  cluster = clusters_.front();
  clusters_.pop_front();
  return true;
}

bool Pending::take_last(uint32_t& cluster) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (clusters_.empty()) return false;
  cluster = clusters_.back();
  clusters_.pop_back();
  return true;
}

// Any cluster that has not started may be cancelled, mostly the first one. A request may also fail for no
// reason that a program knows. The places of the response hold nothing from now on until it comes.
void try_cancel(uint32_t smem, uint32_t barrier, bool multicast) {
  Block& own = *block;
  ++requests;
  if (own.rank_ != 0) own.fail("two blocks of a cluster ask for clusters");
  if (own.refused_) own.fail("asks for a cluster after there was none");
  if (smem % sizeof(Response) != 0 || !own.holds(smem, sizeof(Response)))
    return own.fail("a response goes beyond shared memory, or between its places");
  Pending& pending = own.cluster_.pending;
  uint32_t cluster = 0;
  const bool cancelled =
      !own.chance(16) && (own.chance(4) ? pending.take_last(cluster) : pending.take_first(cluster));
  const uint32_t ctas = own.cluster_.blocks.size();
  for (uint32_t rank = 0; rank < (multicast ? ctas : 1); ++rank) {
    std::memset(own.cluster_.blocks[rank]->memory() + smem, 0xFF, sizeof(Response));
    own.answers_.push_back({{Response::kCome, cancelled, cluster * ctas, 0}, smem, barrier, rank});
  }
}

void Block::answer(size_t which) {
  const Answer answer = answers_[which];
  answers_.erase(answers_.begin() + which);
  Block& to = *cluster_.blocks[answer.rank];
  if (to.ended_) return fail("a response goes to a block that has ended");
  std::memcpy(to.memory_ + answer.to, &answer.response, sizeof(Response));
  to.complete_bytes(answer.barrier, sizeof(Response));
  progressed();
}

bool query_cancel(uint32_t smem, uint32_t& first_block) {
  Response response;
  std::memcpy(&response, block->memory() + smem, sizeof(response));
  if (response.come != Response::kCome) block->fail("reads a response before it has come");
  block->lane_->queried = true;
  if (response.cancelled == 0) block->refused_ = true;
  first_block = response.first_block;
  return response.cancelled == 1;
}

void yield() { block->wait({}); }

Slots exchange(const void* value, size_t size, void (*last)(Slots)) {
  Lane& lane = *block->lane_;
  Warp& warp = *lane.warp;
  auto& slots = warp.slots[warp.exchanges % 2];
  if (warp.arrived == 0) warp.meets = {size, last};
  if (size > kSlot || warp.meets != std::pair(size, last))
    block->fail("lanes of a warp meet at different places");
  if (size > 0) std::memcpy(slots[lane.thread.x % kWarp], value, size);
  if (++warp.arrived == warp.size) {
    if (last != nullptr) last(slots);
    warp.arrived = 0;
    ++warp.exchanges;
    warp.progress = true;
    block->progressed();
  } else {
    block->wait({&warp.exchanges, warp.exchanges});
  }
  return slots;
}

void set_seed(uint32_t value) { seed = value; }
void set_patience(int seconds) { patience = seconds; }

cudaError_t launch(const Shape& shape, const std::function<void()>& kernel) {
  if (shape.shared > kMostShared || shape.block.x > kMostThreads || shape.block.x % kWarp != 0 ||
      shape.block.y != 1 || shape.block.z != 1 || shape.grid.z != 1 || shape.grid.x % shape.cluster != 0) {
    return cudaErrorInvalidConfiguration;
  }
  Progress progress;
  const uint32_t clusters = shape.grid.x / shape.cluster * shape.grid.y;
  Pending pending(clusters);
  // In the order of their indices, as the hardware starts them.
  const auto work = [&] {
    for (uint32_t c; !progress.failed && pending.take_first(c);) {
      Cluster cluster{pending};
      std::vector<std::unique_ptr<Block>> blocks;
      for (uint32_t rank = 0; rank < shape.cluster; ++rank) {
        const uint32_t x = c * shape.cluster % shape.grid.x + rank, y = c * shape.cluster / shape.grid.x;
        blocks.push_back(std::make_unique<Block>(shape, kernel, cluster, rank, make_uint3(x, y, 0), progress,
                                                 next_seed()));
        cluster.blocks.push_back(blocks.back().get());
      }
      std::vector<std::thread> others;
      for (uint32_t rank = 1; rank < shape.cluster; ++rank) {
        others.emplace_back([&, rank] { blocks[rank]->run(); });
      }
      blocks[0]->run();
      for (std::thread& other : others) other.join();
    }
  };
  // All at once, as on a GPU that has room for them, or as few as the host's processors like, or one more:
  // then blocks that wait for later ones wait for ever.
  const bool together = clusters * shape.cluster <= 32 && next_seed() >> 16 & 1;
  const uint32_t few =
      std::max(1u, std::thread::hardware_concurrency() / shape.cluster) + (next_seed() >> 17 & 1);
  const uint32_t count = together ? clusters : std::min(clusters, few);
  std::vector<std::thread> workers;
  for (uint32_t i = 0; i < count; ++i) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
  return progress.failed ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace emulator

// Returns how many requests of cluster launch control were made since the last call.
extern "C" int emulator_requests() { return emulator::requests.exchange(0); }
