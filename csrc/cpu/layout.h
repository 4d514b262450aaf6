// The order in which kernels read a weight: panels of 16 rows.
//
// A plain row is a run of 32-bit words, eight codes each (the lowest k in the lowest nibble). A panel is the
// transpose of 16 rows: word w of all 16 rows lies together, so that one 64-byte load holds the same eight k
// of 16 rows, one row a lane. Its block scales are transposed in the same way: scale s of all 16 rows
// together.
//
//   plain   codes [16][K/8] words, scales [16][K/block]
//   panel   codes [K/8][16] words, scales [K/block][16]
//
// Layout "tile16" stores whole panels in place of the 16 rows. The rows past the last whole panel, and
// matrices whose K is no multiple of 32, stay plain, and are made into panels when they are used.
#pragma once

#include <cstdint>

#include "common/formats.h"

namespace fp4::cpu {

inline constexpr int kPanelRows = kTile16Rows;
inline constexpr int kPanelK = kTile16K;  // panels are as long as K rounded up to this

struct Panel {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t k;  // a multiple of kPanelK
  int block;  // k that share a block scale, a power of two
};

inline int64_t padded_k(int64_t k) { return (k + kPanelK - 1) / kPanelK * kPanelK; }

// Whether `tile16` stores the 16 rows from `row` as a panel.
inline bool is_panel(int64_t row, int64_t n, int64_t k) { return row + kPanelRows <= n && k % kPanelK == 0; }

// The block scales of a weight: how many k share one, and their type.
struct BlockScales {
  int block;
  Scale scale;

  int64_t count(int64_t k) const { return (k + block - 1) / block; }
  int64_t bytes(int64_t k) const { return count(k) * scale_size(scale); }  // of one row
};

// `rows` (at most 16) plain rows into one panel, padded with zeros in both directions.
void pack_panel(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t k, BlockScales of,
                uint8_t* panel_codes, uint8_t* panel_scales);

// The inverse, for a whole panel of 16 rows whose K is a multiple of kPanelK.
void unpack_panel(const uint8_t* panel_codes, const uint8_t* panel_scales, int64_t k, BlockScales of,
                  uint8_t* codes, uint8_t* scales);

}  // namespace fp4::cpu
