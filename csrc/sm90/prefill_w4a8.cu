// NVFP4 weights x e4m3 activations in the layout's order, with a scale a row: the candidates.

#include "prefill_fold.cuh"
#include "prefill_fp8.cuh"

fp4::sm90::Candidates fp4::sm90::w4a8_candidates() { return fp8_candidates<FoldedWeights>(); }
