// Every operator schema of fp4_ops, in one place. All but update_cache and cached_attention are
// functional: they change no argument.
//
// Shapes: a [M, K] activations, b [G, N, K/2] (or [N, K/2]) packed weights, b_scale [G, N, ceil(K/block)],
// b_global_scale float32 [G] (or []). `format` names the weight format, `layout` the order of the bytes
// inside b and b_scale ("plain", or a kernel layout made by prepack). `a_format` names the format of packed
// activations; for others it is '' (in moe: what activations are quantised to). Meta kernels: meta/fakes.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(fp4, m) {
  // The kernel family this process uses on CPUs, as in "scalar", "avx512", "neon_i8mm"
  // (csrc/cpu/dispatch.cpp).
  m.def("cpu_capability() -> str");
  m.def("cpu_threads() -> int");

  // --- formats ---
  m.def("quantize(Tensor x, str format, Tensor? global_scale=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "dequantize(Tensor packed, Tensor block_scale, Tensor? global_scale, str format, ScalarType dtype, *, "
      "str layout='plain') -> Tensor");
  m.def("quantize_int8(Tensor x) -> (Tensor, Tensor)");
  m.def("quantize_fp8(Tensor x, *, str layout='plain') -> (Tensor, Tensor)");
  m.def(
      "prepack(Tensor packed, Tensor block_scale, Tensor? global_scale, str format, str layout) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "unpack(Tensor packed, Tensor block_scale, Tensor? global_scale, str format, str layout) -> "
      "(Tensor, Tensor, Tensor)");

  // --- matrix products ---
  m.def(
      "mm(Tensor a, Tensor b, Tensor b_scale, Tensor? b_global_scale, "
      "Tensor? a_scale=None, Tensor? bias=None, Tensor? a_global_scale=None, *, str format, "
      "str layout='plain', str a_format='', ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "grouped_mm(Tensor a, Tensor b, Tensor b_scale, Tensor? b_global_scale, Tensor offs, "
      "Tensor? a_scale=None, Tensor? bias=None, Tensor? a_global_scale=None, *, str format, "
      "str layout='plain', str a_format='', ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "grouped_mm_masked(Tensor a, Tensor b, Tensor b_scale, Tensor? b_global_scale, Tensor masked_m, "
      "Tensor? a_scale=None, Tensor? bias=None, Tensor? a_global_scale=None, *, str format, "
      "str layout='plain', str a_format='', ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "indexed_mm(Tensor a, Tensor b, Tensor b_scale, Tensor? b_global_scale, Tensor expert_ids, "
      "Tensor? a_scale=None, Tensor? bias=None, Tensor? a_global_scale=None, *, str format, "
      "str layout='plain', str a_format='', ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "grouped_mm_k(Tensor a, Tensor b, Tensor b_scale, Tensor? b_global_scale, Tensor offs, "
      "Tensor? a_scale=None, Tensor? a_global_scale=None, *, str format, str layout='plain', "
      "str a_format='', ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "packed_linears(Tensor a, Tensor[] b, Tensor[] b_scale, Tensor?[] b_global_scale, Tensor?[] bias, *, "
      "str format, str layout='plain', str a_format='none', ScalarType? out_dtype=None) -> Tensor[]");
  m.def(
      "moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale, "
      "Tensor? w13_global_scale, Tensor w2, Tensor w2_scale, Tensor? w2_global_scale, "
      "Tensor? w13_bias=None, Tensor? w2_bias=None, *, str format, str layout='plain', "
      "str activation='silu', str a_format='none', ScalarType? out_dtype=None) -> Tensor");
  // `moe` with weights in host memory, which the GPU can read, and with GPU memory for some experts. `slots`
  // uint8 is this memory (meta/slot_checks.py defines how it is divided), and `state` int32 [E + S + 3] says
  // which experts it holds. Both only cache the weights: they have an effect on the time of a call, but never
  // on its result.
  m.def(
      "moe_slots(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale, "
      "Tensor? w13_global_scale, Tensor w2, Tensor w2_scale, Tensor? w2_global_scale, "
      "Tensor? w13_bias, Tensor? w2_bias, Tensor slots, Tensor state, *, str format, str layout='plain', "
      "str activation='silu', str a_format='none', ScalarType? out_dtype=None) -> Tensor");
  // The gradients of `moe` for x and topk_weights, given that of its result
  // (fp4_ops/runtime/input_gradients.py).
  m.def(
      "moe_input_grads(Tensor grad, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, "
      "Tensor w13_scale, Tensor? w13_global_scale, Tensor w2, Tensor w2_scale, Tensor? w2_global_scale, "
      "Tensor? w13_bias=None, Tensor? w2_bias=None, *, str format, str layout='plain', "
      "str activation='silu') -> (Tensor, Tensor)");

  // --- a decoding step beside the experts ---
  m.def(
      "linears(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor? norm_weight, float eps, "
      "Tensor? residual, Tensor? addend=None, Tensor[]? weight_scales=None, *, bool early=False, "
      "bool keep_norm=False, bool norm_in_float=False) -> Tensor[]");
  // One product of linears with a weight in fp8, without lists: Inductor's C++ wrapper cannot pass them.
  m.def("fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None) -> Tensor");
  m.def(
      "update_cache(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, "
      "float eps, Tensor(a!) keys, Tensor(b!) values, Tensor start) -> Tensor");
  m.def(
      "attention(Tensor q, Tensor keys, Tensor values, Tensor? mask, float scale, Tensor? sinks=None) -> "
      "Tensor");
  // update_cache of one token of each sequence, then attention of the result over these caches.
  m.def(
      "cached_attention(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? "
      "k_norm, "
      "float eps, Tensor(a!) keys, Tensor(b!) values, Tensor start, Tensor? mask, float scale, "
      "Tensor? sinks=None) -> Tensor");
  m.def(
      "top_experts(Tensor logits, int k, *, bool softmax=False, bool normalize=False, "
      "ScalarType? out_dtype=None) -> (Tensor, Tensor)");
  m.def(
      "router(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, float eps, Tensor? addend, int k, "
      "*, bool softmax=False, bool normalize=False, bool early=False, bool keep_norm=False, "
      "bool norm_in_float=False, ScalarType? out_dtype=None) -> Tensor[]");

  // --- several processes (fp4_ops/distributed/) ---
  m.def(
      "moe_ep(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale, "
      "Tensor? w13_global_scale, Tensor w2, Tensor w2_scale, Tensor? w2_global_scale, "
      "Tensor? w13_bias=None, Tensor? w2_bias=None, *, SymInt num_experts, str tokens, str group_name, "
      "SymInt? max_tokens=None, str format, str layout='plain', str activation='silu', "
      "str a_format='none', ScalarType? out_dtype=None) -> Tensor");
  m.def("all_reduce(Tensor x, *, str group_name) -> Tensor");

  // --- layouts of the rows ---
  m.def("offs_to_m_indices(Tensor offs, SymInt m) -> Tensor");
  m.def("m_indices_to_offs(Tensor m_indices, SymInt num_groups) -> Tensor");
  m.def("to_masked(Tensor a, Tensor offs, SymInt max_m) -> (Tensor, Tensor)");
  m.def("from_masked(Tensor a, Tensor masked_m, SymInt m) -> (Tensor, Tensor)");
}
