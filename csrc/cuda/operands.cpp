#include "cuda/operands.h"

#include <algorithm>

namespace fp4::cuda {
namespace {

// Expands factors to one for each row of a leading shape. There is one factor for all rows, one for each
// group, or one for each row.
Tensor factor_a_row(const Tensor& factor, const Shape& lead) {
  Shape shape = shape_of(factor);
  shape.resize(lead.size(), 1);
  const Tensor each = call("aten::expand", "", torch::stable::reshape(factor, shape), lead, false);
  return as_contiguous(torch::stable::reshape(each, Shape{-1}));
}

// Returns codes times block scales, which bfloat16 holds exactly, and the factor of each row.
Rows packed_rows(const Here& here, const Tensor& a, const OptionalTensor& a_scale,
                 const OptionalTensor& a_global_scale, const std::string& a_format) {
  OptionalTensor ones;
  if (entry(kFormats, a_format).has_global_scale) {
    Tensor made = torch::stable::new_empty(a, leading(a, -2), ScalarType::Float);
    ones = torch::stable::fill_(made, 1.0);
  }
  Rows rows{fallback("dequantize", text("a is packed ", a_format), a, a_scale.value(), ones, a_format,
                     ScalarType::BFloat16, std::string("plain")),
            std::nullopt};
  if (ones) rows.factor = factor_a_row(a_global_scale.value(), leading(a, -1));
  return rows;
}

bool unquantised(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

void require_rows(std::string_view op, const KernelLibrary& library, const Layout& layout,
                  const DeviceKind& kind, ScalarType rows) {
  for (const RowsOfLayout& of : library.rows) {
    if (of.layout != layout.name || !unquantised(rows)) continue;
    if (std::ranges::find(of.dtypes, dtype_name(rows)) != of.dtypes.end()) continue;
    std::string read;
    for (std::string_view dtype : of.dtypes) read += (read.empty() ? "" : " or ") + std::string(dtype);
    fail("fp4::", op, ": layout is '", layout.name, "', and rows are ", dtype_name(rows),
         "; on this GPU, of compute capability ", kind.major, ".", kind.minor, ", its kernels read ", read,
         ". Convert the rows, or use layout '", library.layouts[1],
         layout.batch_invariant ? "_invariant" : "", "' (torch.ops.fp4.unpack, then prepack)");
  }
}

}  // namespace

void require_kernels(std::string_view op, const Layout& layout, const Here& here,
                     std::optional<ScalarType> rows) {
  const DeviceKind& kind = here.kind();
  std::string_view needs;  // capability of the last family in the list, which runs on most GPUs
  bool built_for_others = false;
  for (const KernelLibrary& library : kKernelLibraries) {
    if (std::ranges::find(library.layouts, layout.name) == library.layouts.end()) continue;
    if (int(kind.gpu.family) == library.family) {
      if (rows) require_rows(op, library, layout, kind, *rows);
      return;
    }
    needs = library.capability;
    built_for_others |= library.of(kind.major, kind.minor);
  }
  constexpr std::string_view kPlain = "Use layout 'plain' (convert with torch.ops.fp4.unpack)";
  if (built_for_others)
    fail("fp4::", op, ": layout is '", layout.name, "'. Its kernels were built, but not for this GPU, ",
         "which has compute capability ", kind.major, ".", kind.minor,
         ". Build them: FP4_CUDA_ARCHS=all pip ", "install --no-build-isolation -e . ", kPlain);
  fail("fp4::", op, ": layout is '", layout.name, "', whose kernels need compute capability ", needs,
       "; this GPU has ", kind.major, ".", kind.minor, ". ", kPlain);
}

Kernel kernel_of(ScalarType rows, const WeightOperand& w) {
  return rows == ScalarType::Float8_e4m3fn ? Kernel::kFp8 : w.bf16 ? Kernel::kBf16 : Kernel::kHalf;
}

Rows given_rows(const Here& here, const Tensor& a, const OptionalTensor& a_scale,
                const OptionalTensor& a_global_scale, const std::string& a_format) {
  Rows rows = a_format.empty() ? Rows{a, a_scale} : packed_rows(here, a, a_scale, a_global_scale, a_format);
  return {as_operand(rows.values), as_contiguous(rows.factor)};
}

Rows ordered(const Here& here, const Rows& rows) {
  Rows made = make_rows(here, device::Form::kHalf, rows.values, nullptr, {});
  if (rows.factor) made.factor = call("aten::mul", "Tensor", *made.factor, *rows.factor);
  return made;
}

void multiply(const Here& here, const Rows& x, const WeightOperand& w, const Route& route, int per_group,
              const Tensor& out) {
  ProductPlan plan;
  const ScalarType dtype = x.values.scalar_type();
  if (!w.prefill_alone())
    plan = cuda::plan(product_of(w, route.routing, per_group), kernel_of(dtype, w), here.gpu());
  const ProductArguments arguments{.rows = int(out.size(0))};
  switch (plan.family) {
    case Family::kGemv:
      return run_gemv(here, plan.gemv, x, w, route, arguments, out);
    case Family::kDecode:
      return run_decode(here, plan.decode, x, w, route, arguments, out);
    case Family::kPrefill:
      break;
  }
  const bool in_order = dtype != ScalarType::Float8_e4m3fn && !w.bf16;
  // If `ordered` reorders the rows, the kernels before prefill make only x and its factors. (If the rows had
  // a factor, the last of these kernels multiplies by it.) So loads of weights need not wait (`early`).
  run_prefill(here, in_order ? ordered(here, x) : x, w, route, {.rows = per_group, .early = in_order}, out);
}

}  // namespace fp4::cuda
