// int4 weights with group scales x e4m3 activations, any number of rows: the candidates.
//
// Scales are float32 [groups, n / 16, kp / 128, 128 / group, 8, 2], and their factor is global_scale: see
// prefill_int4.cuh.

#include "prefill_fp8.cuh"
#include "prefill_int4.cuh"

namespace fp4::sm90 {

// Groups of 128, 64 and 32 have candidates of the same names and costs. The scales of groups of 32 take the
// memory of one stage.
Candidates int4_candidates() { return fp8_candidates<Int4Weights<128>>(); }
Candidates int4_g64_candidates() { return fp8_candidates<Int4Weights<64>>(); }
Candidates int4_g32_candidates() { return fp8_candidates<Int4Weights<32>, 7>(); }

}  // namespace fp4::sm90
