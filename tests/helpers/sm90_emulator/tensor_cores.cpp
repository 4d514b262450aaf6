// mma.sync and wgmma: sums of products of a warp's rows, in float32, or of int8 in int32.
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstring>

#include "block.h"

namespace emulator {
namespace {

// ---- numbers ----

float half_value(uint16_t bits) {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (size_t i = 0; i < values.size(); ++i) {
      __half_raw raw;
      raw.x = static_cast<unsigned short>(i);
      values[i] = __half2float(__half(raw));
    }
    return values;
  }();
  return table[bits];
}

float e4m3_value(uint8_t bits) {
  static const std::vector<float> table = [] {
    std::vector<float> values(256);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<uint8_t>(i), __NV_E4M3)));
    }
    return values;
  }();
  return table[bits];
}

int size_of(Type type) { return type == Type::kE4m3 ? 1 : 2; }

float value_of(const uint8_t* at, Type type) {
  if (type == Type::kE4m3) return e4m3_value(*at);
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  if (type == Type::kFloat16) return half_value(bits);
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// sums[16][tokens] += a[16][k] b[k][tokens]
__attribute__((target_clones("avx512f", "avx2", "default"))) void multiply(const float* a, const float* b,
                                                                           float* sums, int k, int tokens) {
  for (int row = 0; row < 16; ++row) {
    for (int i = 0; i < k; ++i) {
      const float left = a[row * k + i];
      const float* right = b + i * tokens;
      float* to = sums + row * tokens;
      for (int n = 0; n < tokens; ++n) to[n] += left * right[n];
    }
  }
}

// The rows g and g + 8 of A that lane's four registers hold: K 4-byte words t and t + 4.
void scatter_a(int lane, const uint32_t* a, Type type, int k, float* to) {
  const int g = lane / 4, t = lane % 4, each = 4 / size_of(type);
  for (int r = 0; r < 4; ++r) {
    for (int e = 0; e < each; ++e) {
      const auto* at = reinterpret_cast<const uint8_t*>(a + r) + e * size_of(type);
      to[(g + r % 2 * 8) * k + (t + r / 2 * 4) * each + e] = value_of(at, type);
    }
  }
}

// ---- products ----

struct MmaOperands {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};
static_assert(sizeof(MmaOperands) <= kSlot);

template <Type kType>
void run_mma(Slots slots) {
  float a[16 * 16], b[16 * 8], sums[16 * 8];
  MmaOperands lanes[kWarp];
  for (int lane = 0; lane < kWarp; ++lane) {
    std::memcpy(&lanes[lane], slots[lane], sizeof(MmaOperands));
    const MmaOperands& its = lanes[lane];
    const int g = lane / 4, t = lane % 4;
    scatter_a(lane, its.a, kType, 16, a);
    for (int r = 0; r < 2; ++r) {
      for (int e = 0; e < 2; ++e) {
        b[(2 * t + 8 * r + e) * 8 + g] = value_of(reinterpret_cast<const uint8_t*>(&its.b[r]) + 2 * e, kType);
      }
    }
    for (int i = 0; i < 4; ++i) sums[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = its.d[i];
  }
  multiply(a, b, sums, 16, 8);
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) lanes[lane].d[i] = sums[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  }
}

struct Int8Operands {
  int* d;
  const uint32_t* a;
  uint32_t b[2];
};
static_assert(sizeof(Int8Operands) <= kSlot);

void run_mma_int8(Slots slots) {
  int8_t a[16][32], b[8][32];
  Int8Operands lanes[kWarp];
  for (int lane = 0; lane < kWarp; ++lane) {
    std::memcpy(&lanes[lane], slots[lane], sizeof(Int8Operands));
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) std::memcpy(&a[g + r % 2 * 8][4 * t + r / 2 * 16], lanes[lane].a + r, 4);
    for (int r = 0; r < 2; ++r) std::memcpy(&b[g][4 * t + r * 16], lanes[lane].b + r, 4);
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 32; ++k) lanes[lane].d[i] += a[g + i / 2 * 8][k] * b[2 * t + i % 2][k];
    }
  }
}

struct ScaledOperands {
  float* d;
  const uint32_t* a;
  uint32_t b[2], sfa, sfb;
};
static_assert(sizeof(ScaledOperands) <= kSlot);

double e2m1_value(uint32_t word, int i) {
  static constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const uint32_t code = word >> 4 * i & 15;
  return code & 8 ? -kValues[code & 7] : kValues[code];
}

double block_scale(uint32_t word, int i, bool e4m3) {
  const uint8_t byte = word >> 8 * i;
  if (e4m3) return e4m3_value(byte & 127);
  return byte == 255 ? NAN : std::ldexp(1.0, byte - 127);
}

template <bool kE4m3>
void run_mma_scaled(Slots slots) {
  constexpr int kBlock = kE4m3 ? 16 : 32;
  double a[16][64], b[8][64];
  ScaledOperands lanes[kWarp];
  for (int lane = 0; lane < kWarp; ++lane) std::memcpy(&lanes[lane], slots[lane], sizeof(ScaledOperands));
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i) {
      for (int r = 0; r < 4; ++r) {
        const int k = r / 2 * 32 + 8 * t + i, high = r % 2;
        const double scale = block_scale(lanes[4 * g + high].sfa, k / kBlock, kE4m3);
        a[g + 8 * high][k] = e2m1_value(lanes[lane].a[r], i) * scale;
      }
      for (int r = 0; r < 2; ++r) {
        const int k = r * 32 + 8 * t + i;
        b[g][k] = e2m1_value(lanes[lane].b[r], i) * block_scale(lanes[4 * g].sfb, k / kBlock, kE4m3);
      }
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      double sum = lanes[lane].d[i];
      for (int k = 0; k < 64; ++k) sum += a[g + i / 2 * 8][k] * b[2 * t + i % 2][k];
      lanes[lane].d[i] = static_cast<float>(sum);
    }
  }
}

