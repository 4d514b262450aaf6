// The matrix products on CUDA. They check their arguments, then run the native kernels for native layouts and
// Triton's kernels for others.
#include "cuda/operands.h"

namespace fp4::cuda {
namespace {

// A product on a native layout, ready to launch: device, rows and weight.
struct Ready {
  Ready(std::string_view op, const WeightShape& shape, const Tensor& a, const Tensor& b,
        const Tensor& b_scale, const OptionalTensor& b_global_scale, const OptionalTensor& a_scale,
        const OptionalTensor& bias, const OptionalTensor& a_global_scale, const std::string& a_format)
      : here(b),
        w((require_kernels(op, *shape.layout, here, a.scalar_type()), shape), b, b_scale, b_global_scale,
          bias) {
    rows = given_rows(here, a, a_scale, a_global_scale, a_format);
  }

  Here here;
  WeightOperand w;
  Rows rows;
};

Tensor mm(const Tensor& a, const Tensor& b, const Tensor& b_scale, const OptionalTensor& b_global_scale,
          const OptionalTensor& a_scale, const OptionalTensor& bias, const OptionalTensor& a_global_scale,
          const std::string& format, const std::string& layout, const std::string& a_format,
          std::optional<ScalarType> out_dtype) {
  const WeightShape shape =
      check_mm(a, b, b_scale, b_global_scale, format, layout, a_scale, bias, a_global_scale, a_format);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  if (!shape.layout->native)
    return fallback("mm", layout_words(layout), a, b, b_scale, b_global_scale, a_scale, bias, a_global_scale,
                    format, layout, a_format, out_dtype);
  const Ready r("mm", shape, a, b, b_scale, b_global_scale, a_scale, bias, a_global_scale, a_format);
  const Tensor out = r.here.empty({a.size(0), shape.n}, dtype);
  const int m = int(a.size(0));
  if (out.numel() > 0) multiply(r.here, r.rows, r.w, {Routing::kDense, nullptr, nullptr, m}, m, out);
  return out;
}

Tensor grouped_mm(const Tensor& a, const Tensor& b, const Tensor& b_scale,
                  const OptionalTensor& b_global_scale, const Tensor& offs, const OptionalTensor& a_scale,
                  const OptionalTensor& bias, const OptionalTensor& a_global_scale, const std::string& format,
                  const std::string& layout, const std::string& a_format,
                  std::optional<ScalarType> out_dtype) {
  const WeightShape shape = check_grouped_mm(a, b, b_scale, b_global_scale, offs, format, layout, a_scale,
                                             bias, a_global_scale, a_format);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  if (!shape.layout->native)
    return fallback("grouped_mm", layout_words(layout), a, b, b_scale, b_global_scale, offs, a_scale, bias,
                    a_global_scale, format, layout, a_format, out_dtype);
  const Ready r("grouped_mm", shape, a, b, b_scale, b_global_scale, a_scale, bias, a_global_scale, a_format);
  if (shape.groups == 0) return r.here.zeros({a.size(0), shape.n}, dtype);
  const Tensor out = r.here.empty({a.size(0), shape.n}, dtype);
  const int m = int(a.size(0));
  const Tensor ends = as_contiguous(offs);
  if (out.numel() > 0) multiply(r.here, r.rows, r.w, {Routing::kOffs, pointer(ends), nullptr, m}, m, out);
  return out;
}

Tensor grouped_mm_masked(const Tensor& a, const Tensor& b, const Tensor& b_scale,
                         const OptionalTensor& b_global_scale, const Tensor& masked_m,
                         const OptionalTensor& a_scale, const OptionalTensor& bias,
                         const OptionalTensor& a_global_scale, const std::string& format,
                         const std::string& layout, const std::string& a_format,
                         std::optional<ScalarType> out_dtype) {
  const WeightShape shape = check_grouped_mm_masked(a, b, b_scale, b_global_scale, masked_m, format, layout,
                                                    a_scale, bias, a_global_scale, a_format);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  if (!shape.layout->native)
    return fallback("grouped_mm_masked", layout_words(layout), a, b, b_scale, b_global_scale, masked_m,
                    a_scale, bias, a_global_scale, format, layout, a_format, out_dtype);
  Ready r("grouped_mm_masked", shape, a, b, b_scale, b_global_scale, a_scale, bias, a_global_scale, a_format);
  const int64_t groups = a.size(0), max_m = a.size(1);
  const Tensor out = r.here.empty({groups, max_m, shape.n}, dtype);
  if (out.numel() == 0) return out;
  r.rows.values = torch::stable::view(r.rows.values, {groups * max_m, size(r.rows.values, -1)});
  const Tensor counts = as_contiguous(masked_m);
  const Route route{Routing::kMasked, pointer(counts), nullptr, int(max_m)};
  multiply(r.here, r.rows, r.w, route, int(max_m), torch::stable::view(out, {groups * max_m, shape.n}));
  return out;
}

// Takes rows by their indices. fp8 rows are taken as bytes, because every index operator knows bytes.
Tensor take_rows(const Tensor& t, const Tensor& index) {
  const bool fp8 = t.scalar_type() == ScalarType::Float8_e4m3fn;
  const Tensor from = fp8 ? call("aten::view", "dtype", t, ScalarType::Byte) : t;
  const Tensor taken = call("aten::index_select", "", from, int64_t(0), index);
  return fp8 ? call("aten::view", "dtype", taken, ScalarType::Float8_e4m3fn) : taken;
}

// Sorts rows by expert for prefill, and sorts the results back.
void multiply_sorted(const Here& here, const Rows& x, const WeightOperand& w, const Tensor& ids,
                     const Tensor& out) {
  const int m = int(ids.numel());
  Sorted sorted = sort_rows(here, ids, w.groups);
  const Tensor order = torch::stable::narrow(sorted.made, 0, w.groups, m);
  const Tensor position = torch::stable::narrow(sorted.made, 0, w.groups + m, m);
  Rows rows{take_rows(x.values, order), std::nullopt};
  if (x.factor) rows.factor = take_rows(*x.factor, order);
  const Tensor product = here.empty({m, w.n}, out.scalar_type());
  multiply(here, rows, w, {Routing::kOffs, sorted.offs(), nullptr, m}, m, product);
  Tensor to = out;
  torch::stable::copy_(to, take_rows(product, position));
}

Tensor indexed_mm(const Tensor& a, const Tensor& b, const Tensor& b_scale,
                  const OptionalTensor& b_global_scale, const Tensor& expert_ids,
                  const OptionalTensor& a_scale, const OptionalTensor& bias,
                  const OptionalTensor& a_global_scale, const std::string& format, const std::string& layout,
                  const std::string& a_format, std::optional<ScalarType> out_dtype) {
  const WeightShape shape = check_indexed_mm(a, b, b_scale, b_global_scale, expert_ids, format, layout,
                                             a_scale, bias, a_global_scale, a_format);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  if (!shape.layout->native)
    return fallback("indexed_mm", layout_words(layout), a, b, b_scale, b_global_scale, expert_ids, a_scale,
                    bias, a_global_scale, format, layout, a_format, out_dtype);
  const Ready r("indexed_mm", shape, a, b, b_scale, b_global_scale, a_scale, bias, a_global_scale, a_format);
  if (shape.groups == 0) return r.here.zeros({a.size(0), shape.n}, dtype);
  const Tensor out = r.here.empty({a.size(0), shape.n}, dtype);
  if (out.numel() == 0) return out;
  const int m = int(a.size(0));
  const Tensor ids = as_contiguous(expert_ids);
  const Route route{by_id(ids), pointer(ids), nullptr, 0};
  ProductPlan plan;
  if (!r.w.prefill_alone())
    plan = cuda::plan(product_of(r.w, route.routing, m), kernel_of(r.rows.values.scalar_type(), r.w),
                      r.here.gpu());
  switch (plan.family) {
    case Family::kGemv:
      run_gemv(r.here, plan.gemv, r.rows, r.w, route, {.rows = m}, out);
      break;
    case Family::kDecode:
      if (m <= kMaxIds) {
        run_decode(r.here, plan.decode, r.rows, r.w, route, {.rows = m}, out);
      } else {
        const Sorted sorted = sort_rows(r.here, ids, r.w.groups);
        run_decode(r.here, plan.decode, r.rows, r.w, {Routing::kOffs, sorted.offs(), sorted.sorted_rows(), 0},
                   {.rows = m}, out);
      }
      break;
    case Family::kPrefill:
      return multiply_sorted(r.here, r.rows, r.w, ids, out), out;
  }
  return out;
}

// Groups along K are needed in training, where weights are not in 4 bits. This product is therefore written
// in Python, with `mm`.
Tensor grouped_mm_k(const Tensor& a, const Tensor& b, const Tensor& b_scale,
                    const OptionalTensor& b_global_scale, const Tensor& offs, const OptionalTensor& a_scale,
                    const OptionalTensor& a_global_scale, const std::string& format,
                    const std::string& layout, const std::string& a_format,
                    std::optional<ScalarType> out_dtype) {
  const WeightShape shape = check_grouped_mm_k(a, b, b_scale, b_global_scale, offs, format, layout, a_scale,
                                               a_global_scale, a_format);
  if (shape.layout->native) require_kernels("grouped_mm_k", *shape.layout, Here(b), a.scalar_type());
  return fallback("grouped_mm_k", "groups lie along K", a, b, b_scale, b_global_scale, offs, a_scale,
                  a_global_scale, format, layout, a_format, out_dtype);
}

std::vector<Tensor> packed_linears(const Tensor& a, const std::vector<Tensor>& b,
                                   const std::vector<Tensor>& b_scale,
                                   const std::vector<OptionalTensor>& b_global_scale,
                                   const std::vector<OptionalTensor>& bias, const std::string& format,
                                   const std::string& layout, const std::string& a_format,
                                   std::optional<ScalarType> out_dtype) {
  return fallback<std::vector<Tensor>>("packed_linears", "it calls mm for each weight", a, b, b_scale,
                                       b_global_scale, bias, format, layout, a_format, out_dtype);
}

}  // namespace

FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) {
  m.impl("mm", FP4_BOX(mm));
  m.impl("packed_linears", FP4_BOX(packed_linears));
  m.impl("grouped_mm", FP4_BOX(grouped_mm));
  m.impl("grouped_mm_masked", FP4_BOX(grouped_mm_masked));
  m.impl("indexed_mm", FP4_BOX(indexed_mm));
  m.impl("grouped_mm_k", FP4_BOX(grouped_mm_k));
}

}  // namespace fp4::cuda
