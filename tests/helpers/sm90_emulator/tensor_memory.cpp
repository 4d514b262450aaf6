// tcgen05: tensor memory, and the queue of copies, products and commits that one thread starts.
//
// The queue runs in order, at times that the block draws. All that a product will overwrite is NaN from the
// moment it is started, so sums that are read too early are NaN. Registers are NaN until the wait for loads.
// A thread must fence between a wait and the next instruction of tcgen05, between a load and an arrival, and
// between its stores to shared memory and an arrival.
//
// A pair of blocks shares the queue of the even one. Its copies go from the shared to the tensor memory of
// each. Its products read both shared memories, write both tensor memories, and read in each the scales of
// all tokens.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "block.h"

namespace emulator {
namespace {

constexpr uint32_t kPoison = 0x7FFFFFFF;  // a NaN

struct Matrix {
  uint32_t start, eight_rows, swizzle;
};

// Reads a shared memory descriptor, as CUTLASS' SmemDescriptor has its fields.
bool read_descriptor(uint64_t word, Matrix& matrix) {
  const uint32_t layout = word >> 61, version = word >> 46 & 3, base_offset = word >> 49 & 7;
  matrix = {static_cast<uint32_t>(word & 0x3FFF) << 4, static_cast<uint32_t>(word >> 32 & 0x3FFF) << 4,
            layout == 2 ? 128u : 0u};
  return (layout == 2 || layout == 0) && version == 1 && base_offset == 0 && (word >> 52 & 0x1FF) == 0;
}

double code_value(uint32_t code) {
  static constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kValues[code & 7] : kValues[code];
}

double e4m3_value(uint32_t bits) {
  const uint32_t exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 127) == 127) return NAN;
  const double value =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, static_cast<int>(exponent) - 10);
  return bits & 128 ? -value : value;
}

// Operands of kind::mxf8f6f4, by their numbers in the instruction descriptor. (Kinds with K 64 call e2m1 1.)
constexpr uint32_t kE4m3 = 0, kE2m1 = 5;

// ue4m3, which has 7 bits, or ue8m0.
double scale_value(uint32_t bits, bool e4m3) {
  if (!e4m3) return (bits & 255) == 255 ? NAN : std::ldexp(1.0, static_cast<int>(bits & 255) - 127);
  return e4m3_value(bits & 127);
}

struct Shape {
  int k, scale_block;
};

Shape shape_of(TensorKind kind) {
  return {kind == TensorKind::kMxf8f6f4 ? 32 : 64, kind == TensorKind::kMxf4Nvf4By16 ? 16 : 32};
}

// sums[row][n] = sum over K of a[row] * b[n]; a: [rows][K], b: [K][tokens].
__attribute__((target_clones("avx512f", "avx2", "default"))) void multiply(const double* a, const double* b,
                                                                           double* sums, int tokens,
                                                                           int part) {
  for (int row = 0; row < kLanes; ++row) {
    for (int k = 0; k < part; ++k) {
      const double left = a[row * part + k];
      const double* const right = b + k * tokens;
      double* const to = sums + row * tokens;
      for (int n = 0; n < tokens; ++n) to[n] += left * right[n];
    }
  }
}

}  // namespace

// The column of a lane at an address of tensor memory.
uint32_t* TensorMemory::at(uint32_t address, uint32_t lane, uint32_t column) {
  lane += address >> 16;
  column += address & 0xFFFF;
  if (lane >= kLanes || column >= allocated_) return nullptr;
  return &cells_[lane][column];
}

void TensorMemory::allocate(uint32_t columns, int ctas) {
  allocated_ = columns, ctas_ = ctas;
  std::fill(&cells_[0][0], &cells_[0][0] + kLanes * kTensorColumns, kPoison);
}

