// The router of a decoding step on CUDA (csrc/sm90/router.cu): a linear layer and the choice of experts.
#include "device/router.h"

#include <vector>

#include "cuda/fallback.h"

namespace fp4::cuda {
namespace {

std::vector<Tensor> router(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& norm_weight, double eps, const OptionalTensor& addend,
                           int64_t k, bool softmax, bool normalize, bool early, bool keep_norm,
                           bool norm_in_float, std::optional<ScalarType> out_dtype) {
  const ScalarType dtype =
      check_router(x, weight, bias, norm_weight, addend, k, keep_norm, norm_in_float, out_dtype);
  const Here here(x);
  const int64_t columns = size(x, -1), rows = columns > 0 ? x.numel() / columns : 0;
  const int64_t experts = weight.size(0);
  device::RouterParams p;
  bool fits = here.gpu().hopper() && here.sms() >= 1 << device::kMostLinearClusterBits;
  fits = fits && x.scalar_type() != ScalarType::Float && rows >= 1 && rows <= device::kMostRouterRows;
  fits = fits && experts <= device::kMostRouted && k <= device::kMostChosen;
  fits = fits && columns % device::kLinearStepK == 0 && columns < int64_t(1) << 24;
  fits = fits && weight.is_contiguous() && reinterpret_cast<uintptr_t>(pointer(weight)) % 16 == 0;
  if (fits) {
    p.product.rows = int(rows);
    p.product.k = int(columns);
    p.product.count = 1;
    p.product.weight[0].n = int(experts);
    p.product.norm_weight = norm_weight ? pointer(*norm_weight) : nullptr;
    fits = complete_router(p, here.sms()) <= here.gpu().shared_bytes;
    fits = fits && p.product.config.depth <= device::kMostRouterDepth;
  }
  if (!fits)
    return fallback<std::vector<Tensor>>("router", "its kernel does not take these rows or this weight", x,
                                         weight, bias, norm_weight, eps, addend, k, softmax, normalize, early,
                                         keep_norm, norm_in_float, out_dtype);

  const Tensor values = as_operand(x);
  const OptionalTensor first = as_operand(addend), norm = as_operand(norm_weight),
                       added = as_contiguous(bias);
  const auto make = [&](int64_t last, ScalarType type) {
    return torch::stable::view(here.empty({rows, last}, type), with_last(leading(x, -1), last));
  };
  std::vector<Tensor> made = {make(experts, x.scalar_type()), make(k, dtype), make(k, ScalarType::Long)};
  p.product.weight[0].values = pointer(weight);
  p.product.weight[0].bias = pointer(added);
  p.product.weight[0].out = mutable_pointer(made[0]);
  p.choice.weights = mutable_pointer(made[1]);
  p.choice.ids = mutable_pointer<int64_t>(made[2]);
  for (const auto& [wanted, to] :
       {std::pair(keep_norm, &p.product.normed), std::pair(addend.has_value(), &p.product.sum)})
    if (wanted) *to = mutable_pointer(made.emplace_back(make(columns, x.scalar_type())));
  p.product.x = pointer(values);
  p.product.addend = pointer(first);
  p.product.norm_weight = pointer(norm);
  p.product.eps = float(eps);
  p.product.type = p.product.bias_type = code_of(x.scalar_type());
  p.product.early = early && pointer(norm) == pointer(norm_weight);  // else the kernel before copies it
  p.product.norm_in_float = norm_in_float;
  p.choice.rows = int(rows);
  p.choice.experts = int(experts);
  p.choice.k = int(k);
  p.choice.type = code_of(x.scalar_type());
  p.choice.weight_type = code_of(dtype);
  p.choice.softmax = softmax;
  p.choice.normalize = normalize;
  check_launch(here.kernels().router(&p, here.sms(), here.stream()), "fp4_kernel_router");
  return made;
}

}  // namespace

FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) { m.impl("router", FP4_BOX(router)); }

}  // namespace fp4::cuda
