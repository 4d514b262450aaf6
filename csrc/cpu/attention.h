// Parts of a decoding step that cached_attention is composed of.
#pragma once

#include "cpu/tensors.h"

namespace fp4::cpu {

Tensor update_cache(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                    const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps,
                    const Tensor& keys, const Tensor& values, const Tensor& start);

}  // namespace fp4::cpu
