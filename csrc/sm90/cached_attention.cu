// The update of a cache by one token of each sequence, and attention over the cache, as one kernel. The
// interface is plain C, without torch.
#include "attention_launch.cuh"
#include "new_token.cuh"

// `params` without q. `update` without out. `sinks`: as in attention.cu.
extern "C" int fp4_kernel_cached_attention(const fp4::device::AttentionParams* params,
                                           const fp4::device::UpdateCacheParams* update, const void* sinks,
                                           int sms, void* stream) {
  using namespace fp4::sm90::attention;
  auto* s = static_cast<cudaStream_t>(stream);
  return params->type == DType::kBFloat16 ? launch<__nv_bfloat16>(*params, sinks, *update, sms, s)
                                          : launch<__half>(*params, sinks, *update, sms, s);
}
