// Operators of a decoding step of which others are composed.
#pragma once

#include <tuple>
#include <vector>

#include "cpu/tensors.h"

namespace fp4::cpu {

std::vector<Tensor> linears(const Tensor& x, const std::vector<Tensor>& weights,
                            const std::vector<OptionalTensor>& biases, const OptionalTensor& norm_weight,
                            double eps, const OptionalTensor& residual, const OptionalTensor& addend,
                            const std::optional<std::vector<Tensor>>& weight_scales, bool early,
                            bool keep_norm, bool norm_in_float);

Tensor update_cache(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                    const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps,
                    const Tensor& keys, const Tensor& values, const Tensor& start);

std::tuple<Tensor, Tensor> top_experts(const Tensor& logits, int64_t k, bool softmax, bool normalize,
                                       std::optional<ScalarType> out_dtype);

}  // namespace fp4::cpu
