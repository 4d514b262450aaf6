#include "cuda/linears.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "cuda/constants.h"
#include "cuda/fallback.h"
#include "cuda/launches.h"

namespace fp4::cuda {

using device::LinearsConfig;
using device::LinearsParams;

namespace {

// Completes a launch with the deepest ring that fits and is not deeper than `wanted`. Returns false if none
// fits.
bool fit_depth(LinearsParams& p, int wanted, const Gpu& gpu) {
  for (const int depth : device::kLinearDepths) {
    if (depth > wanted) continue;
    p.config.depth = depth;
    p.config.clusters = 0;
    if (complete_linears(p, gpu.sms) <= gpu.shared_bytes) return true;
  }
  return false;
}

// Returns the steps of K that a warp multiplies.
int steps_of_warp(const LinearsParams& p) {
  const int block = (p.steps + (1 << p.config.cluster_bits) - 1) >> p.config.cluster_bits;
  return p.rounds * ((p.config.group * block + device::kLinearWarps - 1) / device::kLinearWarps);
}

// The division with the smallest cost is taken. These rules follow times of whole decoding steps on an H200,
// and for heads and routers of single products (benchmarks/linears.py).
double cost(const LinearsParams& p, const LinearsConstants& fitted) {
  const int cluster_bits = p.config.cluster_bits, group = p.config.group;
  const auto unlike = [&](int bits, int tiles) {
    return std::abs(cluster_bits - bits) + std::abs(group - tiles);
  };
  // A router, with few tiles. One row: as many warps as possible split K. More rows: fewer sums should cross
  // the cluster.
  if (p.tiles <= fitted.few_tiles) return p.rows <= fitted.single_rows ? unlike(2, 2) : unlike(3, 4);
  // A head, with many tiles and rounds: sums should rarely be exchanged.
  if (p.tiles > fitted.many_tiles) return unlike(p.fp8 ? 0 : 1, device::kLinearWarps);
  // The time of a warp's steps, of each round's exchange, and of a block's part of x.
  const double values = double(p.k >> cluster_bits) * p.rows;
  return (fitted.step_us + fitted.step_row_us * p.rows) * steps_of_warp(p) +
         (fitted.round_us + fitted.round_row_us * p.rows) * (p.rounds - 1) +
         (p.copied ? fitted.copied_us : fitted.prepared_us) * values;
}

}  // namespace

std::optional<LinearsConfig> configure_linears(const LinearsParams& given, const Gpu& gpu) {
  const LinearsConstants& fitted = k_linears;
  if (!gpu.hopper() || given.rows < 1 || given.rows > given.most_rows()) return std::nullopt;
  std::optional<LinearsConfig> best;
  double least = 0;
  for (int cluster_bits = 0; cluster_bits <= device::kMostLinearClusterBits; ++cluster_bits) {
    for (int group = 1; group <= device::kLinearWarps; ++group) {
      LinearsParams p = given;
      p.config = {cluster_bits, group};
      if (gpu.sms * 7 / 8 < 1 << cluster_bits) continue;
      complete_linears(p, gpu.sms);
      // No more than a warp multiplies: the next kernel can begin if shared memory is left.
      const int most = p.copied ? 3 : cluster_bits == 3 ? 4 : 8;
      if (!fit_depth(p, std::min(most, std::max(steps_of_warp(p), 3)), gpu)) continue;
      const double its = cost(p, fitted);
      if (!best || its < least) best = p.config, least = its;
    }
  }
  return best;
}

namespace {

// More rows of x by weights in fp8 are multiplied by torch, which first makes weights in 16 bits. Up to here
// several launches read the weights.
constexpr int64_t kMostFp8Rows = 2 * device::kMostLinearRows;

// Returns the most rows of a launch. A head is faster if each block has all of K, and then 64 rows do not
// fit.
int most_of_launch(const LinearsParams& p) {
  int64_t n = 0;
  for (int i = 0; i < p.count; ++i) n += p.weight[i].n;
  return n > k_linears.many_tiles * 16 ? std::min(p.most_rows(), 32) : p.most_rows();
}

// Returns the launch of `count` rows from `first` on.
LinearsParams rows_of(LinearsParams p, int64_t first, int64_t count) {
  const auto at = [&](const void* values, int64_t columns) -> void* {
    if (values == nullptr) return nullptr;
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(values)) + first * columns * 2;
  };
  p.x = at(p.x, p.k);
  p.addend = at(p.addend, p.k);
  p.sum = at(p.sum, p.k);
  p.normed = at(p.normed, p.k);
  p.residual = at(p.residual, p.weight[0].n);
  for (int i = 0; i < p.count; ++i) p.weight[i].out = at(p.weight[i].out, p.weight[i].n);
  p.rows = int(count);
  return p;
}

std::vector<Tensor> linears(const Tensor& x, const std::vector<Tensor>& weights,
                            const std::vector<OptionalTensor>& biases, const OptionalTensor& norm_weight,
                            double eps, const OptionalTensor& residual, const OptionalTensor& addend,
                            const std::optional<std::vector<Tensor>>& weight_scales, bool early,
                            bool keep_norm, bool norm_in_float) {
  const int count = int(weights.size());
  const bool fp8 = weight_scales && !weight_scales->empty();
  check_linears(x, norm_weight, residual, addend, count, int64_t(biases.size()), keep_norm, norm_in_float,
                fp8 ? int64_t(weight_scales->size()) : 0);
  for (int i = 0; i < count; ++i)
    check_linear(x, weights[i], biases[i], residual,
                 fp8 ? OptionalTensor((*weight_scales)[i]) : std::nullopt);
  const Here here(x);
  const int64_t k = size(x, -1), rows = k > 0 ? x.numel() / k : 0;
  const auto as_is = [](const Tensor& t) {  // weights are not copied, because a copy would double their cost
    return t.is_contiguous() && reinterpret_cast<uintptr_t>(pointer(t)) % 16 == 0;
  };
  LinearsParams p;
  p.fp8 = fp8;
  p.norm_weight = norm_weight ? pointer(*norm_weight) : nullptr;
  p.addend = addend ? pointer(*addend) : nullptr;
  bool fits = rows >= 1 && rows <= (fp8 ? kMostFp8Rows : p.most_rows()) && k % device::kLinearStepK == 0;
  fits = fits && count <= device::kMostLinears && x.scalar_type() != ScalarType::Float;
  double weight_bytes = 0;
  for (const Tensor& w : weights) weight_bytes += 2.0 * double(w.numel());
  for (const Tensor& w : weights) fits = fits && as_is(w) && w.size(0) > 0 && w.numel() < int64_t(1) << 40;
  // More rows are faster with torch's products, unless this kernel saves the launches of several weights.
  // torch has no product of weights in fp8 and rows in 16 bits.
  if (!fp8 && rows > device::kMostPreparedRows)
    fits = fits && weight_bytes <= k_linears.most_bytes && (count > 1 || rows <= k_linears.most_rows);
  std::optional<LinearsConfig> config;
  int most = 0;
  if (fits) {
    p.k = int(k);
    p.count = count;
    p.type = code_of(x.scalar_type());
    p.bias_type = p.type;
    p.eps = float(eps);
    p.early = early;
    p.norm_in_float = norm_in_float;
    for (int i = 0; i < count; ++i) p.weight[i].n = int(weights[i].size(0));
    most = most_of_launch(p);
    p.rows = int(std::min<int64_t>(rows, most));
    config = configure_linears(p, here.gpu());
  }
  if (!config)
    return fallback<std::vector<Tensor>>("linears", "its kernel does not take these rows or weights", x,
                                         weights, biases, norm_weight, eps, residual, addend, weight_scales,
                                         early, keep_norm, norm_in_float);

  const Tensor values = as_operand(x);
  const OptionalTensor first = as_operand(addend);
  const OptionalTensor norm = as_operand(norm_weight), added = as_operand(residual);
  std::vector<OptionalTensor> added_biases;
  std::vector<Tensor> scales;
  std::vector<Tensor> made;
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  for (int i = 0; i < count; ++i) {
    added_biases.push_back(as_contiguous(biases[i]));
    shape.back() = weights[i].size(0);
    made.push_back(torch::stable::view(here.empty({rows, shape.back()}, x.scalar_type()), shape));
    p.weight[i].values = pointer(weights[i]);
    p.weight[i].bias = pointer(added_biases[i]);
    if (fp8)
      p.weight[i].scale =
          static_cast<const float*>(pointer(scales.emplace_back(as_contiguous((*weight_scales)[i]))));
    p.weight[i].out = mutable_pointer(made[i]);
  }
  shape.back() = k;
  for (const auto& [wanted, to] : {std::pair(keep_norm, &p.normed), std::pair(addend.has_value(), &p.sum)}) {
    if (!wanted) continue;
    made.push_back(torch::stable::view(here.empty({rows, k}, x.scalar_type()), shape));
    *to = mutable_pointer(made.back());
  }
  p.x = pointer(values);
  p.addend = pointer(first);
  p.norm_weight = pointer(norm);
  if (norm && pointer(norm) != pointer(norm_weight)) p.early = false;  // a kernel before this one copies it
  p.residual = pointer(added);
  p.config = *config;
  for (int64_t first = 0; first < rows; first += most) {
    LinearsParams part = rows_of(p, first, std::min<int64_t>(rows - first, most));
    check_launch(here.kernels().linears(&part, here.sms(), here.stream()), "fp4_kernel_linears");
  }
  return made;
}

Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                  const OptionalTensor& bias) {
  check_fp8_linear(x, weight, weight_scale, bias);
  return linears(x, {weight}, {bias}, {}, 0, {}, {}, {{weight_scale}}, false, false, false)[0];
}

}  // namespace

FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) {
  m.impl("linears", FP4_BOX(linears));
  m.impl("fp8_linear", FP4_BOX(fp8_linear));
}

}  // namespace fp4::cuda
