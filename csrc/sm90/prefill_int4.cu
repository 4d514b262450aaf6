// int4 weights with group scales x e4m3 activations, any number of rows: the candidates.
//
// Scales are float32 [groups, n / 16, kp / 128, 128 / group, 8, 2], their factor is global_scale: see
// prefill_int4.cuh.

#include "prefill_fp8.cuh"
#include "prefill_int4.cuh"

namespace fp4::sm90 {

// Of groups of 128, 64, 32 they have the same names and costs; scales of 32 take the room of a stage.
Candidates int4_candidates() { return fp8_candidates<Int4Weights<128>>(); }
Candidates int4_g64_candidates() { return fp8_candidates<Int4Weights<64>>(); }
Candidates int4_g32_candidates() { return fp8_candidates<Int4Weights<32>, 7>(); }

}  // namespace fp4::sm90
