// Which library these sources are compiled for: FP4_FAMILY is 90 in `_sm90.so`, for Hopper, and 80 in
// `_sm80.so`, for other GPUs from compute capability 8.0 on, whose kernels take rows of 16 bits, or of int8,
// and layout mma_bf16 alone.
#pragma once

#ifndef FP4_FAMILY
#define FP4_FAMILY 90
#endif

namespace fp4::device {

constexpr bool kHopper = FP4_FAMILY == 90;

}  // namespace fp4::device
