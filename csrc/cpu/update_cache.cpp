// Rotary position embedding of queries and keys on the CPU, with the RMS norm of each head before it, and the
// write of keys and values to a cache. A head is a unit of work. Each operation rounds where a model rounds.
#include <algorithm>

#include "common/boxed.h"
#include "cpu/parallel.h"
#include "cpu/step.h"

namespace fp4::cpu {
namespace {

// A tensor of heads with four dimensions. The values of a head lie side by side.
struct Heads {
  uint8_t* data;
  int64_t strides[3];  // in bytes

  explicit Heads(const Tensor& t) : data(mutable_data<uint8_t>(t)) {
    for (int i = 0; i < 3; ++i) strides[i] = t.stride(i) * dtype_size(dtype_of(t.scalar_type()));
  }
  uint8_t* at(int64_t i, int64_t j, int64_t k) const {
    return data + i * strides[0] + j * strides[1] + k * strides[2];
  }
};

bool has_whole_heads(const Tensor& t) { return t.stride(3) == 1 || t.size(3) == 1; }

Tensor with_whole_heads(const Tensor& t) { return has_whole_heads(t) ? t : torch::stable::contiguous(t); }

// Copies a cache to the one that was given, unless it is that one.
void write_back(const Tensor& from, Tensor to) {
  if (!has_whole_heads(to)) torch::stable::copy_(to, from);
}

struct Problem {
  DType dtype;
  int64_t sequences, tokens, q_heads, kv_heads, size, value_size;
  Heads q, k, v;
  const uint8_t *cos, *sin;
  int64_t angles;                  // bytes between those of two sequences; 0 if all share them
  const uint8_t *q_norm, *k_norm;  // may be null
  float eps;
  int64_t place;  // of the first token
  Heads keys, values, out;

  int64_t heads() const { return q_heads + 2 * kv_heads; }
};

void run_head(const Problem& p, int64_t unit, float* scratch) {
  const int64_t head = unit % p.heads(), token = unit / p.heads() % p.tokens,
                sequence = unit / p.heads() / p.tokens;
  const int64_t place = p.place + token, row_bytes = p.size * dtype_size(p.dtype);
  const int64_t angle = sequence * p.angles + token * row_bytes;
  const auto rotate = [&](const uint8_t* x, const uint8_t* norm, uint8_t* to) {
    kernels().rotate(x, norm, p.eps, p.cos + angle, p.sin + angle, p.dtype, p.size, scratch, to);
  };
  if (head < p.q_heads) {
    rotate(p.q.at(sequence, token, head), p.q_norm, p.out.at(sequence, token, head));
    return;
  }
  const int64_t kv_head = (head - p.q_heads) % p.kv_heads;
  if (head < p.q_heads + p.kv_heads)
    rotate(p.k.at(sequence, token, kv_head), p.k_norm, p.keys.at(sequence, kv_head, place));
  else
    copy_bytes(p.values.at(sequence, kv_head, place), p.v.at(sequence, token, kv_head),
               p.value_size * dtype_size(p.dtype));
}

}  // namespace

Tensor update_cache(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                    const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps,
                    const Tensor& keys, const Tensor& values, const Tensor& start) {
  check_update_cache(q, k, v, cos, sin, q_norm, k_norm, keys, values, start);
  const int64_t tokens = q.size(1), room = keys.size(2), place = indices(start)[0];
  // Nothing has been written yet, so an error leaves the caches as they were.
  if (place < 0 || place > room - tokens)
    fail("start is ", place, "; keys has room for ", room, " tokens, and q has ", tokens);
  const Tensor keys_ = with_whole_heads(keys), values_ = with_whole_heads(values);
  const Tensor q_ = with_whole_heads(q), k_ = with_whole_heads(k), v_ = with_whole_heads(v);
  const Tensor cos_ = as_contiguous(cos), sin_ = as_contiguous(sin);
  const OptionalTensor q_norm_ = as_contiguous(q_norm), k_norm_ = as_contiguous(k_norm);
  const Tensor out = empty({q.size(0), tokens, q.size(2), q.size(3)}, q.scalar_type());
  const DType dtype = dtype_of(q.scalar_type());
  const Problem p{.dtype = dtype,
                  .sequences = q.size(0),
                  .tokens = tokens,
                  .q_heads = q.size(2),
                  .kv_heads = k.size(2),
                  .size = q.size(3),
                  .value_size = v.size(3),
                  .q = Heads(q_),
                  .k = Heads(k_),
                  .v = Heads(v_),
                  .cos = data<uint8_t>(cos_),
                  .sin = data<uint8_t>(sin_),
                  .angles = cos.size(0) == 1 ? 0 : tokens * q.size(3) * dtype_size(dtype),
                  .q_norm = q_norm_ ? data<uint8_t>(*q_norm_) : nullptr,
                  .k_norm = k_norm_ ? data<uint8_t>(*k_norm_) : nullptr,
                  .eps = float(eps),
                  .place = place,
                  .keys = Heads(keys_),
                  .values = Heads(values_),
                  .out = Heads(out)};
  const auto run = [&](int64_t begin, int64_t end) {
    const Buffer scratch(padded_k(p.size) * sizeof(float));
    for (int64_t i = begin; i < end; ++i) run_head(p, i, scratch.floats());
  };
  const int64_t units = p.sequences * p.tokens * p.heads();
  // To wake threads takes as long as the work of many heads. Once they are awake, all of them share it.
  const bool alone = units * (p.size + 1) <= fitted::grains::combined_values;
  run_phases({{units, alone ? units : 1, run}});
  write_back(keys_, keys);
  write_back(values_, values);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) { m.impl("update_cache", FP4_BOX(update_cache)); }

}  // namespace fp4::cpu