void Block::run_copy(const TensorWork& work, Block& own) {
  Matrix from;
  if (!read_descriptor(work.a, from) || from.swizzle != 0) return fail("a wrong descriptor of scales");
  for (uint32_t row = 0; row < 32; ++row) {
    const uint32_t at = from.start + row / 8 * from.eight_rows + row % 8 * 16;
    if (!holds(at, 16)) return fail("a copy to tensor memory reads beyond shared memory");
    for (uint32_t warp = 0; warp < 4; ++warp) {
      for (uint32_t i = 0; i < 4; ++i) {
        uint32_t* const to = own.tensor_.at(work.d, row + 32 * warp, i);
        if (to == nullptr) return fail("a copy goes beyond the columns of tensor memory");
        std::memcpy(to, own.memory_ + at + 4 * i, 4);
      }
    }
  }
}

// Reads the values of `rows` rows with their scales. They are the operand's rows from first_row on. The codes
// of the first of them are where the descriptor says.
bool Block::read_operand(const Operand& operand, Block& codes, Block& scales, int first_row, int rows,
                         std::vector<double>& to) {
  const auto [part, scale_block] = shape_of(operand.kind);
  Matrix matrix;
  if (!read_descriptor(operand.descriptor, matrix) || matrix.swizzle != 128 || matrix.start % 32 != 0) {
    fail("a wrong descriptor of codes");
    return false;
  }
  to.resize(operand.rows * part);
  for (int i = 0; i < rows; ++i) {
    const int row = first_row + i;
    const uint32_t line = matrix.start + i / 8 * matrix.eight_rows + i % 8 * 128;
    if (!holds(line, 32)) {
      fail("a product reads beyond shared memory");
      return false;
    }
    const uint32_t* const word = scales.tensor_.at(operand.scales, row % 32, row / 32);
    if (word == nullptr) {
      fail("a product reads scales beyond the columns of tensor memory");
      return false;
    }
    for (int k = 0; k < part; ++k) {
      // K 64: two codes in a byte. K 32: a byte for each, of which e2m1 fills the first half of every 16.
      const bool bytes = operand.kind == TensorKind::kMxf8f6f4, e4m3 = bytes && operand.type == kE4m3;
      const uint32_t from = !bytes ? k / 2 : e4m3 ? k : k / 16 * 16 + k % 16 / 2;
      const uint8_t found = codes.memory_[swizzled(line + from, 128)];
      const double value = e4m3 ? e4m3_value(found) : code_value(k % 2 ? found >> 4 : found & 15);
      const uint32_t scale = *word >> 8 * (operand.first_scale + k / scale_block);
      to[operand.k_first ? k * operand.rows + row : row * part + k] =
          value * scale_value(scale, scale_block == 16);
    }
  }
  return true;
}

