// Rotates queries and keys, and writes keys and values to a cache, on CUDA (csrc/sm90/update_cache.cu).
#include "device/update_cache.h"

#include "cuda/fallback.h"

namespace fp4::cuda {
namespace {

bool in_place(const Tensor& t) {
  return t.is_contiguous() && reinterpret_cast<uintptr_t>(pointer(t)) % 16 == 0;
}

Tensor update_cache(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                    const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps,
                    const Tensor& keys, const Tensor& values, const Tensor& start) {
  check_update_cache(q, k, v, cos, sin, q_norm, k_norm, keys, values, start);
  const Here here(q);
  const int64_t head = size(q, 3);
  const bool fits = (head == 64 || head == 128 || head == 256) && size(v, 3) == head &&
                    q.scalar_type() != ScalarType::Float && q.numel() > 0 && k.numel() > 0 &&
                    q.numel() + 2 * k.numel() < int64_t(1) << 31 && size(keys, 2) < int64_t(1) << 31 &&
                    start.scalar_type() == ScalarType::Long && in_place(keys) && in_place(values);
  if (!fits || !here.gpu().hopper())
    return fallback("update_cache", "this GPU, or heads or a cache like these, have no kernel", q, k, v, cos,
                    sin, q_norm, k_norm, eps, keys, values, start);
  const Tensor operands[] = {as_operand(q), as_operand(k), as_operand(v), as_operand(cos), as_operand(sin)};
  const OptionalTensor norms[] = {as_operand(q_norm), as_operand(k_norm)};
  const Tensor out = here.empty({size(q, 0), size(q, 1), size(q, 2), head}, q.scalar_type());
  device::UpdateCacheParams p;
  p.q = pointer(operands[0]);
  p.k = pointer(operands[1]);
  p.v = pointer(operands[2]);
  p.cos = pointer(operands[3]);
  p.sin = pointer(operands[4]);
  p.q_norm = pointer(norms[0]);
  p.k_norm = pointer(norms[1]);
  p.out = mutable_pointer(out);
  p.keys = mutable_pointer(keys);
  p.values = mutable_pointer(values);
  p.start = pointer<int64_t>(start);
  p.sequences = int(size(q, 0));
  p.tokens = int(size(q, 1));
  p.q_heads = int(size(q, 2));
  p.kv_heads = int(size(k, 2));
  p.length = int(size(keys, 2));
  p.size = int(head);
  p.one_angle = size(cos, 0) == 1;
  p.eps = float(eps);
  p.type = code_of(q.scalar_type());
  check_launch(here.kernels().update_cache(&p, here.stream()), "fp4_kernel_update_cache");
  return out;
}

}  // namespace

FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) { m.impl("update_cache", FP4_BOX(update_cache)); }

}  // namespace fp4::cuda
