// Activation rows made ready for the panel kernels. int8 codes stay int8, the fast path, and bfloat16 stays
// what it is where there are kernels for it; everything else becomes float32, which holds fp8 and FP4 values
// exactly up to the rounding of their float32 factor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu_constants.h"

namespace fp4::cpu {

// A 64-byte aligned block of memory, not initialised.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes);
  uint8_t* data() const { return data_.get(); }
  float* floats() const { return reinterpret_cast<float*>(data_.get()); }

 private:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  std::unique_ptr<uint8_t[], Free> data_;
};

// A row's k in pieces, each of which a thread may make: all of k, or `kPiece` of it.
struct Pieces {
  static constexpr int64_t kPiece = fitted::threads::piece_k;
  static_assert(kPiece % kInt8Block == 0);

  int64_t k = 0, size = 1;  // of a piece

  int64_t each() const { return (k + size - 1) / size; }  // pieces of a row
  int64_t row(int64_t piece) const { return piece / each(); }
  int64_t begin(int64_t piece) const { return piece % each() * size; }
  int64_t end(int64_t piece) const { return std::min(k, begin(piece) + size); }
};

// Activation rows [rows, k] as the panel kernels read them, once `fill` has run. It reads what the rows are
// made of, which must live until then.
struct Activations {
  RowKind kind;
  const uint8_t* data;
  int64_t stride;  // bytes from row to row
  Buffer owned;    // holds data, unless the caller's own rows serve as they are
  Phase fill;      // of the pieces of all rows; empty where the caller's rows serve
  Pieces pieces;

  const uint8_t* row(int64_t i) const { return data + i * stride; }
};

Activations prepare_float(const void* x, DType dtype, int64_t rows, int64_t k);
// The same, but of bfloat16 x as it is where there are kernels for that.
Activations prepare_floating(const void* x, DType dtype, int64_t rows, int64_t k);
// `weight`: the type of the block scales of the weight that the rows meet.
Activations prepare_int8(const int8_t* codes, const float* scales, int64_t rows, int64_t k, Scale weight);
// int8 codes as float32, for products that cut K elsewhere than the int8 kernels can.
Activations prepare_int8_as_float(const int8_t* codes, const float* scales, int64_t rows, int64_t k);
// e4m3 codes with one scale a row.
Activations prepare_fp8(const uint8_t* codes, const float* scales, int64_t rows, int64_t k);
// Packed rows; row r has factor factors[r / rows_per_factor], or 1 if there are none.
Activations prepare_packed(const Format& format, const uint8_t* codes, const uint8_t* scales,
                           const float* factors, int64_t rows_per_factor, int64_t rows, int64_t k);
// Floating x, quantised on the way.
Activations quantize_and_prepare(AFormat a_format, const void* x, DType dtype, int64_t rows, int64_t k,
                                 Scale weight);

// The number of rows that are worth waking a thread for, if each has this many bytes.
int64_t rows_per_thread(int64_t row_bytes);

}  // namespace fp4::cpu
