// The kernels of one instruction set. Each kernels_<isa>.cpp fills one table, and dispatch.cpp picks one.
//
// No torch here: rows and panels are pointers, so a kernel file compiles in seconds.
#pragma once

#include <cstdint>

#include "common/formats.h"
#include "cpu/layout.h"

namespace fp4::cpu {

enum class DType : uint8_t { f32, bf16, f16 };

inline int64_t dtype_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// The most activation rows one panel kernel takes at a time.
inline constexpr int kTokenBlock = 8;

// One activation row as the panel kernels read it, k padded with zeros to a multiple of 32:
//   float    k float32, in the order of Kernels::arrange_float, which moves them within groups of eight
//   bf16     k values of bfloat16 as Bf16Kernels::prepare writes them: two bytes each, moved within groups of
//            eight, or float32
//   int8     k codes, each group of eight ordered 0 2 4 6 1 3 5 7 to meet the low and then the high nibbles
//   of
//            a panel word; then float32 scales, one per 32; then int32 corrections -offset * sum(codes), one
//            per step of the weight's kernels (which multiply by unit * value + offset, an unsigned byte: see
//            Codes). NEON's kernels have an order of their own, and need no corrections (neon.h).
struct Int8Row {
  static int64_t bytes(int64_t k, int step) { return k + k / 32 * 4 + k / step * 4; }
  static int64_t scales_at(int64_t k) { return k; }
  static int64_t corrections_at(int64_t k) { return k + k / 32 * 4; }
};

// How many k the kernels take between two looks at the scales: a block of scales, or of int8 activations.
inline constexpr int step_of(Scale scale) { return scale == Scale::e4m3 ? 16 : 32; }

// tile[m][16] = rows[m] . panel, m < count <= kTokenBlock, with block scales and without the global scale.
using PanelKernel = void (*)(const Panel& panel, const uint8_t* const* rows, int count, float* tile);

struct PanelKernels {
  PanelKernel int8, floating;  // by the kind of activation rows
};

// What an instruction set with products of bfloat16 adds.
struct Bf16Kernels {
  bool (*supported)();
  PanelKernel panels[std::size(kScales)];  // by Scale
  int64_t value_bytes;                     // of a value in a row
  // bfloat16 x [k] -> a bf16 row, padded with zeros.
  void (*prepare)(const uint16_t* x, int64_t k, uint8_t* row);
};

// How activation rows are stored: see above.
enum class RowKind : uint8_t { floating, int8, bf16 };

// From how many rows an expert on; 0 is never.
struct MinRows {
  int64_t floating, int8, bf16;

  int64_t of(RowKind kind) const {
    return kind == RowKind::int8 ? int8 : kind == RowKind::bf16 ? bf16 : floating;
  }
};

// Products for experts with many rows, which unpack a panel's weights once for up to kTileBlocks blocks of 16
// rows.
struct TileKernels {
  bool (*supported)();
  MinRows min_rows;
  int64_t speed;  // how many products of the panel kernels they make in the time of one
  // The bytes of a block of 16 rows of k values, made of at most 16 rows as the panel kernels read them.
  int64_t (*rows_bytes)(RowKind kind, int64_t k);
  void (*pack_rows)(RowKind kind, const uint8_t* const* rows, int count, int64_t k, uint8_t* to);
  // A panel's weights as the tiles read them, and whether they have their block scales.
  int64_t (*panel_bytes)(int64_t k);
  bool (*unpack[std::size(kScales)])(const Panel& panel, uint8_t* to);  // by Scale
  // out[row][2][16] = rows . panel, for `row_count` rows in blocks of 16 one after another, and one or two
  // panels with their unpacked weights. Without the global scale. What out has for the rest of a block is
  // undefined.
  void (*multiply)(RowKind kind, const uint8_t* rows, int row_count, const Panel* panels, int count,
                   uint8_t* const* weights, const bool* scaled, float* out);
};

// What one unit of work stores of an output row: two panels.
inline constexpr int kMostColumns = 2 * kPanelRows;

// The rows of a block, and the most blocks that share one unpacked panel.
inline constexpr int kTileRows = 16, kTileBlocks = 8;

struct Kernels {
  const char* name;
  bool (*supported)();                      // by this machine and its operating system
  PanelKernels panels[std::size(kScales)];  // by Scale
  const Bf16Kernels* bf16;                  // or null: bfloat16 activations become float rows
  const TileKernels* tiles;                 // or null

  // The largest magnitude in x [count]; *finite is cleared if x holds a NaN or an infinity.
  float (*max_magnitude)(const void* x, DType dtype, int64_t count, bool* finite);
  // x [k] -> packed [k / 2], scales [ceil(k / block)]; x is finite.
  void (*quantize)(const Format& format, const void* x, DType dtype, int64_t k, float global_scale,
                   uint8_t* packed, uint8_t* scales);
  // x [k] -> codes int8 [k], scales [ceil(k / 32)].
  void (*quantize_int8)(const void* x, DType dtype, int64_t k, int8_t* codes, float* scales);
  // int8 codes of k in [begin, end) and their scales -> that part of an Int8Row of k values that meets
  // weights with such block scales. begin is a multiple of 32, and so is end, or it is k.
  void (*prepare_int8)(const int8_t* codes, const float* scales, int64_t begin, int64_t end, int64_t k,
                       Scale weight, uint8_t* row);
  // x [k] -> float32 [k], padded with zeros.
  void (*prepare_float)(const void* x, DType dtype, int64_t k, float* row);
  // float32 [k] -> a float row, in place; null where that is the same.
  void (*arrange_float)(float* row, int64_t k);
  // out[0..count) = tile * factor + bias for at most kMostColumns; bias may be null.
  void (*store)(const float* tile, float factor, const void* bias, DType bias_dtype, void* out,
                DType out_dtype, int64_t count);
  // h [end - begin] = [begin, end) of the gated activation of gate_up [2k].
  void (*activate)(const float* gate_up, const Activation& activation, int64_t k, int64_t begin, int64_t end,
                   float* h);
  // out [n] = x, rounded.
  void (*convert)(const float* x, int64_t n, void* out, DType out_dtype);
  // sum [n] += weight * x.
  void (*accumulate)(const float* x, float weight, int64_t n, float* sum);
};

extern const Kernels kScalarKernels, kAvx2Kernels, kAvx512Kernels;
extern const Bf16Kernels kAvx512Bf16, kAvx512WidenedBf16;
extern const TileKernels kAmxBf16, kAvx512Bf16Tiles;
extern const Kernels kNeonKernels, kNeonDotprodKernels, kNeonI8mmKernels;
extern const Bf16Kernels kNeonBf16;

// The table for this machine: the best it supports, or what FP4_CPU_CAPABILITY asks for.
const Kernels& kernels();

}  // namespace fp4::cpu
