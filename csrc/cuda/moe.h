// The expert block, for the operators that consist of it.
#pragma once

#include "cuda/launches.h"

namespace fp4::cuda {

// What becomes of a call: the sums over each token's experts; or, where these are left to the caller, the
// rows of the (token, slot)s, and how they are sorted if they are. Decode's rows of no expert are zeros,
// prefill's hold anything.
struct Outcome {
  Tensor out;
  std::optional<Sorted> sorted;
  bool rows = false;
};

// `fp4::moe`, checked as that is. `combined`: sums are wanted; else rows of the second product, without its
// bias, where decode or prefill runs, and sums still where gemv does, or nothing. `ranks`: of several
// processes that share the tokens' experts; 0: one process has all. `ready`: fp8 rows of x, which then only
// says what they were.
Outcome run_moe(bool combined, int64_t ranks, const Rows* ready, const Tensor& x, const Tensor& topk_ids,
                const Tensor& topk_weights, const Tensor& w13, const Tensor& w13_scale,
                const OptionalTensor& w13_global_scale, const Tensor& w2, const Tensor& w2_scale,
                const OptionalTensor& w2_global_scale, const OptionalTensor& w13_bias,
                const OptionalTensor& w2_bias, const std::string& format, const std::string& layout,
                const std::string& activation, const std::string& a_format,
                std::optional<ScalarType> out_dtype);

}  // namespace fp4::cuda
