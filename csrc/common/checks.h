// The argument checks of every operator, for the C++ kernels. The checks of meta/checks.py are translated
// into build/operator_checks.h, which this file includes. This file has the functions that they use;
// meta/check_parts.py has the same functions for Python. A failed check throws std::runtime_error, which
// reaches Python as a RuntimeError (common/boxed.h) with this message and nothing else. STD_TORCH_CHECK would
// add this file's path in front of it.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <charconv>
#include <concepts>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/formats.h"

namespace fp4 {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

// The shape of a packed weight, with k as its layout pads it (Weight in meta/operand_checks.py).
struct WeightShape {
  int64_t groups, n, k;
  const Format* format;
  const Layout* layout;
  ScalarType scale_dtype;
};

struct Stored {
  const Format* format;
  const Layout* layout;
};

struct Experts {
  WeightShape up, down;
};

// --- words ---

inline void append(std::string& text, std::string_view part) { text += part; }
template <std::integral T>
void append(std::string& text, T part) {
  text += std::to_string(part);
}

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::string made;
  (append(made, parts), ...);
  return made;
}

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(text(parts...));
}

// The names that Python prints, without "torch.".
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
  std::string made;
  for (ScalarType dtype : dtypes) made += (made.empty() ? "" : " or ") + dtype_name(dtype);
  return made;
}

inline std::string shape_text(std::span<const int64_t> sizes) {
  std::string made;
  for (int64_t size : sizes) made += (made.empty() ? "" : ", ") + std::to_string(size);
  return "[" + made + "]";
}

inline std::string device_text(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device:") + std::to_string(t.get_device_index());
}

// --- sizes and dtypes ---

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The number of rows of t if it were flattened to [rows, last dimension].
inline int64_t num_rows(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) rows *= t.size(i);
  return rows;
}

// A negative dimension counts from the end.
inline int64_t size(const Tensor& t, int64_t dim) { return t.size(dim < 0 ? dim + t.dim() : dim); }

inline Shape shape_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return Shape(sizes.begin(), sizes.end());
}

// The first `count` sizes. A negative count leaves out that many sizes at the end.
inline Shape leading(const Tensor& t, int64_t count) {
  Shape shape = shape_of(t);
  shape.resize(std::clamp<int64_t>(count < 0 ? count + t.dim() : count, 0, t.dim()));
  return shape;
}

inline Shape with_last(Shape shape, int64_t last) {
  shape.push_back(last);
  return shape;
}

inline bool contains(Dtypes dtypes, ScalarType dtype) {
  return std::ranges::find(dtypes, dtype) != dtypes.end();
}
inline bool contains(Names names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

inline bool same(Dtypes a, Dtypes b) { return std::ranges::equal(a, b); }

// The dtypes that are in both lists.
inline std::vector<ScalarType> common(Dtypes dtypes, Dtypes others) {
  std::vector<ScalarType> found;
  std::ranges::copy_if(dtypes, std::back_inserter(found),
                       [&](ScalarType dtype) { return contains(others, dtype); });
  return found;
}

// The kind of block scales whose dtype is already checked.
inline Scale scale_kind(ScalarType scale_dtype) {
  return Scale(std::ranges::find(kScales, scale_dtype, &ScaleKind::dtype) - std::begin(kScales));
}

// --- conditions ---

// Fails if `value` is not one of `names`.
inline void check_name(std::string_view what, std::string_view value, Names names, std::string_view when = "",
                       std::string_view hint = "") {
  if (contains(names, value)) return;
  std::string listed;
  for (std::string_view name : names) append(listed, text(listed.empty() ? "" : ", ", name));
  fail(what, " is '", value, "'; ", when, "it must be one of: ", listed, hint);
}

inline void check_dtype(std::string_view name, const Tensor& t, Dtypes allowed) {
  const ScalarType dtype = t.scalar_type();
  if (!contains(allowed, dtype))
    fail(name, " has dtype ", dtype_name(dtype), "; it must be ", dtype_names(allowed));
}

inline void check_shape(std::string_view name, const Tensor& t, const Shape& shape) {
  const Shape sizes = shape_of(t);
  if (sizes != shape) fail(name, " has shape ", shape_text(sizes), "; it must be ", shape_text(shape));
}

inline void check_device(std::string_view name, const Tensor& t, std::string_view like_name,
                         const Tensor& like) {
  if (t.is_cpu() == like.is_cpu() && t.get_device_index() == like.get_device_index()) return;
  fail(name, " is on ", device_text(t), " and ", like_name, " on ", device_text(like),
       "; they must be on one device");
}

// Reads the limit in "(limit=7.5)", as find_activation in meta/formats.py does.
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
  check_name("activation", contains(kActivationNames, base) ? base : name, kActivationNames);
  Activation a = entry(kActivations, base);
  if (open < name.size() && (!a.gated || !read_limit(name.substr(open), &a.limit)))
    fail("activation is '", name,
         "'; one with a gate may have brackets, and in them limit=L, L a positive number: what gate and up "
         "are clamped to");
  return a;
}

}  // namespace fp4

#include "operator_checks.h"

namespace fp4 {

// The value of a name that is already checked.
inline AFormat a_format_of(std::string_view name) {
  return AFormat(std::ranges::find(kAFormatNames, name) - kAFormatNames.begin());
}

// Refuses a layout that the CPU products do not read. They read plain, tile16 and tile16_invariant.
inline void refuse_layout(std::string_view op, const Layout& layout) {
  if (layout.native)
    fail(
        "fp4::", op, ": layout is '", layout.name,
        "', which only CUDA kernels read; on CPU it must be plain or tile16 (torch.ops.fp4.unpack converts)");
}

}  // namespace fp4
