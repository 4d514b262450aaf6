// mxfp4 weights x fp16 activations.

#include "prefill_candidates.cuh"

namespace fp4::sm80 {

Candidates fp16_b32_candidates() { return candidates_of<Fp16Words<32>>(); }

}  // namespace fp4::sm80
