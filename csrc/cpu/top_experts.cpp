// The choice of experts on the CPU: the k largest logits of each row, and their weights.
#include <algorithm>
#include <cmath>

#include "common/boxed.h"
#include "cpu/parallel.h"
#include "cpu/step.h"

namespace fp4::cpu {
namespace {

// True if a comes before b: NaN first, then the larger.
bool is_before(float a, float b) { return a > b || (a != a && b == b); }

struct Problem {
  DType dtype, out_dtype;
  int64_t experts, k;
  bool softmax, normalize;
  const uint8_t* logits;
  uint8_t* weights;
  int64_t* ids;
};

// `x` has room for the experts, `chosen` for k.
void run_row(const Problem& p, int64_t row, float* x, float* chosen) {
  const Kernels& kn = kernels();
  kn.prepare_float(p.logits + row * p.experts * dtype_size(p.dtype), p.dtype, p.experts, x);
  int64_t* const ids = p.ids + row * p.k;
  int64_t count = 0;
  for (int64_t e = 0; e < p.experts; ++e) {
    if (count == p.k && !is_before(x[e], x[ids[count - 1]])) continue;
    int64_t at = count < p.k ? count++ : count - 1;
    // The first of equal logits stays before the others.
    for (; at > 0 && is_before(x[e], x[ids[at - 1]]); --at) ids[at] = ids[at - 1];
    ids[at] = e;
  }
  const float top = x[ids[0]];
  if (p.softmax) {
    float total = 0;
    for (int64_t e = 0; e < p.experts; ++e) total += x[e] = std::exp(x[e] - top);
    for (int64_t i = 0; i < p.k; ++i) chosen[i] = x[ids[i]] / total;
  } else {
    for (int64_t i = 0; i < p.k; ++i) chosen[i] = x[ids[i]];
  }
  if (p.normalize) {
    float total = 0;
    for (int64_t i = 0; i < p.k; ++i) total += chosen[i];
    for (int64_t i = 0; i < p.k; ++i) chosen[i] /= total;
  }
  kn.convert(chosen, p.k, p.weights + row * p.k * dtype_size(p.out_dtype), p.out_dtype);
}

}  // namespace

std::tuple<Tensor, Tensor> top_experts(const Tensor& logits, int64_t k, bool softmax, bool normalize,
                                       std::optional<ScalarType> out_dtype) {
  const ScalarType dtype = check_top_experts(logits, k, out_dtype);
  const Tensor logits_ = as_contiguous(logits);
  Shape shape(logits.sizes().begin(), logits.sizes().end());
  const int64_t experts = shape.back(), rows = logits.numel() / experts;
  shape.back() = k;
  const Tensor weights = empty(shape, dtype), ids = empty(shape, ScalarType::Long);
  const Problem p{.dtype = dtype_of(logits.scalar_type()),
                  .out_dtype = dtype_of(dtype),
                  .experts = experts,
                  .k = k,
                  .softmax = softmax,
                  .normalize = normalize,
                  .logits = data<uint8_t>(logits_),
                  .weights = mutable_data<uint8_t>(weights),
                  .ids = mutable_data<int64_t>(ids)};
  const auto run = [&](int64_t begin, int64_t end) {
    const Buffer x(padded_k(experts) * sizeof(float)), chosen(k * sizeof(float));
    for (int64_t i = begin; i < end; ++i) run_row(p, i, x.floats(), chosen.floats());
  };
  run_phases({{rows, grain_for(experts), run}});
  return {weights, ids};
}

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) { m.impl("top_experts", FP4_BOX(top_experts)); }

}  // namespace fp4::cpu
