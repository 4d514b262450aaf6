// The argument checks of every operator, for the C++ kernels: the twin of meta/checks.py, with the same
// words. Each failure throws std::runtime_error, which reaches Python as a RuntimeError with this message
// and nothing else (STD_TORCH_CHECK would put this file's path in front of it).
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/formats.h"

namespace fp4 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;
using Dtypes = std::initializer_list<ScalarType>;

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

inline constexpr Dtypes kFloating = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
inline constexpr Dtypes kFloatingOrDouble = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                                             ScalarType::Double};
inline constexpr Dtypes kActivation = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                                       ScalarType::Char};
inline constexpr Dtypes kPacked = {ScalarType::Byte, ScalarType::Float4_e2m1fn_x2};
inline constexpr Dtypes kIndex = {ScalarType::Int, ScalarType::Long};
inline constexpr Dtypes kInt32 = {ScalarType::Int};
inline constexpr Dtypes kFloat32 = {ScalarType::Float};

inline bool contains(Dtypes dtypes, ScalarType dtype) {
  return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}

// The names that Python prints, without the "torch." in front.
inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e8m0fnu:
      return "float8_e8m0fnu";
    case ScalarType::Float4_e2m1fn_x2:
      return "float4_e2m1fn_x2";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline std::string dtype_names(Dtypes dtypes) {
  std::string text;
  for (ScalarType dtype : dtypes) text += (text.empty() ? "" : " or ") + dtype_name(dtype);
  return text;
}

template <typename Sizes>
std::string shape_text(const Sizes& sizes) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << ']';
  return text.str();
}

inline std::string device_text(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device:") + std::to_string(t.get_device_index());
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The number of rows of x, were it flattened to [rows, last dimension].
inline int64_t num_rows(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) rows *= t.size(i);
  return rows;
}

// --- pieces ---

inline void check_dtype(std::string_view name, const Tensor& t, Dtypes allowed) {
  const ScalarType dtype = t.scalar_type();
  if (!contains(allowed, dtype))
    fail(name, " has dtype ", dtype_name(dtype), "; it must be ", dtype_names(allowed));
}

inline void check_dim(std::string_view name, const Tensor& t, int64_t dim) {
  if (t.dim() != dim) fail(name, " has ", t.dim(), " dimensions; it must have ", dim);
}

inline void check_min_dim(std::string_view name, const Tensor& t) {
  if (t.dim() < 1) fail(name, " has 0 dimensions; it must have 1 or more");
}

inline void check_shape(std::string_view name, const Tensor& t, const Shape& shape) {
  const auto sizes = t.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()))
    fail(name, " has shape ", shape_text(sizes), "; it must be ", shape_text(shape));
}

inline void check_device(std::string_view name, const Tensor& t, std::string_view like_name,
                         const Tensor& like) {
  if (t.is_cpu() == like.is_cpu() && t.get_device_index() == like.get_device_index()) return;
  fail(name, " is on ", device_text(t), " and ", like_name, " on ", device_text(like),
       "; they must be on one device");
}

