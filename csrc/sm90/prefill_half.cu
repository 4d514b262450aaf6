// NVFP4 weights x fp16 activations in the order of half_position, with a factor a row: the candidates.

#include "prefill_half.cuh"
#include "prefill_words.cuh"

namespace fp4::sm90 {

Candidates half_candidates() { return word_candidates<HalfWeights<16>>(); }
Candidates half_b32_candidates() { return word_candidates<HalfWeights<32>>(); }

}  // namespace fp4::sm90
