// nvfp4 weights x int8 activations.

#include "prefill_candidates.cuh"

namespace fp4::sm80 {

Candidates int8_candidates() { return candidates_of<Int8Words<16>>(); }

}  // namespace fp4::sm80
