// Prepares activation rows for the panel kernels. int8 codes stay int8, which is the fast path. bfloat16
// stays bfloat16 if there are kernels for it. Everything else becomes float32, which holds fp8 and FP4 values
// exactly, except that their float32 factor is rounded.
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

// Divides the k of a row into pieces that different threads may fill: the whole row, or pieces of `kPiece`.
struct Pieces {
  static constexpr int64_t kPiece = fitted::threads::piece_k;
  static_assert(kPiece % kInt8Block == 0);

  int64_t k = 0, size = 1;  // size: k of a piece

  int64_t each() const { return (k + size - 1) / size; }  // pieces of a row
  int64_t row(int64_t piece) const { return piece / each(); }
  int64_t begin(int64_t piece) const { return piece % each() * size; }
  int64_t end(int64_t piece) const { return std::min(k, begin(piece) + size); }
};

// Activation rows [rows, k] in the order of the panel kernels. They are valid after `fill` has run. `fill`
// reads the caller's tensors, which must live until then.
struct Activations {
  RowKind kind;
  const uint8_t* data;
  int64_t stride;  // bytes from row to row
  Buffer owned;    // owns `data`; empty if the caller's rows are used directly
  Phase fill;      // fills the pieces of all rows; empty if the caller's rows are used directly
  Pieces pieces;

  const uint8_t* row(int64_t i) const { return data + i * stride; }
};

Activations prepare_float(const void* x, DType dtype, int64_t rows, int64_t k);
// The same, but bfloat16 x stays bfloat16 if there are kernels for it.
Activations prepare_floating(const void* x, DType dtype, int64_t rows, int64_t k);
// `weight`: the type of the block scales of the weight.
Activations prepare_int8(const int8_t* codes, const float* scales, int64_t rows, int64_t k, Scale weight);
// Converts int8 codes to float32, for products that are cut along K at places that the int8 kernels do not
// support.
Activations prepare_int8_as_float(const int8_t* codes, const float* scales, int64_t rows, int64_t k);
// e4m3 codes with one scale a row.
Activations prepare_fp8(const uint8_t* codes, const float* scales, int64_t rows, int64_t k);
// Packed rows. Row r has the factor factors[r / rows_per_factor], or 1 if `factors` is null.
Activations prepare_packed(const Format& format, const uint8_t* codes, const uint8_t* scales,
                           const float* factors, int64_t rows_per_factor, int64_t rows, int64_t k);
// Quantises floating x and prepares the result.
Activations quantize_and_prepare(AFormat a_format, const void* x, DType dtype, int64_t rows, int64_t k,
                                 Scale weight);

// The fewest rows of this many bytes that are worth waking a thread for.
int64_t rows_per_thread(int64_t row_bytes);

}  // namespace fp4::cpu
