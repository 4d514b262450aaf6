// What formats, layouts and activations are, as data. The rows are those of meta/formats.py and
// meta/layouts.py, which explain each field: setup.py writes them to build/tables.h
// (csrc/generate/tables.py).
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
enum class AFormat : uint8_t;  // how `moe` quantises activations in front of each product
enum class GateFunction : uint8_t;

// What the 16 codes of an element stand for. `unit` times a value is an integer, and with `offset` added it
// is an unsigned byte: what the int8 kernels multiply.
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
  Scale scale;            // that quantize makes
  Dtypes scale_dtypes;    // of block scales that are taken: those of quantize, and others
  Dtypes packed_dtypes;   // of codes that are taken
  bool has_global_scale;  // a float32 factor for each matrix on top of the block scales

  int64_t num_blocks(int64_t k) const { return (k + block - 1) / block; }
};

struct Layout {
  std::string_view name;
  Order order;
  int n_multiple, k_multiple, k_padding;  // N and K are multiples of these; K is padded with zeros to one
  std::optional<ScalarType> scale_dtype;  // of the block scales, whatever the format
  Dtypes scale_dtypes;                    // the same, or empty
  bool has_factor;                        // a float32 factor for each matrix, whatever the format
  Names formats;                          // that it holds
  Names a_formats;                        // of moe, that give activations its kernels read; empty: all
  Dtypes a_dtypes;                        // of such activations; empty: all
  std::string_view a_layout;              // the order of fp8 ones: the `layout` of quantize_fp8
  bool native;                            // only the native CUDA kernels read it

  int64_t padded(int64_t k) const { return (k + k_padding - 1) / k_padding * k_padding; }

  // Whether with this `a_format` of moe its kernels may read activations in their own dtype.
  bool leaves(std::string_view a_format) const {
    if (a_format == "int8") return native;  // few rows are left
    const bool may = a_formats.empty() || std::ranges::find(a_formats, "none") != a_formats.end();
    return a_format == "none" || (a_format == "auto" && may);
  }
};

// What stands between an expert's two products.
struct Activation {
  using Function = GateFunction;

  std::string_view name;
  Function function;
  bool interleaved;
  float alpha;
  float limit;  // 0: no clamp
  float up_offset;
  bool gated;

  // Rows of the first weight for each column of the second.
  int64_t parts() const { return gated ? 2 : 1; }
};

}  // namespace fp4

#include "tables.h"

namespace fp4 {

// The entry of a table with this name, which must be there.
template <typename T, size_t n>
constexpr const T& entry(const T (&table)[n], std::string_view name) {
  return *std::find_if(std::begin(table), std::end(table), [&](const T& t) { return t.name == name; });
}

inline constexpr const Layout& kPlain = kLayouts[int(Order::plain)];

inline constexpr const Codes& codes_of(Element element) { return kCodes[int(element)]; }
inline constexpr Element element_of(Scale scale) { return kScales[int(scale)].element; }
inline constexpr int scale_size(Scale scale) { return kScales[int(scale)].bytes; }

}  // namespace fp4
