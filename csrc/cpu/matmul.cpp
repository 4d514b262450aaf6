// The matrix products on the CPU. Each checks its arguments, allocates its result, turns the routing into
// segments and calls gemm.
#include <algorithm>
#include <cstring>
#include <memory>

#include "common/boxed.h"
#include "cpu/prepack.h"

namespace fp4::cpu {
namespace {

void zero_rows(const Tensor& out, int64_t begin, int64_t end, int64_t n, ScalarType dtype) {
  const int64_t bytes = n * dtype_size(dtype_of(dtype));
  zero_bytes(mutable_data<uint8_t>(out) + begin * bytes, (end - begin) * bytes);
}

Tensor mm(const Tensor& a, const Tensor& b, const Tensor& b_scale, const OptionalTensor& b_global_scale,
          const OptionalTensor& a_scale, const OptionalTensor& bias, const OptionalTensor& a_global_scale,
          const std::string& format, const std::string& layout, const std::string& a_format,
          std::optional<ScalarType> out_dtype) {
  const WeightShape w =
      check_mm(a, b, b_scale, b_global_scale, format, layout, a_scale, bias, a_global_scale, a_format);
  refuse_layout("mm", *w.layout);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  const int64_t m = a.size(0);
  const Tensor out = empty({m, w.n}, dtype);
  if (m == 0) return out;
  const WeightOperand weight(w, b, b_scale, b_global_scale, bias);
  const Rows rows{.segments = {{0, 0, m}}, .a_index = {}, .out_index = {}};
  const ActivationOperand ready(a, a_scale, a_global_scale, a_format, w);
  gemm(ready.view(), weight.view(), rows, out.data_ptr(), dtype_of(dtype));
  return out;
}

std::vector<Tensor> packed_linears(const Tensor& a, const std::vector<Tensor>& b,
                                   const std::vector<Tensor>& b_scale,
                                   const std::vector<OptionalTensor>& b_global_scale,
                                   const std::vector<OptionalTensor>& bias, const std::string& format,
                                   const std::string& layout, const std::string& a_format,
                                   std::optional<ScalarType> out_dtype) {
  const size_t count = b.size();
  check_packed_linears(a, int64_t(count), int64_t(b_scale.size()), int64_t(b_global_scale.size()),
                       int64_t(bias.size()), a_format);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  const int64_t m = a.size(0);
  std::vector<Tensor> made;
  std::vector<WeightOperand> weights;
  for (size_t i = 0; i < count; ++i) {
    const WeightShape w = check_mm(a, b[i], b_scale[i], b_global_scale[i], format, layout, std::nullopt,
                                   bias[i], std::nullopt, "");
    check_same_scales(b_scale[0], b_scale[i]);
    refuse_layout("packed_linears", *w.layout);
    made.push_back(empty({m, w.n}, dtype));
    weights.emplace_back(w, b[i], b_scale[i], b_global_scale[i], bias[i]);
  }
  if (m == 0) return made;
  const Tensor values = as_contiguous(a);
  const Activations ready =
      quantize_and_prepare(a_format_of(a_format), values.data_ptr(), dtype_of(values.scalar_type()), m,
                           weights[0].view().k, weights[0].view().scale);
  const Rows rows{.segments = {{0, 0, m}}, .a_index = {}, .out_index = {}};
  std::vector<std::unique_ptr<Product>> products;
  std::vector<Phase> phases{ready.fill}, multiply;
  Phase all;  // the work of all products, so that threads wait for each other once
  for (size_t i = 0; i < count; ++i) {
    products.push_back(
        std::make_unique<Product>(ready, weights[i].view(), rows, made[i].data_ptr(), dtype_of(dtype)));
    phases.push_back(products.back()->pack());
    multiply.push_back(products.back()->multiply());
    all.count += multiply.back().count;
    all.grain = multiply.back().grain;  // K is the same for all
  }
  all.run = [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const Phase& of : multiply) {
      const int64_t from = std::max(begin, first) - first, to = std::min(end, first + of.count) - first;
      if (from < to) of.run(from, to);
      first += of.count;
    }
  };
  phases.push_back(all);
  run_phases(phases);
  return made;
}

Tensor grouped_mm(const Tensor& a, const Tensor& b, const Tensor& b_scale,
                  const OptionalTensor& b_global_scale, const Tensor& offs, const OptionalTensor& a_scale,
                  const OptionalTensor& bias, const OptionalTensor& a_global_scale, const std::string& format,
                  const std::string& layout, const std::string& a_format,
                  std::optional<ScalarType> out_dtype) {
  const WeightShape w = check_grouped_mm(a, b, b_scale, b_global_scale, offs, format, layout, a_scale, bias,
                                         a_global_scale, a_format);
  refuse_layout("grouped_mm", *w.layout);
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
  const ActivationOperand ready(a, a_scale, a_global_scale, a_format, w);
  gemm(ready.view(), weight.view(), rows, out.data_ptr(), dtype_of(dtype));
  return out;
}

Tensor grouped_mm_masked(const Tensor& a, const Tensor& b, const Tensor& b_scale,
                         const OptionalTensor& b_global_scale, const Tensor& masked_m,
                         const OptionalTensor& a_scale, const OptionalTensor& bias,
                         const OptionalTensor& a_global_scale, const std::string& format,
                         const std::string& layout, const std::string& a_format,
                         std::optional<ScalarType> out_dtype) {
  const WeightShape w = check_grouped_mm_masked(a, b, b_scale, b_global_scale, masked_m, format, layout,
                                                a_scale, bias, a_global_scale, a_format);
  refuse_layout("grouped_mm_masked", *w.layout);
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
  const ActivationOperand ready(a, a_scale, a_global_scale, a_format, w);
  gemm(ready.view(), weight.view(), rows, out.data_ptr(), dtype_of(dtype));
  return out;
}

Tensor indexed_mm(const Tensor& a, const Tensor& b, const Tensor& b_scale,
                  const OptionalTensor& b_global_scale, const Tensor& expert_ids,
                  const OptionalTensor& a_scale, const OptionalTensor& bias,
                  const OptionalTensor& a_global_scale, const std::string& format, const std::string& layout,
                  const std::string& a_format, std::optional<ScalarType> out_dtype) {
  const WeightShape w = check_indexed_mm(a, b, b_scale, b_global_scale, expert_ids, format, layout, a_scale,
                                         bias, a_global_scale, a_format);
  refuse_layout("indexed_mm", *w.layout);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  const int64_t m = a.size(0);
  const Tensor out = empty({m, w.n}, dtype);
  const std::vector<int64_t> ids = indices(expert_ids);
  const Rows rows = sort_by_expert(ids.data(), m, w.groups, 1, nullptr);
  if (int64_t(rows.out_index.size()) < m) zero_rows(out, 0, m, w.n, dtype);
  if (rows.segments.empty()) return out;
  const WeightOperand weight(w, b, b_scale, b_global_scale, bias);
  const ActivationOperand ready(a, a_scale, a_global_scale, a_format, w);
  gemm(ready.view(), weight.view(), rows, out.data_ptr(), dtype_of(dtype));
  return out;
}

Tensor grouped_mm_k(const Tensor& a, const Tensor& b, const Tensor& b_scale,
                    const OptionalTensor& b_global_scale, const Tensor& offs, const OptionalTensor& a_scale,
                    const OptionalTensor& a_global_scale, const std::string& format,
                    const std::string& layout, const std::string& a_format,
                    std::optional<ScalarType> out_dtype) {
  const WeightShape w = check_grouped_mm_k(a, b, b_scale, b_global_scale, offs, format, layout, a_scale,
                                           a_global_scale, a_format);
  refuse_layout("grouped_mm_k", *w.layout);
  const ScalarType dtype = resolve_out_dtype(a, out_dtype);
  // No group may begin inside a block of scales.
  int block = w.format->block;
  if (!a_format.empty()) block = std::max(block, entry(kFormats, a_format).block);
  if (a.scalar_type() == ScalarType::Char) block = std::max(block, kInt8Block);
  const std::vector<int64_t> ends = indices(offs);
  for (size_t g = 0; g < ends.size(); ++g) {
    const int64_t begin = g > 0 ? ends[g - 1] : 0;
    if (ends[g] < begin) fail("offs decreases from ", begin, " to ", ends[g], " at index ", g);
    if (ends[g] > w.k) fail("offs is ", ends[g], " at index ", g, "; a has only ", w.k, " columns");
    if (ends[g] % block != 0 && ends[g] != w.k)
      fail("offs is ", ends[g], " at index ", g, "; it must be a multiple of ", block,
           " (a block of scales) or ", w.k, " (all of K)");
  }

  const int64_t m = a.size(0), groups = ends.size(), bytes = dtype_size(dtype_of(dtype));
  const Tensor out = empty({groups, m, w.n}, dtype);
  if (m == 0 || w.n == 0 || groups == 0) return out;
  const auto [packed, scales, factor] = to_plain(b, b_scale, b_global_scale, {w.format, w.layout});
  const ActivationOperand ready(a, a_scale, a_global_scale, a_format, w, /*as_float=*/true);
  const Activations& rows = ready.view();
  run_phases({rows.fill});
  const BlockScales of{w.format->block, scale_kind(w.scale_dtype)};
  int64_t begin = 0;
  for (int64_t g = 0; g < groups; begin = ends[g++]) {
    const int64_t k = ends[g] - begin, group_bytes = of.bytes(k);
    if (k == 0) {
      zero_rows(out, g * m, (g + 1) * m, w.n, dtype);
      continue;
    }
    // Copies the group's columns to operands of their own. A group begins at a multiple of a scale block, so
    // activation rows may be cut there even in the order that the kernels read.
    const int64_t kp = padded_k(k), whole = ceil_div(k, 8) * 8;
    const Buffer codes(w.n * (k / 2)), group_scales(w.n * group_bytes);
    Buffer group_rows(m * kp * sizeof(float));
    for (int64_t i = 0; i < w.n; ++i) {
      std::memcpy(codes.data() + i * (k / 2), data<uint8_t>(packed) + (i * w.k + begin) / 2, k / 2);
      std::memcpy(group_scales.data() + i * group_bytes,
                  data<uint8_t>(scales) + i * of.bytes(w.k) + of.bytes(begin), group_bytes);
    }
    for (int64_t i = 0; i < m; ++i) {
      const float* from = reinterpret_cast<const float*>(rows.data + i * rows.stride) + begin;
      float* to = group_rows.floats() + i * kp;
      std::fill(std::copy(from, from + whole, to), to + kp, 0.f);
    }
    const Weight weight{.format = w.format,
                        .order = Order::plain,
                        .batch_invariant = w.layout->batch_invariant,
                        .scale = scale_kind(w.scale_dtype),
                        .groups = 1,
                        .n = w.n,
                        .k = k,
                        .codes = codes.data(),
                        .scales = group_scales.data(),
                        .global_scale = w.format->has_global_scale ? data<float>(factor) : nullptr,
                        .bias = nullptr,
                        .bias_dtype = DType::f32};
    const Rows all{.segments = {{0, 0, m}}, .a_index = {}, .out_index = {}};
    const uint8_t* first = group_rows.data();
    gemm({RowKind::floating, first, kp * int64_t(sizeof(float)), std::move(group_rows), Phase(), {}}, weight,
         all, mutable_data<uint8_t>(out) + g * m * w.n * bytes, dtype_of(dtype));
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) {
  m.impl("mm", FP4_BOX(mm));
  m.impl("packed_linears", FP4_BOX(packed_linears));
  m.impl("grouped_mm", FP4_BOX(grouped_mm));
  m.impl("grouped_mm_masked", FP4_BOX(grouped_mm_masked));
  m.impl("indexed_mm", FP4_BOX(indexed_mm));
  m.impl("grouped_mm_k", FP4_BOX(grouped_mm_k));
}

}  // namespace fp4::cpu