void Block::run_multiply(const TensorWork& work) {
  const uint32_t i = work.instruction;
  const int tokens = (i >> 17 & 63) * 8;
  const int a_first = i >> 29 & 3, b_first = i >> 4 & 3;
  // 128 rows of each CTA, ue4m3 or ue8m0 scales, nothing negated or transposed. Of a word of four scales, an
  // instruction takes all, the first or the last two, or any one. The types of the operands are e2m1 by e2m1,
  // or what their three bits say. The tokens of a pair are a multiple of 16.
  const auto [part, scale_block] = shape_of(work.product);
  const uint32_t rest = i & ~(63u << 17 | 3u << 29 | 3u << 4 | 7u << 7 | 7u << 10);
  const uint32_t a_type = i >> 7 & 7, b_type = i >> 10 & 7;
  const auto known = [&](uint32_t type) { return part == 64 ? type == 1 : type == kE4m3 || type == kE2m1; };
  const int taken = part / scale_block;
  const uint32_t rows = work.ctas == 2 ? 0x10000000 : 0x08000000;
  if (rest != (scale_block == 16 ? rows : rows | 0x00800000) || a_first % taken != 0 ||
      b_first % taken != 0 || !known(a_type) || !known(b_type) || tokens < 8 * work.ctas || tokens > 256 ||
      tokens % (8 * work.ctas) != 0) {
    return fail("a wrong instruction descriptor");
  }
  const Operand left = {work.a, work.a_scales, a_first, work.product, a_type, kLanes, false};
  const Operand right = {work.b, work.b_scales, b_first, work.product, b_type, tokens, true};
  const int share = tokens / work.ctas;
  std::vector<double> a, b, sums(kLanes * tokens);
  for (int rank = 0; rank < work.ctas; ++rank) {
    Block& own = work.ctas == 2 ? paired(rank) : *this;
    if (!read_operand(left, own, own, 0, kLanes, a)) return;
    for (int other = 0; other < work.ctas; ++other) {
      Block& codes = work.ctas == 2 ? paired(other) : *this;
      if (!read_operand(right, codes, own, other * share, share, b)) return;
    }
    for (int row = 0; row < kLanes; ++row) {
      for (int n = 0; n < tokens; ++n) {
        const uint32_t* const from = own.tensor_.at(work.d, row, n);
        if (from == nullptr) return fail("sums go beyond the columns of tensor memory");
        float before;
        std::memcpy(&before, from, 4);
        sums[row * tokens + n] = work.keep ? before : 0;
      }
    }
    multiply(a.data(), b.data(), sums.data(), tokens, part);
    for (int row = 0; row < kLanes; ++row) {
      for (int n = 0; n < tokens; ++n) {
        const float after = static_cast<float>(sums[row * tokens + n]);
        std::memcpy(own.tensor_.at(work.d, row, n), &after, 4);
      }
    }
  }
}

// The oldest copy, product or commit.
void Block::run_tensor_work() {
  const TensorWork work = tensor_work_.front();
  tensor_work_.pop_front();
  switch (work.kind) {
    case TensorWork::kCopy:
      for (int rank = 0; rank < work.ctas; ++rank) run_copy(work, work.ctas == 2 ? paired(rank) : *this);
      break;
    case TensorWork::kMultiply:
      run_multiply(work);
      break;
    case TensorWork::kCommit:
      if (work.ctas == 1) {
        arrive(work.d, 0);
        break;
      }
      for (int rank = 0; rank < 2; ++rank) {
        if ((work.blocks >> rank & 1) == 0) continue;
        if (paired(rank).ended_) return fail("a commit tells a block that has ended");
        paired(rank).arrive(work.d, 0);
      }
      break;
  }
  progressed();
}

// ---- what fibers call ----

namespace {

constexpr size_t kMostLogged = 256;
std::mutex log_mutex;
std::vector<TensorWork> logged;  // what was started first

void start(const TensorWork& work) {
  Lane& lane = *block->lane_;
  if (block->tensor_thread_ == nullptr) block->tensor_thread_ = &lane;
  if (block->tensor_thread_ != &lane) block->fail("two threads start work of tensor cores");
  if (!lane.fenced) block->fail("no fence between a wait and work of tensor cores");
  if (block->rank_ % work.ctas != 0) block->fail("the odd block of a pair starts work of tensor cores");
  for (int rank = 0; rank < work.ctas; ++rank) {
    const Block& own = work.ctas == 2 ? block->paired(rank) : *block;
    if (own.tensor_.allocated() == 0 || own.tensor_.ctas() != work.ctas)
      return block->fail("a block has no tensor memory for work of so many CTAs");
  }
  block->tensor_work_.push_back(work);
  const std::lock_guard<std::mutex> lock(log_mutex);
  if (logged.size() < kMostLogged) logged.push_back(work);
}

}  // namespace

void tensor_allocate(uint32_t smem, uint32_t columns, int ctas) {
  if (columns < 32 || columns > kTensorColumns || (columns & (columns - 1)) != 0)
    block->fail("tensor memory is allocated in powers of two");
  exchange(nullptr, 0);
  if (place().thread.x % kWarp != 0) return;
  if (block->tensor_.allocated() != 0) block->fail("tensor memory is allocated twice");
  block->tensor_.allocate(columns, ctas);
  const uint32_t address = 0;
  std::memcpy(block->memory() + smem, &address, sizeof(address));
}

