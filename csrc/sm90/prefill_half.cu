// NVFP4 weights x fp16 activations in the order of half_position, with a factor a row: the candidates.

#include "prefill_half.cuh"
#include "prefill_words.cuh"

fp4::sm90::Candidates fp4::sm90::half_candidates() { return word_candidates<HalfWeights>(); }
