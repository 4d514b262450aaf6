// The C++ twin of meta/formats.py: what a 4-bit format is, as data. tests/test_formats.py holds the two
// tables against each other through torch.ops.fp4.dequantize over every code and every scale byte.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace fp4 {

enum class Element : uint8_t { e2m1, int4 };

// The types that block scales have. Each belongs to one element, so kernels are compiled for a scale.
enum class Scale : uint8_t { e4m3, e8m0, bf16, f32 };
inline constexpr int kScaleKinds = 4;
inline constexpr Element element_of(Scale scale) {
  return scale < Scale::bf16 ? Element::e2m1 : Element::int4;
}
inline constexpr int scale_size(Scale scale) {
  return scale < Scale::bf16 ? 1 : scale == Scale::bf16 ? 2 : 4;
}

struct Format {
  std::string_view name;
  Element element;
  int block;                    // elements along K that share one block scale
  std::array<Scale, 2> scales;  // what quantize makes, and what else is taken (the same: nothing)
  bool has_global_scale;        // a float32 factor for each matrix on top of the block scales
};

inline constexpr Format kFormats[] = {
    {"nvfp4", Element::e2m1, 16, {Scale::e4m3, Scale::e4m3}, true},
    {"mxfp4", Element::e2m1, 32, {Scale::e8m0, Scale::e8m0}, false},
    {"int4", Element::int4, 128, {Scale::bf16, Scale::f32}, false},
    {"int4_g64", Element::int4, 64, {Scale::bf16, Scale::f32}, false},
    {"int4_g32", Element::int4, 32, {Scale::bf16, Scale::f32}, false},
};

using Names = std::span<const std::string_view>;

// The names in the order in which error messages list them; of all, of those whose element is e2m1, which
// activations and layouts sm90 and sm90_bf16 may have, and of those whose element is int4, which layout
// sm90_int4 may have.
inline constexpr std::array<std::string_view, 5> kFormatNames = {"int4", "int4_g32", "int4_g64", "mxfp4",
                                                                 "nvfp4"};
inline constexpr std::array<std::string_view, 2> kFp4Names = {"mxfp4", "nvfp4"};
inline constexpr std::array<std::string_view, 3> kInt4Names = {"int4", "int4_g32", "int4_g64"};

// The `a_format`s of moe that a layout's kernels take, as error messages list them.
inline constexpr std::array<std::string_view, 5> kSm90AFormatNames = {"none", "fp8", "nvfp4", "mxfp4",
                                                                      "auto"};
inline constexpr std::array<std::string_view, 3> kSm90Bf16AFormatNames = {"none", "nvfp4", "mxfp4"};
inline constexpr std::array<std::string_view, 2> kSm90Int4AFormatNames = {"fp8", "auto"};

// The order of the bytes inside a packed weight, and what it asks of the operands: meta/layouts.py, Layout.
enum class Order : uint8_t { plain, tile16, sm90, sm90_bf16, sm90_int4 };

// The block scales of a layout: as the format has them; or uint8 or float32, and a float32 factor for each
// matrix.
enum class LayoutScales : uint8_t { of_format, bytes, floats };

struct Layout {
  std::string_view name;
  Order order;
  int n_multiple = 1;  // N must be a multiple of this
  int k_multiple = 1;  // K must be a multiple of this, ...
  int k_padding = 1;   // ... and is padded with zeros to a multiple of this
  LayoutScales scales = LayoutScales::of_format;
  Names formats = kFormatNames;  // that it holds
  Names a_formats = {};          // of moe, that give activations its kernels read; empty: all
  bool hopper = false;           // only CUDA kernels read it

  int64_t padded(int64_t k) const { return (k + k_padding - 1) / k_padding * k_padding; }

  // Whether with this `a_format` of moe its kernels may read activations in their own dtype.
  bool leaves(std::string_view a_format) const {
    const bool may = a_formats.empty() || std::ranges::find(a_formats, "none") != a_formats.end();
    return a_format == "none" || (a_format == "auto" && may);
  }
};

