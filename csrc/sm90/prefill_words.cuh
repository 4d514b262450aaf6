// The candidates for 16-bit activations, for all layouts of weights.
#pragma once

#include <iterator>

#include "prefill_host.cuh"

namespace fp4::sm90 {

constexpr Cost kOneWarpgroup = cost_of(fitted::words_one_warpgroup), kPair = cost_of(fitted::words_pair),
               kTwoWarpgroups = cost_of(fitted::words_two_warpgroups),
               kThreeBroad = cost_of(fitted::words_three_broad),
               kThreeMiddle = cost_of(fitted::words_three_middle),
               kThreeWarpgroups = cost_of(fitted::words_three_warpgroups),
               kFourBroad = cost_of(fitted::words_four_broad),
               kFourWarpgroups = cost_of(fitted::words_four_warpgroups);

// Shared memory limits the number of stages.
using Wide = WidthList<192, 176, 160, 144, 128, 112, 96, 64>;
using Broad = WidthList<144, 128, 112, 96>;
using Middle = WidthList<96, 80, 64>;
using Small = WidthList<64, 48, 32>;
using Pair = WidthList<64, 32>;
using NarrowPair = WidthList<48, 40, 32>;
using Few = WidthList<32, 24, 16>;
using Any = WidthList<128, 96, 64, 32, 16>;

// PrefillConfig<weights, warpgroups, widths, cluster, stages>. The last candidate is for small weights, where
// tiles of more rows would leave multiprocessors idle.
template <class Weights>
constexpr Candidate kWordCandidates[] = {
    candidate<PrefillConfig<Weights, 2, Wide, 2, 3>>("rows 128, tokens 192, cluster 2", kPair),
    candidate<PrefillConfig<Weights, 2, Wide, 1, 3>>("rows 128, tokens 192, cluster 1", kTwoWarpgroups),
    candidate<PrefillConfig<Weights, 3, Broad, 1, 4>>("rows 192, tokens 144, cluster 1", kThreeBroad),
    candidate<PrefillConfig<Weights, 3, Middle, 1, 5>>("rows 192, tokens 96, cluster 1", kThreeMiddle),
    candidate<PrefillConfig<Weights, 3, Small, 1, 6>>("rows 192, tokens 64, cluster 1", kThreeWarpgroups),
    candidate<PrefillConfig<Weights, 4, Pair, 1, 5>>("rows 256, tokens 64, cluster 1", kFourBroad),
    candidate<PrefillConfig<Weights, 4, NarrowPair, 1, 6>>("rows 256, tokens 48, cluster 1", kFourWarpgroups),
    candidate<PrefillConfig<Weights, 4, Few, 1, 7>>("rows 256, tokens 32, cluster 1", kFourWarpgroups),
    candidate<PrefillConfig<Weights, 1, Any, 1, 5>>("rows 64, tokens 128, cluster 1", kOneWarpgroup),
};

template <class Weights>
Candidates word_candidates() {
  return {kWordCandidates<Weights>, std::size(kWordCandidates<Weights>)};
}

}  // namespace fp4::sm90
