#include "cpu/layout.h"

#include <cstring>

namespace fp4::cpu {

void pack_panel(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t k, int block,
                uint8_t* panel_codes, uint8_t* panel_scales) {
  const int64_t row_bytes = k / 2, blocks = (k + block - 1) / block;
  const int64_t words = padded_k(k) / 8, panel_blocks = padded_k(k) / block;
  if (rows < kPanelRows || k % kPanelK != 0) {
    std::memset(panel_codes, 0, words * 4 * kPanelRows);
    std::memset(panel_scales, 0, panel_blocks * kPanelRows);
  }
  const int64_t whole_words = row_bytes / 4;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* row = codes + r * row_bytes;
    uint8_t* to = panel_codes + r * 4;
    for (int64_t w = 0; w < whole_words; ++w) std::memcpy(to + w * 4 * kPanelRows, row + w * 4, 4);
    std::memcpy(to + whole_words * 4 * kPanelRows, row + whole_words * 4, row_bytes % 4);
    for (int64_t b = 0; b < blocks; ++b) panel_scales[b * kPanelRows + r] = scales[r * blocks + b];
  }
}

void unpack_panel(const uint8_t* panel_codes, const uint8_t* panel_scales, int64_t k, int block,
                  uint8_t* codes, uint8_t* scales) {
  const int64_t words = k / 8, blocks = k / block;
  for (int64_t r = 0; r < kPanelRows; ++r) {
    for (int64_t w = 0; w < words; ++w)
      std::memcpy(codes + (r * words + w) * 4, panel_codes + (w * kPanelRows + r) * 4, 4);
    for (int64_t b = 0; b < blocks; ++b) scales[r * blocks + b] = panel_scales[b * kPanelRows + r];
  }
}

}  // namespace fp4::cpu
