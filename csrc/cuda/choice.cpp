// The constants (cuda/constants.h) are fitted to the times of benchmarks/h200_rows.py. On its record
// rows_h200.json the chosen kernel is on average at most 0.5 % slower than the best one (dense fp8: 1.1 %).
// test_sm90_binary.py checks this.
#include "cuda/choice.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "common/formats.h"
#include "cuda/constants.h"
#include "cuda/library.h"
#include "device/few_rows.h"

namespace fp4::cuda {
namespace {

using device::kChunk;

std::atomic<Only> only_runs{Only::kAny};

double weight_bytes(const Product& p) { return 0.5 + 1.0 / p.block; }

// Expected chunks of a group whose rows are Poisson distributed.
double chunks_by_chance(double mean) {
  if (mean > 8 * kChunk)  // the last chunk is short by any number of rows equally often
    return mean / kChunk + (kChunk - 1) / (2.0 * kChunk);
  double p = std::exp(-mean), expected = 0;
  for (int rows = 1; rows < 20 * kChunk; ++rows) {
    p *= mean / rows;
    expected += p * ((rows + kChunk - 1) / kChunk);
  }
  return expected;
}

// Returns whether decode is chosen: `us` is its time, `other_us` that of prefill.
bool first(double us, double other_us) {
  switch (only_runs.load()) {
    case Only::kDecode:
    case Only::kGemv:
      return us < std::numeric_limits<double>::infinity();
    case Only::kPrefill:
      return false;
    default:
      return us < other_us;
  }
}

// Returns gemv's configuration if gemv replaces decode for these rows. Each row of the output reads a row of
// x.
std::optional<GemvConfig> gemv_for(const Product& p, const Gpu& gpu) {
  const auto config = configure_gemv(p.routing, p.rows, p.rows, p.n, p.kp, false, gpu);
  const Only only = only_runs.load();
  if (!config || only == Only::kDecode) return std::nullopt;
  // Up to gemv_units_alone, gemv is faster for a single product. Up to gemv_units it is faster in the
  // products of a block, and if decode makes several passes over K. Above that decode is faster, because it
  // has more weights in flight.
  const PlannerConstants& fitted = constants_of(gpu);
  if (only == Only::kGemv || config->units() <= fitted.gemv_units_alone) return config;
  if (config->units() > fitted.gemv_units) return std::nullopt;
  const auto other = choose_decode(p.all_rows(), p.groups, p.n, p.kp, gpu);
  return !other || other->passes > 1 ? config : std::nullopt;
}

bool decodes(const Product& product, Kernel kernel, const Gpu& gpu) {
  const double sort = prefill_takes(product.routing) ? 0 : constants_of(gpu).sort_us;
  return first(decode_us(product, kernel, gpu), prefill_us(product, kernel, gpu) + sort);
}

// Returns whether decode runs both products. With a_format 'auto', prefill quantises rows to fp8, and decode
// reads the given rows.
bool block_decodes(const Block& block, const Gpu& gpu) {
  if (block.prefill_alone) return false;
  const Kernel exact = block.bf16 ? Kernel::kBf16 : Kernel::kHalf;
  const bool automatic = block.a_format == int(AFormat::automatic), fp8 = block.a_format == int(AFormat::fp8);
  const Kernel many = automatic || fp8 ? Kernel::kFp8 : exact, few = fp8 ? Kernel::kFp8 : exact;
  const PlannerConstants& fitted = constants_of(gpu);
  double decode_all = 0, prefill_all = fitted.block_sort_us;
  for (Product p : {block.up, block.down}) {
    p.routing = Routing::kOffs;
    if (block.expected > 0) {
      if (!choose_decode(p.all_rows(), p.groups, p.n, p.kp, gpu)) return false;
      p.rows = block.expected;
    }
    decode_all += decode_us(p, few, gpu);
    prefill_all += prefill_us(p, many, gpu);
  }
  if (automatic) prefill_all = (prefill_all + fitted.quantize_us) * fitted.auto_gain;
  return first(decode_all, prefill_all);
}

// gemv runs both products of a block, or none; the second one combines its rows. One product by gemv and one
// by decode would be slower, because the multiprocessors must change between the kernels.
void plan_block_gemv(const Block& block, const Gpu& gpu, BlockPlan& plan) {
  const Product &up = block.up, &down = block.down;
  const int tokens = (up.rows + block.top_k - 1) / block.top_k;
  const auto gate_up = configure_gemv(up.routing, up.rows, tokens, up.n, up.kp, false, gpu);
  const auto combined = configure_gemv(down.routing, down.rows, down.rows, down.n, down.kp, true, gpu);
  const auto even = configure_gemv(down.routing, down.rows, down.rows, down.n, down.kp, false, gpu);
  const Only only = only_runs.load();
  if (!gate_up || !combined || !even || only == Only::kDecode) return;
  const bool few = std::max(gate_up->units(), combined->units()) <= constants_of(gpu).gemv_units;
  plan.gemv = only == Only::kGemv || (few && combined->units() <= 1.1 * even->units());
  if (!plan.gemv) return;
  plan.up = {Family::kGemv, {}, *gate_up};
  plan.down = {Family::kGemv, {}, *combined};
}

DecodeConfig decode_config(const Product& p, const Gpu& gpu) {
  return choose_decode(p.all_rows(), p.groups, p.n, p.kp, gpu)
      .value();  // only for products that decode can run
}

ProductPlan make_plan(Product product, Kernel kernel, const Gpu& gpu) {
  if (!decodes(product, kernel, gpu)) return {};
  if (!prefill_takes(product.routing) && product.rows > kMaxIds)
    product.routing = Routing::kOffs;
  else if (const auto gemv = gemv_for(product, gpu))
    return {Family::kGemv, {}, *gemv};
  return {Family::kDecode, decode_config(product, gpu), {}};
}

BlockPlan make_plan(const Block& block, const Gpu& gpu) {
  BlockPlan plan;
  plan.few = block_decodes(block, gpu);
  if (!plan.few) return plan;
  plan_block_gemv(block, gpu, plan);
  if (plan.gemv) return plan;
  plan.up = {Family::kDecode, decode_config(block.up, gpu), {}};
  plan.down = {Family::kDecode, decode_config(block.down, gpu), {}};
  return plan;
}

// A cache of decisions. It is cleared when it is full, because some processes always use new sizes.
template <size_t n, class Value>
class Decided {
 public:
  using Key = std::array<int, n>;

