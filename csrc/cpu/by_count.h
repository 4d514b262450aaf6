// Instantiates a kernel for each number of activation rows, so that every row has its own registers.
#pragma once

#include <utility>

#include "cpu/kernels.h"

namespace fp4::cpu {
namespace {

template <typename Tile, int... counts>
void dispatch(std::integer_sequence<int, counts...>, const Panel& panel, const uint8_t* const* rows,
              int count, float* tile) {
  (void)((count == counts + 1 && (Tile::template run<counts + 1>(panel, rows, tile), true)) || ...);
}

// Calls Tile::run<count>(panel, rows, tile), for a count of 1 to kTokenBlock rows.
template <typename Tile>
void panel_kernel(const Panel& panel, const uint8_t* const* rows, int count, float* tile) {
  dispatch<Tile>(std::make_integer_sequence<int, kTokenBlock>(), panel, rows, count, tile);
}

}  // namespace
}  // namespace fp4::cpu
