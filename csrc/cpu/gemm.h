// What every matrix product shares: activations made ready once, and one parallel loop over
// (expert, panel of 16 weight rows) that multiplies the expert's activation rows with the panel.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/kernels.h"

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

// A stack of packed matrices b [groups, n, k].
struct Weight {
  const Format* format;
  Layout layout;
  int64_t groups, n, k;
  const uint8_t* codes;
  const uint8_t* scales;
  const float* global_scale;  // [groups], or null
  const void* bias;           // [groups, n], or null
  DType bias_dtype;
};

// Activation rows [rows, k] as the panel kernels read them.
struct Activations {
  bool int8;
  const uint8_t* data;
  int64_t stride;  // bytes from row to row
  Buffer owned;    // holds data, unless the caller's own rows serve as they are
};

Activations prepare_float(const void* x, DType dtype, int64_t rows, int64_t k);
Activations prepare_int8(const int8_t* codes, const float* scales, int64_t rows, int64_t k, int block);
// Floating x, quantised to int8 on the way.
Activations quantize_and_prepare(const void* x, DType dtype, int64_t rows, int64_t k, int block);

// `count` rows that meet one expert: positions begin, begin + 1, ... Position p stands for activation row
// a_index[p] and output row out_index[p]; without an index, for p itself.
struct Segment {
  int64_t expert, begin, count;
};

struct Rows {
  std::vector<Segment> segments;
  std::vector<int64_t> a_index, out_index;
};

// Rows sorted by expert, in their order: ids [count], those outside [0, groups) left out. Row i is activation
// row i / rows_per_a. `position`, if wanted, gets each row's place after sorting, or -1.
Rows sort_by_expert(const int64_t* ids, int64_t count, int64_t groups, int64_t rows_per_a,
                    std::vector<int64_t>* position);

// out[row] [n] = a[row] . weight[expert]^T * global_scale[expert] + bias[expert], for the rows of each
// segment; other rows of out are left alone.
void gemm(const Activations& a, const Weight& weight, const Rows& rows, void* out, DType out_dtype);

}  // namespace fp4::cpu
