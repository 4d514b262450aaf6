// The candidates for 16-bit activations, whatever the words that hold the weights.
#pragma once

#include <iterator>

#include "prefill_host.cuh"

namespace fp4::sm90 {

constexpr Cost kOneWarpgroup = {330, 2.6, 4.7, 1000, 9}, kPair = {600, 5, 8.75, 1000, 9},
               kTwoWarpgroups = {600, 5, 9.1, 1300, 6.5}, kThreeBroad = {760, 7, 13.8, 1000, 7},
               kThreeMiddle = {720, 7, 13.0, 1000, 12}, kThreeWarpgroups = {650, 7, 13.0, 1000, 12},
               kFourBroad = {950, 9, 17.0, 1000, 16}, kFourWarpgroups = {800, 9, 17.0, 1000, 16};

// Shared memory limits the number of stages.
using Wide = WidthList<192, 176, 160, 144, 128, 112, 96, 64>;
using Broad = WidthList<144, 128, 112, 96>;
using Middle = WidthList<96, 80, 64>;
using Small = WidthList<64, 48, 32>;
using Pair = WidthList<64, 32>;
using NarrowPair = WidthList<48, 40, 32>;
using Few = WidthList<32, 24, 16>;
using Any = WidthList<128, 96, 64, 32, 16>;

// PrefillConfig<weights, warpgroups, widths, cluster, stages>. The last is for so few weights that
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
