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

// One activation row as the panel kernels read it. k is padded with zeros to a multiple of 32.
//   float    k float32 values. Kernels::arrange_float may change their order within groups of eight.
//   bf16     k bfloat16 values as Bf16Kernels::prepare writes them: two bytes each and reordered within
//            groups of eight, or widened to float32.
//   int8     k codes, then float32 scales, one for 32 codes, then int32 corrections, one for each step of the
//            weight's kernels. Each group of eight codes has the order 0 2 4 6 1 3 5 7: the first four are
//            multiplied by the low nibbles of a panel word, the last four by the high nibbles. The kernels
//            multiply by unit * value + offset, an unsigned byte (see Codes); a correction is
//            -offset * sum(codes). NEON's kernels have another order and need no corrections (neon.h).
struct Int8Row {
  static int64_t bytes(int64_t k, int step) { return k + k / 32 * 4 + k / step * 4; }
  static int64_t scales_at(int64_t k) { return k; }
  static int64_t corrections_at(int64_t k) { return k + k / 32 * 4; }
};

// The number of k for which one pair of scales holds: a scale block of the weight, or one of int8
// activations.
inline constexpr int step_of(Scale scale) { return scale == Scale::e4m3 ? 16 : 32; }

// tile[m][16] = rows[m] . panel, m < count <= kTokenBlock, with block scales and without the global scale.
using PanelKernel = void (*)(const Panel& panel, const uint8_t* const* rows, int count, float* tile);

struct PanelKernels {
  PanelKernel int8, floating;  // by kind of activation rows
};

// What an instruction set with bfloat16 products adds.
struct Bf16Kernels {
  bool (*supported)();
  PanelKernel panels[std::size(kScales)];  // by Scale
  int64_t value_bytes;                     // bytes of one value in a row
  bool one_order;                          // as Kernels::one_order
  // bfloat16 x [k] -> a bf16 row, padded with zeros.
  void (*prepare)(const uint16_t* x, int64_t k, uint8_t* row);
};

// How activation rows are stored: see the table above.
enum class RowKind : uint8_t { floating, int8, bf16 };

// The smallest number of rows of an expert for which a kernel is used, by kind of row. 0 means never.
struct MinRows {
  int64_t floating, int8, bf16;

  int64_t of(RowKind kind) const {
    return kind == RowKind::int8 ? int8 : kind == RowKind::bf16 ? bf16 : floating;
  }
};

// Kernels for experts with many rows. They unpack a panel's weights once for up to kTileBlocks blocks of 16
// rows.
struct TileKernels {
  bool (*supported)();
  MinRows min_rows;
  int64_t speed;  // speed relative to the panel kernels
  // True if their results for such rows and block scales have the bits of the panel kernels.
  bool (*same_bits)(RowKind kind, Scale scale);
  // The size of a packed block of 16 rows of k values. pack_rows makes it of at most 16 rows in the order of
  // the panel kernels.
  int64_t (*rows_bytes)(RowKind kind, int64_t k);
  void (*pack_rows)(RowKind kind, const uint8_t* const* rows, int count, int64_t k, uint8_t* to);
  // The size of a panel's unpacked weights. unpack writes them and returns whether their block scales are
  // multiplied in.
  int64_t (*panel_bytes)(int64_t k);
  bool (*unpack[std::size(kScales)])(const Panel& panel, uint8_t* to);  // by Scale
  // out[row][2][16] = rows . panel, without the global scale. `rows` has `row_count` rows in blocks of 16,
  // one after another. There are one or two panels with their unpacked weights. The rest of the last block of
  // `out` is undefined.
  void (*multiply)(RowKind kind, const uint8_t* rows, int row_count, const Panel* panels, int count,
                   uint8_t* const* weights, const bool* scaled, float* out);
};

// The columns that one unit of work stores in an output row: two panels.
inline constexpr int kMostColumns = 2 * kPanelRows;

// The number of rows in a block, and the largest number of blocks that share one unpacked panel.
inline constexpr int kTileRows = 16, kTileBlocks = 8;

struct Kernels {
  const char* name;
  bool (*supported)();                      // by this machine and its operating system
  PanelKernels panels[std::size(kScales)];  // by Scale
  const Bf16Kernels* bf16;                  // or null: then bfloat16 activations become float rows
  const TileKernels* tiles;                 // or null
  // True if the floating panel kernels sum a row in one order, however many rows a call has. Those of int8
  // rows always do.
  bool one_order;

