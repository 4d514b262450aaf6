// The candidates, for both sizes of scale blocks. Each weight format and type of rows has its own source
// file, so they compile in parallel.
#pragma once

#include <iterator>

#include "prefill_host.cuh"

namespace fp4::sm80 {

using Wide = WidthList<128, 112, 96, 80, 64>;
using Broad = WidthList<96, 80, 64, 48>;
using Middle = WidthList<64, 48, 32>;
using Small = WidthList<32, 16>;
using Few = WidthList<16>;

// PrefillConfig<words, warps (rows), warps (tokens), row tiles of a warp, widths, stages, blocks>.
template <class Words>
constexpr Candidate kCandidates[] = {
    candidate<PrefillConfig<Words, 8, 1, 2, Wide, 2, 1>>("rows 256, tokens 128, warps 8, stages 2"),
    candidate<PrefillConfig<Words, 4, 1, 2, Wide, 2, 2>>("rows 128, tokens 128, warps 4, stages 2"),
    candidate<PrefillConfig<Words, 12, 1, 2, Broad, 2, 1>>("rows 384, tokens 96, warps 12, stages 2"),
    candidate<PrefillConfig<Words, 8, 1, 2, Middle, 2, 2>>("rows 256, tokens 64, warps 8, stages 2"),
    candidate<PrefillConfig<Words, 4, 1, 2, Middle, 2, 3>>("rows 128, tokens 64, warps 4, stages 2"),
    candidate<PrefillConfig<Words, 4, 1, 2, Small, 4, 3>>("rows 128, tokens 32, warps 4, stages 4"),
    candidate<PrefillConfig<Words, 8, 1, 2, Few, 4, 2>>("rows 256, tokens 16, warps 8, stages 4"),
    candidate<PrefillConfig<Words, 4, 1, 2, Few, 4, 3>>("rows 128, tokens 16, warps 4, stages 4"),
};

// The candidates for int8 rows. Their integer sums need registers, too, so no candidate puts 12 warps on a
// multiprocessor.
template <class Words>
constexpr Candidate kInt8Candidates[] = {
    candidate<PrefillConfig<Words, 8, 1, 2, Wide, 2, 1>>("rows 256, tokens 128, warps 8, stages 2"),
    candidate<PrefillConfig<Words, 4, 1, 2, Wide, 2, 2>>("rows 128, tokens 128, warps 4, stages 2"),
    candidate<PrefillConfig<Words, 8, 1, 2, Middle, 2, 1>>("rows 256, tokens 64, warps 8, stages 2"),
    candidate<PrefillConfig<Words, 4, 1, 2, Middle, 2, 2>>("rows 128, tokens 64, warps 4, stages 2"),
    candidate<PrefillConfig<Words, 4, 1, 2, Small, 4, 3>>("rows 128, tokens 32, warps 4, stages 4"),
};

// The candidates of each weight format and type of rows, defined in its own file. b32: one scale for 32 K
// instead of 16.
Candidates bf16_candidates();
Candidates bf16_b32_candidates();
Candidates fp16_candidates();
Candidates fp16_b32_candidates();
Candidates int8_candidates();
Candidates int8_b32_candidates();

template <class Words>
Candidates candidates_of() {
  if constexpr (Words::kElement == Element::kInt8) {
    return {kInt8Candidates<Words>, static_cast<int>(std::size(kInt8Candidates<Words>))};
  } else {
    return {kCandidates<Words>, static_cast<int>(std::size(kCandidates<Words>))};
  }
}

}  // namespace fp4::sm80
