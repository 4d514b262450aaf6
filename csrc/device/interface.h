// C interface of the libraries of kernels, such as `_sm90.so`. It needs neither torch nor CUDA, so the
// operators (csrc/cuda) and the kernels share one definition of each struct.
//
// Pointers are device pointers unless a comment says otherwise. Launchers return 0 for
// success, a cudaError_t or a LaunchError, and launch on the current device.
#pragma once

#include <cstdint>

namespace fp4::device {

// Dtypes and gates cross the interface as these numbers (fp4_ops/backends/launchers/library.py has the same
// numbers).
enum class DType : int { kFloat32, kBFloat16, kFloat16, kFloat8 };
enum class Act : int { kNone, kSilu, kGelu, kGeluTanh };
enum class Routing : int { kOffs, kIds32, kIds64, kMasked, kDense };
enum class RowMode : int { kDense = 0, kContiguous = 1, kMasked = 2 };

// Why nothing was launched. fp4_ops/runtime/cuda_errors.py and csrc/cuda/library.cpp have a text for each.
enum LaunchError : int {
  kBadArgument = -1,      // the kernel does not take these sizes or addresses
  kNoDriver = -2,         // the driver has no function that makes tensor maps
  kTooLittleShared = -3,  // no candidate fits into the shared memory of a thread block
};

// The prefill kernels, named after the rows that they take, or after int4 weights. kFp8: fp8 rows. kHalf:
// fp16 rows as Form::kHalf makes them. kBf16: bfloat16 rows. kFp16: fp16 rows in plain order. kInt8: int8
// rows. Their weights are nvfp4, or with B32 e2m1 with a scale for 32 K. kInt4, kInt4G64 and kInt4G32: fp8
// rows by int4 weights in groups of 128, 64 and 32. `_sm80.so` has only the kernels of kBf16, kFp16 and
// kInt8; `_sm90.so` has all but those of kFp16 and kInt8.
enum class PrefillKernel : int {
  kFp8,
  kFp8B32,
  kHalf,
  kHalfB32,
  kBf16,
  kBf16B32,
  kInt4,
  kInt4G64,
  kInt4G32,
  kFp16,
  kFp16B32,
  kInt8,
  kInt8B32
};

// The form to which a row is converted. kSame: x's type, in plain order. kFp8: e4m3 with a scale for each
// row, in the layout's order. kHalf: fp16 with a power of two for each row, in the layout's order
// (half_position in e2m1_sm90.cuh). In a bfloat16 row this loses bits only of values below 2^-31 of its
// largest value. kInt8: int8 with a scale for each kInt8Step columns, in the order of
// csrc/sm80/e2m1_to_int8.cuh.
enum class Form : int { kSame, kFp8, kHalf, kInt8 };
constexpr int kInt8Step = 128;

// An activation of meta/formats.py: f(gate) * up.
struct Gate {
  Act act = Act::kNone;  // f; kNone: values as they are
  float alpha = 1, limit = 0, up_offset = 0;
};

struct ProductParams {
  const void* x = nullptr;         // [rows / a_div, k] of x_type, row stride k (fp8: kp)
  const float* x_scale = nullptr;  // one a row of x; null for ones (16-bit rows)
  const uint8_t* codes = nullptr;  // layout sm90 or mma_bf16
  const uint8_t* scales = nullptr;
  const float* global_scale = nullptr;  // [groups]
  const void* bias = nullptr;           // [groups, n] of bias_type, or null
  void* out = nullptr;                  // [rows, n], gated: [rows, n / 2]
  const void* route = nullptr;          // offs [groups], ids [rows], or masked_m [groups]
  int rows = 0, groups = 0, n = 0, k = 0, kp = 0;
  int a_div = 1;  // row r of the output reads row r / a_div of x
  Routing routing = Routing::kOffs;
  DType x_type = DType::kFloat32, out_type = DType::kFloat32, bias_type = DType::kFloat32;
  Gate gate;             // gated: rows 2i and 2i + 1 of the weight are gate i and up i
  int scale_block = 16;  // K that share a scale: 16 or 32
  bool early = false;    // the routing was known before the previous kernel began
  bool bf16_words =
      false;  // the weights have layout mma_bf16, which takes 16-bit rows as they are; else sm90
  uint32_t grid_mul = 0, grid_shift = 0, a_div_mul = 0,
           a_div_shift = 0;  // the launcher sets them, for divisions
};

struct DecodeParams : ProductParams {
  const int* sorted_rows = nullptr;  // kOffs: the row at each sorted position, or null for the identity
  int max_m = 0;                     // kMasked: rows an expert
  int k_warps = 0, row_warps = 0, passes = 0;
  int ring = 4;  // steps between compute and reducer warps: 4, or 2 where memory is short
  float k_warps_inverse = 0, row_warps_inverse = 0;  // from here on the launcher sets them
  uint32_t chunk_mul = 0, chunk_shift = 0;           // to divide by a chunk's units
  int chunk_units = 0, change_units = 0;             // see Share
};

struct GemvParams : ProductParams {
  const void* topk_weights = nullptr;  // [rows] of weight_type: the product is combined; else null
  DType weight_type = DType::kFloat32;
  int top_k = 0, tokens = 0;  // rows that are combined into one, and how many results that makes
  int columns = 0;            // rows of x: at most kChunk
  int slices = 0;             // of K
  int tiles = 0;              // row tiles of a block, at most
  float slices_inverse = 0, tokens_inverse = 0;  // the launcher sets them
};

// One launch of a prefill kernel. Pointers are 16-byte aligned.
struct PrefillArguments {
  const void* x = nullptr;         // [rows, k] of the kernel's element, in the order that it takes
  const float* x_scale = nullptr;  // [rows]; for int8 rows [kp / 128, rows]
  const void *codes = nullptr, *scales = nullptr;
  const float* global_scale = nullptr;  // [groups]
  const void* bias = nullptr;           // [groups, n] of bias_type, or null
  void* out = nullptr;                  // [rows, n] of out_type, gated: [rows, n / 2]
  const int32_t* group_rows = nullptr;  // as in Rows
  void* workspace = nullptr;            // of fp4_kernel_prefill_workspace bytes
  int m = 0, groups = 0, n = 0;
  int k = 0, kp = 0;  // columns of x and of the weights. If x has fewer, zeros follow
  RowMode mode = RowMode::kDense;
  DType out_type = DType::kFloat32, bias_type = DType::kFloat32;
  Gate gate;
  bool early = false;        // the kernel launched before makes at most x and x_scale of what this one reads:
                             // weights need not wait
  bool leaves_rest = false;  // rows of no group may be left unwritten; else they become zeros
  bool whole_tiles = false;  // one block sums a tile, so that a row's bits do not depend on the other rows
  int config = -1;           // number of a candidate; -1: the one that `choose` takes
  void* stream = nullptr;
};

// A cache of experts that are in host memory (slots.cu). There are at most 1024 experts and 1024 slots.
struct SlotPlan {
  const void* ids = nullptr;  // [pairs], int64 if `wide`, else int32; those of no expert are skipped
  bool wide = false;
  int pairs = 0, experts = 0, slots = 0;
  int rounds = 1;  // ceil(min(experts, pairs) / slots): enough for any ids
  // [experts + slots + kSlotCounters], kept between calls: the slot of each expert (-1: none), the clock when
  // each slot was last used, and counters modulo 2^32. It begins with -1 for the experts and zeros else.
  int* state = nullptr;
  int* fetches = nullptr;  // [rounds, 1 + 2 slots], scratch: how many, and the (expert, slot) of each
  int* place = nullptr;    // [experts], scratch: round * slots + slot of those wanted, else -1
};
// Indices of the counters: calls, experts that the calls used, and experts that had to be fetched.
enum SlotCounter : int { kSlotClock, kSlotWanted, kSlotFetched, kSlotCounters };

// One of the tensors that an expert consists of.
struct SlotPart {
  const uint8_t* host = nullptr;  // [experts, bytes], memory of the host that the GPU reads
  uint8_t* slots = nullptr;       // [slots, bytes]
  int64_t bytes = 0;
};
constexpr int kMaxSlotParts = 8;
struct SlotParts {
  SlotPart part[kMaxSlotParts];
};

// Facts about a GPU. The clocks and the bus width are zero if its driver does not report them.
struct DeviceFacts {
  int major = 0, minor = 0, sms = 0;
  int shared_bytes = 0;  // the most that a thread block may use
  int clock_khz = 0, memory_clock_khz = 0, memory_bus_bits = 0;
};

struct Estimate {
  double seconds;
  int share_below;  // as TileWalk takes it
  int tile_width;   // as Rows has it
  bool claims;      // whether blocks claim tiles
};

struct Choice {
  int candidate = 0;
  Estimate estimate = {};
};

}  // namespace fp4::device