  // The largest magnitude in x [count]. Sets *finite to false if x holds a NaN or an infinity.
  float (*max_magnitude)(const void* x, DType dtype, int64_t count, bool* finite);
  // x [k] -> packed [k / 2], scales [ceil(k / block)]; x is finite.
  void (*quantize)(const Format& format, const void* x, DType dtype, int64_t k, float global_scale,
                   uint8_t* packed, uint8_t* scales);
  // x [k] -> codes int8 [k], scales [ceil(k / 32)].
  void (*quantize_int8)(const void* x, DType dtype, int64_t k, int8_t* codes, float* scales);
  // Writes the part [begin, end) of an Int8Row of k values from int8 codes and their scales. `weight` is the
  // type of the block scales of the weight. begin is a multiple of 32; end is one, too, or it is k.
  void (*prepare_int8)(const int8_t* codes, const float* scales, int64_t begin, int64_t end, int64_t k,
                       Scale weight, uint8_t* row);
  // x [k] -> float32 [k], padded with zeros.
  void (*prepare_float)(const void* x, DType dtype, int64_t k, float* row);
  // Reorders float32 [k] to a float row in place. Null if the order is the same.
  void (*arrange_float)(float* row, int64_t k);
  // out[0..count) = tile * factor + bias for at most kMostColumns; bias may be null.
  void (*store)(const float* tile, float factor, const void* bias, DType bias_dtype, void* out,
                DType out_dtype, int64_t count);
  // h [end - begin] = values [begin, end) of the gated activation of gate_up [2k].
  void (*activate)(const float* gate_up, const Activation& activation, int64_t k, int64_t begin, int64_t end,
                   float* h);
  // out [n] = x, rounded.
  void (*convert)(const float* x, int64_t n, void* out, DType out_dtype);
  // sum [n] += weight * x.
  void (*accumulate)(const float* x, float weight, int64_t n, float* sum);
  // out[m] = x[m] . w, for `count` float32 rows of k values, `stride` values apart, and a row of a weight.
  void (*dot)(const float* x, int64_t stride, int count, const void* w, DType dtype, int64_t k, float* out);
  // The same for a row of a weight in fp8 (e4m3) and k that is a multiple of 32, with the bits of `dot` for
  // its values in float32.
  void (*dot_e4m3)(const float* x, int64_t stride, int count, const uint8_t* w, int64_t k, float* out);
  // e4m3 codes [k] -> float32 [k].
  void (*widen_e4m3)(const uint8_t* codes, int64_t k, float* to);
  // x [count] = e^(x * scale - top), where top is the largest x * scale: -infinity if there is no x, and NaN
  // if one is. Returns the sum.
  float (*exponentiate)(float* x, int64_t count, float scale, float* top);
  // out[m][j] = x[m] . w[indices[j]], for `rows` float32 rows of k values, `stride` values apart, and j <
  // count; w [.., k]. Rows of `out` are `out_stride` values apart.
  void (*dots)(const float* x, int64_t stride, int64_t rows, const void* w, DType dtype,
               const int64_t* indices, int64_t count, int64_t k, float* out, int64_t out_stride);
  // out[m] [n] = the sum of weights[m][j] * x[indices[j]], for j < count; x [.., n]. Rows of weights are
  // `stride` values apart.
  void (*weighted_sums)(const void* x, DType dtype, const int64_t* indices, const float* weights,
                        int64_t stride, int64_t rows, int64_t count, int64_t n, float* out);
  // out [size] = x * cos + (-x[size / 2:], x[:size / 2]) * sin, for x that is normed first, unless
  // norm_weight is null. All have one dtype, and each operation rounds to it, as a model's operators do.
  // `scratch` has room for `size` values.
  void (*rotate)(const void* x, const void* norm_weight, float eps, const void* cos, const void* sin,
                 DType dtype, int64_t size, float* scratch, void* out);
};

extern const Kernels kScalarKernels, kAvx2Kernels, kAvx512Kernels;
extern const Bf16Kernels kAvx512Bf16, kAvx512WidenedBf16;
extern const TileKernels kAmxBf16, kAvx512Bf16Tiles;
extern const Kernels kNeonKernels, kNeonDotprodKernels, kNeonI8mmKernels;
extern const Bf16Kernels kNeonBf16;

// The table for this machine: the best that it supports, or the one that FP4_CPU_CAPABILITY names.
const Kernels& kernels();

}  // namespace fp4::cpu
