// AMX's eight tile registers of 16 rows of 64 bytes each, with only the operations that the kernels need.
//
// With FP4_EMULATED_TILES, tiles are thread-local arrays and their instructions are loops. Tests can then run
// a kernel's indexing and packing without AMX (tests/kernels_cpu/test_tiles.py).
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"

#if !defined(FP4_EMULATED_TILES)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fp4::cpu {
namespace {

inline constexpr int kTileRowBytes = 64, kTileBytes = kTileRows * kTileRowBytes;

#if defined(FP4_EMULATED_TILES)

struct EmulatedTiles {
  uint8_t bytes[8][kTileBytes];
  bool configured = false;
};
inline thread_local EmulatedTiles emulated_tiles;

inline bool tiles_supported() { return true; }

class TileScope {
 public:
  TileScope() {
    std::memset(emulated_tiles.bytes, 0, sizeof(emulated_tiles.bytes));
    emulated_tiles.configured = true;
  }
  ~TileScope() { emulated_tiles.configured = false; }
  TileScope(const TileScope&) = delete;
};

// Using a tile outside of a TileScope ends the process, as on a processor.
inline uint8_t* emulated_tile(int tile) {
  if (!emulated_tiles.configured) __builtin_trap();
  return emulated_tiles.bytes[tile];
}

template <int tile>
inline void tile_zero() {
  std::memset(emulated_tile(tile), 0, kTileBytes);
}

template <int tile>
inline void tile_load(const uint8_t* from) {
  std::memcpy(emulated_tile(tile), from, kTileBytes);
}

template <int tile>
inline void tile_store(float* to) {
  std::memcpy(to, emulated_tile(tile), kTileBytes);
}

// Subnormal operands and results count as zero, as on a processor.
inline float emulated_bf16(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  const uint32_t bits = (half & 0x7f80) == 0 ? uint32_t(half & 0x8000) << 16 : uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <int c, int a, int b>
inline void tile_dot_bf16() {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float sums[2] = {};
      for (int pair = 0; pair < 16; ++pair)
        for (int i = 0; i < 2; ++i)
          sums[i] = __builtin_fmaf(emulated_bf16(emulated_tile(a) + m * 64 + pair * 4 + i * 2),
                                   emulated_bf16(emulated_tile(b) + pair * 64 + n * 4 + i * 2), sums[i]);
      float sum;
      std::memcpy(&sum, emulated_tile(c) + m * 64 + n * 4, 4);
      sum += sums[0] + sums[1];
      std::memcpy(emulated_tile(c) + m * 64 + n * 4, &sum, 4);
    }
}

#else

// True if the processor has tiles with bfloat16 products and the system lets this process use them. Linux
// reserves space for tiles in a thread's saved state only if the process asks.
inline bool tiles_supported() {
  constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl: ARCH_REQ_XCOMP_PERM
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTile) == 0 || (d & kBf16) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Configures the calling thread's tiles, all of 16 x 64 bytes, until the end of the scope. Released tiles
// cost nothing when the system saves the thread's state.
class TileScope {
 public:
  TileScope() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; ++t) {
      config.row_bytes[t] = kTileRowBytes;
      config.rows[t] = kTileRows;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileScope() { asm volatile("tilerelease"); }
  TileScope(const TileScope&) = delete;
};

// The compiler's own intrinsics are macros that need a literal number. "memory" is there because the compiler
// does not see which bytes are read.
template <int tile>
[[gnu::always_inline]] inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int tile>
[[gnu::always_inline]] inline void tile_load(const uint8_t* from) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t(kTileRowBytes)), "i"(tile)
               : "memory");
}

template <int tile>
[[gnu::always_inline]] inline void tile_store(float* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t(kTileRowBytes)), "i"(tile) : "memory");
}

// c [16][16] += a [16][32] . b [16 pairs][16][2]: bfloat16 products, float32 sums.
template <int c, int a, int b>
[[gnu::always_inline]] inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

#endif

}  // namespace
}  // namespace fp4::cpu
