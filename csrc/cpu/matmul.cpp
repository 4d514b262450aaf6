// The matrix products on the CPU: check, allocate, turn the routing into segments, call gemm.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "cpu/tensors.h"

namespace fp4::cpu {
namespace {

void zero_rows(const Tensor& out, int64_t begin, int64_t end, int64_t n, ScalarType dtype) {
  const int64_t bytes = n * dtype_size(dtype_of(dtype));
  std::memset(mutable_data<uint8_t>(out) + begin * bytes, 0, (end - begin) * bytes);
}

Tensor mm(const Tensor& a, const Tensor& b, const Tensor& b_scale, const OptionalTensor& b_global_scale,
          const OptionalTensor& a_scale, const OptionalTensor& bias, const std::string& format,
          const std::string& layout, std::optional<ScalarType> out_dtype) {
  const WeightShape w = check_weight("b", b, b_scale, b_global_scale, format, layout, false);
  check_a(a, a_scale, b, w.k, 2);
  check_operand("bias", bias, "b", b, {w.n}, kFloating);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  const int64_t m = a.size(0);
  const Tensor out = empty({m, w.n}, dtype);
  if (m == 0) return out;
  const WeightOperand weight(w, b, b_scale, b_global_scale, bias);
  const Rows rows{.segments = {{0, 0, m}}, .a_index = {}, .out_index = {}};
  const ActivationOperand ready(a, a_scale, w);
  gemm(ready.view(), weight.view(), rows, out.data_ptr(), dtype_of(dtype));
  return out;
}

Tensor grouped_mm(const Tensor& a, const Tensor& b, const Tensor& b_scale,
                  const OptionalTensor& b_global_scale, const Tensor& offs, const OptionalTensor& a_scale,
                  const OptionalTensor& bias, const std::string& format, const std::string& layout,
                  std::optional<ScalarType> out_dtype) {
  const WeightShape w = check_weight("b", b, b_scale, b_global_scale, format, layout, true);
  check_a(a, a_scale, b, w.k, 2);
  check_operand("offs", offs, "b", b, {w.groups}, kInt32);
  check_operand("bias", bias, "b", b, {w.groups, w.n}, kFloating);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  const int64_t m = a.size(0);
  Rows rows;
  int64_t begin = 0;
  const std::vector<int64_t> ends = indices(offs);
  for (int64_t g = 0; g < w.groups; ++g) {
    if (ends[g] < begin) fail("offs decreases from ", begin, " to ", ends[g], " at index ", g);
    if (ends[g] > m) fail("offs is ", ends[g], " at index ", g, "; a has only ", m, " rows");
    if (ends[g] > begin) rows.segments.push_back({g, begin, ends[g] - begin});
    begin = ends[g];
  }
  const Tensor out = empty({m, w.n}, dtype);
  zero_rows(out, begin, m, w.n, dtype);
  if (rows.segments.empty()) return out;
  const WeightOperand weight(w, b, b_scale, b_global_scale, bias);
  const ActivationOperand ready(a, a_scale, w);
  gemm(ready.view(), weight.view(), rows, out.data_ptr(), dtype_of(dtype));
  return out;
}

Tensor grouped_mm_masked(const Tensor& a, const Tensor& b, const Tensor& b_scale,
                         const OptionalTensor& b_global_scale, const Tensor& masked_m,
                         const OptionalTensor& a_scale, const OptionalTensor& bias, const std::string& format,
                         const std::string& layout, std::optional<ScalarType> out_dtype) {
  const WeightShape w = check_weight("b", b, b_scale, b_global_scale, format, layout, true);
  check_a(a, a_scale, b, w.k, 3);
  if (a.size(0) != w.groups)
    fail("a has ", a.size(0), " groups; b has ", w.groups, ", and they must be equal");
  check_operand("masked_m", masked_m, "b", b, {w.groups}, kInt32);
  check_operand("bias", bias, "b", b, {w.groups, w.n}, kFloating);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  const int64_t max_m = a.size(1);
  const Tensor out = empty({w.groups, max_m, w.n}, dtype);
  Rows rows;
  const std::vector<int64_t> counts = indices(masked_m);
  for (int64_t g = 0; g < w.groups; ++g) {
    if (counts[g] < 0 || counts[g] > max_m)
      fail("masked_m is ", counts[g], " at index ", g, "; it must be between 0 and ", max_m);
    if (counts[g] > 0) rows.segments.push_back({g, g * max_m, counts[g]});
    zero_rows(out, g * max_m + counts[g], (g + 1) * max_m, w.n, dtype);
  }
  if (rows.segments.empty()) return out;
  const WeightOperand weight(w, b, b_scale, b_global_scale, bias);
  const ActivationOperand ready(a, a_scale, w);
  gemm(ready.view(), weight.view(), rows, out.data_ptr(), dtype_of(dtype));
  return out;
}

Tensor indexed_mm(const Tensor& a, const Tensor& b, const Tensor& b_scale,
                  const OptionalTensor& b_global_scale, const Tensor& expert_ids,
                  const OptionalTensor& a_scale, const OptionalTensor& bias, const std::string& format,
                  const std::string& layout, std::optional<ScalarType> out_dtype) {
  const WeightShape w = check_weight("b", b, b_scale, b_global_scale, format, layout, true);
  check_a(a, a_scale, b, w.k, 2);
  check_operand("expert_ids", expert_ids, "b", b, {a.size(0)}, kIndex);
  check_operand("bias", bias, "b", b, {w.groups, w.n}, kFloating);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  const int64_t m = a.size(0);
  const Tensor out = empty({m, w.n}, dtype);
  const std::vector<int64_t> ids = indices(expert_ids);
  const Rows rows = sort_by_expert(ids.data(), m, w.groups, 1, nullptr);
  if (int64_t(rows.out_index.size()) < m) zero_rows(out, 0, m, w.n, dtype);
  if (rows.segments.empty()) return out;
  const WeightOperand weight(w, b, b_scale, b_global_scale, bias);
  const ActivationOperand ready(a, a_scale, w);
  gemm(ready.view(), weight.view(), rows, out.data_ptr(), dtype_of(dtype));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) {
  m.impl("mm", TORCH_BOX(&mm));
  m.impl("grouped_mm", TORCH_BOX(&grouped_mm));
  m.impl("grouped_mm_masked", TORCH_BOX(&grouped_mm_masked));
  m.impl("indexed_mm", TORCH_BOX(&indexed_mm));
}

}  // namespace fp4::cpu
