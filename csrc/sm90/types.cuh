// The numbers by which dtypes and gates cross the C interface (fp4_ops/sm90/library.py, decode.py), and what
// tensor cores multiply.
#pragma once

namespace fp4::sm90 {

enum class DType : int { kFloat32, kBFloat16, kFloat16, kFloat8 };
enum class Act : int { kNone, kSilu, kGelu, kGeluTanh };
enum class Element { kE4m3, kFloat16, kBFloat16 };

// An activation of meta/formats.py: f(gate) * up.
struct Gate {
  Act act;  // f; kNone: values as they are
  float alpha, limit, up_offset;
};

}  // namespace fp4::sm90
