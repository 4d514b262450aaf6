// The candidates for e4m3 activations, for all weights that are folded into e4m3.
#pragma once

#include <iterator>

#include "prefill_host.cuh"

namespace fp4::sm90 {

// Fitted to the times of all candidates with NVFP4 weights.
constexpr Cost kOneWarpgroup = cost_of(fitted::fp8_one_warpgroup), kPair = cost_of(fitted::fp8_pair),
               kTwoWarpgroups = cost_of(fitted::fp8_two_warpgroups),
               kThreeMiddle = cost_of(fitted::fp8_three_middle),
               kThreeWarpgroups = cost_of(fitted::fp8_three_warpgroups),
               kFourWarpgroups = cost_of(fitted::fp8_four_warpgroups);

// Shared memory limits the number of stages. For few tokens it has room for more than kEnoughStages. But with
// more stages the queues of the memory are long, multiprocessors get less equal shares of its bandwidth, and
// they end at different times.
constexpr int kEnoughStages = 6;
using Wide = WidthList<288, 272, 256, 240, 224, 208, 192, 160, 128, 96, 64>;
using Middle = WidthList<192, 176, 160, 144, 128, 112, 96>;
using Narrow = WidthList<80, 64, 48, 32>;
using NarrowPair = WidthList<80, 64>;
using Small = WidthList<64, 48, 32>;
using Few = WidthList<32, 24, 16>;
using Any = WidthList<128, 96, 64, 32, 16>;

// PrefillConfig<weights, warpgroups, widths, cluster, stages>. The last candidate is for small weights, where
// tiles of more rows would leave multiprocessors idle.
template <class Weights, int kNarrowStages = 8>
constexpr Candidate kFp8Candidates[] = {
    candidate<PrefillConfig<Weights, 2, Wide, 2, 4>>("rows 128, tokens 288, cluster 2", kPair),
    candidate<PrefillConfig<Weights, 2, Wide, 1, 4>>("rows 128, tokens 288, cluster 1", kTwoWarpgroups),
    candidate<PrefillConfig<Weights, 3, Middle, 1, 5>>("rows 192, tokens 192, cluster 1", kThreeMiddle),
    candidate<PrefillConfig<Weights, 3, Narrow, 1, kNarrowStages>>("rows 192, tokens 80, cluster 1",
                                                                   kThreeWarpgroups),
    candidate<PrefillConfig<Weights, 4, NarrowPair, 1, 6>>("rows 256, tokens 80, cluster 1", kFourWarpgroups),
    candidate<PrefillConfig<Weights, 4, Small, 1, kEnoughStages>>("rows 256, tokens 64, cluster 1",
                                                                  kFourWarpgroups),
    candidate<PrefillConfig<Weights, 4, Few, 1, kEnoughStages>>("rows 256, tokens 32, cluster 1",
                                                                kFourWarpgroups),
    candidate<PrefillConfig<Weights, 1, Any, 1, 9>>("rows 64, tokens 128, cluster 1", kOneWarpgroup),
};

template <class Weights, int kNarrowStages = 8>
Candidates fp8_candidates() {
  return {kFp8Candidates<Weights, kNarrowStages>, std::size(kFp8Candidates<Weights, kNarrowStages>)};
}

}  // namespace fp4::sm90
