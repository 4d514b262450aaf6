// NVFP4 weights of layout mma_bf16 x bf16 activations in plain order: the candidates.

#include "prefill_bf16.cuh"
#include "prefill_words.cuh"

namespace fp4::sm90 {

Candidates bf16_candidates() { return word_candidates<Bf16Weights<16>>(); }
Candidates bf16_b32_candidates() { return word_candidates<Bf16Weights<32>>(); }

}  // namespace fp4::sm90
