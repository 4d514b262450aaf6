// Attention of a token of each sequence over a cache, on CUDA (csrc/sm90/attention.cu), and together with the
// update of the cache by this token (csrc/sm90/cached_attention.cu).
#include "device/attention.h"

#include "cuda/fallback.h"
#include "cuda/update_cache.h"

namespace fp4::cuda {
namespace {

constexpr const char* kNoKernel = "this GPU, or heads or a cache like these, have no kernel";

bool attends(const Tensor& q, const Tensor& keys, const Tensor& values) {
  const int64_t head = size(q, 3), length = size(keys, 2);
  return size(q, 1) == 1 && (head == 64 || head == 128) && size(values, 3) == head &&
         q.scalar_type() != ScalarType::Float && q.numel() > 0 && length > 0 &&
         q.numel() < int64_t(1) << 31 && length < int64_t(1) << 30 && in_place(keys) && in_place(values);
}

// Holds what `params` points to. `params` has no `q`.
struct Attention {
  OptionalTensor seen, sinks;
  Tensor out;
  device::AttentionParams params;

  Attention(const Here& here, const Tensor& q, const Tensor& keys, const Tensor& values,
            const OptionalTensor& mask, double scale, const OptionalTensor& sinks_)
      : seen(mask && mask->stride(3) != 1 ? OptionalTensor(as_operand(*mask)) : mask),
        sinks(as_operand(sinks_)),
        out(here.empty({size(q, 0), 1, size(q, 2), size(q, 3)}, q.scalar_type())) {
    params.keys = pointer(keys);
    params.values = pointer(values);
    params.mask = seen ? pointer<bool>(*seen) : nullptr;
    params.mask_stride = seen && size(*seen, 0) > 1 ? seen->stride(0) : 0;
    params.out = mutable_pointer(out);
    params.sequences = int(size(q, 0));
    params.q_heads = int(size(q, 2));
    params.kv_heads = int(size(keys, 1));
    params.length = int(size(keys, 2));
    params.size = int(size(q, 3));
    params.scale = float(scale);
    params.type = code_of(q.scalar_type());
  }
};

Tensor attention(const Tensor& q, const Tensor& keys, const Tensor& values, const OptionalTensor& mask,
                 double scale, const OptionalTensor& sinks) {
  check_attention(q, keys, values, mask, sinks);
  const Here here(q);
  if (!attends(q, keys, values) || !here.gpu().hopper())
    return fallback("attention", kNoKernel, q, keys, values, mask, scale, sinks);
  const Tensor queries = as_operand(q);
  Attention a(here, q, keys, values, mask, scale, sinks);
  a.params.q = pointer(queries);
  const auto& kernels = here.kernels();
  check_launch(a.sinks ? kernels.attention_with_sinks(&a.params, pointer(a.sinks), here.sms(), here.stream())
                       : kernels.attention(&a.params, here.sms(), here.stream()),
               "fp4_kernel_attention");
  return a.out;
}

Tensor cached_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                        const Tensor& sin, const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                        double eps, const Tensor& keys, const Tensor& values, const Tensor& start,
                        const OptionalTensor& mask, double scale, const OptionalTensor& sinks) {
  check_cached_attention(q, k, v, cos, sin, q_norm, k_norm, keys, values, start, mask, sinks);
  const Here here(q);
  const bool fits = attends(q, keys, values) && updates(q, k, v, keys, values, start);
  if (!fits || !here.gpu().hopper())
    return fallback("cached_attention", kNoKernel, q, k, v, cos, sin, q_norm, k_norm, eps, keys, values,
                    start, mask, scale, sinks);
  const CacheUpdate update(q, k, v, cos, sin, q_norm, k_norm, eps, keys, values, start);
  const Attention a(here, q, keys, values, mask, scale, sinks);
  check_launch(
      here.kernels().cached_attention(&a.params, &update.params, pointer(a.sinks), here.sms(), here.stream()),
      "fp4_kernel_cached_attention");
  return a.out;
}

}  // namespace

FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) {
  m.impl("attention", FP4_BOX(attention));
  m.impl("cached_attention", FP4_BOX(cached_attention));
}

}  // namespace fp4::cuda
