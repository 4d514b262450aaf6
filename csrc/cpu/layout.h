// The order in which the CPU kernels read a weight: panels of 16 rows.
//
// A plain row is a sequence of 32-bit words with eight codes each (the lowest k in the lowest nibble). A
// panel is the transpose of 16 rows: word w of all 16 rows is stored together. One 64-byte load then holds
// the same eight k of 16 rows, one row in each lane. Block scales are transposed in the same way: scale s of
// all 16 rows is stored together.
//
//   plain   codes [16][K/8] words, scales [16][K/block]
//   panel   codes [K/8][16] words, scales [K/block][16]
//
// Layout "tile16" stores whole panels in place of their 16 rows. Two cases stay plain and are packed into
// panels at each use: the rows after the last whole panel, and matrices whose K is not a multiple of 32.
#pragma once

#include <cstdint>

#include "common/formats.h"

namespace fp4::cpu {

inline constexpr int kPanelRows = kTile16Rows;
inline constexpr int kPanelK = kTile16K;  // a panel's k is K rounded up to a multiple of this

struct Panel {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t k;  // a multiple of kPanelK
  int block;  // number of k that share a block scale, a power of two
};

inline int64_t padded_k(int64_t k) { return (k + kPanelK - 1) / kPanelK * kPanelK; }

// True if `tile16` stores the 16 rows from `row` on as a panel.
inline bool is_panel(int64_t row, int64_t n, int64_t k) { return row + kPanelRows <= n && k % kPanelK == 0; }

// The block scales of a weight: how many k share one, and their type.
struct BlockScales {
  int block;
  Scale scale;

  int64_t count(int64_t k) const { return (k + block - 1) / block; }
  int64_t bytes(int64_t k) const { return count(k) * scale_size(scale); }  // bytes of one row
};

// Packs `rows` (at most 16) plain rows into one panel, padded with zeros in both directions.
void pack_panel(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t k, BlockScales of,
                uint8_t* panel_codes, uint8_t* panel_scales);

// The inverse of pack_panel, for a whole panel of 16 rows whose K is a multiple of kPanelK.
void unpack_panel(const uint8_t* panel_codes, const uint8_t* panel_scales, int64_t k, BlockScales of,
                  uint8_t* codes, uint8_t* scales);

}  // namespace fp4::cpu
