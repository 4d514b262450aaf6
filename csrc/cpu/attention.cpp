// Attention of few tokens over a cache on the CPU. Keys are divided into parts that threads share, and keys
// that are not seen are not read.
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/boxed.h"
#include "cpu/parallel.h"
#include "cpu/tensors.h"

namespace fp4::cpu {
namespace {

// The keys of a part. It does not depend on the number of threads, so the order of sums does not either.
constexpr int64_t kPartKeys = 64;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Problem {
  DType dtype;
  int64_t sequences, tokens, heads, size, kv_heads, length, value_size;
  const uint8_t *q, *keys, *values, *sinks;
  const bool* mask;
  int64_t mask_sequence, mask_token, mask_key;  // strides
  float scale;
  uint8_t* out;

  int64_t group() const { return heads / kv_heads; }
  int64_t parts() const { return (length + kPartKeys - 1) / kPartKeys; }
  // A part holds, for each query head, the sums of the values. The largest scores and the sums of the weights
  // follow.
  int64_t part_values() const { return group() * (value_size + 2); }
};

// Computes one part of the keys for all query heads that share them.
void run_part(const Problem& p, int64_t unit, float* to) {
  const Kernels& kn = kernels();
  const int64_t part = unit % p.parts(), kv_head = unit / p.parts() % p.kv_heads;
  const int64_t token = unit / p.parts() / p.kv_heads % p.tokens,
                sequence = unit / p.parts() / p.kv_heads / p.tokens;
  const int64_t group = p.group(), size = dtype_size(p.dtype), stride = padded_k(p.size);
  float *const top = to + group * p.value_size, *const total = top + group;
  const Buffer queries(group * stride * sizeof(float)), scores(kPartKeys * group * sizeof(float));
  for (int64_t g = 0; g < group; ++g) {
    const int64_t head = (sequence * p.tokens + token) * p.heads + kv_head * group + g;
    kn.prepare_float(p.q + head * p.size * size, p.dtype, p.size, queries.floats() + g * stride);
  }
  const int64_t begin = part * kPartKeys, end = std::min(p.length, begin + kPartKeys);
  const int64_t cache = (sequence * p.kv_heads + kv_head) * p.length;
  const bool* mask = p.mask == nullptr ? nullptr : p.mask + sequence * p.mask_sequence + token * p.mask_token;
  int64_t seen[kPartKeys], count = 0;
  for (int64_t i = begin; i < end; ++i)
    if (mask == nullptr || mask[i * p.mask_key]) seen[count++] = i;
  const Buffer column(group * sizeof(float));
  std::fill(top, total, kNothing);
  for (int64_t j = 0; j < count; ++j) {
    kn.dot(queries.floats(), stride, int(group), p.keys + (cache + seen[j]) * p.size * size, p.dtype, p.size,
           column.floats());
    for (int64_t g = 0; g < group; ++g) {
      const float score = column.floats()[g] * p.scale;
      scores.floats()[g * kPartKeys + j] = score;
      top[g] = score > top[g] || score != score ? score : top[g];  // a NaN stays one
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    float* const weights = scores.floats() + g * kPartKeys;
    total[g] = kn.exponentiate(weights, count, top[g]);
    kn.weighted_sum(p.values + cache * p.value_size * size, p.dtype, seen, weights, count, p.value_size,
                    to + g * p.value_size);
  }
}

// Adds up the parts of one query head, in their order.
void join_parts(const Problem& p, int64_t row, const float* parts) {
  const Kernels& kn = kernels();
  const int64_t group = p.group(), head = row % p.heads, g = head % group;
  const int64_t first = (row / p.heads * p.kv_heads + head / group) * p.parts();
  const auto part = [&](int64_t i) { return parts + (first + i) * p.part_values(); };
  const auto top = [&](int64_t i) { return part(i)[group * p.value_size + g]; };
  float highest = kNothing, sink = kNothing;
  if (p.sinks != nullptr) {
    float padded[padded_k(1)];
    kn.prepare_float(p.sinks + head * dtype_size(p.dtype), p.dtype, 1, padded);
    highest = sink = padded[0];
  }
  for (int64_t i = 0; i < p.parts(); ++i) highest = top(i) > highest || top(i) != top(i) ? top(i) : highest;
  float total = sink == kNothing ? 0.f : std::exp(sink - highest);
  const Buffer sums(padded_k(p.value_size) * sizeof(float));
  std::fill(sums.floats(), sums.floats() + p.value_size, 0.f);
  for (int64_t i = 0; i < p.parts(); ++i) {
    if (top(i) == kNothing) continue;  // no key of the part is seen
    const float weight = std::exp(top(i) - highest);
    total += weight * part(i)[group * (p.value_size + 1) + g];
    kn.accumulate(part(i) + g * p.value_size, weight, p.value_size, sums.floats());
  }
  if (total != 0.f)
    for (int64_t i = 0; i < p.value_size; ++i) sums.floats()[i] /= total;
  kn.convert(sums.floats(), p.value_size, p.out + row * p.value_size * dtype_size(p.dtype), p.dtype);
}

Tensor attention(const Tensor& q, const Tensor& keys, const Tensor& values, const OptionalTensor& mask,
                 double scale, const OptionalTensor& sinks) {
  check_attention(q, keys, values, mask, sinks);
  const Tensor q_ = as_contiguous(q), keys_ = as_contiguous(keys), values_ = as_contiguous(values);
  const OptionalTensor sinks_ = as_contiguous(sinks);
  const Tensor out = empty({q.size(0), q.size(1), q.size(2), values.size(3)}, q.scalar_type());
  const auto stride = [&](int64_t dim) { return mask && mask->size(dim) > 1 ? mask->stride(dim) : 0; };
  const Problem p{.dtype = dtype_of(q.scalar_type()),
                  .sequences = q.size(0),
                  .tokens = q.size(1),
                  .heads = q.size(2),
                  .size = q.size(3),
                  .kv_heads = keys.size(1),
                  .length = keys.size(2),
                  .value_size = values.size(3),
                  .q = data<uint8_t>(q_),
                  .keys = data<uint8_t>(keys_),
                  .values = data<uint8_t>(values_),
                  .sinks = sinks_ ? data<uint8_t>(*sinks_) : nullptr,
                  .mask = mask ? data<bool>(*mask) : nullptr,
                  .mask_sequence = stride(0),
                  .mask_token = stride(2),
                  .mask_key = stride(3),
                  .scale = float(scale),
                  .out = mutable_data<uint8_t>(out)};
  const int64_t units = p.sequences * p.tokens * p.kv_heads * p.parts();
  const Buffer parts(std::max<int64_t>(1, units * p.part_values()) * sizeof(float));
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run_part(p, i, parts.floats() + i * p.part_values());
  };
  const auto join = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) join_parts(p, i, parts.floats());
  };
  const auto grain = [](int64_t multiply_adds) {
    return std::max<int64_t>(1, fitted::grains::multiply_adds / std::max<int64_t>(1, multiply_adds));
  };
  run_phases({{units, grain(kPartKeys * p.group() * (p.size + p.value_size)), run},
              {p.sequences * p.tokens * p.heads, grain(p.value_size * (p.parts() + 1)), join}});
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) { m.impl("attention", FP4_BOX(attention)); }

}  // namespace fp4::cpu
