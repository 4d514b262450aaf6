// What every matrix product shares: one parallel loop over (expert, panel of 16 weight rows) that multiplies
// the expert's activation rows with the panel.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/activations.h"

namespace fp4::cpu {

// A stack of packed matrices b [groups, n, k].
struct Weight {
  const Format* format;
  Order order;
  Scale scale;
  int64_t groups, n, k;
  const uint8_t* codes;
  const uint8_t* scales;
  const float* global_scale;  // [groups], or null
  const void* bias;           // [groups, n], or null
  DType bias_dtype;

  BlockScales block_scales() const { return {format->block, scale}; }
};

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
