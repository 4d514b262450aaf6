// The kernel launches that the operators consist of. Each takes checked tensors and runs on the current
// device and its current stream. None reads device memory on the host.
#pragma once

#include "cuda/choice.h"
#include "cuda/host.h"

namespace fp4::cuda {

// A weight in one of the Hopper layouts: [groups, n, kp].
struct WeightOperand {
  WeightOperand(const WeightShape& shape, const Tensor& b, const Tensor& b_scale,
                const OptionalTensor& factor, const OptionalTensor& bias);

  Tensor codes, scales, factor;
  OptionalTensor bias;
  int groups, n, kp;
  int block;  // K that share a scale
  bool bf16, int4;
  bool batch_invariant;  // a row's bits must not depend on the other rows: prefill multiplies any number

  bool prefill_alone() const { return int4 || batch_invariant; }
  WeightOperand without_bias() const {
    WeightOperand w = *this;
    w.bias.reset();
    return w;
  }
};

// Activation rows as a kernel takes them. `factor`: one for each row, if they have factors; int8 rows have
// one for each step of K, [steps, rows].
struct Rows {
  Tensor values;
  OptionalTensor factor;
};

// The expert of each row of a product.
struct Route {
  Routing routing = Routing::kDense;
  const void* route = nullptr;       // offs, ids or masked_m; none for kDense
  const int* sorted_rows = nullptr;  // as DecodeParams has it
  int max_m = 0;                     // kMasked: rows a group
};

// Rows sorted by expert, as prefill multiplies them.
struct Sorted {
  Tensor made;  // offs [groups], the row at each position, the position of each row
  int groups, rows;

  const int* offs() const { return pointer<int>(made); }
  const int* sorted_rows() const { return offs() + groups; }
  const int* position() const { return sorted_rows() + rows; }
};

// --- products ---

struct ProductArguments {
  int rows;                          // of the output
  int a_div = 1;                     // row r of it reads row r / a_div of x
  const Activation* gate = nullptr;  // applied to results; its weight has gate and up rows interleaved
  bool early = false;                // the routing was known before the kernel launched before this one began
  bool leaves_rest = false;  // prefill: rows of no expert may be left unwritten, else they become zeros
};

void run_decode(const Here& here, const DecodeConfig& config, const Rows& x, const WeightOperand& w,
                const Route& route, const ProductArguments& arguments, const Tensor& out);

// With `topk_weights` [tokens, k], out [tokens, n] is the weighted sum of the k rows of each token.
void run_gemv(const Here& here, const GemvConfig& config, const Rows& x, const WeightOperand& w,
              const Route& route, const ProductArguments& arguments, const Tensor& out,
              const Tensor* topk_weights = nullptr);

// x is sorted by expert, masked or dense. If masked, `rows` counts those of one group. `early`: the kernel
// launched before may make x and its factors, but nothing else that this kernel reads.
void run_prefill(const Here& here, const Rows& x, const WeightOperand& w, const Route& route,
                 const ProductArguments& arguments, const Tensor& out);

// True if run_prefill can apply this activation to results of this dtype.
bool prefill_gates(const Activation& gate, ScalarType out);
// True if the row kernels, decode and gemv can apply this activation.
bool rows_gate(const Activation& gate);

// --- rows ---

// Where the rows of a launch go: each row of x becomes the rows position[r * copies ..]. Rows from *end on
// may be left unwritten. `dependent`: the kernel begins while the one before may still run, and waits for it.
struct Placed {
  const int* position = nullptr;
  int rows = 0;  // of the result, if `position` is given
  const int* end = nullptr;
  bool dependent = false;
};

// Converts x [M, K] (gated: [M, 2 K]). Form::kSame: K columns of x's dtype; Form::kFp8: e4m3 [.., Kp] in the
// layout's order with scales; Form::kHalf: fp16 in prefill's order with powers of two; Form::kInt8: int8 [..,
// Kp] in prefill's order.
Rows make_rows(const Here& here, device::Form form, const Tensor& x, const Activation* gate,
               const Placed& to);

// Copies rows that are fp8 already, as make_rows(Form::kFp8) leaves them, to their places.
Rows place_rows(const Here& here, const Rows& x, const Placed& to);

// Quantises x row by row to nvfp4, or to mxfp4 if `nvfp4` is false. Returns the quantised values as bf16 [..,
// K], and factors.
Rows make_fp4_rows(const Here& here, bool nvfp4, const Tensor& x, const Activation* gate, const Placed& to);

// Sorts rows by expert, stably. Ids outside [0, groups) come last and count in no offset.
Sorted sort_rows(const Here& here, const Tensor& ids, int groups);

// out[t] = sum over j of weights[t, j] * (y[position[t * k + j]] + bias[ids[t, j]]), in float32.
void combine(const Here& here, const Tensor& y, const int* position, const Tensor& ids, const Tensor& weights,
             const OptionalTensor& bias, int groups, const Tensor& out);

}  // namespace fp4::cuda