extern "C" {

// The library's family: 90, or 80 (family.cuh).
int fp4_kernel_family();
// Writes the facts about a GPU to `facts`, which is in host memory.
int fp4_kernel_device(int device, fp4::device::DeviceFacts* facts);
// Returns whether the library has code for this GPU.
int fp4_kernel_runs(int device);

int fp4_kernel_decode(const fp4::device::DecodeParams* params, int blocks, void* stream);
int fp4_kernel_gemv(const fp4::device::GemvParams* params, int blocks, void* stream);
int fp4_kernel_prefill(int kernel, const fp4::device::PrefillArguments* arguments);
int64_t fp4_kernel_prefill_workspace(int kernel, int sms);
// Return the number of candidates of a PrefillKernel, and a description of one.
int fp4_kernel_prefill_configs(int kernel);
const char* fp4_kernel_prefill_config_name(int kernel, int config);
fp4::device::Choice fp4_kernel_prefill_choose(int kernel, int mode, int groups, int m, int n, int kp, int sms,
                                              int config);
// Only in `_sm80.so`: from now on launches use at most `bytes` of shared memory in a block. 0: as much as the
// GPU has.
void fp4_kernel_prefill_most_shared(int bytes);
int fp4_kernel_route(const void* ids, int wide, int rows, int groups, int* counts, int* offs,
                     int* sorted_rows, int* position, void* stream);
int fp4_kernel_rows(const void* x, fp4::device::DType x_type, int count, const int* position, int copies,
                    const int* end, fp4::device::Act act, float alpha, float limit, float up_offset,
                    int interleaved, int width, int padded, fp4::device::Form form, void* out, float* scale,
                    int dependent, void* stream);
int fp4_kernel_rows_fp4(const void* x, fp4::device::DType x_type, int count, const int* position, int copies,
                        fp4::device::Act act, float alpha, float limit, float up_offset, int interleaved,
                        int width, int nvfp4, void* out, float* factor, void* stream);
int fp4_kernel_place(const void* x, const float* factor, int count, const int* position, int copies,
                     const int* end, int bytes, void* out, float* out_factor, int dependent, void* stream);
int fp4_kernel_combine(const void* y, fp4::device::DType y_type, const int* position, const void* ids,
                       int wide, const void* weights, fp4::device::DType weight_type, const void* bias,
                       fp4::device::DType bias_type, void* out, fp4::device::DType out_type, int tokens,
                       int top_k, int groups, int n, void* stream);
int fp4_kernel_slots_plan(const fp4::device::SlotPlan* plan, void* stream);
int fp4_kernel_slots_fetch(const fp4::device::SlotPlan* plan, const fp4::device::SlotParts* parts, int round,
                           int* ids, int blocks, void* stream);
int fp4_kernel_dequantize(const uint8_t* packed, const uint8_t* scales, const float* global_scale,
                          int64_t rows, int64_t n, int kp, int scale_block, int bf16_words, void* out,
                          int out_type, void* stream);
}