  template <class Make>
  Value get(const Key& key, const Make& make) {
    {
      std::shared_lock lock(mutex_);
      if (const auto found = known_.find(key); found != known_.end()) return found->second;
    }
    const Value value = make();
    std::unique_lock lock(mutex_);
    if (known_.size() >= 8192) known_.clear();
    known_.emplace(key, value);
    return value;
  }

 private:
  struct Hash {
    size_t operator()(const Key& key) const {
      uint64_t hash = 14695981039346656037u;
      for (int part : key) hash = (hash ^ uint32_t(part)) * 1099511628211u;
      return hash;
    }
  };
  std::shared_mutex mutex_;
  std::unordered_map<Key, Value, Hash> known_;
};

}  // namespace

int index_of(std::string_view a_format) {
  const auto found = std::ranges::find(kAFormatNames, a_format);
  if (found == kAFormatNames.end()) throw std::invalid_argument("no a_format: " + std::string(a_format));
  return int(found - kAFormatNames.begin());
}

void set_only(Only only) { only_runs.store(only); }

device::RowMode row_mode(Routing routing) {
  return routing == Routing::kDense    ? device::RowMode::kDense
         : routing == Routing::kMasked ? device::RowMode::kMasked
                                       : device::RowMode::kContiguous;
}

std::optional<DecodeWork> decode_work(const Product& p, const Gpu& gpu) {
  const auto config = choose_decode(p.all_rows(), p.groups, p.n, p.kp, gpu);
  if (!config) return std::nullopt;
  double each, rows;
  if (p.routing == Routing::kMasked || p.routing == Routing::kDense || p.groups == 1) {
    each = (p.rows + kChunk - 1) / kChunk;
    rows = p.rows;
  } else {
    each = chunks_by_chance(double(p.rows) / p.groups);
    rows = rows_per_expert(p.rows, p.groups);
  }
  const double values = (std::min(rows, double(kChunk)) - 1) * p.kp;
  return DecodeWork{each * p.groups * p.n * p.kp, double(config->passes), std::max(values, 0.0)};
}

double decode_us(const Product& p, Kernel kernel, const Gpu& gpu) {
  const auto work = decode_work(p, gpu);
  if (!work) return std::numeric_limits<double>::infinity();
  const PlannerConstants& fitted = constants_of(gpu);
  // A family for many kinds of GPUs has no measured rate, only a share of the memory's rate.
  const double measured = fitted.decode_rate[int(kernel)];
  const double rate = measured > 0 ? measured : fitted.decode_share * gpu.copy_rate / weight_bytes(p);
  const double time = work->weights / rate * std::pow(work->passes, fitted.pass_power);
  return fitted.decode_us + time + fitted.row_us * work->values / 2048;
}

device::Choice prefill_choice(const Product& p, PrefillKernel kernel, const Gpu& gpu) {
  return kernels(gpu.family)
      .prefill_choose(int(kernel), int(row_mode(p.routing)), p.groups, p.rows, p.n, p.kp, gpu.sms, -1);
}

PrefillWork prefill_work(const Product& p, Kernel kernel, const Gpu& gpu) {
  const device::Estimate estimate = prefill_choice(p, prefill_kernel(kernel, p.block), gpu).estimate;
  const double ordered = kernel == Kernel::kHalf ? double(p.all_rows()) * p.kp : 0;
  return {estimate.seconds, double(estimate.share_below > 0), ordered};
}

double prefill_us(const Product& p, Kernel kernel, const Gpu& gpu) {
  const PrefillWork work = prefill_work(p, kernel, gpu);
  const PlannerConstants& fitted = constants_of(gpu);
  const int k = int(kernel);
  double time = fitted.prefill_scale[k] * work.seconds * 1e6;
  if (work.shares > 0) time = fitted.shared_extra_us[k] + fitted.shared_scale[k] * time;
  return fitted.prefill_launch_us[k] + fitted.group_us * p.groups + time + work.ordered / fitted.order_rate;
}

ProductPlan plan(const Product& p, Kernel kernel, const Gpu& gpu) {
  static Decided<13, ProductPlan> decided;
  return decided.get({int(p.routing), p.groups, p.rows, p.n, p.kp, p.block, int(kernel), int(gpu.family),
                      gpu.sms, gpu.shared_bytes, gpu.copy_rate, gpu.constants, int(only_runs.load())},
                     [&] { return make_plan(p, kernel, gpu); });
}

BlockPlan plan(const Block& block, const Gpu& gpu) {
  static Decided<18, BlockPlan> decided;
  const Product &up = block.up, &down = block.down;
  return decided.get(
      {int(up.routing), up.groups, up.rows, up.n, up.kp, down.n, down.kp, up.block, block.top_k,
       2 * block.bf16 + block.prefill_alone, block.a_format, int(gpu.family), gpu.sms, gpu.shared_bytes,
       gpu.copy_rate, gpu.constants, int(only_runs.load()), block.expected},
      [&] { return make_plan(block, gpu); });
}

}  // namespace fp4::cuda