// `value` must be one of `names`, which are sorted.
template <size_t n>
void check_name(std::string_view what, std::string_view value, const std::array<std::string_view, n>& names) {
  if (std::find(names.begin(), names.end(), value) != names.end()) return;
  std::string text;
  for (std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  fail(what, " is '", value, "'; it must be one of: ", text);
}

inline const Format& check_format(std::string_view format) {
  check_name("format", format, kFormatNames);
  return *std::find_if(std::begin(kFormats), std::end(kFormats),
                       [&](const Format& f) { return f.name == format; });
}

inline Layout check_layout(std::string_view layout) {
  check_name("layout", layout, kLayoutNames);
  return layout == "tile16" ? Layout::tile16 : Layout::plain;
}

inline const Activation& check_activation(std::string_view activation) {
  check_name("activation", activation, kActivationNames);
  return *std::find_if(std::begin(kActivations), std::end(kActivations),
                       [&](const Activation& a) { return a.name == activation; });
}

inline bool check_a_format_is_int8(std::string_view a_format) {
  check_name("a_format", a_format, kAFormatNames);
  return a_format == "int8";
}

inline ScalarType scale_dtype(const Format& fmt) {
  return fmt.scale == Scale::e4m3 ? ScalarType::Float8_e4m3fn : ScalarType::Float8_e8m0fnu;
}

// scale [..., ceil(K/block)] for packed [..., K/2].
inline void check_block_scale(std::string_view scale_name, const Tensor& scale, std::string_view name,
                              const Tensor& packed, const Format& fmt) {
  check_dtype(scale_name, scale, {scale_dtype(fmt)});
  check_device(scale_name, scale, name, packed);
  const auto sizes = packed.sizes();
  Shape shape(sizes.begin(), sizes.end());
  shape.back() = ceil_div(shape.back() * 2, fmt.block);
  check_shape(scale_name, scale, shape);
}

// scale float32 packed.shape[:-2], one factor a matrix, for the formats that have one.
inline void check_global_scale(std::string_view scale_name, const OptionalTensor& scale,
                               std::string_view name, const Tensor& packed, const Format& fmt) {
  if (!fmt.has_global_scale) {
    if (scale && scale->numel() != 0)
      fail(scale_name, " was given; format ", fmt.name, " has no global scale");
    return;
  }
  if (!scale) fail(scale_name, " is missing; format ", fmt.name, " needs one");
  check_dtype(scale_name, *scale, kFloat32);
  check_device(scale_name, *scale, name, packed);
  const auto sizes = packed.sizes();
  check_shape(scale_name, *scale, Shape(sizes.begin(), sizes.end() - std::min<size_t>(2, sizes.size())));
}

// A weight operand: b [G, N, K/2] if grouped, else [N, K/2].
struct WeightShape {
  const Format* format;
  Layout layout;
  int64_t groups, n, k;
};

inline WeightShape check_weight(const std::string& name, const Tensor& b, const Tensor& b_scale,
                                const OptionalTensor& b_global_scale, const std::string& format,
                                const std::string& layout, bool grouped) {
  const Format& fmt = check_format(format);
  const Layout order = check_layout(layout);
  check_dtype(name, b, kPacked);
  check_dim(name, b, grouped ? 3 : 2);
  check_block_scale(name + "_scale", b_scale, name, b, fmt);
  check_global_scale(name + "_global_scale", b_global_scale, name, b, fmt);
  const int64_t dim = b.dim();
  return {&fmt, order, grouped ? b.size(0) : 1, b.size(dim - 2), b.size(dim - 1) * 2};
}

// Activations [..., K]: floating without a scale, or int8 with a_scale float32 [..., ceil(K/32)].
inline void check_a(const Tensor& a, const OptionalTensor& a_scale, const Tensor& b, int64_t k, int64_t dim) {
  check_dtype("a", a, kActivation);
  check_dim("a", a, dim);
  check_device("a", a, "b", b);
  if (a.size(dim - 1) != k)
    fail("a has ", a.size(dim - 1), " columns; b has K = ", k, ", and they must be equal");
  if (a.scalar_type() == ScalarType::Char) {
    if (!a_scale) fail("a_scale is missing; int8 activations need one");
    check_dtype("a_scale", *a_scale, kFloat32);
    check_device("a_scale", *a_scale, "a", a);
    const auto sizes = a.sizes();
    Shape shape(sizes.begin(), sizes.end());
    shape.back() = ceil_div(k, kInt8Block);
    check_shape("a_scale", *a_scale, shape);
  } else if (a_scale) {
    fail("a_scale was given; only int8 activations have one");
  }
}

// A bias (one row of N for each expert), routing weights, offsets or expert ids.
inline void check_operand(std::string_view name, const Tensor& t, std::string_view like_name,
                          const Tensor& like, const Shape& shape, Dtypes dtypes) {
  check_dtype(name, t, dtypes);
  check_device(name, t, like_name, like);
  check_shape(name, t, shape);
}

inline void check_operand(std::string_view name, const OptionalTensor& t, std::string_view like_name,
                          const Tensor& like, const Shape& shape, Dtypes dtypes) {
  if (t) check_operand(name, *t, like_name, like, shape, dtypes);
}

// The output dtype: as asked, else that of floating activations, else bfloat16.
inline ScalarType resolve_out_dtype(const Tensor& a, std::optional<ScalarType> out_dtype) {
  if (!out_dtype) {
    const ScalarType dtype = a.scalar_type();
    return contains(kFloating, dtype) ? dtype : ScalarType::BFloat16;
  }
  if (!contains(kFloating, *out_dtype))
    fail("out_dtype is ", dtype_name(*out_dtype), "; it must be ", dtype_names(kFloating));
  return *out_dtype;
}

// --- one check for each operator ---

inline void check_quantize(const Tensor& x, const OptionalTensor& global_scale, const Format& fmt) {
  check_dtype("x", x, kFloating);
  check_min_dim("x", x);
  const int64_t k = x.size(x.dim() - 1);
  if (k % 2 != 0) fail("x has K = ", k, " (last dimension); it must be even");
  if (global_scale) check_global_scale("global_scale", global_scale, "x", x, fmt);
}

inline void check_quantize_int8(const Tensor& x) {
  check_dtype("x", x, kFloating);
  check_min_dim("x", x);
}

struct FormatAndLayout {
  const Format* format;
  Layout layout;
};

inline FormatAndLayout check_dequantize(const Tensor& packed, const Tensor& block_scale,
                                        const OptionalTensor& global_scale, const std::string& format,
                                        ScalarType dtype, const std::string& layout) {
  const Format& fmt = check_format(format);
  const Layout order = check_layout(layout);
  if (!contains(kFloatingOrDouble, dtype))
    fail("dtype is ", dtype_name(dtype), "; it must be ", dtype_names(kFloatingOrDouble));
  check_dtype("packed", packed, kPacked);
  check_min_dim("packed", packed);
  check_block_scale("block_scale", block_scale, "packed", packed, fmt);
  check_global_scale("global_scale", global_scale, "packed", packed, fmt);
  return {&fmt, order};
}

inline FormatAndLayout check_prepack(const Tensor& packed, const Tensor& block_scale,
                                     const std::string& format, const std::string& layout) {
  const Format& fmt = check_format(format);
  const Layout order = check_layout(layout);
  check_dtype("packed", packed, kPacked);
  if (packed.dim() != 2 && packed.dim() != 3)
    fail("packed has ", packed.dim(), " dimensions; it must have 2 or 3");
  check_block_scale("block_scale", block_scale, "packed", packed, fmt);
  return {&fmt, order};
}

inline void check_count(std::string_view name, int64_t count) {
  if (count < 0) fail(name, " is ", count, "; it must be 0 or more");
}

inline void check_offsets(std::string_view name, const Tensor& t, const Tensor* a = nullptr) {
  check_dtype(name, t, kInt32);
  check_dim(name, t, 1);
  if (a != nullptr) check_device(name, t, "a", *a);
}

struct MoeShape {
  WeightShape up, down;
};

inline MoeShape check_moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                          const Tensor& w13, const Tensor& w13_scale, const OptionalTensor& w13_global_scale,
                          const Tensor& w2, const Tensor& w2_scale, const OptionalTensor& w2_global_scale,
                          const OptionalTensor& w13_bias, const OptionalTensor& w2_bias,
                          const std::string& format, const std::string& layout, const std::string& activation,
                          const std::string& a_format) {
  const WeightShape up = check_weight("w13", w13, w13_scale, w13_global_scale, format, layout, true);
  const WeightShape down = check_weight("w2", w2, w2_scale, w2_global_scale, format, layout, true);
  check_activation(activation);
  check_a_format_is_int8(a_format);
  check_dtype("x", x, kFloating);
  check_dim("x", x, 2);
  check_device("x", x, "w13", w13);
  check_device("w2", w2, "w13", w13);
  if (x.size(1) != up.k)
    fail("x has ", x.size(1), " columns; w13 has K = ", up.k, ", and they must be equal");
  check_dim("topk_ids", topk_ids, 2);
  const Shape routed = {x.size(0), topk_ids.size(1)};
  check_operand("topk_ids", topk_ids, "w13", w13, routed, kIndex);
  check_operand("topk_weights", topk_weights, "w13", w13, routed, kFloating);
  if (up.n != 2 * down.k)
    fail("w13 has ", up.n, " rows; w2 has K = ", down.k, ", and w13 must have twice that (gate and up)");
  if (up.groups != down.groups)
    fail("w2 has ", down.groups, " experts; w13 has ", up.groups, ", and they must be equal");
  check_operand("w13_bias", w13_bias, "w13", w13, {up.groups, up.n}, kFloating);
  check_operand("w2_bias", w2_bias, "w13", w13, {down.groups, down.n}, kFloating);
  return {up, down};
}

}  // namespace fp4
