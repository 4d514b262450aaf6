// Formats, layouts and activations as data. The rows come from meta/formats.py and meta/layouts.py, which
// explain each field: setup.py writes them to build/tables.h (csrc/generate/tables.py).
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace fp4 {

using torch::headeronly::ScalarType;
using Names = std::span<const std::string_view>;

enum class Element : uint8_t;
enum class Scale : uint8_t;  // the types of block scales; each belongs to one element
enum class Order : uint8_t;
enum class AFormat : uint8_t;  // how `moe` quantises activations before each product
enum class GateFunction : uint8_t;

// The values of an element's 16 codes. `unit` times a value is an integer. With `offset` added it is an
// unsigned byte, which the int8 kernels multiply.
struct Codes {
  float values[16];
  int unit, offset;
};

struct ScaleKind {
  ScalarType dtype;
  Element element;
  int bytes;
};

using Dtypes = std::span<const ScalarType>;

struct Format {
  std::string_view name;
  Element element;
  int block;              // elements along K that share one block scale
  Scale scale;            // the block scales that quantize makes
  Dtypes scale_dtypes;    // accepted dtypes of block scales: those of quantize, and others
  Dtypes packed_dtypes;   // accepted dtypes of codes
  bool has_global_scale;  // a float32 factor for each matrix on top of the block scales

  int64_t num_blocks(int64_t k) const { return (k + block - 1) / block; }
};

struct Layout {
  std::string_view name;
  Order order;
  int n_multiple, k_multiple, k_padding;  // N and K are multiples of these; K is padded with zeros to one
  std::optional<ScalarType> scale_dtype;  // dtype of the block scales, for every format
  Dtypes scale_dtypes;                    // the same, or empty
  bool has_factor;                        // a float32 factor for each matrix, for every format
  Names formats;                          // formats that the layout can hold
  Names a_formats;                        // a_format values of moe that its kernels accept; empty: all
  Dtypes a_dtypes;                        // dtypes of such activations; empty: all
  std::string_view a_layout;              // the order of fp8 activations: the `layout` of quantize_fp8
  bool native;                            // only the native CUDA kernels read it
  bool batch_invariant;                   // its kernels sum a row in one order, whatever the other rows are

  int64_t padded(int64_t k) const { return (k + k_padding - 1) / k_padding * k_padding; }

  // True if, with this `a_format` of moe, the layout's kernels may read unquantised activations.
  bool leaves(std::string_view a_format) const {
    if (a_format == "int8") return native;  // few rows stay as they are
    const bool may = a_formats.empty() || std::ranges::find(a_formats, "none") != a_formats.end();
    return a_format == "none" || (a_format == "auto" && may);
  }
};

// The function between an expert's two products.
struct Activation {
  using Function = GateFunction;

  std::string_view name;
  Function function;
  bool interleaved;
  float alpha;
  float limit;  // 0: no clamp
  float up_offset;
  bool gated;
  float gate_cap, up_cap;  // situ's soft limits

  // The number of rows of the first weight for each column of the second.
  int64_t parts() const { return gated ? 2 : 1; }
};

}  // namespace fp4

#include "tables.h"

namespace fp4 {

// The table entry with this name. It must exist.
template <typename T, size_t n>
constexpr const T& entry(const T (&table)[n], std::string_view name) {
  return *std::find_if(std::begin(table), std::end(table), [&](const T& t) { return t.name == name; });
}

inline constexpr const Layout& kPlain = kLayouts[int(Order::plain)];

inline constexpr const Codes& codes_of(Element element) { return kCodes[int(element)]; }
inline constexpr Element element_of(Scale scale) { return kScales[int(scale)].element; }
inline constexpr int scale_size(Scale scale) { return kScales[int(scale)].bytes; }

}  // namespace fp4
