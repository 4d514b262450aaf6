// Attention of a token of each sequence over a cache, on CUDA (csrc/sm90/attention.cu).
#include "device/attention.h"

#include "cuda/fallback.h"

namespace fp4::cuda {
namespace {

Tensor attention(const Tensor& q, const Tensor& keys, const Tensor& values, const OptionalTensor& mask,
                 double scale, const OptionalTensor& sinks) {
  check_attention(q, keys, values, mask, sinks);
  const Here here(q);
  const int64_t head = size(q, 3), length = size(keys, 2);
  const auto in_place = [](const Tensor& t) {
    return t.is_contiguous() && reinterpret_cast<uintptr_t>(pointer(t)) % 16 == 0;
  };
  const bool fits = size(q, 1) == 1 && (head == 64 || head == 128) && size(values, 3) == head &&
                    q.scalar_type() != ScalarType::Float && q.numel() > 0 && length > 0 &&
                    q.numel() < int64_t(1) << 31 && length < int64_t(1) << 30 && in_place(keys) &&
                    in_place(values);
  if (!fits || !here.gpu().hopper())
    return fallback("attention", "this GPU, or heads or a cache like these, have no kernel", q, keys, values,
                    mask, scale, sinks);
  const Tensor queries = as_operand(q);
  const OptionalTensor seen = mask && mask->stride(3) != 1 ? OptionalTensor(as_operand(*mask)) : mask;
  const Tensor out = here.empty({size(q, 0), 1, size(q, 2), head}, q.scalar_type());
  device::AttentionParams p;
  p.q = pointer(queries);
  p.keys = pointer(keys);
  p.values = pointer(values);
  p.mask = seen ? pointer<bool>(*seen) : nullptr;
  p.mask_stride = seen && size(*seen, 0) > 1 ? seen->stride(0) : 0;
  p.out = mutable_pointer(out);
  p.sequences = int(size(q, 0));
  p.q_heads = int(size(q, 2));
  p.kv_heads = int(size(keys, 1));
  p.length = int(length);
  p.size = int(head);
  p.scale = float(scale);
  p.type = code_of(q.scalar_type());
  const auto& kernels = here.kernels();
  const OptionalTensor of_heads = as_operand(sinks);
  check_launch(of_heads ? kernels.attention_with_sinks(&p, pointer(of_heads), here.sms(), here.stream())
                        : kernels.attention(&p, here.sms(), here.stream()),
               "fp4_kernel_attention");
  return out;
}

}  // namespace

FP4_REGISTER(FP4_LIBRARY, FP4_DISPATCH_KEY, m) { m.impl("attention", FP4_BOX(attention)); }

}  // namespace fp4::cuda
