// The operands of an update of a cache by csrc/sm90/update_cache.cu or csrc/sm90/cached_attention.cu.
#pragma once

#include "cuda/host.h"
#include "device/update_cache.h"

namespace fp4::cuda {

// True for a cache that a kernel reads and writes where it lies.
inline bool in_place(const Tensor& t) {
  return t.is_contiguous() && reinterpret_cast<uintptr_t>(pointer(t)) % 16 == 0;
}

// True if the kernels have these sizes and dtypes, but for the size of a head.
bool updates(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values,
             const Tensor& start);

// Holds what `params` points to. `params` has no `out`.
struct CacheUpdate {
  Tensor q, k, v, cos, sin;
  OptionalTensor q_norm, k_norm;
  device::UpdateCacheParams params;

  CacheUpdate(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
              const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps, const Tensor& keys,
              const Tensor& values, const Tensor& start);
};

}  // namespace fp4::cuda
