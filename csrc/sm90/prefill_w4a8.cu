// NVFP4 weights x e4m3 activations with many rows: the entry point.

#include "prefill_fp8.cuh"

using namespace fp4::sm90;

namespace {
constexpr auto& kCandidates = kFp8Candidates<FoldedWeights>;
}

extern "C" int fp4_sm90_prefill_w4a8_configs() { return kFp8CandidateCount; }

extern "C" const char* fp4_sm90_prefill_w4a8_config_name(int config) {
  return config >= 0 && config < kFp8CandidateCount ? kCandidates[config].name : "";
}

// What config = -1 takes on a GPU of `sms` multiprocessors.
extern "C" Choice fp4_sm90_prefill_w4a8_choose(int mode, int groups, int m, int n, int kp, int sms) {
  return choose(kCandidates, static_cast<RowMode>(mode), groups, m, n, kp, sms);
}

// x e4m3 [rows, kp] in the layout's order with x_scale [rows]. Pointers are device pointers, 16-byte aligned.
extern "C" int fp4_sm90_prefill_w4a8(const void* x, const float* x_scale, const void* packed,
                                     const void* block_scale, const float* global_scale, const void* bias,
                                     int bias_dtype, const int32_t* group_rows, void* out, int out_dtype,
                                     Act act, float alpha, float limit, float up_offset, int mode, int groups,
                                     int m, int n, int kp, int early, int config, void* stream) {
  const Gate gate{act, alpha, limit, up_offset};
  Arguments arguments = {x,          x_scale,    packed, block_scale, global_scale, bias,  //
                         bias_dtype, group_rows, out,    out_dtype,   gate,         mode,   groups,
                         m,          n,          kp,     kp,          early,        config, stream};
  return run(kCandidates, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments);
}
