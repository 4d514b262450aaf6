// int4 weights with group scales x e4m3 activations, any number of rows: the entry point.

#include "prefill_fp8.cuh"

using namespace fp4::sm90;

// x e4m3 [rows, kp] in the layout's order with x_scale [rows]; packed [groups, n, kp / 2], float32 scales
// [groups, n / 16, kp / 128, 128 / group, 8, 2] and their factor [groups]: see prefill_int4.cuh. group: 128,
// 64 or 32. Pointers are device pointers, 16-byte aligned.
extern "C" int fp4_sm90_prefill_int4(const void* x, const float* x_scale, const void* packed,
                                     const float* scales, const float* factor, int group, const void* bias,
                                     int bias_dtype, const int32_t* group_rows, void* out, int out_dtype,
                                     int mode, int groups, int m, int n, int kp, int config, void* stream) {
  Arguments arguments = {x,         x_scale, packed, scales, factor, bias, bias_dtype, group_rows, out,
                         out_dtype, mode,    groups, m,      n,      kp,   kp,         config,     stream};
  switch (group) {
    case 128:
      return run(kFp8Candidates<Int4Weights<128>>, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments);
    case 64:
      return run(kFp8Candidates<Int4Weights<64>>, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments);
    case 32:  // its scales take the room of a stage
      return run(kFp8Candidates<Int4Weights<32>, 6>, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments);
    default:
      return kBadArgument;
  }
}
