// mxfp4 weights x int8 activations.

#include "prefill_candidates.cuh"

namespace fp4::sm80 {

Candidates int8_b32_candidates() { return candidates_of<Int8Words<32>>(); }

}  // namespace fp4::sm80
