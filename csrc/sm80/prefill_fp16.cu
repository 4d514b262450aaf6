// nvfp4 weights x fp16 activations.

#include "prefill_candidates.cuh"

namespace fp4::sm80 {

Candidates fp16_candidates() { return candidates_of<Fp16Words<16>>(); }

}  // namespace fp4::sm80
