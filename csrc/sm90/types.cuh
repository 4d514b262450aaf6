// The numbers by which dtypes and gates cross the C interface (fp4_ops/sm90/library.py, decode.py).
#pragma once

namespace fp4::sm90 {

enum class DType : int { kFloat32, kBFloat16, kFloat16, kFloat8 };
enum class Act : int { kNone, kSilu, kGelu, kGeluTanh };

}  // namespace fp4::sm90
