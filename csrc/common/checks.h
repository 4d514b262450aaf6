// The argument checks of every operator, for the C++ kernels: the twin of meta/checks.py, with the same
// words. Each failure throws std::runtime_error, which reaches Python as a RuntimeError (common/boxed.h) with
// this message and nothing else (STD_TORCH_CHECK would put this file's path in front of it).
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/formats.h"

namespace fp4 {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;
using Dtypes = std::span<const ScalarType>;

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

inline constexpr ScalarType kFloating[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
inline constexpr ScalarType kFloatingOrDouble[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                                                   ScalarType::Double};
inline constexpr ScalarType kActivation[] = {ScalarType::Float,
                                             ScalarType::BFloat16,
                                             ScalarType::Half,
                                             ScalarType::Char,
                                             ScalarType::Float8_e4m3fn,
                                             ScalarType::Byte,
                                             ScalarType::Float4_e2m1fn_x2};
inline constexpr ScalarType kPacked[] = {ScalarType::Byte, ScalarType::Float4_e2m1fn_x2};
inline constexpr ScalarType kBytes[] = {ScalarType::Byte};
inline constexpr ScalarType kIndex[] = {ScalarType::Int, ScalarType::Long};
inline constexpr ScalarType kInt32[] = {ScalarType::Int};
inline constexpr ScalarType kFloat32[] = {ScalarType::Float};

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

// `value` must be one of `names`; returns its place.
inline size_t check_name(std::string_view what, std::string_view value, Names names,
                         std::string_view when = "", std::string_view hint = "") {
  const auto at = std::find(names.begin(), names.end(), value);
  if (at != names.end()) return at - names.begin();
  std::string text;
  for (std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  fail(what, " is '", value, "'; ", when, "it must be one of: ", text, hint);
}

inline const Format& check_format(std::string_view format) {
  check_name("format", format, kFormatNames);
  return entry(kFormats, format);
}

inline const Layout& check_layout(std::string_view layout) {
  check_name("layout", layout, kLayoutNames);
  return entry(kLayouts, layout);
}

// The limit in "(limit=7.5)", as meta/formats.py, find_activation takes it.
inline bool read_limit(std::string_view text, float* limit) {
  constexpr std::string_view kBegin = "(limit=";
  if (!text.starts_with(kBegin) || !text.ends_with(')')) return false;
  const std::string_view number = text.substr(kBegin.size(), text.size() - kBegin.size() - 1);
  if (number.empty() || number[0] < '0' || number[0] > '9') return false;
  double value = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  *limit = float(value);
  return error == std::errc() && end == number.data() + number.size() && value > kLeastLimit &&
         value < kMostLimit;
}

inline Activation check_activation(std::string_view name) {
  const size_t open = std::min(name.find('('), name.size());
  const std::string_view base = name.substr(0, open);
  const bool known = std::ranges::find(kActivationNames, base) != kActivationNames.end();
  check_name("activation", known ? base : name, kActivationNames);
  Activation a = entry(kActivations, base);
  if (open < name.size() && (!a.gated || !read_limit(name.substr(open), &a.limit)))
    fail("activation is '", name,
         "'; one with a gate may have brackets, and in them limit=L, L a positive number: what gate and up "
         "are "
         "clamped to");
  return a;
}

inline AFormat check_a_format(std::string_view a_format) {
  return AFormat(check_name("a_format", a_format, kAFormatNames));
}

inline void check_multiple(std::string_view name, std::string_view what, int64_t count, int multiple,
                           const Layout& layout) {
  if (count % multiple != 0)
    fail(name, " has ", count, " ", what, "; layout '", layout.name, "' needs a multiple of ", multiple);
}

// Of the block scales that quantize makes.
inline ScalarType scale_dtype(const Format& fmt) { return kScales[int(fmt.scale)].dtype; }

// Of checked block scales.
inline Scale scale_kind(const Tensor& block_scale) {
  const auto found = std::ranges::find(kScales, block_scale.scalar_type(), &ScaleKind::dtype);
  return Scale(found - std::begin(kScales));
}

// uint8; e2m1 codes may have torch's dtype for pairs of them too.
inline void check_packed(std::string_view name, const Tensor& packed, const Format& fmt) {
  check_dtype(name, packed, fmt.element == Element::e2m1 ? Dtypes(kPacked) : kBytes);
}

inline std::string with_layout(const Layout& layout) {
  return "with layout '" + std::string(layout.name) + "' ";
}

inline void check_holds(const Layout& layout, const Format& fmt) {
  check_name("format", fmt.name, layout.formats, with_layout(layout));
}

// scale [..., ceil(K/block)] for packed [..., K/2].
inline void check_block_scale(std::string_view scale_name, const Tensor& scale, std::string_view name,
                              const Tensor& packed, const Format& fmt) {
  const ScalarType dtypes[] = {scale_dtype(fmt), kScales[int(fmt.another_scale)].dtype};
  check_dtype(scale_name, scale, Dtypes(dtypes, dtypes[0] == dtypes[1] ? 1 : 2));
  check_device(scale_name, scale, name, packed);
  const auto sizes = packed.sizes();
  Shape shape(sizes.begin(), sizes.end());
  shape.back() = ceil_div(shape.back() * 2, fmt.block);
  check_shape(scale_name, scale, shape);
}

// scale float32 packed.shape[:-2]: one factor a matrix.
inline void check_factor(std::string_view scale_name, const Tensor& scale, std::string_view name,
                         const Tensor& packed) {
  check_dtype(scale_name, scale, kFloat32);
  check_device(scale_name, scale, name, packed);
  const auto sizes = packed.sizes();
  check_shape(scale_name, scale, Shape(sizes.begin(), sizes.end() - std::min<size_t>(2, sizes.size())));
}

// The global scale of the formats that have one.
inline void check_global_scale(std::string_view scale_name, const OptionalTensor& scale,
                               std::string_view name, const Tensor& packed, const Format& fmt) {
  if (!fmt.has_global_scale) {
    if (scale && scale->numel() != 0)
      fail(scale_name, " was given; format ", fmt.name, " has no global scale");
    return;
  }
  if (!scale) fail(scale_name, " is missing; format ", fmt.name, " needs one");
  check_factor(scale_name, *scale, name, packed);
}

// The scales of packed [..., N, K/2] (K padded) in the form the layout gives them; `prefix` is the weight's
// name, or empty where the scales are called block_scale and global_scale.
inline void check_scales(const std::string& prefix, const Tensor& block_scale,
                         const OptionalTensor& global_scale, std::string_view name, const Tensor& packed,
                         const Format& fmt, const Layout& layout) {
  const std::string scale_name = prefix.empty() ? "block_scale" : prefix + "_scale";
  const std::string global_name = prefix.empty() ? "global_scale" : prefix + "_global_scale";
  if (!layout.scale_dtype) {
    check_block_scale(scale_name, block_scale, name, packed, fmt);
    check_global_scale(global_name, global_scale, name, packed, fmt);
    return;
  }
  const auto sizes = packed.sizes();
  Shape shape(sizes.begin(), sizes.end());
  const int64_t k = shape.back() * 2;
  check_multiple(name, "rows", shape[shape.size() - 2], layout.n_multiple, layout);
  check_multiple(name, "columns", k, layout.k_padding, layout);
  check_dtype(scale_name, block_scale, Dtypes(&*layout.scale_dtype, 1));
  check_device(scale_name, block_scale, name, packed);
  shape.back() = k / fmt.block;
  check_shape(scale_name, block_scale, shape);
  if (!layout.has_factor) return check_global_scale(global_name, global_scale, name, packed, fmt);
  if (!global_scale) fail(global_name, " is missing; layout '", layout.name, "' needs one");
  check_factor(global_name, *global_scale, name, packed);
}

// A weight operand: b [G, N, K/2] if grouped, else [N, K/2]; k is as its layout pads it.
struct WeightShape {
  const Format* format;
  const Layout* layout;
  Scale scale;  // of the block scales; not of layout sm90
  int64_t groups, n, k;
};

inline WeightShape check_weight(const std::string& name, const Tensor& b, const Tensor& b_scale,
                                const OptionalTensor& b_global_scale, const std::string& format,
                                const std::string& layout, bool grouped) {
  const Format& fmt = check_format(format);
  const Layout& order = check_layout(layout);
  check_holds(order, fmt);
  check_packed(name, b, fmt);
  check_dim(name, b, grouped ? 3 : 2);
  check_scales(name, b_scale, b_global_scale, name, b, fmt, order);
  const int64_t dim = b.dim();
  return {&fmt, &order, scale_kind(b_scale), grouped ? b.size(0) : 1, b.size(dim - 2), b.size(dim - 1) * 2};
}

// The activations, of those `among`, that the kernels of a layout read; plain and tile16 take all.
inline void check_a_dtype(std::string_view name, const Tensor& a, const Layout& layout, Dtypes among) {
  if (layout.a_dtypes.empty()) return;
  std::vector<ScalarType> allowed;
  std::ranges::copy_if(layout.a_dtypes, std::back_inserter(allowed),
                       [&](ScalarType dtype) { return contains(among, dtype); });
  if (contains(allowed, a.scalar_type())) return;
  const bool fp8 = allowed.size() == 1 && allowed[0] == ScalarType::Float8_e4m3fn;
  const std::string hint =
      fp8 ? " (from quantize_fp8 with layout='" + std::string(layout.a_layout) + "')" : "";
  fail(name, " has dtype ", dtype_name(a.scalar_type()), "; layout '", layout.name, "' reads ",
       dtype_names(allowed), hint);
}

// As many columns as the weight, `padded` already or to be padded as the weight is.
inline void check_columns(std::string_view name, int64_t columns, std::string_view b_name,
                          const WeightShape& b, bool padded = false) {
  const Layout& layout = *b.layout;
  check_multiple(name, "columns", columns, layout.k_multiple, layout);
  if ((padded ? columns : layout.padded(columns)) == b.k) return;
  const std::string note =
      layout.k_padding == 1 ? "" : " (padded to a multiple of " + std::to_string(layout.k_padding) + ")";
  fail(name, " has ", columns, " columns; ", b_name, " has K = ", b.k, note, ", and they must be equal");
}

// The activations of a product. `format` is set for packed ones.
struct Operand {
  const Tensor& a;
  const OptionalTensor &scale, &global_scale;
  const Format* format = nullptr;
};

inline void check_no_a_global_scale(const OptionalTensor& a_global_scale) {
  if (a_global_scale && a_global_scale->numel() != 0)
    fail("a_global_scale was given; only nvfp4 activations have one");
}

// The float32 scales of int8 or fp8 activations.
inline void check_a_scale(const Operand& op, const Shape& shape) {
  if (!op.scale) fail("a_scale is missing; ", dtype_name(op.a.scalar_type()), " activations need one");
  check_dtype("a_scale", *op.scale, kFloat32);
  check_device("a_scale", *op.scale, "a", op.a);
  check_shape("a_scale", *op.scale, shape);
}

// Packed activations [..., K/2]: block scales, and for nvfp4 a factor for all, one a group or one a row.
inline void check_a_packed(const Operand& op) {
  const Format& fmt = *op.format;
  if (!op.scale) fail("a_scale is missing; ", fmt.name, " activations need one");
  check_block_scale("a_scale", *op.scale, "a", op.a, fmt);
  if (!fmt.has_global_scale) return check_no_a_global_scale(op.global_scale);
  if (!op.global_scale) fail("a_global_scale is missing; ", fmt.name, " activations need one");
  check_dtype("a_global_scale", *op.global_scale, kFloat32);
  check_device("a_global_scale", *op.global_scale, "a", op.a);
  const int64_t dim = op.global_scale->dim(), most = op.a.dim() - 1;
  if (dim > most) fail("a_global_scale has ", dim, " dimensions; it must have at most ", most);
  const auto sizes = op.a.sizes();
  check_shape("a_global_scale", *op.global_scale, Shape(sizes.begin(), sizes.begin() + dim));
}

// Activations [..., K] of one of the kinds that meta/checks.py, check_a lists.
inline Operand check_a(const Tensor& a, const OptionalTensor& a_scale, const OptionalTensor& a_global_scale,
                       const std::string& a_format, const Tensor& b, const WeightShape& w, int64_t dim) {
  Operand op{a, a_scale, a_global_scale};
  check_dtype("a", a, kActivation);
  check_a_dtype("a", a, *w.layout, kActivation);
  check_dim("a", a, dim);
  check_device("a", a, "b", b);
  const ScalarType dtype = a.scalar_type();
  const int64_t columns = a.size(dim - 1);
  if (contains(kPacked, dtype)) {
    check_name("a_format", a_format, kFp4Names, "for packed a ");
    op.format = &entry(kFormats, a_format);
    check_columns("a", columns * 2, "b", w);
    check_a_packed(op);
    return op;
  }
  if (!a_format.empty())
    fail("a_format is '", a_format, "'; only packed a has one, for others it must be ''");
  // quantize_fp8 pads its rows itself where the layout asks for it.
  const bool fp8 = dtype == ScalarType::Float8_e4m3fn;
  check_columns("a", columns, "b", w, fp8);
  check_no_a_global_scale(a_global_scale);
  const auto sizes = a.sizes();
  Shape shape(sizes.begin(), sizes.end() - 1);
  if (dtype == ScalarType::Char) {
    shape.push_back(ceil_div(w.k, kInt8Block));
    check_a_scale(op, shape);
  } else if (fp8) {
    check_a_scale(op, shape);
  } else if (a_scale) {
    fail("a_scale was given; ", dtype_name(dtype), " activations have none");
  }
  return op;
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

inline const Layout& check_quantize_fp8(const Tensor& x, const std::string& layout) {
  check_name("layout", layout, kALayoutNames);
  check_quantize_int8(x);
  return entry(kLayouts, layout);
}

struct FormatAndLayout {
  const Format* format;
  const Layout* layout;
};

inline void check_matrices(const Tensor& packed) {
  if (packed.dim() != 2 && packed.dim() != 3)
    fail("packed has ", packed.dim(), " dimensions; it must have 2 or 3");
}

inline FormatAndLayout check_dequantize(const Tensor& packed, const Tensor& block_scale,
                                        const OptionalTensor& global_scale, const std::string& format,
                                        ScalarType dtype, const std::string& layout) {
  const Format& fmt = check_format(format);
  const Layout& order = check_layout(layout);
  if (!contains(kFloatingOrDouble, dtype))
    fail("dtype is ", dtype_name(dtype), "; it must be ", dtype_names(kFloatingOrDouble));
  check_holds(order, fmt);
  check_packed("packed", packed, fmt);
  if (!order.scale_dtype)
    check_min_dim("packed", packed);
  else
    check_matrices(packed);
  check_scales("", block_scale, global_scale, "packed", packed, fmt, order);
  return {&fmt, &order};
}

// A weight that `layout` can hold: stored plain, or already in it.
inline FormatAndLayout check_stored(const Tensor& packed, const Tensor& block_scale,
                                    const OptionalTensor& global_scale, const std::string& format,
                                    const std::string& layout, bool plain) {
  const Format& fmt = check_format(format);
  const Layout& order = check_layout(layout);
  check_holds(order, fmt);
  check_packed("packed", packed, fmt);
  check_matrices(packed);
  check_scales("", block_scale, global_scale, "packed", packed, fmt, plain ? kPlain : order);
  return {&fmt, &order};
}

// A plain weight, that `layout` can hold.
inline FormatAndLayout check_prepack(const Tensor& packed, const Tensor& block_scale,
                                     const OptionalTensor& global_scale, const std::string& format,
                                     const std::string& layout) {
  const FormatAndLayout checked =
      check_stored(packed, block_scale, global_scale, format, layout, /*plain=*/true);
  const Layout& order = *checked.layout;
  check_multiple("packed", "rows", packed.size(packed.dim() - 2), order.n_multiple, order);
  check_multiple("packed", "columns", packed.size(packed.dim() - 1) * 2, order.k_multiple, order);
  return checked;
}

// A weight in `layout`.
inline FormatAndLayout check_unpack(const Tensor& packed, const Tensor& block_scale,
                                    const OptionalTensor& global_scale, const std::string& format,
                                    const std::string& layout) {
  return check_stored(packed, block_scale, global_scale, format, layout, /*plain=*/false);
}

inline void check_count(std::string_view name, int64_t count) {
  if (count < 0) fail(name, " is ", count, "; it must be 0 or more");
}

inline void check_offsets(std::string_view name, const Tensor& t, const Tensor* a = nullptr) {
  check_dtype(name, t, kInt32);
  check_dim(name, t, 1);
  if (a != nullptr) check_device(name, t, "a", *a);
}

// The CPU products read plain and tile16.
inline void refuse_layout(std::string_view op, const Layout& layout) {
  if (layout.hopper)
    fail(
        "fp4::", op, ": layout is '", layout.name,
        "', which only CUDA kernels read; on CPU it must be plain or tile16 (torch.ops.fp4.unpack converts)");
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
  const Activation act = check_activation(activation);
  check_a_format(a_format);
  const Layout& order = *up.layout;
  if (!order.a_formats.empty())
    check_name("a_format", a_format, order.a_formats, with_layout(order), "; layout 'plain' takes others");
  check_dtype("x", x, kFloating);
  if (order.leaves(a_format)) check_a_dtype("x", x, order, kFloating);
  check_dim("x", x, 2);
  check_device("x", x, "w13", w13);
  check_device("w2", w2, "w13", w13);
  check_columns("x", x.size(1), "w13", up);
  check_dim("topk_ids", topk_ids, 2);
  const Shape routed = {x.size(0), topk_ids.size(1)};
  check_operand("topk_ids", topk_ids, "w13", w13, routed, kIndex);
  check_operand("topk_weights", topk_weights, "w13", w13, routed, kFloating);
  if (up.n % act.parts() != 0 || order.padded(up.n / act.parts()) != down.k)
    fail("w13 has ", up.n, " rows; w2 has K = ", down.k, ", and w13 must have ",
         act.gated ? "twice that (gate and up)" : "as many ('" + activation + "' has no gate)");
  if (up.groups != down.groups)
    fail("w2 has ", down.groups, " experts; w13 has ", up.groups, ", and they must be equal");
  check_operand("w13_bias", w13_bias, "w13", w13, {up.groups, up.n}, kFloating);
  check_operand("w2_bias", w2_bias, "w13", w13, {down.groups, down.n}, kFloating);
  return {up, down};
}

}  // namespace fp4
