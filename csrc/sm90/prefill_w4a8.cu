// The candidate kernels for prefill with NVFP4 weights and e4m3 activations. Activations are in the layout's
// order, with one scale for each row.

#include "e2m1_to_e4m3.cuh"
#include "prefill_fp8.cuh"

namespace fp4::sm90 {

Candidates w4a8_candidates() { return fp8_candidates<FoldedWeights<16>>(); }
Candidates w4a8_b32_candidates() { return fp8_candidates<FoldedWeights<32>>(); }

}  // namespace fp4::sm90
