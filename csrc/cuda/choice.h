// Chooses the kernels that run a product or an expert block: a cost model predicts their times, and the
// fastest one is taken. Decisions are cached by sizes, so a warm call only looks one up. This needs neither
// torch nor CUDA, except for the candidates of prefill, which the kernels' library knows.
#pragma once

#include <string_view>

#include "cuda/configs.h"

namespace fp4::cuda {

// What the activations of a product are for its kernels: 16-bit rows with weights in layout sm90 or
// mma_bf16, or fp8 rows.
enum class Kernel : int { kFp8, kHalf, kBf16 };

// `rows` activation rows, of each group where the routing is masked, times [groups, n, kp].
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
  bool bf16;         // the weights are in layout mma_bf16
  bool int4;         // or in sm90_int4
  int a_format;      // an AFormat of common/formats.h
  int expected = 0;  // of the rows, those whose expert is here, where others' are masked; 0: all
};

// Of the name of an AFormat.
int index_of(std::string_view a_format);

struct BlockPlan {
  bool few = false;   // decode or gemv runs both products, else prefill
  bool gemv = false;  // gemv runs both, and combines
  ProductPlan up, down;
};

// Routing by id is sorted for prefill and for decode of more than kMaxIds rows.
ProductPlan plan(const Product& product, Kernel kernel, const Gpu& gpu);
BlockPlan plan(const Block& block, const Gpu& gpu);

// What the models are of, for a fit of their constants. decode: weights that are read, passes over K, values
// of rows beyond an expert's first; nothing where it cannot run. prefill: what the kernels' own model says;
// whether multiprocessors share tiles; 16-bit values that are put in order.
struct DecodeWork {
  double weights, passes, values;
};
struct PrefillWork {
  double seconds, shares, ordered;
};
std::optional<DecodeWork> decode_work(const Product& product, const Gpu& gpu);
PrefillWork prefill_work(const Product& product, Kernel kernel, const Gpu& gpu);

// What the models say, in microseconds; infinite where decode cannot run.
double decode_us(const Product& product, Kernel kernel, const Gpu& gpu);
double prefill_us(const Product& product, Kernel kernel, const Gpu& gpu);
device::Choice prefill_choice(const Product& product, device::PrefillKernel kernel, const Gpu& gpu);

using device::PrefillKernel;

// Of e2m1 weights with a scale for so many K; of Kernel::kBf16 that for bf16 rows, whose times those of fp16
// are taken to be.
inline PrefillKernel prefill_kernel(Kernel kernel, int block) {
  constexpr PrefillKernel kOf[3][2] = {{PrefillKernel::kFp8, PrefillKernel::kFp8B32},
                                       {PrefillKernel::kHalf, PrefillKernel::kHalfB32},
                                       {PrefillKernel::kBf16, PrefillKernel::kBf16B32}};
  return kOf[int(kernel)][block == 32];
}
// Of int4 weights.
inline PrefillKernel prefill_int4_kernel(int block) {
  return block == 128  ? PrefillKernel::kInt4
         : block == 64 ? PrefillKernel::kInt4G64
                       : PrefillKernel::kInt4G32;
}
inline bool prefill_takes(Routing routing) {
  return routing != Routing::kIds32 && routing != Routing::kIds64;
}
device::RowMode row_mode(Routing routing);

// For tests and measurements: whatever the models say, decode, or gemv and decode, wherever they can run, or
// prefill.
enum class Only : int { kAny, kDecode, kGemv, kPrefill };
void set_only(Only only);

}  // namespace fp4::cuda
