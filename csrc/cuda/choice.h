// Chooses the kernels that run a product or an expert block: a cost model predicts their times, and the
// fastest one is taken. Decisions are cached by sizes, so a warm call only looks one up. This needs neither
// torch nor CUDA, except for the candidates of prefill, which the kernels' library knows.
#pragma once

#include <string_view>

#include "cuda/configs.h"

namespace fp4::cuda {

// The activations of a product and the layout of its weights. kFp8: fp8 rows. kHalf and kBf16: 16-bit rows,
// with weights in layout sm90 (kHalf) or mma_bf16 (kBf16).
enum class Kernel : int { kFp8, kHalf, kBf16 };

// A product of `rows` activation rows and weights [groups, n, kp]. If the routing is masked, each group has
// `rows` rows.
struct Product {
  Routing routing;
  int groups, rows, n, kp;
  int block = 16;  // K that share a scale

  int all_rows() const { return routing == Routing::kMasked ? rows * groups : rows; }
};

enum class Family : int { kPrefill, kDecode, kGemv };

struct ProductPlan {
  Family family = Family::kPrefill;
  DecodeConfig decode;
  GemvConfig gemv;
};

// `rows`: (token, expert) pairs.
struct Block {
  Product up, down;
  int top_k;
  bool bf16;           // the weights are in layout mma_bf16
  bool prefill_alone;  // only prefill reads the weights, or it alone keeps them batch invariant
  int a_format;        // an AFormat of common/formats.h
  int expected = 0;    // rows whose expert is here, if the others are masked; 0: all
};

// Returns the number of the AFormat of this name. Throws std::invalid_argument if there is none.
int index_of(std::string_view a_format);

struct BlockPlan {
  bool few = false;   // decode or gemv runs both products; else prefill does
  bool gemv = false;  // gemv runs both products, and combines the rows
  ProductPlan up, down;
};

// Make the plan of a product or a block. Rows that are routed by id are sorted for prefill, and for decode if
// they are more than kMaxIds.
ProductPlan plan(const Product& product, Kernel kernel, const Gpu& gpu);
BlockPlan plan(const Block& block, const Gpu& gpu);

// The inputs of the cost models, to which their constants are fitted. For decode: the number of weights that
// are read, of passes over K, and of values in rows after the first row of each expert. For prefill: the time
// that the kernels' own model predicts, 1 if multiprocessors share tiles, and the number of 16-bit values
// that are reordered. decode_work is empty if decode cannot run.
struct DecodeWork {
  double weights, passes, values;
};
struct PrefillWork {
  double seconds, shares, ordered;
};
std::optional<DecodeWork> decode_work(const Product& product, const Gpu& gpu);
PrefillWork prefill_work(const Product& product, Kernel kernel, const Gpu& gpu);

// The times that the models predict, in microseconds. decode_us is infinite if decode cannot run.
double decode_us(const Product& product, Kernel kernel, const Gpu& gpu);
double prefill_us(const Product& product, Kernel kernel, const Gpu& gpu);
device::Choice prefill_choice(const Product& product, device::PrefillKernel kernel, const Gpu& gpu);

using device::PrefillKernel;

// Returns the prefill kernel for e2m1 weights with a scale for `block` K. Kernel::kBf16 also covers fp16
// rows; their times are taken to be those of bf16 rows.
inline PrefillKernel prefill_kernel(Kernel kernel, int block) {
  constexpr PrefillKernel kOf[3][2] = {{PrefillKernel::kFp8, PrefillKernel::kFp8B32},
                                       {PrefillKernel::kHalf, PrefillKernel::kHalfB32},
                                       {PrefillKernel::kBf16, PrefillKernel::kBf16B32}};
  return kOf[int(kernel)][block == 32];
}
// Returns the prefill kernel for int4 weights.
inline PrefillKernel prefill_int4_kernel(int block) {
  return block == 128  ? PrefillKernel::kInt4
         : block == 64 ? PrefillKernel::kInt4G64
                       : PrefillKernel::kInt4G32;
}
inline bool prefill_takes(Routing routing) {
  return routing != Routing::kIds32 && routing != Routing::kIds64;
}
device::RowMode row_mode(Routing routing);

// For tests and measurements: overrides the models. kDecode: decode wherever it can run. kGemv: gemv or
// decode wherever they can run. kPrefill: always prefill.
enum class Only : int { kAny, kDecode, kGemv, kPrefill };
void set_only(Only only);

}  // namespace fp4::cuda
