// All kernels over single rows. Every kernels_<isa>.cpp compiles its own copy (see common/convert.h on
// linkage).
#pragma once

#include "cpu/e4m3_row.h"
#include "cpu/quantize_row.h"
#include "cpu/rowwise.h"

namespace fp4::cpu {
namespace {

// Completes a table of panel kernels with the row kernels.
constexpr Kernels with_row_kernels(Kernels kernels) {
  kernels.max_magnitude = max_magnitude_row;
  kernels.quantize = quantize_row_4bit;
  kernels.quantize_int8 = quantize_int8_row;
  kernels.prepare_int8 = prepare_int8_row;
  kernels.prepare_float = prepare_float_row;
  kernels.store = store_row;
  kernels.activate = activate_row;
  kernels.convert = convert_row;
  kernels.accumulate = accumulate_row;
  kernels.dot = dot_rows;
  kernels.dot_e4m3 = dot_rows_e4m3;
  kernels.widen_e4m3 = widen_row_e4m3;
  kernels.dots = dots_of_rows;
  kernels.exponentiate = exponentiate_row;
  kernels.weighted_sums = weighted_sums;
  kernels.rotate = rotate_row;
  return kernels;
}

}  // namespace
}  // namespace fp4::cpu
