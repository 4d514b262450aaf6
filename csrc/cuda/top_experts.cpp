// Chooses the experts of each token on CUDA (csrc/sm90/top_experts.cu).
#include "device/top_experts.h"

#include <tuple>

#include "cuda/fallback.h"

namespace fp4::cuda {
namespace {

using Two = std::tuple<Tensor, Tensor>;

Two top_experts(const Tensor& logits, int64_t k, bool softmax, bool normalize,
                std::optional<ScalarType> out_dtype) {
  const ScalarType dtype = check_top_experts(logits, k, out_dtype);
  const Here here(logits);
  const int64_t experts = size(logits, -1), rows = logits.numel() / experts;
  const bool fits = k <= device::kMostChosen && experts <= device::kMostScored && rows < int64_t(1) << 31;
  if (!fits || rows == 0 || !here.gpu().hopper())
    return fallback<Two>("top_experts", "this GPU, or so many experts, have no kernel", logits, k, softmax,
                         normalize, out_dtype);
  const Tensor values = as_contiguous(logits);
  const Tensor weights = here.empty({rows, k}, dtype), ids = here.empty({rows, k}, ScalarType::Long);
  device::TopExpertsParams p;
  p.logits = pointer(values);
  p.weights = mutable_pointer(weights);
  p.ids = mutable_pointer<int64_t>(ids);
  p.rows = int(rows);
  p.experts = int(experts);
  p.k = int(k);
  p.type = code_of(logits.scalar_type());
  p.weight_type = code_of(dtype);
  p.softmax = softmax;
  p.normalize = normalize;
  check_launch(here.kernels().top_experts(&p, here.stream()), "fp4_kernel_top_experts");
  const Shape shape = with_last(leading(logits, -1), k);
  return {torch::stable::view(weights, shape), torch::stable::view(ids, shape)};
}

}  // namespace

FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) { m.impl("top_experts", FP4_BOX(top_experts)); }

}  // namespace fp4::cuda
