// int4 weights with group scales x e4m3 activations with many rows: the candidates and the entry point.

#include "prefill_host.cuh"

namespace fp4::sm90 {
namespace {

// An estimate: the sums of a group are added in float32 between its products. The two candidates measured
// within some per cent of each other, so little hangs on it.
constexpr Cost kTwoWarpgroups = {700, 3.5, 4.7, 1000, 9};

// Two sets of sums: more than 128 tokens do not fit in registers (ptxas then serialises the products, C7511).
using Wide = WidthList<128, 96, 64>;

// PrefillConfig<weights, warpgroups, widths, cluster, stages>
template <int kGroup>
constexpr Candidate kCandidates[] = {
    candidate<PrefillConfig<Int4Weights<kGroup>, 2, Wide, 2, 7>>("rows 128, tokens 128, cluster 2",
                                                                 kTwoWarpgroups),
    candidate<PrefillConfig<Int4Weights<kGroup>, 2, Wide, 1, 7>>("rows 128, tokens 128, cluster 1",
                                                                 kTwoWarpgroups),
};

}  // namespace
}  // namespace fp4::sm90

using namespace fp4::sm90;

// x e4m3 [rows, kp] in the layout's order with x_scale [rows]; packed [groups, n, kp / 2] and float32 scales
// [groups, n / 16, kp / 128, 128 / group, 8, 2]: see prefill_int4.cuh. group: 128 or 64. Pointers are
// device pointers, 16-byte aligned.
extern "C" int fp4_sm90_prefill_int4(const void* x, const float* x_scale, const void* packed,
                                     const float* scales, int group, const void* bias, int bias_dtype,
                                     const int32_t* group_rows, void* out, int out_dtype, int mode,
                                     int groups, int m, int n, int kp, int config, void* stream) {
  Arguments arguments = {x,         x_scale, packed, scales, nullptr, bias, bias_dtype, group_rows, out,
                         out_dtype, mode,    groups, m,      n,       kp,   kp,         config,     stream};
  switch (group) {
    case 128:
      return run(kCandidates<128>, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments);
    case 64:
      return run(kCandidates<64>, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments);
    default:
      return kBadArgument;
  }
}