inline constexpr Layout kLayouts[] = {
    {"plain", Order::plain},
    {"tile16", Order::tile16},
    {"sm90", Order::sm90, 64, 16, 128, LayoutScales::bytes, kFp4Names, kSm90AFormatNames, true},
    {"sm90_bf16", Order::sm90_bf16, 64, 16, 128, LayoutScales::bytes, kFp4Names, kSm90Bf16AFormatNames, true},
    {"sm90_int4", Order::sm90_int4, 64, 16, 128, LayoutScales::floats, kInt4Names, kSm90Int4AFormatNames,
     true},
};
inline constexpr const Layout& kPlain = kLayouts[0];
inline constexpr std::array<std::string_view, 5> kLayoutNames = {"plain", "sm90", "sm90_bf16", "sm90_int4",
                                                                 "tile16"};
// The orders in which quantize_fp8 can write a row.
inline constexpr std::array<std::string_view, 2> kALayoutNames = {"plain", "sm90"};

// What stands between an expert's two products: see meta/formats.py, Activation.
struct Activation {
  std::string_view name;
  enum class Function : uint8_t { silu, gelu, gelu_tanh, relu2 } function;
  bool interleaved = false;  // columns are gate0, up0, gate1, ...; else the first half is gate
  float alpha = 1.f;         // silu: g * sigmoid(alpha * g)
  float limit = 0.f;         // if positive: gate is clamped to at most, up to within, this bound
  float up_offset = 0.f;
  bool gated = true;  // else the first product makes up alone, and h = f(up)

  // Rows of the first weight for each column of the second.
  int64_t parts() const { return gated ? 2 : 1; }
};

inline constexpr Activation kActivations[] = {
    {"silu", Activation::Function::silu},
    {"gelu", Activation::Function::gelu},
    {"gelu_tanh", Activation::Function::gelu_tanh},
    {"silu_interleaved", Activation::Function::silu, true},
    {"gelu_interleaved", Activation::Function::gelu, true},
    {"gelu_tanh_interleaved", Activation::Function::gelu_tanh, true},
    {"swigluoai", Activation::Function::silu, true, 1.702f, 7.f, 1.f},
    {"swigluoai_halves", Activation::Function::silu, false, 1.702f, 7.f, 1.f},
    {"relu2", Activation::Function::relu2, false, 1.f, 0.f, 0.f, false},
};
inline constexpr std::array<std::string_view, 9> kActivationNames = {
    "gelu", "gelu_interleaved", "gelu_tanh", "gelu_tanh_interleaved", "relu2",
    "silu", "silu_interleaved", "swigluoai", "swigluoai_halves"};

// How `moe` quantises activations in front of each product.
enum class AFormat : uint8_t { automatic, fp8, int8, mxfp4, none, nvfp4 };
inline constexpr std::array<std::string_view, 6> kAFormatNames = {"auto",  "fp8",  "int8",
                                                                  "mxfp4", "none", "nvfp4"};

// What the 16 codes of an element stand for. `unit` times a value is an integer, and with `offset` added it
// is an unsigned byte: what the int8 kernels multiply.
struct Codes {
  float values[16];
  int unit, offset;
};

inline constexpr Codes kCodes[] = {
    // e2m1: sign in bit 3, two exponent bits, one mantissa bit
    {{0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f}, 2, 12},
    // int4: two's complement
    {{0.f, 1.f, 2.f, 3.f, 4.f, 5.f, 6.f, 7.f, -8.f, -7.f, -6.f, -5.f, -4.f, -3.f, -2.f, -1.f}, 1, 8},
};
inline constexpr const Codes& codes_of(Element element) { return kCodes[int(element)]; }

// Activations quantised to int8 share one float32 scale per this many elements along K.
inline constexpr int kInt8Block = 32;

}  // namespace fp4
