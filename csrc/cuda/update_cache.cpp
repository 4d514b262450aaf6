// Rotates queries and keys, and writes keys and values to a cache, on CUDA (csrc/sm90/update_cache.cu).
#include "cuda/update_cache.h"

#include "cuda/fallback.h"

namespace fp4::cuda {

bool updates(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values,
             const Tensor& start) {
  return size(v, 3) == size(q, 3) && q.scalar_type() != ScalarType::Float && q.numel() > 0 && k.numel() > 0 &&
         q.numel() + 2 * k.numel() < int64_t(1) << 31 && size(keys, 2) < int64_t(1) << 31 &&
         start.scalar_type() == ScalarType::Long && in_place(keys) && in_place(values);
}

CacheUpdate::CacheUpdate(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& cos_,
                         const Tensor& sin_, const OptionalTensor& q_norm_, const OptionalTensor& k_norm_,
                         double eps, const Tensor& keys, const Tensor& values, const Tensor& start)
    : q(as_operand(q_)),
      k(as_operand(k_)),
      v(as_operand(v_)),
      cos(as_operand(cos_)),
      sin(as_operand(sin_)),
      q_norm(as_operand(q_norm_)),
      k_norm(as_operand(k_norm_)) {
  params.q = pointer(q);
  params.k = pointer(k);
  params.v = pointer(v);
  params.cos = pointer(cos);
  params.sin = pointer(sin);
  params.q_norm = pointer(q_norm);
  params.k_norm = pointer(k_norm);
  params.keys = mutable_pointer(keys);
  params.values = mutable_pointer(values);
  params.start = pointer<int64_t>(start);
  params.sequences = int(size(q, 0));
  params.tokens = int(size(q, 1));
  params.q_heads = int(size(q, 2));
  params.kv_heads = int(size(k, 2));
  params.length = int(size(keys, 2));
  params.size = int(size(q, 3));
  params.one_angle = size(cos, 0) == 1;
  params.eps = float(eps);
  params.type = code_of(q.scalar_type());
}

namespace {

Tensor update_cache(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                    const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps,
                    const Tensor& keys, const Tensor& values, const Tensor& start) {
  check_update_cache(q, k, v, cos, sin, q_norm, k_norm, keys, values, start);
  const Here here(q);
  const int64_t head = size(q, 3);
  const bool fits = (head == 64 || head == 128 || head == 256) && updates(q, k, v, keys, values, start);
  if (!fits || !here.gpu().hopper())
    return fallback("update_cache", "this GPU, or heads or a cache like these, have no kernel", q, k, v, cos,
                    sin, q_norm, k_norm, eps, keys, values, start);
  const Tensor out = here.empty({size(q, 0), size(q, 1), size(q, 2), head}, q.scalar_type());
  CacheUpdate update(q, k, v, cos, sin, q_norm, k_norm, eps, keys, values, start);
  update.params.out = mutable_pointer(out);
  check_launch(here.kernels().update_cache(&update.params, here.stream()), "fp4_kernel_update_cache");
  return out;
}

}  // namespace

FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) { m.impl("update_cache", FP4_BOX(update_cache)); }

}  // namespace fp4::cuda
