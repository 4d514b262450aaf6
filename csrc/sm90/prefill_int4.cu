// int4 weights with group scales x e4m3 activations, any number of rows: the candidates and the entry point.

#include "prefill_fp8.cuh"

using namespace fp4::sm90;

namespace {

// Scales of 32 take the room of a stage.
template <int kGroup>
constexpr int kSmallStages = kGroup == 32 ? 6 : 7;

template <int kGroup>
Candidates candidates_of() {
  return fp8_candidates<Int4Weights<kGroup>, kSmallStages<kGroup>>();
}

}  // namespace

// Those of other groups have the same names and costs.
Candidates fp4::sm90::int4_candidates() { return candidates_of<128>(); }

// x e4m3 [rows, kp] in the layout's order with x_scale [rows]; packed [groups, n, kp / 2], float32 scales
// [groups, n / 16, kp / 128, 128 / group, 8, 2] and their factor [groups]: see prefill_int4.cuh. group: 128,
// 64 or 32. Pointers are device pointers, 16-byte aligned.
extern "C" int fp4_sm90_prefill_int4(const void* x, const float* x_scale, const void* packed,
                                     const float* scales, const float* factor, int group, const void* bias,
                                     int bias_dtype, const int32_t* group_rows, void* out, int out_dtype,
                                     Act act, float alpha, float limit, float up_offset, int mode, int groups,
                                     int m, int n, int kp, int early, int config, void* stream) {
  const Gate gate{act, alpha, limit, up_offset};
  Arguments arguments = {x,          x_scale,    packed, scales,    factor, bias,  //
                         bias_dtype, group_rows, out,    out_dtype, gate,   mode,   groups,
                         m,          n,          kp,     kp,        early,  config, stream};
  switch (group) {
    case 128:
      return run(candidates_of<128>(), CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments);
    case 64:
      return run(candidates_of<64>(), CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments);
    case 32:
      return run(candidates_of<32>(), CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments);
    default:
      return kBadArgument;
  }
}
