// NVFP4 weights x e4m3 activations with many rows: the entry point.

#include "prefill_fp8.cuh"

using namespace fp4::sm90;

Candidates fp4::sm90::w4a8_candidates() { return fp8_candidates<FoldedWeights>(); }

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
  return run(w4a8_candidates(), CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments);
}
