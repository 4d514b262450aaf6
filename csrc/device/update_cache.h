// Rotation of queries and keys, and the write to a cache: the arguments of a launch. Needs neither torch nor
// CUDA.
#pragma once

#include <cstdint>

#include "interface.h"

namespace fp4::device {

struct UpdateCacheParams {
  const void* q = nullptr;         // [sequences, tokens, q_heads, size]
  const void* k = nullptr;         // [sequences, tokens, kv_heads, size]
  const void* v = nullptr;         // like k
  const void* cos = nullptr;       // [sequences or 1, tokens, size]
  const void* sin = nullptr;       // like cos
  const void* q_norm = nullptr;    // [size]: each head is normalised by its root mean square first; or null
  const void* k_norm = nullptr;    // like q_norm
  void* out = nullptr;             // like q
  void* keys = nullptr;            // [sequences, kv_heads, length, size]
  void* values = nullptr;          // like keys
  const int64_t* start = nullptr;  // the first token's place in the cache
  int sequences = 0, tokens = 0, q_heads = 0, kv_heads = 0, length = 0;
  int size = 0;            // of a head: 64, 128 or 256
  bool one_angle = false;  // cos and sin are the same for all sequences
  float eps = 0;
  DType type = DType::kBFloat16;  // of all tensors but start: 16 bits
};

}  // namespace fp4::device

extern "C" {
int fp4_kernel_update_cache(const fp4::device::UpdateCacheParams* params, void* stream);
}
