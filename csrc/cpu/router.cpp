// The router of a decoding step on the CPU: a linear layer and the choice of experts in one call, because a
// call takes about as long as the choice.
#include "common/boxed.h"
#include "cpu/step.h"

namespace fp4::cpu {
namespace {

std::vector<Tensor> router(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& norm_weight, double eps, const OptionalTensor& addend,
                           int64_t k, bool softmax, bool normalize, bool early, bool keep_norm,
                           bool norm_in_float, std::optional<ScalarType> out_dtype) {
  check_router(x, weight, bias, norm_weight, addend, k, keep_norm, norm_in_float, out_dtype);
  std::vector<Tensor> made =
      linears(x, {weight}, {bias}, norm_weight, eps, {}, addend, {}, early, keep_norm, norm_in_float);
  const auto [weights, ids] = top_experts(made[0], k, softmax, normalize, out_dtype);
  made.insert(made.begin() + 1, {weights, ids});
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) { m.impl("router", FP4_BOX(router)); }

}  // namespace fp4::cpu
