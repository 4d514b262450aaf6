// Runs `fp4::moe` with experts in host memory, which the GPU can read, and with slots on the GPU for the
// experts in use (csrc/device/slots.cu). A call makes a plan. In each round it then fetches experts and runs
// the block over the slots, which form a stacked weight with an expert in each slot.
//
// `state` and `slots` cache weights between calls. Their contents have an effect on the time of a call, but
// never on its result. Only this operator reads them, and all calls with one cache must be in the order of
// one stream.
#include <algorithm>
#include <exception>

#include "cuda/moe.h"
#include "cuda/operands.h"

namespace fp4::cuda {
namespace {

constexpr int kMostExperts = 1024;  // and slots: what fp4_kernel_slots_plan takes

struct Plan {
  Tensor ids, fetches, place;  // which `fields` points into
  device::SlotPlan fields;
};

// `halves`: each round becomes two rounds, with half of the slots each.
Plan make_plan(const Here& here, const Tensor& topk_ids, const Tensor& state, int64_t slots, bool halves) {
  const int64_t experts = state.numel() - slots - device::kSlotCounters, pairs = topk_ids.numel();
  if (state.scalar_type() != ScalarType::Int || !state.is_contiguous() || experts < 1 || slots < 1)
    fail("state has dtype ", dtype_name(state.scalar_type()), " and ", state.numel(),
         " elements; it must be contiguous int32 [experts + slots + ", int(device::kSlotCounters), "] with ",
         slots, " slots, at least 1");
  if (std::max(experts, slots) > kMostExperts)
    fail("state has ", experts, " experts and ", slots, " slots; at most ", kMostExperts,
         " of each are possible");
  const int64_t turns = std::max<int64_t>(1, ceil_div(std::min(experts, pairs), slots));
  const int64_t rounds = halves ? 2 * turns : turns;
  Plan plan{as_contiguous(topk_ids),
            here.empty({rounds, 1 + 2 * slots}, ScalarType::Int),
            here.empty({experts}, ScalarType::Int),
            {}};
  plan.fields = {.ids = pointer(plan.ids),
                 .wide = plan.ids.scalar_type() == ScalarType::Long,
                 .pairs = int(pairs),
                 .experts = int(experts),
                 .slots = int(slots),
                 .rounds = int(rounds),
                 .state = mutable_pointer<int>(state),
                 .fetches = mutable_pointer<int>(plan.fetches),
                 .place = mutable_pointer<int>(plan.place)};
  const auto launch = halves ? here.kernels().slots_plan_halves : here.kernels().slots_plan;
  check_launch(launch(&plan.fields, here.stream()), "fp4_kernel_slots_plan");
  return plan;
}

constexpr int64_t kSlotAlign = 256;  // alignment of each tensor's part, as in meta/slot_checks.py

// The weights as tensors [experts, ...], and the slots as tensors [count, ...], one after another in `slots`.
struct Cache {
  device::SlotParts parts;
  std::vector<Tensor> tensors;
};

Cache cache_of(const std::vector<Tensor>& host, const Tensor& slots, int64_t experts, int64_t count) {
  if (slots.scalar_type() != ScalarType::Byte || slots.dim() != 1 || !slots.is_contiguous() ||
      reinterpret_cast<uintptr_t>(pointer(slots)) % 16 != 0)
    fail("slots has shape ", shape_text(slots.sizes()), " and dtype ", dtype_name(slots.scalar_type()),
         "; it must be contiguous uint8 in one dimension, and begin at a multiple of 16 bytes");
  if (host.size() > device::kMaxSlotParts)
    fail("there are ", host.size(), " tensors of weights; at most ", int(device::kMaxSlotParts),
         " are possible");
  Cache cache;
  int64_t at = 0;
  for (size_t i = 0; i < host.size(); ++i) {
    const Tensor& from = host[i];
    if (!from.is_contiguous() || from.dim() < 1 || from.size(0) != experts)
      fail("the weight with shape ", shape_text(from.sizes()), " must be contiguous, of ", experts,
           " experts");
    const int64_t bytes = from.numel() / experts * int64_t(from.element_size());
    if (at + count * bytes <= slots.numel()) {
      auto* to = mutable_pointer<uint8_t>(slots) + at;
      std::vector<int64_t> sizes(from.sizes().begin(), from.sizes().end()), strides(sizes.size(), 1);
      sizes[0] = count;
      for (size_t d = sizes.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * sizes[d];
      cache.parts.part[i] = {pointer<uint8_t>(from), to, bytes};
      cache.tensors.push_back(
          torch::stable::from_blob(to, sizes, strides, slots.device(), from.scalar_type()));
    }
    at += ceil_div(count * bytes, kSlotAlign) * kSlotAlign;
  }
  if (at > slots.numel())
    fail("slots has ", slots.numel(), " bytes; ", count, " slots of these weights take ", at);
  return cache;
}

// Copies the experts of a round into slots, with `blocks` thread blocks.
void fetch(const Here& here, const Plan& plan, const device::SlotParts& parts, int round, int blocks,
           void* stream) {
  check_launch(here.kernels().slots_fetch(&plan.fields, &parts, round, nullptr, blocks, stream),
               "fp4_kernel_slots_fetch");
}

// Returns for each id the slot of its expert, or -1 if the expert belongs to another round. First, `blocks`
// thread blocks copy the experts to the slots; 0: they are already there.
Tensor assign(const Here& here, const Plan& plan, const device::SlotParts& parts, int round, int blocks) {
  const Tensor ids = here.empty({plan.ids.size(0), plan.ids.size(1)}, ScalarType::Int);
  check_launch(here.kernels().slots_fetch(&plan.fields, &parts, round, mutable_pointer<int>(ids), blocks,
                                          here.stream()),
               "fp4_kernel_slots_fetch");
  return ids;
}

// Keeps the cache valid if a round fails, for example because memory is full. The state describes the slots
// after all rounds, but rounds that did not run have fetched nothing. So all experts are marked as missing. A
// fetch on the side stream ends before the plan that it reads is freed.
class Unfinished {
 public:
  Unfinished(const Here& here, const Tensor& state, int64_t experts)
      : here_(here), state_(state), experts_(experts), exceptions_(std::uncaught_exceptions()) {}
  Unfinished(const Unfinished&) = delete;
  ~Unfinished() {
    if (std::uncaught_exceptions() == exceptions_) return;
    try {
      if (forked) here_.kernels().side_join(here_.stream());
      Tensor state = state_;
      Tensor slot_of = torch::stable::narrow(state, 0, 0, experts_);
      torch::stable::fill_(slot_of, -1.0);
    } catch (...) {  // the first error is reported
    }
  }
  mutable bool forked = false;

 private:
  const Here& here_;
  const Tensor& state_;
  int64_t experts_;
  int exceptions_;
};

// With at least this number of rows per expert, the fetch of the next round overlaps the product of this
// round.
constexpr int64_t kRowsToOverlap = 8;
// The number of thread blocks that fetch while a product runs. They use the whole link, and leave most
// multiprocessors to the product.
constexpr int kBlocksBeside = 16;
// The largest number of rows, one for each (token, slot), in a product. More tokens are multiplied in parts,
// so that a long prompt needs little memory. Each round still fetches its experts once. models/memory_plan.py
// has the same number.
constexpr int64_t kMostRows = 16384;

Tensor part_of(Tensor t, int64_t first, int64_t count) {
  return count == t.size(0) ? t : torch::stable::narrow(t, 0, first, count);
}

Tensor moe_slots(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13,
                 const Tensor& w13_scale, const OptionalTensor& w13_global_scale, const Tensor& w2,
                 const Tensor& w2_scale, const OptionalTensor& w2_global_scale,
                 const OptionalTensor& w13_bias, const OptionalTensor& w2_bias, const Tensor& slots,
                 const Tensor& state, const std::string& format, const std::string& layout,
                 const std::string& activation, const std::string& a_format,
                 std::optional<ScalarType> out_dtype) {
  const Experts shape = check_moe(x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale,
                                  w2_global_scale, format, layout, activation, a_format, w13_bias, w2_bias);
  const OptionalTensor all[] = {w13,      w13_scale,       w13_global_scale, w2,
                                w2_scale, w2_global_scale, w13_bias,         w2_bias};
  std::vector<Tensor> host;
  for (const OptionalTensor& t : all)
    if (t) host.push_back(*t);
  check_device("slots", slots, "x", x);
  check_device("state", state, "x", x);
  if (!shape.up.layout->native)
    return fallback("moe_slots", layout_words(layout), x, topk_ids, topk_weights, w13, w13_scale,
                    w13_global_scale, w2, w2_scale, w2_global_scale, w13_bias, w2_bias, slots, state, format,
                    layout, activation, a_format, out_dtype);
  const int64_t experts = shape.up.groups, count = state.numel() - experts - device::kSlotCounters;
  if (experts < 1) fail("w13 has 0 experts; slots are for 1 or more");
  if (state.scalar_type() != ScalarType::Int || state.dim() != 1 || !state.is_contiguous() || count < 1)
    fail("state has shape ", shape_text(state.sizes()), " and dtype ", dtype_name(state.scalar_type()),
         "; it must be contiguous int32 [", experts, " experts + slots + ", int(device::kSlotCounters),
         "], with one slot at least");
  const Cache cache = cache_of(host, slots, experts, count);
  const device::SlotParts& parts = cache.parts;

  OptionalTensor cached[std::size(all)];
  for (size_t i = 0, next = 0; i < std::size(all); ++i)
    if (all[i]) cached[i] = cache.tensors[next++];
  // Runs the block for tokens from `first` on, with the same kernels as the resident block.
  const auto block = [&](bool combined, const Tensor& ids, int64_t first, std::optional<ScalarType> dtype) {
    return run_moe(combined, 0, experts, nullptr, part_of(x, first, ids.size(0)), ids,
                   part_of(topk_weights, first, ids.size(0)), *cached[0], *cached[1], cached[2], *cached[3],
                   *cached[4], cached[5], cached[6], cached[7], format, layout, activation, a_format, dtype);
  };
  const ScalarType dtype = resolve_out_dtype(x, out_dtype);
  if (topk_ids.numel() == 0) return block(true, topk_ids, 0, dtype).out;
  const Here here(state);
  require_kernels("moe_slots", *shape.up.layout, here);
  const bool overlaps = count >= 2 && topk_ids.numel() >= kRowsToOverlap * experts && count < experts;
  const Plan plan = make_plan(here, topk_ids, state, count, overlaps);
  const Unfinished unfinished(here, state, experts);
  const int rounds = plan.fields.rounds;
  // Parts have equal sizes, so that the same kind of kernel runs all of them.
  const int64_t tokens = x.size(0), top_k = topk_ids.size(1);
  const int64_t most = ceil_div(tokens, ceil_div(topk_ids.numel(), kMostRows));
  if (rounds == 1) return block(true, assign(here, plan, parts, 0, here.sms()), 0, dtype).out;

  // Each row has its expert in one round. So rows are collected and added up at the end, as without rounds.
  std::optional<Tensor> rows, sums;
  const Kernels& kernels = here.kernels();
  const auto fork = [&] {
    void* side = nullptr;
    check_launch(kernels.side_fork(here.stream(), &side), "fp4_kernel_side_fork");
    unfinished.forked = true;
    return side;
  };
  const auto join = [&] {
    check_launch(kernels.side_join(here.stream()), "fp4_kernel_side_join");
    unfinished.forked = false;
  };
  void* side = nullptr;
  if (overlaps) fetch(here, plan, parts, 0, kBlocksBeside, side = fork());
  for (int round = 0; round < rounds; ++round) {
    if (overlaps) {
      join();  // this round's experts are there
      // The next round's slots are free: the products that read them were launched before this round's.
      if (round + 1 < rounds) {
        if (round > 0) side = fork();
        fetch(here, plan, parts, round + 1, kBlocksBeside, side);
      }
    }
    const Tensor ids = assign(here, plan, parts, round, overlaps ? 0 : here.sms());
    for (int64_t first = 0; first < tokens; first += most) {
      const int64_t count_now = std::min(most, tokens - first);
      const Tensor its = part_of(ids, first, count_now);
      const Outcome made = block(false, its, first, ScalarType::Float);
      if (!made.rows) {
        sums = sums ? torch::stable::sum(
                          call("aten::stack", "", std::vector<Tensor>{*sums, made.out}, int64_t(0)),
                          std::vector<int64_t>{0})
                    : made.out;
        continue;
      }
      const int64_t width = made.out.size(1);
      if (!rows) rows = here.empty({topk_ids.numel(), width}, made.out.scalar_type());
      const Tensor to = part_of(*rows, first * top_k, count_now * top_k);
      check_launch(kernels.slots_collect(pointer<int>(its), made.sorted ? made.sorted->position() : nullptr,
                                         pointer(made.out), mutable_pointer<void>(to), int(its.numel()),
                                         width * int64_t(made.out.element_size()), here.stream()),
                   "fp4_kernel_slots_collect");
    }
  }
  if (sums) return to_dtype(*sums, dtype);
  const Tensor out = here.empty({x.size(0), shape.down.n}, dtype);
  // Each row reads a bias, and the link is slow for so many small reads.
  const OptionalTensor bias = w2_bias ? OptionalTensor(copy_of(*w2_bias)) : std::nullopt;
  combine(here, *rows, nullptr, plan.ids, as_contiguous(topk_weights), bias, int(experts), out);
  return out;
}

// The steps as operators, for tests and measurements.

std::tuple<Tensor, Tensor> slots_plan(const Tensor& topk_ids, const Tensor& state, int64_t slots,
                                      bool halves) {
  const Plan plan = make_plan(Here(state), topk_ids, state, slots, halves);
  return {plan.fetches, plan.place};
}

Tensor slots_fetch(const Tensor& topk_ids, const Tensor& fetches, const Tensor& place,
                   const std::vector<Tensor>& host, const Tensor& slots, int64_t round, int64_t blocks) {
  const Here here(place);
  Plan plan{as_contiguous(topk_ids), fetches, place, {}};
  plan.fields = {.ids = pointer(plan.ids),
                 .wide = plan.ids.scalar_type() == ScalarType::Long,
                 .pairs = int(topk_ids.numel()),
                 .experts = int(place.numel()),
                 .slots = int(fetches.size(1) / 2),
                 .rounds = int(fetches.size(0)),
                 .fetches = mutable_pointer<int>(fetches),
                 .place = mutable_pointer<int>(place)};
  return assign(here, plan, cache_of(host, slots, place.numel(), plan.fields.slots).parts, int(round),
                blocks > 0 ? int(blocks) : here.sms());
}

}  // namespace

#define FP4_FRAGMENT(library, m) STABLE_TORCH_LIBRARY_FRAGMENT(library, m)
FP4_FRAGMENT(FP4_PARTS_LIBRARY, m) {
  m.def("slots_plan(Tensor topk_ids, Tensor(a!) state, int slots, bool halves=False) -> (Tensor, Tensor)");
  m.def(
      "slots_fetch(Tensor topk_ids, Tensor fetches, Tensor place, Tensor[] host, Tensor(a!) slots, "
      "int round, int blocks=0) -> Tensor");
}
FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) { m.impl("moe_slots", FP4_BOX(moe_slots)); }
FP4_REGISTER(FP4_PARTS_LIBRARY, FP4_DISPATCH_KEY, m) {
  m.impl("slots_plan", FP4_BOX(slots_plan));
  m.impl("slots_fetch", FP4_BOX(slots_fetch));
}

}  // namespace fp4::cuda
