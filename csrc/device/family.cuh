// FP4_FAMILY names the library that these sources are compiled for. It is 90 in `_sm90.so`, for Hopper. It
// is 80 in `_sm80.so`, for other GPUs from compute capability 8.0 on. The kernels of `_sm80.so` take rows
// of 16 bits or of int8, and only layout mma_bf16.
#pragma once

#ifndef FP4_FAMILY
#define FP4_FAMILY 90
#endif

namespace fp4::device {

constexpr bool kHopper = FP4_FAMILY == 90;

}  // namespace fp4::device
