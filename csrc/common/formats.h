// The C++ twin of meta/formats.py: what a 4-bit format is, as data. tests/test_formats.py holds the two
// tables against each other through torch.ops.fp4.dequantize over every code and every scale byte.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace fp4 {

enum class Element : uint8_t { e2m1 };
enum class Scale : uint8_t { e4m3, e8m0 };

struct Format {
  std::string_view name;
  Element element;
  int block;  // elements along K that share one block scale
  Scale scale;
  bool has_global_scale;  // a float32 factor for each matrix on top of the block scales
};

inline constexpr Format kFormats[] = {
    {"nvfp4", Element::e2m1, 16, Scale::e4m3, true},
    {"mxfp4", Element::e2m1, 32, Scale::e8m0, false},
};

// The names in the order in which error messages list them.
inline constexpr std::array<std::string_view, 2> kFormatNames = {"mxfp4", "nvfp4"};

// The order of the bytes inside a packed weight: meta/layouts.py.
enum class Layout : uint8_t { plain, tile16 };
inline constexpr std::array<std::string_view, 2> kLayoutNames = {"plain", "tile16"};

// A gated activation h = f(gate) * up: see meta/formats.py, Activation.
struct Activation {
  std::string_view name;
  enum class Function : uint8_t { silu, gelu, gelu_tanh } function;
  bool interleaved = false;  // columns are gate0, up0, gate1, ...; else the first half is gate
  float alpha = 1.f;         // silu: g * sigmoid(alpha * g)
  float limit = 0.f;         // if positive: gate is clamped to at most, up to within, this bound
  float up_offset = 0.f;
};

inline constexpr Activation kActivations[] = {
    {"silu", Activation::Function::silu},
    {"gelu", Activation::Function::gelu},
    {"gelu_tanh", Activation::Function::gelu_tanh},
    {"swigluoai", Activation::Function::silu, true, 1.702f, 7.f, 1.f},
};
inline constexpr std::array<std::string_view, 4> kActivationNames = {"gelu", "gelu_tanh", "silu",
                                                                     "swigluoai"};
inline constexpr std::array<std::string_view, 2> kAFormatNames = {"int8", "none"};

// e2m1: sign in bit 3, two exponent bits, one mantissa bit.
inline constexpr float kE2m1[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                    -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

// Activations quantised to int8 share one float32 scale per this many elements along K.
inline constexpr int kInt8Block = 32;

}  // namespace fp4
