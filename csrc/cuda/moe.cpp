// The whole expert block on CUDA: route, gate and up, activation, down, combine.
#include "cuda/operands.h"

namespace fp4::cuda {
namespace {

// A call of `moe`, checked and ready.
struct Call {
  const Here& here;
  Tensor x, ids, weights;  // contiguous
  WeightOperand up, down;
  Activation gate;
  AFormat a_format;
  bool few;            // decode or gemv runs the products
  ScalarType between;  // of what the first product leaves to be gated and quantised
  int pairs;           // (token, expert)

  int top_k() const { return int(ids.size(1)); }
};

// The rows of one product as its kernel takes them: gated, brought to their places, quantised.
Rows rows_for(const Call& c, const Tensor& x, const Activation* gate, const Placed& to) {
  switch (c.a_format) {
    case AFormat::fp8:
      return make_rows(c.here, device::Form::kFp8, x, gate, to);
    case AFormat::nvfp4:
    case AFormat::mxfp4: {
      const Rows rows = make_fp4_rows(c.here, c.a_format == AFormat::nvfp4, x, gate, to);
      return c.few || c.up.bf16 ? rows : ordered(c.here, rows);
    }
    default:
      if (!c.few && !c.up.bf16) return make_rows(c.here, device::Form::kHalf, x, gate, to);
      if (gate == nullptr && to.position == nullptr) return {x, std::nullopt};
      return make_rows(c.here, device::Form::kSame, x, gate, to);
  }
}

// The same of what the first product left. The row kernels apply `gate` where they know it; relu2, which they
// do not, torch's operators do.
Rows hidden_rows(const Call& c, const Tensor& h, const Activation* gate, const Placed& to) {
  if (gate == nullptr || rows_gate(*gate)) return rows_for(c, h, gate, to);
  const Tensor positive = call("aten::relu", "", to_dtype(h, ScalarType::Float));
  const Tensor squared = call("aten::mul", "Tensor", positive, positive);
  return rows_for(c, to_dtype(squared, h.scalar_type()), nullptr, to);
}

Tensor hidden(const Call& c, const Activation* fused) {
  const int64_t width = fused != nullptr ? c.up.n / c.gate.parts() : c.up.n;
  return c.here.empty({c.pairs, width}, c.between);
}

// Few rows an expert: their outputs are one row a (token, slot) in float32, where they are not combined at
// once.
void run_few(const Call& c, const BlockPlan& plan, const Tensor& out) {
  std::optional<Sorted> sorted;
  Route route{by_id(c.ids), pointer(c.ids), nullptr, 0};
  if (c.pairs > kMaxIds) {
    sorted = sort_rows(c.here, c.ids, c.up.groups);
    route = {Routing::kOffs, sorted->offs(), sorted->sorted_rows(), 0};
  }
  const Rows a = rows_for(c, c.x, nullptr, {});
  // Gate and up meet in one lane's sums.
  const Activation* fused = c.gate.interleaved && rows_gate(c.gate) ? &c.gate : nullptr;
  const Activation* left = fused != nullptr ? nullptr : &c.gate;
  const Tensor h = hidden(c, fused);
  const ProductArguments first{.rows = c.pairs, .a_div = c.top_k(), .gate = fused};
  if (plan.gemv) {
    run_gemv(c.here, plan.up.gemv, a, c.up, route, first, h);
    const Rows ready = hidden_rows(c, h, left, {});
    run_gemv(c.here, plan.down.gemv, ready, c.down, route, {.rows = c.pairs, .early = true}, out, &c.weights);
    return;
  }
  run_decode(c.here, plan.up.decode, a, c.up, route, first, h);
  const Rows ready = hidden_rows(c, h, left, {});
  const Tensor y = c.here.empty({c.pairs, c.down.n}, ScalarType::Float);
  run_decode(c.here, plan.down.decode, ready, c.down.without_bias(), route,
             {.rows = c.pairs, .early = !sorted}, y);
  combine(c.here, y, nullptr, c.ids, c.weights, c.down.bias, c.up.groups, out);
}

// Many: rows sorted by expert, whose outputs are bfloat16.
void run_sorted(const Call& c, const Tensor& out) {
  const Sorted sorted = sort_rows(c.here, c.ids, c.up.groups);
  const Activation* fused = prefill_gates(c.gate, c.between) ? &c.gate : nullptr;
  const Tensor h = hidden(c, fused), y = c.here.empty({c.pairs, c.down.n}, ScalarType::BFloat16);
  const int* end =
      sorted.offs() + c.up.groups - 1;  // rows of no expert are sorted last, and nothing reads them
  const Route route{Routing::kOffs, sorted.offs(), nullptr, 0};
  const Rows a = rows_for(c, c.x, nullptr, {sorted.position(), c.pairs, end, true});
  run_prefill(c.here, a, c.up, route, {.rows = c.pairs, .gate = fused, .early = true}, h);
  const Rows ready = hidden_rows(c, h, fused != nullptr ? nullptr : &c.gate, {nullptr, 0, end, true});
  run_prefill(c.here, ready, c.down.without_bias(), route, {.rows = c.pairs, .early = true}, y);
  combine(c.here, y, sorted.position(), c.ids, c.weights, c.down.bias, c.up.groups, out);
}

Tensor moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13,
           const Tensor& w13_scale, const OptionalTensor& w13_global_scale, const Tensor& w2,
           const Tensor& w2_scale, const OptionalTensor& w2_global_scale, const OptionalTensor& w13_bias,
           const OptionalTensor& w2_bias, const std::string& format, const std::string& layout,
           const std::string& activation, const std::string& a_format, std::optional<ScalarType> out_dtype) {
  const Experts shape = check_moe(x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale,
                                  w2_global_scale, format, layout, activation, a_format, w13_bias, w2_bias);
  const ScalarType dtype = resolve_out_dtype(x, out_dtype);
  if (!shape.up.layout->hopper)
    return fallback("moe", layout_words(layout), x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale,
                    w2, w2_scale, w2_global_scale, w13_bias, w2_bias, format, layout, activation, a_format,
                    out_dtype);
  const Here here(w13);
  require_hopper("moe", layout, here);
  const int64_t tokens = x.size(0), pairs = topk_ids.numel();
  const Activation gate = check_activation(activation);
  const Tensor out = here.empty({tokens, shape.down.n}, dtype);
  if (out.numel() == 0) return out;
  if (pairs == 0 || shape.up.groups == 0 || shape.up.n / gate.parts() == 0) {
    Tensor zeros = out;
    return torch::stable::zero_(zeros);
  }
  Call c{.here = here,
         .x = as_operand(x),
         .ids = as_contiguous(topk_ids),
         .weights = as_contiguous(topk_weights),
         .up = WeightOperand(shape.up, w13, w13_scale, w13_global_scale, w13_bias),
         .down = WeightOperand(shape.down, w2, w2_scale, w2_global_scale, w2_bias),
         .gate = gate,
         .a_format = a_format_of(a_format),
         .few = false,
         .between = x.scalar_type(),
         .pairs = int(pairs)};
  const Routing routing = pairs > kMaxIds ? Routing::kOffs : by_id(c.ids);
  const BlockPlan plan =
      cuda::plan(Block{product_of(c.up, routing, c.pairs), product_of(c.down, routing, c.pairs), c.top_k(),
                       c.up.bf16, c.up.int4, int(c.a_format)},
                 here.sms());
  c.few = plan.few;
  // As they are while decode runs, which waits for the weights, else fp8.
  if (c.a_format == AFormat::automatic) c.a_format = plan.few ? AFormat::none : AFormat::fp8;
  if (c.a_format == AFormat::fp8) {
    if (c.x.scalar_type() == ScalarType::Float) c.x = to_dtype(c.x, ScalarType::BFloat16);
    c.between = ScalarType::BFloat16;
  } else if (c.a_format != AFormat::none) {
    c.between = ScalarType::Float;
  }
  if (plan.few) {
    run_few(c, plan, out);
  } else {
    run_sorted(c, out);
  }
  return out;
}

}  // namespace

FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) { m.impl("moe", FP4_BOX(moe)); }

}  // namespace fp4::cuda
