#include "cuda/launches.h"

namespace fp4::cuda {
namespace {

constexpr int kMaxWidth = 32768, kMaxFp4Width = 16384;  // columns that one block of the row kernels holds
constexpr int kRouteChunk = 1024;                       // as in csrc/device/route.cu

static_assert(1 + int(GateFunction::silu) == int(device::Act::kSilu) &&
              1 + int(GateFunction::gelu) == int(device::Act::kGelu) &&
              1 + int(GateFunction::gelu_tanh) == int(device::Act::kGeluTanh));

device::Gate gate_fields(const Activation* gate) {
  if (gate == nullptr) return {};
  return {device::Act(1 + int(gate->function)), gate->alpha, gate->limit, gate->up_offset};
}

// Fills the fields that the launches of decode and gemv share.
void describe(device::ProductParams& p, const Rows& x, const WeightOperand& w, const Route& route,
              const ProductArguments& arguments, const Tensor& out) {
  p.x = pointer(x.values);
  p.x_scale = pointer<float>(x.factor);
  p.codes = pointer<uint8_t>(w.codes);
  p.scales = pointer<uint8_t>(w.scales);
  p.global_scale = pointer<float>(w.factor);
  p.bias = pointer(w.bias);
  p.out = mutable_pointer(out);
  p.route = route.route;
  p.rows = arguments.rows;
  p.groups = w.groups;
  p.n = w.n;
  p.k = int(size(x.values, -1));
  p.kp = w.kp;
  p.a_div = arguments.a_div;
  p.routing = route.routing;
  p.x_type = code_of(x.values.scalar_type());
  p.out_type = code_of(out.scalar_type());
  p.bias_type = code_of(w.bias);
  p.gate = gate_fields(arguments.gate);
  p.scale_block = w.block;
  p.early = arguments.early;
  p.bf16_words = w.bf16;
}

// Returns the prefill kernel for rows of this dtype.
PrefillKernel prefill_kernel_of(ScalarType rows, const WeightOperand& w) {
  if (w.int4) return prefill_int4_kernel(w.block);
  if (rows == ScalarType::Char) return w.block == 32 ? PrefillKernel::kInt8B32 : PrefillKernel::kInt8;
  if (rows == ScalarType::BFloat16) return prefill_kernel(Kernel::kBf16, w.block);
  if (rows != ScalarType::Half) return prefill_kernel(Kernel::kFp8, w.block);
  if (!w.bf16) return prefill_kernel(Kernel::kHalf, w.block);
  return w.block == 32 ? PrefillKernel::kFp16B32 : PrefillKernel::kFp16;
}

// The number of rows of a result, their width, and the number of copies of each row of x.
struct Shaped {
  int count, width, copies;
};

Shaped shape_rows(const Tensor& x, const Activation* gate, const Placed& to, int most) {
  const int count = int(x.size(0)), columns = int(x.size(1));
  const int width = gate == nullptr ? columns : columns / 2;
  if (width > most)
    fail("fp4: rows of ", width, " columns; the native kernels take at most ", most, ". Use layout 'plain'");
  if (to.position == nullptr) return {count, width, 1};
  return {to.rows, width, to.rows / std::max(count, 1)};
}

}  // namespace

WeightOperand::WeightOperand(const WeightShape& shape, const Tensor& b, const Tensor& b_scale,
                             const OptionalTensor& b_factor, const OptionalTensor& b_bias)
    : codes(as_operand(b)),
      scales(as_operand(b_scale)),
      factor(as_contiguous(b_factor.value())),  // all these layouts have one
      bias(as_contiguous(b_bias)),
      groups(int(shape.groups)),
      n(int(shape.n)),
      kp(int(shape.k)),
      block(shape.format->block),
      bf16(shape.layout->order == Order::mma_bf16),
      int4(shape.layout->order == Order::sm90_int4),
      batch_invariant(shape.layout->batch_invariant) {}

void run_decode(const Here& here, const DecodeConfig& config, const Rows& x, const WeightOperand& w,
                const Route& route, const ProductArguments& arguments, const Tensor& out) {
  device::DecodeParams p;
  describe(p, x, w, route, arguments, out);
  p.sorted_rows = route.sorted_rows;
  p.max_m = route.max_m;
  p.k_warps = config.k_warps;
  p.row_warps = config.row_warps;
  p.passes = config.passes;
  p.ring = config.ring;
  check_launch(here.kernels().decode(&p, here.sms(), here.stream()), "fp4_kernel_decode");
}

void run_gemv(const Here& here, const GemvConfig& config, const Rows& x, const WeightOperand& w,
              const Route& route, const ProductArguments& arguments, const Tensor& out,
              const Tensor* topk_weights) {
  device::GemvParams p;
  describe(p, x, w, route, arguments, out);
  p.columns = config.columns;
  p.slices = config.slices;
  p.tiles = config.tiles;
  if (topk_weights != nullptr) {
    p.topk_weights = pointer(*topk_weights);
    p.weight_type = code_of(topk_weights->scalar_type());
    p.tokens = int(topk_weights->size(0));
    p.top_k = int(topk_weights->size(1));
  }
  check_launch(here.kernels().gemv(&p, here.sms(), here.stream()), "fp4_kernel_gemv");
}

void run_prefill(const Here& here, const Rows& x, const WeightOperand& w, const Route& route,
                 const ProductArguments& arguments, const Tensor& out) {
  const int kernel = int(prefill_kernel_of(x.values.scalar_type(), w));
  const Tensor workspace =
      here.empty({here.kernels().prefill_workspace(kernel, here.sms())}, ScalarType::Byte);
  device::PrefillArguments p;
  p.x = pointer(x.values);
  p.x_scale = pointer<float>(x.factor);
  p.codes = pointer(w.codes);
  p.scales = pointer(w.scales);
  p.global_scale = pointer<float>(w.factor);
  p.bias = pointer(w.bias);
  p.out = mutable_pointer(out);
  p.group_rows = static_cast<const int32_t*>(route.route);
  p.workspace = mutable_pointer(workspace);
  p.m = arguments.rows;
  p.groups = w.groups;
  p.n = w.n;
  p.k = int(size(x.values, -1));
  p.kp = w.kp;
  p.mode = row_mode(route.routing);
  p.out_type = code_of(out.scalar_type());
  p.bias_type = code_of(w.bias);
  p.gate = gate_fields(arguments.gate);
  p.early = arguments.early;
  p.leaves_rest = arguments.leaves_rest;
  p.whole_tiles = w.batch_invariant;
  p.stream = here.stream();
  check_launch(here.kernels().prefill(kernel, &p), "fp4_kernel_prefill");
}

// The prefill kernel applies silu itself, if gate and up are interleaved: both of a column are then in one
// lane's sums, and silu costs little beside the products.
bool prefill_gates(const Activation& gate, ScalarType out) {
  const bool known =
      gate.gated && gate.function == GateFunction::silu && (gate.limit > 0 || gate.up_offset == 0);
  return known && gate.interleaved && out != ScalarType::Float;
}

bool rows_gate(const Activation& gate) {
  return gate.function != GateFunction::relu2 && gate.function != GateFunction::situ;
}

Rows make_rows(const Here& here, device::Form form, const Tensor& x, const Activation* gate,
               const Placed& to) {
  const Shaped shape = shape_rows(x, gate, to, kMaxWidth);
  const int padded = int(entry(kLayouts, "sm90").padded(shape.width));
  const bool same = form == device::Form::kSame;
  const bool int8 = form == device::Form::kInt8;
  const ScalarType dtype = same                         ? x.scalar_type()
                           : int8                       ? ScalarType::Char
                           : form == device::Form::kFp8 ? ScalarType::Float8_e4m3fn
                                                        : ScalarType::Half;
  Rows made{here.empty({shape.count, same ? shape.width : padded}, dtype), std::nullopt};
  if (int8) {
    made.factor = here.empty({padded / device::kInt8Step, shape.count}, ScalarType::Float);
  } else if (!same) {
    made.factor = here.empty({shape.count}, ScalarType::Float);
  }
  const device::Gate g = gate_fields(gate);
  check_launch(
      here.kernels().rows(pointer(x), code_of(x.scalar_type()), int(x.size(0)), to.position, shape.copies,
                          to.end, g.act, g.alpha, g.limit, g.up_offset, gate != nullptr && gate->interleaved,
                          shape.width, padded, form, mutable_pointer(made.values),
                          same ? nullptr : mutable_pointer<float>(*made.factor), to.dependent, here.stream()),
      "fp4_kernel_rows");
  return made;
}

Rows place_rows(const Here& here, const Rows& x, const Placed& to) {
  const int count = int(x.values.size(0)), bytes = int(x.values.size(1));
  Rows made{here.empty({to.rows, bytes}, ScalarType::Float8_e4m3fn),
            here.empty({to.rows}, ScalarType::Float)};
  check_launch(here.kernels().place(pointer(x.values), pointer<float>(x.factor), count, to.position,
                                    to.rows / std::max(count, 1), to.end, bytes, mutable_pointer(made.values),
                                    mutable_pointer<float>(*made.factor), to.dependent, here.stream()),
               "fp4_kernel_place");
  return made;
}

Rows make_fp4_rows(const Here& here, bool nvfp4, const Tensor& x, const Activation* gate, const Placed& to) {
  const Shaped shape = shape_rows(x, gate, to, kMaxFp4Width);
  Rows made{here.empty({shape.count, shape.width}, ScalarType::BFloat16),
            here.empty({shape.count}, ScalarType::Float)};
  const device::Gate g = gate_fields(gate);
  check_launch(here.kernels().rows_fp4(
                   pointer(x), code_of(x.scalar_type()), int(x.size(0)), to.position, shape.copies, g.act,
                   g.alpha, g.limit, g.up_offset, gate != nullptr && gate->interleaved, shape.width, nvfp4,
                   mutable_pointer(made.values), mutable_pointer<float>(*made.factor), here.stream()),
               "fp4_kernel_rows_fp4");
  return made;
}

Sorted sort_rows(const Here& here, const Tensor& ids, int groups) {
  const int rows = int(ids.numel());
  const int64_t counts = ceil_div(rows, kRouteChunk) * int64_t(groups + 1);
  const Sorted sorted{here.empty({groups + 2 * int64_t(rows) + counts}, ScalarType::Int), groups, rows};
  int* offs = mutable_pointer<int>(sorted.made);
  int *sorted_rows = offs + groups, *position = sorted_rows + rows;
  check_launch(here.kernels().route(pointer(ids), ids.scalar_type() == ScalarType::Long, rows, groups,
                                    position + rows, offs, sorted_rows, position, here.stream()),
               "fp4_kernel_route");
  return sorted;
}

void combine(const Here& here, const Tensor& y, const int* position, const Tensor& ids, const Tensor& weights,
             const OptionalTensor& bias, int groups, const Tensor& out) {
  const OptionalTensor b = as_operand(bias);
  check_launch(here.kernels().combine(pointer(y), code_of(y.scalar_type()), position, pointer(ids),
                                      ids.scalar_type() == ScalarType::Long, pointer(weights),
                                      code_of(weights.scalar_type()), pointer(b), code_of(b),
                                      mutable_pointer(out), code_of(out.scalar_type()), int(ids.size(0)),
                                      int(ids.size(1)), groups, int(y.size(1)), here.stream()),
               "fp4_kernel_combine");
}

}  // namespace fp4::cuda
