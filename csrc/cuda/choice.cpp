// Constants are fitted to times of all kernels as benchmarks/h200_rows.py prints them. In its table of the
// kernels since then (benchmarks/results/rows_h200.json) the choice costs 0.5 per cent of the faster one's
// time at most, in the mean of each column, but 1.1 of dense fp8 rows (test_sm90_binary.py).
#include "cuda/choice.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "common/formats.h"
#include "cuda/library.h"

namespace fp4::cuda {
namespace {

constexpr double kDecodeUs = 4.45;  // a launch that has nothing to read
// Weights a microsecond, by Kernel. Those of mxfp4, which are fewer bytes, take as long.
constexpr double kDecodeRate[] = {6.97e6, 6.4e6, 6.4e6};
constexpr double kDecodeShare = 0.85;  // of a copy's rate, by which weights arrive
constexpr double kPassPower = 0.09;    // of the passes over K, by which the weights take longer
constexpr double kRowUs = 0.11;        // bringing 2048 values of each further row of an expert

// A launch of prefill: `launch_us` with nothing to do; the measured time over the model's; what a launch that
// shares tiles takes more, and how many times as long the rest of it.
struct PrefillCost {
  double launch_us, model_scale, shared_extra_us, shared_scale;
};
constexpr PrefillCost kPrefillCost[] = {
    {2.87, 0.888, 1.85, 1.13}, {6.3, 1.1, 0.0, 1.09}, {2.45, 1.117, 0.0, 1.09}};

constexpr double kGroupUs = 0.012;  // walking over a group, whether it has rows or not
constexpr double kOrderRate = 1e6;  // 16-bit values a microsecond that Form::kHalf puts in order
constexpr double kSortUs = 12;      // sorting the rows of a product by their expert, and back
constexpr double kBlockSortUs = 9;  // the same for a block, where other kernels do most of it
// Units of a thread block, in a block's products or where decode goes over K several times, and in other
// products: from there on decode, which has more of them on their way, is faster.
constexpr int kGemvUnits = 64, kGemvUnitsAlone = 40;
constexpr double kQuantizeUs = 5.4;  // quantising the rows of both products of a block
constexpr double kAutoGain = 1.03;   // what fp8 rows must gain over those given before 'auto' rounds them

std::atomic<Only> only_runs{Only::kAny};

double weight_bytes(const Product& p) { return 0.5 + 1.0 / p.block; }

// Expected chunks of a group whose rows are Poisson distributed.
double chunks_by_chance(double mean) {
  if (mean > 8 * kChunk)  // the last chunk is as often short by one row as by any other number
    return mean / kChunk + (kChunk - 1) / (2.0 * kChunk);
  double p = std::exp(-mean), expected = 0;
  for (int rows = 1; rows < 20 * kChunk; ++rows) {
    p *= mean / rows;
    expected += p * ((rows + kChunk - 1) / kChunk);
  }
  return expected;
}

// Whether decode, which takes `us`, is chosen before prefill.
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

// Whether gemv multiplies the rows, each one of x, where decode would.
std::optional<GemvConfig> gemv_for(const Product& p, const Gpu& gpu) {
  const auto config = configure_gemv(p.routing, p.rows, p.rows, p.n, p.kp, false, gpu);
  const Only only = only_runs.load();
  if (!config || only == Only::kDecode) return std::nullopt;
  if (only == Only::kGemv || config->units() <= kGemvUnitsAlone) return config;
  if (config->units() > kGemvUnits) return std::nullopt;
  const auto other = choose_decode(p.all_rows(), p.groups, p.n, p.kp, gpu);
  return !other || other->passes > 1 ? config : std::nullopt;
}

bool decodes(const Product& product, Kernel kernel, const Gpu& gpu) {
  const double sort = prefill_takes(product.routing) ? 0 : kSortUs;
  return first(decode_us(product, kernel, gpu), prefill_us(product, kernel, gpu) + sort);
}

// Whether decode runs both products; in 'auto' prefill would have fp8 rows, and decode those given.
bool block_decodes(const Block& block, const Gpu& gpu) {
  if (block.int4) return false;
  const Kernel exact = block.bf16 ? Kernel::kBf16 : Kernel::kHalf;
  const bool automatic = block.a_format == int(AFormat::automatic), fp8 = block.a_format == int(AFormat::fp8);
  const Kernel many = automatic || fp8 ? Kernel::kFp8 : exact, few = fp8 ? Kernel::kFp8 : exact;
  double decode_all = 0, prefill_all = kBlockSortUs;
  for (Product p : {block.up, block.down}) {
    p.routing = Routing::kOffs;
    decode_all += decode_us(p, few, gpu);
    prefill_all += prefill_us(p, many, gpu);
  }
  if (automatic) prefill_all = (prefill_all + kQuantizeUs) * kAutoGain;
  return first(decode_all, prefill_all);
}

// gemv runs both products of a block, the second of which combines its rows, or none. One of them beside
// decode would be slower: the multiprocessors change over between them.
void plan_block_gemv(const Block& block, const Gpu& gpu, BlockPlan& plan) {
  const Product &up = block.up, &down = block.down;
  const int tokens = (up.rows + block.top_k - 1) / block.top_k;
  const auto gate_up = configure_gemv(up.routing, up.rows, tokens, up.n, up.kp, false, gpu);
  const auto combined = configure_gemv(down.routing, down.rows, down.rows, down.n, down.kp, true, gpu);
  const auto even = configure_gemv(down.routing, down.rows, down.rows, down.n, down.kp, false, gpu);
  const Only only = only_runs.load();
  if (!gate_up || !combined || !even || only == Only::kDecode) return;
  const bool few = std::max(gate_up->units(), combined->units()) <= kGemvUnits;
  plan.gemv = only == Only::kGemv || (few && combined->units() <= 1.1 * even->units());
  if (!plan.gemv) return;
  plan.up = {Family::kGemv, {}, *gate_up};
  plan.down = {Family::kGemv, {}, *combined};
}

DecodeConfig decode_config(const Product& p, const Gpu& gpu) {
  return choose_decode(p.all_rows(), p.groups, p.n, p.kp, gpu).value();  // that decode can run
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

// What was decided for these numbers. A process that draws new sizes without end begins anew now and then.
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

void set_only(Only only) { only_runs.store(only); }

device::RowMode row_mode(Routing routing) {
  return routing == Routing::kDense    ? device::RowMode::kDense
         : routing == Routing::kMasked ? device::RowMode::kMasked
                                       : device::RowMode::kContiguous;
}

double decode_us(const Product& p, Kernel kernel, const Gpu& gpu) {
  const auto config = choose_decode(p.all_rows(), p.groups, p.n, p.kp, gpu);
  if (!config) return std::numeric_limits<double>::infinity();
  double each, rows;
  if (p.routing == Routing::kMasked || p.routing == Routing::kDense || p.groups == 1) {
    each = (p.rows + kChunk - 1) / kChunk;
    rows = p.rows;
  } else {
    each = chunks_by_chance(double(p.rows) / p.groups);
    rows = rows_per_expert(p.rows, p.groups);
  }
  const double weights = each * p.groups * p.n * p.kp;
  const double values = (std::min(rows, double(kChunk)) - 1) * p.kp;
  // Elsewhere than on Hopper the same share of the memory's rate: nobody has measured it.
  const double rate =
      gpu.hopper() ? kDecodeRate[int(kernel)] : kDecodeShare * gpu.copy_rate / weight_bytes(p);
  const double time = weights / rate * std::pow(config->passes, kPassPower);
  return kDecodeUs + time + kRowUs * std::max(values, 0.0) / 2048;
}

device::Choice prefill_choice(const Product& p, int kernel, const Gpu& gpu) {
  return kernels(gpu.family)
      .prefill_choose(kernel, int(row_mode(p.routing)), p.groups, p.rows, p.n, p.kp, gpu.sms, -1);
}

double prefill_us(const Product& p, Kernel kernel, const Gpu& gpu) {
  const device::Estimate estimate = prefill_choice(p, prefill_kernel(kernel, p.block), gpu).estimate;
  if (!gpu.hopper()) return kGroupUs * p.groups + estimate.seconds * 1e6;  // a launch is counted
  const PrefillCost& cost = kPrefillCost[int(kernel)];
  double time = cost.model_scale * estimate.seconds * 1e6;
  if (estimate.share_below > 0) time = cost.shared_extra_us + cost.shared_scale * time;
  const double order = kernel == Kernel::kHalf ? double(p.all_rows()) * p.kp / kOrderRate : 0;
  return cost.launch_us + kGroupUs * p.groups + time + order;
}

ProductPlan plan(const Product& p, Kernel kernel, const Gpu& gpu) {
  static Decided<12, ProductPlan> decided;
  return decided.get({int(p.routing), p.groups, p.rows, p.n, p.kp, p.block, int(kernel), int(gpu.family),
                      gpu.sms, gpu.shared_bytes, gpu.copy_rate, int(only_runs.load())},
                     [&] { return make_plan(p, kernel, gpu); });
}

BlockPlan plan(const Block& block, const Gpu& gpu) {
  static Decided<16, BlockPlan> decided;
  const Product &up = block.up, &down = block.down;
  return decided.get({int(up.routing), up.groups, up.rows, up.n, up.kp, down.n, down.kp, up.block,
                      block.top_k, 2 * block.bf16 + block.int4, block.a_format, int(gpu.family), gpu.sms,
                      gpu.shared_bytes, gpu.copy_rate, int(only_runs.load())},
                     [&] { return make_plan(block, gpu); });
}

}  // namespace fp4::cuda
