// Operators on formats, layouts and the order of rows on CUDA. They run a native kernel if there is one, else
// the operator in Python.
#include "cuda/operands.h"

namespace fp4::cuda {
namespace {

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr int kMaxFp8Width = 32768;  // most columns that one block of the row kernels holds
constexpr std::string_view kFrom = "this is a conversion";

Three quantize(const Tensor& x, const std::string& format, const OptionalTensor& global_scale) {
  check_quantize(x, global_scale, check_format(format));
  return fallback<Three>("quantize", kFrom, x, format, global_scale);
}

Two quantize_int8(const Tensor& x) {
  check_quantize_int8(x);
  return fallback<Two>("quantize_int8", kFrom, x);
}

// With layout sm90, 16-bit rows take one fused pass.
Two quantize_fp8(const Tensor& x, const std::string& layout) {
  const Layout& order = check_quantize_fp8(x, layout);
  const int64_t k = size(x, -1);
  const bool kernel_takes = x.scalar_type() != ScalarType::Float && k % 16 == 0 && 0 < k && k <= kMaxFp8Width;
  if (!order.native || !kernel_takes || x.numel() == 0)
    return fallback<Two>(
        "quantize_fp8", text("layout is '", layout, "' and x ", dtype_name(x.scalar_type()), " with K = ", k),
        x, layout);
  const Here here(x);
  if (!here.gpu().hopper())
    return fallback<Two>("quantize_fp8", "this GPU does not have compute capability 9.0", x, layout);
  const Tensor rows = as_operand(x);
  const Rows made = make_rows(here, device::Form::kFp8,
                              x.dim() == 2 ? rows : torch::stable::view(rows, {-1, k}), nullptr, {});
  if (x.dim() == 2) return {made.values, *made.factor};
  const Shape lead = leading(x, -1);
  return {torch::stable::view(made.values, with_last(lead, order.padded(k))),
          torch::stable::view(*made.factor, lead)};
}

Tensor dequantize(const Tensor& packed, const Tensor& block_scale, const OptionalTensor& global_scale,
                  const std::string& format, ScalarType dtype, const std::string& layout) {
  const Stored stored = check_dequantize(packed, block_scale, global_scale, format, dtype, layout);
  const Order order = stored.layout->order;
  if (order != Order::sm90 && order != Order::mma_bf16)
    return fallback("dequantize", layout_words(layout), packed, block_scale, global_scale, format, dtype,
                    layout);
  const Here here(packed);
  require_kernels("dequantize", *stored.layout, here);
  const Tensor codes = as_operand(packed), scales = as_operand(block_scale),
               factor = as_contiguous(global_scale.value());
  const int64_t n = size(codes, -2), k = 2 * size(codes, -1);
  const int64_t rows = num_rows(codes);
  const Tensor flat = here.empty({rows, k}, dtype);
  const int code = dtype == ScalarType::Double ? 3 : int(code_of(dtype));
  if (flat.numel() > 0)
    check_launch(
        here.kernels().dequantize(pointer<uint8_t>(codes), pointer<uint8_t>(scales), pointer<float>(factor),
                                  rows, n, int(k), stored.format->block, order == Order::mma_bf16,
                                  mutable_pointer(flat), code, here.stream()),
        "fp4_kernel_dequantize");
  return codes.dim() == 2 ? flat : torch::stable::view(flat, with_last(leading(codes, -1), k));
}

Three prepack(const Tensor& packed, const Tensor& block_scale, const OptionalTensor& global_scale,
              const std::string& format, const std::string& layout) {
  check_prepack(packed, block_scale, global_scale, format, layout);
  return fallback<Three>("prepack", kFrom, packed, block_scale, global_scale, format, layout);
}

Three unpack(const Tensor& packed, const Tensor& block_scale, const OptionalTensor& global_scale,
             const std::string& format, const std::string& layout) {
  check_unpack(packed, block_scale, global_scale, format, layout);
  return fallback<Three>("unpack", kFrom, packed, block_scale, global_scale, format, layout);
}

Tensor offs_to_m_indices(const Tensor& offs, int64_t m) {
  check_offs_to_m_indices(offs, m);
  return fallback("offs_to_m_indices", kFrom, offs, m);
}

Tensor m_indices_to_offs(const Tensor& m_indices, int64_t num_groups) {
  check_m_indices_to_offs(m_indices, num_groups);
  return fallback("m_indices_to_offs", kFrom, m_indices, num_groups);
}

Two to_masked(const Tensor& a, const Tensor& offs, int64_t max_m) {
  check_to_masked(a, offs, max_m);
  return fallback<Two>("to_masked", kFrom, a, offs, max_m);
}

Two from_masked(const Tensor& a, const Tensor& masked_m, int64_t m) {
  check_from_masked(a, masked_m, m);
  return fallback<Two>("from_masked", kFrom, a, masked_m, m);
}

}  // namespace

FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) {
  m.impl("quantize", FP4_BOX(quantize));
  m.impl("quantize_int8", FP4_BOX(quantize_int8));
  m.impl("quantize_fp8", FP4_BOX(quantize_fp8));
  m.impl("dequantize", FP4_BOX(dequantize));
  m.impl("prepack", FP4_BOX(prepack));
  m.impl("unpack", FP4_BOX(unpack));
  m.impl("offs_to_m_indices", FP4_BOX(offs_to_m_indices));
  m.impl("m_indices_to_offs", FP4_BOX(m_indices_to_offs));
  m.impl("to_masked", FP4_BOX(to_masked));
  m.impl("from_masked", FP4_BOX(from_masked));
}

}  // namespace fp4::cuda
