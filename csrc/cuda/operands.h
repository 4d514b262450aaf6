// Prepares the operands of operators on native layouts for the launches.
#pragma once

#include "cuda/fallback.h"
#include "cuda/launches.h"

namespace fp4::cuda {

// The kernels of a native layout run on this GPU, with rows of this dtype as they are, or an error.
void require_kernels(std::string_view op, const Layout& layout, const Here& here,
                     std::optional<ScalarType> rows = std::nullopt);

// Rows of a product, checked: packed FP4 as bfloat16 values and a factor a row, others as they are.
Rows given_rows(const Here& here, const Tensor& a, const OptionalTensor& a_scale,
                const OptionalTensor& a_global_scale, const std::string& a_format);

// 16-bit rows as prefill takes them for weights in layout sm90: fp16, in its order.
Rows ordered(const Here& here, const Rows& rows);

// out [rows, n] = x times w, by the kernel that the plan says. `per_group`: rows of a masked group, else all.
void multiply(const Here& here, const Rows& x, const WeightOperand& w, const Route& route, int per_group,
              const Tensor& out);

// Rows by their experts' ids, which the kernel reads as they are.
inline Routing by_id(const Tensor& ids) {
  return ids.scalar_type() == ScalarType::Long ? Routing::kIds64 : Routing::kIds32;
}

// What of a product's activations decides the kernels.
Kernel kernel_of(ScalarType rows, const WeightOperand& w);

inline Product product_of(const WeightOperand& w, Routing routing, int rows) {
  return {routing, w.groups, rows, w.n, w.kp, w.block};
}

}  // namespace fp4::cuda
