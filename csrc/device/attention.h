// Attention of one token of each sequence over a cache: the arguments of a launch. Needs neither torch nor
// CUDA.
#pragma once

#include <cstdint>

#include "interface.h"
#include "update_cache.h"

namespace fp4::device {

struct AttentionParams {
  const void* q = nullptr;       // [sequences, q_heads, size]
  const void* keys = nullptr;    // [sequences, kv_heads, length, size]
  const void* values = nullptr;  // like keys
  const bool* mask = nullptr;    // [sequences or 1, length]: which keys are seen; or null: all
  void* out = nullptr;           // like q
  int64_t mask_stride = 0;       // from a sequence to the next
  int sequences = 0, q_heads = 0, kv_heads = 0, length = 0;
  int size = 0;  // of a head: 64 or 128
  float scale = 0;
  DType type = DType::kBFloat16;  // of all tensors but the mask: 16 bits
  // The launcher sets these.
  int parts = 0;       // blocks, or clusters, that share a head of keys: each has some of the query heads
  int split_bits = 0;  // the blocks of a cluster, 2^split_bits, divide the keys
};

}  // namespace fp4::device

extern "C" {
int fp4_kernel_attention(const fp4::device::AttentionParams* params, int sms, void* stream);
// Writes the new keys and values, then computes attention of the queries that `update` describes. `params`
// has no q, and `update` has no out. `sinks` has a logit more for each head of q, in its type, or is null.
int fp4_kernel_cached_attention(const fp4::device::AttentionParams* params,
                                const fp4::device::UpdateCacheParams* update, const void* sinks, int sms,
                                void* stream);
}
