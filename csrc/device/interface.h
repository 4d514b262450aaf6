// C interface of the libraries of kernels, such as `_sm90.so`. It needs neither torch nor CUDA, so the
// operators (csrc/cuda) and the kernels share one definition of each struct.
//
// Pointers are device pointers unless a comment says otherwise. Launchers return a cudaError_t as an int, 0
// is success, and launch on the current device.
#pragma once

#include <cstdint>

namespace fp4::device {

// Dtypes and gates cross the interface as these numbers (fp4_ops/backends/launchers/library.py has those of
// both, too).
enum class DType : int { kFloat32, kBFloat16, kFloat16, kFloat8 };
enum class Act : int { kNone, kSilu, kGelu, kGeluTanh };
enum class Routing : int { kOffs, kIds32, kIds64, kMasked, kDense };
enum class RowMode : int { kDense = 0, kContiguous = 1, kMasked = 2 };

// The prefill kernels, by the weights and the rows that they take: nvfp4 (or e2m1 with a scale for 32 K) by
// fp8 rows, by fp16 rows as Form::kHalf makes them, and by bfloat16 rows; int4 in groups of 128, 64 and 32 by
// fp8 rows; by fp16 rows in plain order; and by int8 rows. `_sm80.so` has those of bfloat16, plain fp16 and
// int8 rows alone, `_sm90.so` all but the latter two.
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

// What becomes of a row: x's type in plain order; or, in the layout's order, e4m3 with a scale a row; or fp16
// with a power of two a row (half_position in e2m1_sm90.cuh), so that of a bfloat16 row bits are lost only
// of values below 2^-31 of its largest; or int8 in the order of csrc/sm80/e2m1_to_int8.cuh, with a scale for
// kInt8Step columns.
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
  Gate gate;                // gated: rows 2i and 2i + 1 of the weight are gate i and up i
  int scale_block = 16;     // K that share a scale: 16 or 32
  bool early = false;       // the routing was known before the previous kernel began
  bool bf16_words = false;  // the weights are of layout mma_bf16, for 16-bit rows as they are; else of sm90
  uint32_t grid_mul = 0, grid_shift = 0, a_div_mul = 0, a_div_shift = 0;  // the launcher's: for divisions
};

struct DecodeParams : ProductParams {
  const int* sorted_rows = nullptr;  // kOffs: the row at each sorted position, or null for the identity
  int max_m = 0;                     // kMasked: rows an expert
  int k_warps = 0, row_warps = 0, passes = 0;
  int ring = 4;  // steps between compute and reducer warps: 4, or 2 where memory is short
  float k_warps_inverse = 0, row_warps_inverse = 0;  // from here on the launcher's
  uint32_t chunk_mul = 0, chunk_shift = 0;           // to divide by a chunk's units
  int chunk_units = 0, change_units = 0;             // see Share
};

struct GemvParams : ProductParams {
  const void* topk_weights = nullptr;  // [rows] of weight_type: the product is combined; else null
  DType weight_type = DType::kFloat32;
  int top_k = 0, tokens = 0;                     // rows that are combined into one, and how many that makes
  int columns = 0;                               // rows of x: at most kChunk
  int slices = 0;                                // of K
  int tiles = 0;                                 // row tiles of a block, at most
  float slices_inverse = 0, tokens_inverse = 0;  // the launcher's
};

// One launch of a prefill kernel. Pointers are 16-byte aligned.
struct PrefillArguments {
  const void* x = nullptr;         // [rows, k] of the kernel's element, in the order that it takes
  const float* x_scale = nullptr;  // [rows]; of int8 rows [kp / 128, rows]
  const void *codes = nullptr, *scales = nullptr;
  const float* global_scale = nullptr;  // [groups]
  const void* bias = nullptr;           // [groups, n] of bias_type, or null
  void* out = nullptr;                  // [rows, n] of out_type, gated: [rows, n / 2]
  const int32_t* group_rows = nullptr;  // as in Rows
  void* workspace = nullptr;            // of fp4_kernel_prefill_workspace bytes
  int m = 0, groups = 0, n = 0;
  int k = 0, kp = 0;  // the columns of x, which may be fewer than the weights': zeros follow
  RowMode mode = RowMode::kDense;
  DType out_type = DType::kFloat32, bias_type = DType::kFloat32;
  Gate gate;
  bool early = false;  // of what is read, the kernel launched before makes x and x_scale at most: weights
                       // need not wait
  bool leaves_rest = false;  // rows of no group may be left unwritten; else they become zeros
  int config = -1;           // a candidate; -1: the one that `choose` takes
  void* stream = nullptr;
};

// A cache of experts that lie in host memory (slots.cu). At most 1024 experts and 1024 slots.
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
// Places among the counters: calls, experts that they wanted, experts that had to be fetched.
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

// Of a GPU; the clocks and the bus are zero where its driver does not tell them.
struct DeviceFacts {
  int major = 0, minor = 0, sms = 0;
  int shared_bytes = 0;  // that a thread block may have
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
// What is to be known of a GPU (to an address of the host).
int fp4_kernel_device(int device, fp4::device::DeviceFacts* facts);
// Whether there is code for a GPU.
int fp4_kernel_runs(int device);

int fp4_kernel_decode(const fp4::device::DecodeParams* params, int blocks, void* stream);
int fp4_kernel_gemv(const fp4::device::GemvParams* params, int blocks, void* stream);
int fp4_kernel_prefill(int kernel, const fp4::device::PrefillArguments* arguments);
int64_t fp4_kernel_prefill_workspace(int kernel, int sms);
// The candidates of a PrefillKernel: how many, and each in words.
int fp4_kernel_prefill_configs(int kernel);
const char* fp4_kernel_prefill_config_name(int kernel, int config);
fp4::device::Choice fp4_kernel_prefill_choose(int kernel, int mode, int groups, int m, int n, int kp, int sms,
                                              int config);
// Of `_sm80.so`: from now on launches use at most so many bytes of shared memory in a block; 0: what the GPU
// has.
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
