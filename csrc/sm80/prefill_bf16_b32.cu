// mxfp4 weights x bf16 activations.

#include "prefill_candidates.cuh"

namespace fp4::sm80 {

Candidates bf16_b32_candidates() { return candidates_of<Bf16Words<32>>(); }

}  // namespace fp4::sm80
