// C interface of the products of FP4 rows by FP4 weights of the same format, and of e4m3 rows by mxfp4
// weights, on GPUs of compute capability 10.x, beside device/interface.h.
#pragma once

#include "../device/scaled.h"

extern "C" {

// Scales of the weights must have no sign, and are in blocks of 512 bytes for 128 rows and four scales: byte
// 16 (r % 32) + 4 (r / 32) + s is scale s of row r. The blocks are [groups, ceil(n / 128), ceil(scales / 4)],
// and rows that do not exist have scales 0. This is how torch.nn.functional.scaled_mm takes them
// (SwizzleType.SWIZZLE_32_4_4). A row of nvfp4 that has a scale with a sign becomes NaN.
//
// With k_ends the scales of the weights have layout plain, because a group may begin inside of such a block.
//
// Returns 0, a cudaError_t or a LaunchError. k must be a multiple of 64, n of 8, x_scale_bytes of 16,
// pointers of 16 bytes. With e4m3 rows, k must be a multiple of 128 and `codes` of 32 bytes.
// With k_ends, rows are FP4, k must be a multiple of 32, x_scale_bytes of 4, and n may be any number.
int fp4_kernel_products(const fp4::device::ScaledProduct* arguments);
int fp4_kernel_products_configs();
const char* fp4_kernel_products_config_name(int config);
}