void tensor_free(uint32_t, uint32_t columns, int ctas) {
  exchange(nullptr, 0);
  if (place().thread.x % kWarp != 0) return;
  if (columns != block->tensor_.allocated() || ctas != block->tensor_.ctas())
    block->fail("not all of the tensor memory is freed");
  if (!block->tensor_work_.empty()) block->fail("tensor memory is freed before its work is over");
  block->tensor_.free();
}

void tensor_fence_before() { block->lane_->tensor_read = false; }
void tensor_fence_after() { block->lane_->fenced = true; }

void tensor_load(uint32_t address, uint32_t* r, int columns) {
  Lane& lane = *block->lane_;
  if (!lane.fenced) block->fail("no fence between a wait and a load of tensor memory");
  if (address >> 16 != lane.thread.x / kWarp % 4 * kWarp) block->fail("a warp loads another warp's lanes");
  exchange(nullptr, 0);
  lane.tensor_loads.push_back({address, r, columns});
  std::fill(r, r + columns, kPoison);
  lane.tensor_read = true;
}

void tensor_load_wait() {
  Lane& lane = *block->lane_;
  exchange(nullptr, 0);
  for (const TensorLoad& load : lane.tensor_loads) {
    for (int i = 0; i < load.columns; ++i) {
      const uint32_t* const from = block->tensor_.at(load.address, lane.thread.x % kWarp, i);
      if (from == nullptr) return block->fail("a load beyond the columns of tensor memory");
      load.to[i] = *from;
    }
  }
  lane.tensor_loads.clear();
}

void tensor_copy(uint32_t address, uint64_t descriptor, int ctas) {
  start({TensorWork::kCopy, address, 0, 0, 0, descriptor, 0, false, {}, static_cast<uint8_t>(ctas), 0});
}

void tensor_multiply(const TensorProduct& p) {
  start({TensorWork::kMultiply, p.d, p.instruction, p.a_scales, p.b_scales, p.a, p.b, p.keep, p.kind,
         static_cast<uint8_t>(p.ctas), 0});
  if (p.keep) return;
  const int tokens = (p.instruction >> 17 & 63) * 8;
  for (int rank = 0; rank < p.ctas; ++rank) {
    TensorMemory& sums = p.ctas == 2 ? block->paired(rank).tensor_ : block->tensor_;
    for (int row = 0; row < kLanes; ++row) {
      for (int n = 0; n < tokens; ++n) {
        if (uint32_t* const to = sums.at(p.d, row, n)) *to = kPoison;
      }
    }
  }
}

void tensor_commit(uint32_t barrier, int ctas, uint32_t blocks) {
  start({TensorWork::kCommit,
         barrier,
         0,
         0,
         0,
         0,
         0,
         false,
         {},
         static_cast<uint8_t>(ctas),
         static_cast<uint8_t>(blocks)});
}

void store_shared(uint32_t smem, const void* from, uint32_t bytes) {
  if (!block->holds(smem, bytes) || smem % bytes != 0) block->fail("a store goes beyond shared memory");
  std::memcpy(block->memory() + smem, from, bytes);
  block->lane_->stored = true;
}

void fence_async_proxy() { block->lane_->stored = block->lane_->queried = false; }

}  // namespace emulator

// Writes the first work that was started since the last call, at most `most`. Returns how much there is.
extern "C" int emulator_tensor_log(emulator::TensorWork* to, int most) {
  using namespace emulator;
  const std::lock_guard<std::mutex> lock(log_mutex);
  const int count = std::min(static_cast<int>(logged.size()), most);
  std::copy_n(logged.begin(), count, to);
  logged.clear();
  return count;
}
