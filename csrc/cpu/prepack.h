// Converts weights from the plain layout to the others and back.
#pragma once

#include <tuple>

#include "cpu/tensors.h"

namespace fp4::cpu {

// Returns packed, block_scale and global_scale in the plain layout. K stays padded as in `from.layout`.
std::tuple<Tensor, Tensor, Tensor> to_plain(const Tensor& packed, const Tensor& block_scale,
                                            const OptionalTensor& global_scale, Stored from);

// Throws if one of `count` block scales is NaN: such a weight is damaged. Kernels would read an e4m3 NaN as
// 480.
void check_scales(Scale scale, const uint8_t* scales, int64_t count);

}  // namespace fp4::cpu
