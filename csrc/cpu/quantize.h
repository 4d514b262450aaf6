// Quantises and dequantises rows on the CPU. Uses no torch. Rows are independent; callers divide them among
// threads.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace fp4::cpu {

// The largest magnitude in x [count]. Sets *finite to false if x holds a NaN or an infinity.
float max_magnitude(const void* x, DType dtype, int64_t count, bool* finite);

// The global scale of a matrix with this largest magnitude, for formats that have one.
float global_scale_for(float amax);

// x [k] -> packed [k / 2], scales [ceil(k / block)].
void quantize_row(const Format& format, const void* x, DType dtype, int64_t k, float global_scale,
                  uint8_t* packed, uint8_t* scales);

// The exact values of one row [k], in double: code * block scale * global scale.
void dequantize_row(const Format& format, Scale scale, const uint8_t* packed, const uint8_t* scales,
                    int64_t k, double global_scale, double* values);

// The same rounded to float32, for block scales of the type that quantize makes.
void dequantize_row_to_float(const Format& format, const uint8_t* packed, const uint8_t* scales, int64_t k,
                             float global_scale, float* row);

// x [k] -> e4m3 codes [k]. Returns their scale, amax / 448. A row of zeros has scale 0. A row with a NaN or
// an infinity has a scale that is not finite and codes 0, so all of it becomes NaN.
float quantize_row_fp8(const void* x, DType dtype, int64_t k, uint8_t* codes);

// row = e4m3 codes [k] times scale.
void dequantize_row_fp8(const uint8_t* codes, int64_t k, float scale, float* row);

// Stores values as `dtype`, rounded once.
void store_values(const double* values, int64_t k, DType dtype, void* out);

}  // namespace fp4::cpu
