// NVFP4 weights x fp16 activations in the layout's order: the candidates and the entry point.

#include <iterator>

#include "prefill_host.cuh"

namespace fp4::sm90 {
namespace {

constexpr Cost kOneWarpgroup = {420, 1.6, 4.7, 1000, 9}, kSplit = {420, 1.6, 4.7, 3000, 9},
               kTwoWarpgroups = {500, 5, 9.0, 1000, 9}, kThreeWarpgroups = {650, 7, 13.0, 1000, 12},
               kFourWarpgroups = {800, 9, 17.0, 1000, 16};

// The number of widths is limited by registers, the stages by shared memory.
using Wide = WidthList<192, 176, 144, 128, 96>;
using Middle = WidthList<96, 80, 64>;
using Small = WidthList<64, 48, 32>;
using Pair = WidthList<64, 32>;
using NarrowPair = WidthList<48, 32>;
using Few = WidthList<32, 16>;
using Any = WidthList<128, 96, 64, 32, 16>;

// PrefillConfig<weights, warpgroups, widths, cluster, stages, splits>. The last are for so few weights that
// tiles of more rows would leave multiprocessors idle.
constexpr Candidate kCandidates[] = {
    candidate<PrefillConfig<HalfWeights, 2, Wide, 2, 3>>("rows 128, tokens 192, cluster 2", kTwoWarpgroups),
    candidate<PrefillConfig<HalfWeights, 2, Wide, 1, 3>>("rows 128, tokens 192, cluster 1", kTwoWarpgroups),
    candidate<PrefillConfig<HalfWeights, 3, Middle, 1, 5>>("rows 192, tokens 96, cluster 1",
                                                           kThreeWarpgroups),
    candidate<PrefillConfig<HalfWeights, 3, Small, 1, 6>>("rows 192, tokens 64, cluster 1", kThreeWarpgroups),
    candidate<PrefillConfig<HalfWeights, 4, Pair, 1, 5>>("rows 256, tokens 64, cluster 1", kFourWarpgroups),
    candidate<PrefillConfig<HalfWeights, 4, NarrowPair, 1, 6>>("rows 256, tokens 48, cluster 1",
                                                               kFourWarpgroups),
    candidate<PrefillConfig<HalfWeights, 4, Few, 1, 7>>("rows 256, tokens 32, cluster 1", kFourWarpgroups),
    candidate<PrefillConfig<HalfWeights, 1, Any, 1, 5>>("rows 64, tokens 128, cluster 1", kOneWarpgroup),
    candidate<PrefillConfig<HalfWeights, 1, Any, 1, 5, 2>>("rows 64, tokens 128, K split in 2", kSplit),
};

}  // namespace
}  // namespace fp4::sm90

using namespace fp4::sm90;

Candidates fp4::sm90::half_candidates() { return {kCandidates, std::size(kCandidates)}; }

// x fp16 [rows, kp] in the order of half_position with x_scale [rows]. Pointers are device pointers, 16-byte
// aligned.
extern "C" int fp4_sm90_prefill_half(const void* x, const float* x_scale, const void* packed,
                                     const void* block_scale, const float* global_scale, const void* bias,
                                     int bias_dtype, const int32_t* group_rows, void* out, int out_dtype,
                                     Act act, float alpha, float limit, float up_offset, int mode, int groups,
                                     int m, int n, int kp, int early, int config, void* stream) {
  const Gate gate{act, alpha, limit, up_offset};
  Arguments arguments = {x,          x_scale,    packed, block_scale, global_scale, bias,  //
                         bias_dtype, group_rows, out,    out_dtype,   gate,         mode,   groups,
                         m,          n,          kp,     kp,          early,        config, stream};
  return run(half_candidates(), CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, arguments);
}
