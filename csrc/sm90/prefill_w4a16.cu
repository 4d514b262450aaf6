// NVFP4 weights x bf16 or fp16 activations with many rows: the candidates and the entry point.

#include "prefill_host.cuh"

namespace fp4::sm90 {
namespace {

constexpr Cost kTwoWarpgroups = {900, 5, 9.4, 1000, 9};

using Wide = WidthList<192, 160, 128, 64>;

// PrefillConfig<weights, warpgroups, widths, cluster, stages>
template <Element kElement>
constexpr Candidate kCandidates[] = {
    candidate<PrefillConfig<ExpandedWeights<kElement>, 2, Wide, 2, 3>>("rows 128, tokens 192, cluster 2",
                                                                       kTwoWarpgroups),
    candidate<PrefillConfig<ExpandedWeights<kElement>, 2, Wide, 1, 3>>("rows 128, tokens 192, cluster 1",
                                                                       kTwoWarpgroups),
};

}  // namespace
}  // namespace fp4::sm90

using namespace fp4::sm90;

// x [rows, k] in plain order, k % 8 == 0, of x_dtype 1 bfloat16 or 2 float16; x_scale [rows], or null for
// ones. Pointers are device pointers, 16-byte aligned.
extern "C" int fp4_sm90_prefill_w4a16(const void* x, int x_dtype, const float* x_scale, const void* packed,
                                      const void* block_scale, const float* global_scale, const void* bias,
                                      int bias_dtype, const int32_t* group_rows, void* out, int out_dtype,
                                      int mode, int groups, int m, int n, int k, int kp, int config,
                                      void* stream) {
  Arguments arguments = {x,          x_scale,    packed, block_scale, global_scale, bias,
                         bias_dtype, group_rows, out,    out_dtype,   mode,         groups,
                         m,          n,          k,      kp,          config,       stream};
  switch (static_cast<DType>(x_dtype)) {
    case DType::kBFloat16:
      return run(kCandidates<Element::kBfloat16>, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, arguments);
    case DType::kFloat16:
      return run(kCandidates<Element::kFloat16>, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, arguments);
    default:
      return kBadArgument;
  }
}
