// NVFP4 weights x e4m3 activations in the layout's order, with a scale a row: the candidates.

#include "e2m1_to_e4m3.cuh"
#include "prefill_fp8.cuh"

namespace fp4::sm90 {

Candidates w4a8_candidates() { return fp8_candidates<FoldedWeights<16>>(); }
Candidates w4a8_b32_candidates() { return fp8_candidates<FoldedWeights<32>>(); }

}  // namespace fp4::sm90
