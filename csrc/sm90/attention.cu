// Attention of one token of each sequence over a cache of keys and values. The interface is plain C, without
// torch.
#include "attention_launch.cuh"

// `sinks`, [q_heads] in the type of q: a logit more for each head, which no key has; or null.
extern "C" int fp4_kernel_attention_with_sinks(const fp4::device::AttentionParams* params, const void* sinks,
                                               int sms, void* stream) {
  using namespace fp4::sm90::attention;
  auto* s = static_cast<cudaStream_t>(stream);
  return params->type == DType::kBFloat16 ? launch<__nv_bfloat16>(*params, sinks, NoUpdate(), sms, s)
                                          : launch<__half>(*params, sinks, NoUpdate(), sms, s);
}

extern "C" int fp4_kernel_attention(const fp4::device::AttentionParams* params, int sms, void* stream) {
  return fp4_kernel_attention_with_sinks(params, nullptr, sms, stream);
}
