// The whole expert block on CUDA: route, gate and up, activation, down, combine.
#include "cuda/moe.h"

#include "cuda/operands.h"

namespace fp4::cuda {
namespace {

// A call of `moe` that was checked.
struct Call {
  const Here& here;
  Tensor x, ids, weights;  // contiguous
  const Rows* ready;       // rows of x as prefill takes them; null: they are made from x
  WeightOperand up, down;
  Activation gate;
  AFormat a_format;
  bool few;            // decode or gemv runs the products
  ScalarType between;  // dtype of the first product's results, before the gate and quantisation
  int pairs;           // (token, expert) pairs

  int top_k() const { return int(ids.size(1)); }
};

// Makes the rows of one product as its kernel takes them: applies the gate, copies them to their places,
// quantises.
Rows rows_for(const Call& c, const Tensor& x, const Activation* gate, const Placed& to) {
  switch (c.a_format) {
    case AFormat::fp8:
      return make_rows(c.here, device::Form::kFp8, x, gate, to);
    case AFormat::int8:
      return make_rows(c.here, device::Form::kInt8, x, gate, to);
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

// cap * tanh(x / cap).
Tensor soft_cap(const Here& here, const Tensor& x, double cap) {
  const Tensor c = torch::stable::fill_(here.empty({1}, ScalarType::Float), cap);
  const Tensor limited = call("aten::tanh", "", call("aten::div", "Tensor", x, c));
  return call("aten::mul", "Tensor", limited, c);
}

// The activations that the row kernels do not know, by torch's operators: relu2 and situ.
Tensor gated_by_torch(const Here& here, const Tensor& h, const Activation& gate) {
  const Tensor x = to_dtype(h, ScalarType::Float);
  if (gate.function == GateFunction::relu2) {
    const Tensor positive = call("aten::relu", "", x);
    return call("aten::mul", "Tensor", positive, positive);
  }
  const int64_t end = size(x, 1), up_at = gate.interleaved ? 1 : end / 2, step = gate.interleaved ? 2 : 1;
  const auto columns = [&](int64_t from, int64_t to) {
    return call("aten::slice", "Tensor", x, int64_t(1), std::optional<int64_t>(from),
                std::optional<int64_t>(to), step);
  };
  const Tensor g = columns(0, gate.interleaved ? end : up_at), up = columns(up_at, end);
  const Tensor curve =
      call("aten::mul", "Tensor", soft_cap(here, g, gate.gate_cap), call("aten::sigmoid", "", g));
  return call("aten::mul", "Tensor", curve, soft_cap(here, up, gate.up_cap));
}

// The same for the first product's results. The row kernels apply `gate` if they know it.
Rows hidden_rows(const Call& c, const Tensor& h, const Activation* gate, const Placed& to) {
  if (gate == nullptr || rows_gate(*gate)) return rows_for(c, h, gate, to);
  return rows_for(c, to_dtype(gated_by_torch(c.here, h, *gate), h.scalar_type()), nullptr, to);
}

Tensor hidden(const Call& c, const Activation* fused) {
  const int64_t width = fused != nullptr ? c.up.n / c.gate.parts() : c.up.n;
  return c.here.empty({c.pairs, width}, c.between);
}

// For few rows an expert. gemv writes the sums over each token's experts to `out`. Decode writes one float32
// row for each (token, slot); rows of no expert are zeros.
OptionalTensor run_few(const Call& c, const BlockPlan& plan, const OptionalTensor& out) {
  std::optional<Sorted> sorted;
  Route route{by_id(c.ids), pointer(c.ids), nullptr, 0};
  if (c.pairs > kMaxIds) {
    sorted = sort_rows(c.here, c.ids, c.up.groups);
    route = {Routing::kOffs, sorted->offs(), sorted->sorted_rows(), 0};
  }
  const Rows a = rows_for(c, c.x, nullptr, {});
  // Gate and up of a column are in one lane's sums.
  const Activation* fused = c.gate.interleaved && rows_gate(c.gate) ? &c.gate : nullptr;
  const Activation* left = fused != nullptr ? nullptr : &c.gate;
  const Tensor h = hidden(c, fused);
  const ProductArguments first{.rows = c.pairs, .a_div = c.top_k(), .gate = fused};
  if (plan.gemv) {
    run_gemv(c.here, plan.up.gemv, a, c.up, route, first, h);
    const Rows ready = hidden_rows(c, h, left, {});
    run_gemv(c.here, plan.down.gemv, ready, c.down, route, {.rows = c.pairs, .early = true}, *out,
             &c.weights);
    return std::nullopt;
  }
  run_decode(c.here, plan.up.decode, a, c.up, route, first, h);
  const Rows ready = hidden_rows(c, h, left, {});
  const Tensor y = c.here.empty({c.pairs, c.down.n}, ScalarType::Float);
  run_decode(c.here, plan.down.decode, ready, c.down.without_bias(), route,
             {.rows = c.pairs, .early = !sorted}, y);
  return y;
}

// For many rows an expert: sorts the rows by expert. The outputs are bfloat16, one row for each (token,
// slot), in sorted order.
Tensor run_sorted(const Call& c, const Sorted& sorted) {
  // Prefill's own gate divides two tokens with one product, so a token's last bit would depend on its
  // neighbour.
  const bool fuses = !c.up.batch_invariant && prefill_gates(c.gate, c.between);
  const Activation* fused = fuses ? &c.gate : nullptr;
  const Tensor h = hidden(c, fused), y = c.here.empty({c.pairs, c.down.n}, ScalarType::BFloat16);
  const int* end =
      sorted.offs() + c.up.groups - 1;  // rows of no expert are sorted last, and nothing reads them
  const Route route{Routing::kOffs, sorted.offs(), nullptr, 0};
  const Placed to{sorted.position(), c.pairs, end, true};
  const Rows a = c.ready ? place_rows(c.here, *c.ready, to) : rows_for(c, c.x, nullptr, to);
  run_prefill(c.here, a, c.up, route, {.rows = c.pairs, .gate = fused, .early = true, .leaves_rest = true},
              h);
  const Rows ready = hidden_rows(c, h, fused != nullptr ? nullptr : &c.gate, {nullptr, 0, end, true});
  run_prefill(c.here, ready, c.down.without_bias(), route,
              {.rows = c.pairs, .early = true, .leaves_rest = true}, y);
  return y;
}

}  // namespace

Outcome run_moe(bool combined, int64_t ranks, int64_t planned, const Rows* ready, const Tensor& x,
                const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13,
                const Tensor& w13_scale, const OptionalTensor& w13_global_scale, const Tensor& w2,
                const Tensor& w2_scale, const OptionalTensor& w2_global_scale, const OptionalTensor& w13_bias,
                const OptionalTensor& w2_bias, const std::string& format, const std::string& layout,
                const std::string& activation, const std::string& a_format,
                std::optional<ScalarType> out_dtype) {
  const Experts shape = check_moe(x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale,
                                  w2_global_scale, format, layout, activation, a_format, w13_bias, w2_bias);
  const ScalarType dtype = resolve_out_dtype(x, out_dtype);
  if (!shape.up.layout->native)
    return {fallback("moe", layout_words(layout), x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale,
                     w2, w2_scale, w2_global_scale, w13_bias, w2_bias, format, layout, activation, a_format,
                     out_dtype),
            {}};
  const Here here(w13);
  const bool as_they_are = shape.up.layout->leaves(a_format);
  require_kernels("moe", *shape.up.layout, here, as_they_are ? std::optional(x.scalar_type()) : std::nullopt);
  const int64_t tokens = x.size(0), pairs = topk_ids.numel();
  const Activation gate = check_activation(activation);
  const auto new_out = [&] { return here.empty({tokens, shape.down.n}, dtype); };
  if (tokens == 0 || shape.down.n == 0) return {new_out(), {}};
  if (pairs == 0 || shape.up.groups == 0 || shape.up.n / gate.parts() == 0) {
    Tensor zeros = new_out();
    return {torch::stable::zero_(zeros), {}};
  }
  Call c{.here = here,
         .x = ready != nullptr ? x : as_operand(x),
         .ids = as_contiguous(topk_ids),
         .weights = as_contiguous(topk_weights),
         .ready = ready,
         .up = WeightOperand(shape.up, w13, w13_scale, w13_global_scale, w13_bias),
         .down = WeightOperand(shape.down, w2, w2_scale, w2_global_scale, w2_bias),
         .gate = gate,
         .a_format = a_format_of(a_format),
         .few = false,
         .between = x.scalar_type(),
         .pairs = int(pairs)};
  const Routing routing = pairs > kMaxIds ? Routing::kOffs : by_id(c.ids);
  Gpu gpu = here.gpu();
  if (ranks > 0) gpu.constants = 0;  // all ranks must decide the same, even if only some hosts were tuned
  Product up = product_of(c.up, routing, c.pairs), down = product_of(c.down, routing, c.pairs);
  if (planned > 0) up.groups = down.groups = int(planned);
  const BlockPlan plan = cuda::plan(Block{up, down, c.top_k(), c.up.bf16, c.up.prefill_alone(),
                                          int(c.a_format), ranks > 1 ? int((pairs + ranks - 1) / ranks) : 0},
                                    gpu);
  c.few = plan.few;
  // Decode reads rows as they are, because it waits for the weights anyway. Else rows become fp8, or int8 if
  // the caller asked for it.
  if (c.a_format == AFormat::automatic) c.a_format = plan.few ? AFormat::none : AFormat::fp8;
  if (c.a_format == AFormat::fp8) {
    if (c.x.scalar_type() == ScalarType::Float) c.x = to_dtype(c.x, ScalarType::BFloat16);
    c.between = ScalarType::BFloat16;
  } else if (c.a_format == AFormat::int8) {
    if (here.gpu().hopper())
      fail("fp4::moe: a_format is 'int8', but Hopper GPUs have no kernel for it. Use 'none', or ",
           "layout 'sm90' and 'fp8'");
    if (plan.few) c.a_format = AFormat::none;
  } else if (c.a_format != AFormat::none) {
    c.between = ScalarType::Float;
  }
  if (plan.few) {
    if (ready != nullptr)
      fail("fp4: moe_parts got fp8 rows, but with so few rows they must not be quantised");
    const OptionalTensor out = combined || plan.gemv ? OptionalTensor(new_out()) : std::nullopt;
    const OptionalTensor y = run_few(c, plan, out);
    if (!out) return {*y, {}, true};
    if (y) combine(c.here, *y, nullptr, c.ids, c.weights, c.down.bias, c.up.groups, *out);
    return {*out, {}};
  }
  const Sorted sorted = sort_rows(c.here, c.ids, c.up.groups);
  const Tensor y = run_sorted(c, sorted);
  if (!combined) return {y, sorted, true};
  const Tensor out = new_out();
  combine(c.here, y, sorted.position(), c.ids, c.weights, c.down.bias, c.up.groups, out);
  return {out, {}};
}

namespace {

Tensor moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13,
           const Tensor& w13_scale, const OptionalTensor& w13_global_scale, const Tensor& w2,
           const Tensor& w2_scale, const OptionalTensor& w2_global_scale, const OptionalTensor& w13_bias,
           const OptionalTensor& w2_bias, const std::string& format, const std::string& layout,
           const std::string& activation, const std::string& a_format, std::optional<ScalarType> out_dtype) {
  return run_moe(true, 0, 0, nullptr, x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2,
                 w2_scale, w2_global_scale, w13_bias, w2_bias, format, layout, activation, a_format,
                 out_dtype)
      .out;
}

// `moe` for a caller that adds up the experts itself (fp4_ops/distributed). It returns two tensors:
// - if gemv ran, or there was nothing to run: the sums in out_dtype, which is then never float32, and an
//   empty tensor;
// - if decode ran: float32 rows, one for each (token, slot), and an empty tensor;
// - if prefill ran: bfloat16 rows [pairs, N], and their sorted order. From index groups + pairs on, the order
//   has the place of each (token, slot).
// The values of rows that belong to no expert are undefined. x_values and x_factor are rows of x that are fp8
// already; x then only gives their original dtype and is not read. `ranks`: the experts are spread over so
// many ranks, so one id in `ranks` is here, and the others are -1.
std::tuple<Tensor, Tensor> moe_parts(const Tensor& x, const OptionalTensor& x_values,
                                     const OptionalTensor& x_factor, const Tensor& topk_ids,
                                     const Tensor& topk_weights, const Tensor& w13, const Tensor& w13_scale,
                                     const OptionalTensor& w13_global_scale, const Tensor& w2,
                                     const Tensor& w2_scale, const OptionalTensor& w2_global_scale,
                                     const OptionalTensor& w13_bias, const std::string& format,
                                     const std::string& layout, const std::string& activation,
                                     const std::string& a_format, std::optional<ScalarType> out_dtype,
                                     int64_t ranks) {
  std::optional<Rows> ready;
  if (x_values) ready = Rows{*x_values, x_factor};
  const Outcome made = run_moe(false, ranks, 0, ready ? &*ready : nullptr, x, topk_ids, topk_weights, w13,
                               w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale, w13_bias,
                               std::nullopt, format, layout, activation, a_format, out_dtype);
  return {made.out, made.sorted ? made.sorted->made : Here(w13).empty({0}, ScalarType::Int)};
}

}  // namespace

FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) { m.impl("moe", FP4_BOX(moe)); }

#define FP4_DEFINE(library, m) STABLE_TORCH_LIBRARY(library, m)
FP4_DEFINE(FP4_PARTS_LIBRARY, m) {
  m.def(
      "moe_parts(Tensor x, Tensor? x_values, Tensor? x_factor, Tensor topk_ids, Tensor topk_weights, "
      "Tensor w13, Tensor w13_scale, Tensor? w13_global_scale, Tensor w2, Tensor w2_scale, "
      "Tensor? w2_global_scale, Tensor? w13_bias, *, str format, str layout, str activation, str a_format, "
      "ScalarType? out_dtype, int ranks) -> (Tensor, Tensor)");
}
FP4_REGISTER(FP4_PARTS_LIBRARY, FP4_DISPATCH_KEY, m) { m.impl("moe_parts", FP4_BOX(moe_parts)); }

}  // namespace fp4::cuda
