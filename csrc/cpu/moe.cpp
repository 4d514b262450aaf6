// The whole expert block on the CPU: out[t] = sum_j weight[t, j] * down(act(gate_up(x[t]))) over the experts
// of token t. x is prepared once for each token. The sum is always taken in the order of j.
#include <algorithm>
#include <cstring>

#include "common/boxed.h"
#include "cpu/tensors.h"

namespace fp4::cpu {
namespace {

// Tokens are processed in chunks whose gate and up rows, in float32, fit this size, or kMostTimes of it where
// experts would have few rows. Beyond 32 MB, glibc gets memory from the system for each call and returns it,
// and fresh pages took a tenth of a call's time.
constexpr int64_t kMaxBytes = fitted::memory::most_hidden_bytes;

// Each chunk unpacks all weights again. So a chunk may be up to kMostTimes as large, until experts have
// kChunkRows rows on average: 1024 tokens of 32 experts, 2 a token, took 0.8 of the time of two chunks. Only
// this shape on one CPU was timed; kMostTimes bounds the memory. At most, gate and up then take 96 MiB, and
// the rows after the activation and of the result come on top.
constexpr int64_t kChunkRows = fitted::chunks::rows_of_expert, kMostTimes = fitted::chunks::most_times;

// With at least this many hidden values, their activation is worth a parallel region. This many took 5 us on
// one thread of an Emerald Rapids, where a region of 16 threads begins and ends in 4 us.
constexpr int64_t kSharedActivations = fitted::threads::shared_activations;

struct Block {
  Weight up, down;
  Activation activation;
  AFormat a_format;
  int64_t top_k;
};

// The dtype that the second product reads if its input is not quantised. It is as exact as the output, so
// bfloat16 output can use bfloat16 kernels.
DType hidden_dtype(const Block& block, DType out) {
  return block.a_format == AFormat::none && out == DType::bf16 ? DType::bf16 : DType::f32;
}

Activations prepare(const Block& block, const void* x, DType dtype, int64_t rows, const Weight& weight) {
  return quantize_and_prepare(block.a_format, x, dtype, rows, weight.k, weight.scale);
}

void run_tokens(const Block& block, const void* x, DType x_dtype, int64_t tokens, const int64_t* ids,
                const float* weights, void* out, DType out_dtype) {
  const Kernels& kn = kernels();
  const int64_t hidden = block.down.n, inter = block.down.k;
  std::vector<int64_t> position;
  Rows rows = sort_by_expert(ids, tokens * block.top_k, block.up.groups, block.top_k, &position);
  const int64_t count = rows.a_index.size();
  const DType h_dtype = hidden_dtype(block, out_dtype);
  const int64_t h_bytes = inter * dtype_size(h_dtype);
  const int64_t width = block.activation.parts() * inter;
  const Buffer gate_up(count * width * sizeof(float)), h(count * h_bytes), y(count * hidden * sizeof(float));

  rows.out_index.clear();  // products stay in sorted order until they are combined
  Rows sorted;             // rows of the second product, which are in sorted order already
  sorted.segments = rows.segments;
  const Activations x_rows = prepare(block, x, x_dtype, tokens, block.up);
  const Activations h_rows = prepare(block, h.data(), h_dtype, count, block.down);
  Product up(x_rows, block.up, rows, gate_up.data(), DType::f32);
  Product down(h_rows, block.down, sorted, y.data(), DType::f32);
  const Pieces pieces = h_rows.pieces;
  // Computes pieces of rows for the second product. The same thread then prepares each piece for that
  // product.
  const auto activate = [&](int64_t begin, int64_t end) {
    const Buffer row(pieces.size * sizeof(float));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t from = pieces.begin(i), to = pieces.end(i);
      uint8_t* const at = h.data() + pieces.row(i) * h_bytes + from * dtype_size(h_dtype);
      float* const exact = h_dtype == DType::f32 ? reinterpret_cast<float*>(at) : row.floats();
      kn.activate(gate_up.floats() + pieces.row(i) * width, block.activation, inter, from, to, exact);
      if (h_dtype != DType::f32) kn.convert(exact, to - from, at, h_dtype);
      if (h_rows.fill.run != nullptr) h_rows.fill.run(i, i + 1);
    }
  };
  const auto combine = [&](int64_t begin, int64_t end) {
    const Buffer sum(hidden * sizeof(float));
    for (int64_t t = begin; t < end; ++t) {
      std::memset(sum.data(), 0, hidden * sizeof(float));
      for (int64_t i = t * block.top_k; i < (t + 1) * block.top_k; ++i)
        if (position[i] >= 0)
          kn.accumulate(y.floats() + position[i] * hidden, weights[i], hidden, sum.floats());
      kn.convert(sum.floats(), hidden, static_cast<uint8_t*>(out) + t * hidden * dtype_size(out_dtype),
                 out_dtype);
    }
  };
  const int64_t activations = count * pieces.each();
  run_phases({x_rows.fill,
              up.pack(),
              up.multiply(),
              {activations, activations * pieces.size < kSharedActivations ? activations : 1, activate},
              down.pack(),
              down.multiply(),
              {tokens, std::max<int64_t>(1, fitted::grains::combined_values / (hidden + 1)), combine}});
}

Tensor moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13,
           const Tensor& w13_scale, const OptionalTensor& w13_global_scale, const Tensor& w2,
           const Tensor& w2_scale, const OptionalTensor& w2_global_scale, const OptionalTensor& w13_bias,
           const OptionalTensor& w2_bias, const std::string& format, const std::string& layout,
           const std::string& activation, const std::string& a_format, std::optional<ScalarType> out_dtype) {
  const Experts shape = check_moe(x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale,
                                  w2_global_scale, format, layout, activation, a_format, w13_bias, w2_bias);
  refuse_layout("moe", *shape.up.layout);
  const ScalarType dtype = resolve_out_dtype(x, out_dtype);
  const int64_t tokens = x.size(0), hidden = shape.down.n, top_k = topk_ids.size(1);
  const Tensor out = empty({tokens, hidden}, dtype);
  if (tokens == 0) return out;

  const WeightOperand up(shape.up, w13, w13_scale, w13_global_scale, w13_bias);
  const WeightOperand down(shape.down, w2, w2_scale, w2_global_scale, w2_bias);
  const Block block{up.view(), down.view(), check_activation(activation), a_format_of(a_format), top_k};
  const Tensor rows = as_contiguous(x), route = as_contiguous(topk_weights);
  const DType x_dtype = dtype_of(rows.scalar_type()), out_kind = dtype_of(dtype);
  const std::vector<int64_t> ids = indices(topk_ids);
  std::vector<float> weights(padded_k(tokens * top_k));
  kernels().prepare_float(route.data_ptr(), dtype_of(route.scalar_type()), tokens * top_k, weights.data());

  const int64_t row_bytes = shape.up.n * int64_t(sizeof(float)), bytes = tokens * top_k * row_bytes;
  const int64_t wanted = kChunkRows * block.up.groups * row_bytes;
  const int64_t most = std::clamp(wanted, kMaxBytes, kMostTimes * kMaxBytes);
  const int64_t chunk = ceil_div(tokens, std::max<int64_t>(1, ceil_div(bytes, most)));
  for (int64_t t = 0; t < tokens; t += chunk)
    run_tokens(block, data<uint8_t>(rows) + t * shape.up.k * dtype_size(x_dtype), x_dtype,
               std::min(chunk, tokens - t), ids.data() + t * top_k, weights.data() + t * top_k,
               mutable_data<uint8_t>(out) + t * hidden * dtype_size(out_kind), out_kind);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) { m.impl("moe", FP4_BOX(moe)); }

}  // namespace fp4::cpu
