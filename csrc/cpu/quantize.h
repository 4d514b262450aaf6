// Packing and unpacking of weights on the CPU. Torch-free; rows are independent and callers split them.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace fp4::cpu {

// The largest magnitude in x [count]; *finite is cleared if x holds a NaN or an infinity.
float max_magnitude(const void* x, DType dtype, int64_t count, bool* finite);

// The global scale that formats with one use for a matrix of this largest magnitude.
float global_scale_for(float amax);

// x [k] -> packed [k / 2], scales [ceil(k / block)].
void quantize_row(const Format& format, const void* x, DType dtype, int64_t k, float global_scale,
                  uint8_t* packed, uint8_t* scales);

// The exact values of one row [k], in double: code * block scale * global scale.
void dequantize_row(const Format& format, Scale scale, const uint8_t* packed, const uint8_t* scales,
                    int64_t k, double global_scale, double* values);

// The same rounded to float32, of the scales that quantize makes.
void dequantize_row_to_float(const Format& format, const uint8_t* packed, const uint8_t* scales, int64_t k,
                             float global_scale, float* row);

// x [k] -> e4m3 codes [k]; returns their scale, amax / 448. A row of zeros has scale 0; a row with a NaN or
// an infinity has a scale that is not finite, and codes 0, so that all of it becomes NaN.
float quantize_row_fp8(const void* x, DType dtype, int64_t k, uint8_t* codes);

// e4m3 codes [k] times scale.
void dequantize_row_fp8(const uint8_t* codes, int64_t k, float scale, float* row);

// Rounds once.
void store_values(const double* values, int64_t k, DType dtype, void* out);

}  // namespace fp4::cpu
