// The expert block, for the operators that consist of it.
#pragma once

#include "cuda/launches.h"

namespace fp4::cuda {

// The result of a call. Either `out` has the sums over each token's experts, or, if the caller computes the
// sums, one row for each (token, slot). `sorted` then has the order of these rows, if they are sorted by
// expert. Rows without an expert are zeros if decode ran, and undefined if prefill ran.
struct Outcome {
  Tensor out;
  std::optional<Sorted> sorted;
  bool rows = false;
};

// Checks and runs `fp4::moe`. `combined`: returns the sums. Else decode and prefill return the rows of the
// second product without its bias; gemv, or a call without work, still returns sums. `ranks`: the number of
// processes that share the experts; 0: one process has all. `ready`: fp8 rows of x; x then only gives their
// original dtype. `planned`: kernels are chosen as for so many experts; 0: for those of the weights.
Outcome run_moe(bool combined, int64_t ranks, int64_t planned, const Rows* ready, const Tensor& x,
                const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13,
                const Tensor& w13_scale, const OptionalTensor& w13_global_scale, const Tensor& w2,
                const Tensor& w2_scale, const OptionalTensor& w2_global_scale, const OptionalTensor& w13_bias,
                const OptionalTensor& w2_bias, const std::string& format, const std::string& layout,
                const std::string& activation, const std::string& a_format,
                std::optional<ScalarType> out_dtype);

}  // namespace fp4::cuda
