// NVFP4 weights x e4m3 activations with many rows: the candidates and the entry point.

#include "prefill_host.cuh"

namespace fp4::sm90 {
namespace {

constexpr Cost kTwoWarpgroups = {580, 2.35, 4.7, 1000, 9}, kThreeWarpgroups = {580, 4.3, 7, 1000, 12},
               kFourWarpgroups = {600, 6.5, 9.4, 1000, 16};

// The number of widths is limited by registers, the stages by shared memory.
using Wide = WidthList<288, 272, 256, 192, 128, 64>;
using Middle = WidthList<192, 160, 128>;
using Narrow = WidthList<80, 64, 48, 32>;
using NarrowPair = WidthList<80, 64>;
using Small = WidthList<64, 32>;

// PrefillConfig<weights, warpgroups, widths, cluster, stages>
constexpr Candidate kCandidates[] = {
    candidate<PrefillConfig<FoldedWeights, 2, Wide, 2, 4>>("rows 128, tokens 288, cluster 2", kTwoWarpgroups),
    candidate<PrefillConfig<FoldedWeights, 2, Wide, 1, 4>>("rows 128, tokens 288, cluster 1", kTwoWarpgroups),
    candidate<PrefillConfig<FoldedWeights, 3, Middle, 1, 5>>("rows 192, tokens 192, cluster 1",
                                                             kThreeWarpgroups),
    candidate<PrefillConfig<FoldedWeights, 3, Narrow, 1, 8>>("rows 192, tokens 80, cluster 1",
                                                             kThreeWarpgroups),
    candidate<PrefillConfig<FoldedWeights, 4, NarrowPair, 1, 6>>("rows 256, tokens 80, cluster 1",
                                                                 kFourWarpgroups),
    candidate<PrefillConfig<FoldedWeights, 4, Small, 1, 7>>("rows 256, tokens 64, cluster 1",
                                                            kFourWarpgroups),
};
constexpr int kCandidateCount = sizeof(kCandidates) / sizeof(kCandidates[0]);

}  // namespace
}  // namespace fp4::sm90

using namespace fp4::sm90;

extern "C" int fp4_sm90_prefill_w4a8_configs() { return kCandidateCount; }

extern "C" const char* fp4_sm90_prefill_w4a8_config_name(int config) {
  return config >= 0 && config < kCandidateCount ? kCandidates[config].name : "";
}

// The index that config = -1 takes on a GPU of `sms` multiprocessors.
extern "C" int fp4_sm90_prefill_w4a8_choose(int mode, int groups, int m, int n, int kp, int sms) {
  return choose(kCandidates, static_cast<RowMode>(mode), groups, m, n, kp, sms);
}

// x e4m3 [rows, kp] in the layout's order with x_scale [rows]. Pointers are device pointers, 16-byte aligned.
extern "C" int fp4_sm90_prefill_w4a8(const void* x, const float* x_scale, const void* packed,
                                     const void* block_scale, const float* global_scale, const void* bias,
                                     int bias_dtype, const int32_t* group_rows, void* out, int out_dtype,
                                     int mode, int groups, int m, int n, int kp, int config, void* stream) {
  Arguments arguments = {x,          x_scale,    packed, block_scale, global_scale, bias,
                         bias_dtype, group_rows, out,    out_dtype,   mode,         groups,
                         m,          n,          kp,     kp,          config,       stream};
  return run(kCandidates, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments);
}
