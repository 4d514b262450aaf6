// Prepares the operands of operators on native layouts for the launches.
#pragma once

#include "cuda/fallback.h"
#include "cuda/launches.h"

namespace fp4::cuda {

// Throws unless this GPU runs the kernels of a native layout and, if `rows` is given, they read rows of this
// dtype unquantised.
void require_kernels(std::string_view op, const Layout& layout, const Here& here,
                     std::optional<ScalarType> rows = std::nullopt);

// Returns the rows of a product, which were checked: packed FP4 as bfloat16 values and a factor for each row,
// others as they are.
Rows given_rows(const Here& here, const Tensor& a, const OptionalTensor& a_scale,
                const OptionalTensor& a_global_scale, const std::string& a_format);

// Converts 16-bit rows to fp16 in the order that prefill reads with weights in layout sm90.
Rows ordered(const Here& here, const Rows& rows);

// Computes out [rows, n] = x times w with the kernel that the plan chooses. `per_group`: rows of one group if
// masked, else all rows.
void multiply(const Here& here, const Rows& x, const WeightOperand& w, const Route& route, int per_group,
              const Tensor& out);

// Returns the routing by expert ids, which the kernel reads in their own dtype.
inline Routing by_id(const Tensor& ids) {
  return ids.scalar_type() == ScalarType::Long ? Routing::kIds64 : Routing::kIds32;
}

// Returns the Kernel for these activations and weights.
Kernel kernel_of(ScalarType rows, const WeightOperand& w);

inline Product product_of(const WeightOperand& w, Routing routing, int rows) {
  return {routing, w.groups, rows, w.n, w.kp, w.block};
}

}  // namespace fp4::cuda
