// NVFP4 weights of layout sm90_bf16 x bf16 activations in the order of half_position: the candidates.

#include "prefill_words.cuh"

fp4::sm90::Candidates fp4::sm90::bf16_candidates() { return word_candidates<Bf16Weights>(); }