// The oldest product of all lanes of a warp.
void run_product(Lane* lanes) {
  const Product& first = lanes[0].products.front();
  const int tokens = first.tokens, k = 32 / size_of(first.type);
  std::vector<float> a(16 * k), b(k * tokens), sums(16 * tokens);
  for (int lane = 0; lane < kWarp; ++lane) {
    const Product& its = lanes[lane].products.front();
    const int g = lane / 4, t = lane % 4;
    if (its.descriptor != first.descriptor || its.tokens != tokens || its.keep != first.keep) {
      block->fail("lanes of a warp start different products");
      return;
    }
    scatter_a(lane, its.a, its.type, k, a.data());
    for (int i = 0; its.keep && i < tokens / 2; ++i) {
      sums[(g + i / 2 % 2 * 8) * tokens + i / 4 * 8 + 2 * t + i % 2] = its.d[i];
    }
  }
  const uint32_t start = (first.descriptor & 0x3FFF) << 4;
  const uint32_t eight_rows = (first.descriptor >> 32 & 0x3FFF) << 4;
  if (first.descriptor >> 62 != 1) return block->fail("a descriptor without 128-byte swizzle");
  if (!block->holds(start, (tokens / 8 - 1) * eight_rows + 7 * 128 + 32)) {
    return block->fail("a product reads beyond shared memory");
  }
  for (int n = 0; n < tokens; ++n) {
    for (int i = 0; i < k; ++i) {
      const uint32_t at = start + n / 8 * eight_rows + n % 8 * 128 + i * size_of(first.type);
      b[i * tokens + n] = value_of(block->memory() + swizzled(at, 128), first.type);
    }
  }
  multiply(a.data(), b.data(), sums.data(), k, tokens);
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < tokens / 2; ++i) {
      lanes[lane].products.front().d[i] = sums[(g + i / 2 % 2 * 8) * tokens + i / 4 * 8 + 2 * t + i % 2];
    }
    lanes[lane].products.pop_front();
  }
}

Lane* lanes_of_warp() { return block->lane_ - block->lane_->thread.x % kWarp; }

}  // namespace

void mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, Type type) {
  const MmaOperands mine = {d, a, {b0, b1}};
  exchange(&mine, sizeof(mine), type == Type::kFloat16 ? run_mma<Type::kFloat16> : run_mma<Type::kBFloat16>);
}

void mma_int8(int* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  const Int8Operands mine = {d, a, {b0, b1}};
  exchange(&mine, sizeof(mine), run_mma_int8);
}

void mma_scaled(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, uint32_t sfa, uint32_t sfb,
                bool e4m3) {
  const ScaledOperands mine = {d, a, {b0, b1}, sfa, sfb};
  exchange(&mine, sizeof(mine), e4m3 ? run_mma_scaled<true> : run_mma_scaled<false>);
}

void wgmma(float* d, const uint32_t* a, uint64_t descriptor, int keep, int tokens, Type type) {
  Lane& lane = *block->lane_;
  lane.products.push_back({d, a, descriptor, keep, tokens, type});
  if (block->late_) {
    ++lane.uncommitted;
  } else {
    exchange(nullptr, 0, [](Slots) { run_product(lanes_of_warp()); });
  }
}

void wgmma_commit() {
  Lane& lane = *block->lane_;
  lane.product_groups.push_back(lane.uncommitted);
  lane.uncommitted = 0;
}

void wgmma_wait(int pending) {
  Lane& mine = *block->lane_;
  int count = 0;
  while (static_cast<int>(mine.product_groups.size()) > pending) {
    count += mine.product_groups.front();
    mine.product_groups.pop_front();
  }
  exchange(&count, sizeof(count), [](Slots slots) {
    int count;
    std::memcpy(&count, slots[0], sizeof(count));
    for (int i = 0; i < count; ++i) run_product(lanes_of_warp());
  });
}

void load_matrices(uint32_t address, uint32_t (&m)[4]) {
  const Slots rows = exchange(&address, sizeof(address));
  const int lane = place().thread.x % kWarp;
  for (int i = 0; i < 4; ++i) {
    uint32_t row;
    std::memcpy(&row, rows[8 * i + lane / 4], sizeof(row));
    std::memcpy(&m[i], shared_memory() + row + lane % 4 * 4, sizeof(m[i]));
  }
}

}  // namespace emulator

// One product of a warp: a [32][4], b [32][2], sfa and sfb [32], d [32][4].
extern "C" void emulator_mma_scaled(float* d, const uint32_t* a, const uint32_t* b, const uint32_t* sfa,
                                    const uint32_t* sfb, int e4m3) {
  using namespace emulator;
  uint8_t slots[kWarp][kSlot];
  for (int lane = 0; lane < kWarp; ++lane) {
    const ScaledOperands its = {
        d + 4 * lane, a + 4 * lane, {b[2 * lane], b[2 * lane + 1]}, sfa[lane], sfb[lane]};
    std::memcpy(slots[lane], &its, sizeof(its));
  }
  e4m3 ? run_mma_scaled<true>(slots) : run_mma_scaled<false>(slots);
}
