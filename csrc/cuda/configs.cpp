#include "cuda/configs.h"

#include <algorithm>
#include <cmath>

#include "cuda/constants.h"

namespace fp4::cuda {
namespace {

constexpr int kMaxSegments = 32;  // chunks that one block may touch
constexpr int kMaxGroups = 640;

// decode: the most warps that compute. With more warps more weights are on their way, but a block begins
// later.
constexpr int kFewWarps = 16, kManyWarps = 24;
constexpr int kSchedulers = 4;  // of an SM: 12 warps are faster than 15 where they have few row tiles
constexpr int kMaxPasses = 8;
constexpr int kLongRing = 4, kShortRing = 2;

constexpr int kTileRows = 16;
constexpr int kGemvRows = 8, kGemvSlices = 64;
constexpr int kGemvUnits = 12 * 32;        // of 16 rows of a weight by kSliceK, for a thread block
constexpr int kGemvFixedBytes = 3 * 1024;  // of shared memory, with room

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

// As DecodeBuffers in csrc/device/decode_plan.cuh adds them up, with room for the fixed part.
int DecodeConfig::shared_bytes() const {
  const int vectors = 2 * k_warps * 256 + ring * k_warps * row_warps * 32 + (passes > 1 ? 8 * ring * 32 : 0);
  return 16 * vectors + kMaxSegments * kChunk * 4 + 4 * ids + 6 * 1024;
}

// How busy the warps are, if nothing else counted; each pass but the first costs a quarter.
double DecodeConfig::value(int kp) const {
  const int warps = k_warps * row_warps, most = warps <= kFewWarps ? kFewWarps : kManyWarps;
  return double(ceil_div(kp, kSliceK)) / (passes * k_warps) * warps / most - (passes - 1) / 4.0;
}

// Without the last of several row warps where that gives all schedulers the same number of warps.
DecodeConfig DecodeConfig::balanced() const {
  const int uneven = k_warps * row_warps % kSchedulers;
  return {k_warps, uneven > 0 && uneven == k_warps ? row_warps - 1 : row_warps, passes, ring, ids};
}

// A short ring only where the long one does not fit: Hopper has no kernels for it.
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

// More warps pay where they save a pass, or share K much better (K = 2880 keeps 12 of 16 busy, and 24 of 24)
// and have enough to do.
std::optional<DecodeConfig> choose_decode(int rows, int groups, int n, int kp, const Gpu& gpu) {
  const auto few = decode_warps_for(rows, kp, kFewWarps, gpu),
             many = decode_warps_for(rows, kp, kManyWarps, gpu);
  const int sms = gpu.sms;
  const int chunks = std::min(rows, groups) + rows / kChunk;
  if (groups > kMaxGroups || !few || chunks / sms + 2 > kMaxSegments) return std::nullopt;
  const double row_tiles = rows / std::max(rows_per_expert(rows, groups), 1.0) * n / 16 / sms;
  const PlannerConstants& fitted = constants_of(gpu);
  const bool many_tiles =
      row_tiles >= fitted.many_row_tiles;  // of a block: the longer start of more warps pays
  const bool shares_better = many && many->value(kp) - few->value(kp) > fitted.better_share;
  if (shares_better && (many->passes < few->passes || many_tiles)) return many;
  return many_tiles ? *few : few->balanced();
}

// As GemvBuffers in csrc/device/gemv.cuh adds them up.
int GemvConfig::shared_bytes() const {
  return kGemvFixedBytes + 2 * slices * kSliceK * columns + units() * kTileRows * 4;
}

std::optional<GemvConfig> configure_gemv(Routing routing, int rows, int columns, int n, int kp, bool combined,
                                         const Gpu& gpu) {
  if (routing == Routing::kMasked || (routing == Routing::kDense && rows > 1)) return std::nullopt;
  if (rows > kGemvRows || columns > kChunk) return std::nullopt;
  const int tiles_n = n / kTileRows, sms = gpu.sms;
  const int tiles = combined ? ceil_div(tiles_n, sms) * rows : ceil_div(tiles_n * rows, sms);
  const GemvConfig config{columns, ceil_div(kp, kSliceK), tiles};
  const bool fits = config.slices <= kGemvSlices && config.units() <= kGemvUnits;
  return fits && config.shared_bytes() <= gpu.shared_bytes ? std::optional(config) : std::nullopt;
}

}  // namespace fp4::cuda
