#include "cuda/configs.h"

#include <algorithm>
#include <cmath>

#include "cuda/constants.h"
#include "device/few_rows.h"

namespace fp4::cuda {
namespace {

using namespace device;

constexpr int kSchedulers = 4;  // of an SM. With few row tiles, 12 warps are faster than 15
constexpr int kMaxPasses = 8;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int whole_kilobytes(int bytes) { return ceil_div(bytes, 1024) * 1024; }

}  // namespace

int DecodeConfig::shared_bytes() const {
  return whole_kilobytes(sizeof(DecodeShared)) + decode_bytes(*this, ids);
}

// Rates a split: the share of warps that have work, minus a quarter for each pass after the first.
double DecodeConfig::value(int kp) const {
  const int warps = k_warps * row_warps,
            most = warps <= kFewComputeWarps ? kFewComputeWarps : kManyComputeWarps;
  return double(ceil_div(kp, kSliceK)) / (passes * k_warps) * warps / most - (passes - 1) / 4.0;
}

// Returns the split with one row warp fewer, if all schedulers then have the same number of warps.
DecodeConfig DecodeConfig::balanced() const {
  const int uneven = k_warps * row_warps % kSchedulers;
  return {k_warps, uneven > 0 && uneven == k_warps ? row_warps - 1 : row_warps, passes, ring, ids};
}

// The ring is short only if the long one does not fit. Hopper has no kernels for the short ring.
std::optional<DecodeConfig> decode_warps_for(int rows, int kp, int compute_warps, const Gpu& gpu) {
  std::optional<DecodeConfig> best;
  const int ids = std::min(rows, kMaxIds);
  for (int passes = 1; passes <= kMaxPasses; ++passes) {
    const int k_warps = ceil_div(ceil_div(kp, kSliceK), passes);
    if (k_warps == 0 || k_warps > compute_warps) continue;
    DecodeConfig config{k_warps, compute_warps / k_warps, passes, kLongRing, ids};
    if (config.shared_bytes() > gpu.shared_bytes && !gpu.hopper()) config.ring = kShortRing;
    if (config.shared_bytes() <= gpu.shared_bytes && (!best || config.value(kp) > best->value(kp)))
      best = config;
  }
  return best;
}

double rows_per_expert(int rows, int groups) {
  if (rows == 0 || groups == 0) return 0;
  return rows / (groups * (1 - std::pow(1 - 1.0 / groups, rows)));
}

// More warps pay if they share K much better (K = 2880 keeps 12 of 16 warps busy, and 24 of 24), and either
// save a pass or have many row tiles.
std::optional<DecodeConfig> choose_decode(int rows, int groups, int n, int kp, const Gpu& gpu) {
  const auto few = decode_warps_for(rows, kp, kFewComputeWarps, gpu),
             many = decode_warps_for(rows, kp, kManyComputeWarps, gpu);
  const int sms = gpu.sms;
  const int chunks = std::min(rows, groups) + rows / kChunk;
  if (groups > kMaxGroups || !few || chunks / sms + 2 > kMaxSegments) return std::nullopt;
  const double row_tiles = rows / std::max(rows_per_expert(rows, groups), 1.0) * n / kTileRows / sms;
  const PlannerConstants& fitted = constants_of(gpu);
  const bool many_tiles =
      row_tiles >=
      fitted.many_row_tiles;  // each block has enough tiles to make up for the longer start of more warps
  const bool shares_better = many && many->value(kp) - few->value(kp) > fitted.better_share;
  if (shares_better && (many->passes < few->passes || many_tiles)) return many;
  return many_tiles ? *few : few->balanced();
}

int GemvConfig::shared_bytes() const { return whole_kilobytes(sizeof(GemvShared)) + gemv_bytes(*this); }

std::optional<GemvConfig> configure_gemv(Routing routing, int rows, int columns, int n, int kp, bool combined,
                                         const Gpu& gpu) {
  if (routing == Routing::kMasked || (routing == Routing::kDense && rows > 1)) return std::nullopt;
  if (rows > kGemvRows || columns > kChunk) return std::nullopt;
  const int tiles_n = n / kTileRows, sms = gpu.sms;
  const int tiles = combined ? ceil_div(tiles_n, sms) * rows : ceil_div(tiles_n * rows, sms);
  const GemvConfig config{columns, ceil_div(kp, kSliceK), tiles};
  const bool fits = config.slices <= kGemvSlices && config.units() <= kGemvWarps * kGemvUnits;
  return fits && config.shared_bytes() <= gpu.shared_bytes ? std::optional(config) : std::nullopt;
}

}  // namespace fp4::cuda
