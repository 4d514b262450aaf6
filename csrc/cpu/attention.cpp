// Attention of few tokens over a cache on the CPU. Keys are divided into parts that threads share. Keys that
// are not seen are not read, and a part without any is skipped: a static cache is seldom full.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/boxed.h"
#include "cpu/parallel.h"
#include "cpu/step.h"

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

  int64_t rows() const { return sequences * tokens; }
  int64_t group() const { return heads / kv_heads; }
  int64_t parts() const { return (length + kPartKeys - 1) / kPartKeys; }
  // A part has, for each of its query heads, the sums of the values. The largest scores and the sums of the
  // weights follow.
  int64_t part_values() const { return group() * (value_size + 2); }
  // A part needs this number of float32 values while it is computed.
  int64_t scratch_values() const { return group() * (padded_k(size) + kPartKeys); }

  // Tells whether key i of a row is seen.
  bool sees(int64_t row, int64_t i) const { return mask == nullptr || row_mask(row)[i * mask_key]; }

  const bool* row_mask(int64_t row) const {
    return mask + row / tokens * mask_sequence + row % tokens * mask_token;
  }

  bool sees_any(int64_t row, int64_t part) const {
    const int64_t begin = part * kPartKeys, end = std::min(length, begin + kPartKeys);
    static constexpr char kZeros[kPartKeys] = {};
    if (mask != nullptr && mask_key == 1) return std::memcmp(row_mask(row) + begin, kZeros, end - begin) != 0;
    for (int64_t i = begin; i < end; ++i)
      if (sees(row, i)) return true;
    return false;
  }
};

// The parts of which some keys are seen.
struct Parts {
  struct Part {
    int64_t row, number;
  };
  std::vector<Part> all;
  std::vector<int64_t> first;  // of each row, and their number

  explicit Parts(const Problem& p) {
    for (int64_t row = 0; row < p.rows(); ++row) {
      first.push_back(all.size());
      for (int64_t i = 0; i < p.parts(); ++i)
        if (p.sees_any(row, i)) all.push_back({row, i});
    }
    first.push_back(all.size());
  }
};

// Computes one part for all query heads that share its keys.
void run_part(const Problem& p, const Parts::Part& part, int64_t kv_head, float* scratch, float* to) {
  const Kernels& kn = kernels();
  const int64_t group = p.group(), size = dtype_size(p.dtype), stride = padded_k(p.size);
  float *const top = to + group * p.value_size, *const total = top + group;
  float *const queries = scratch, *const scores = queries + group * stride;
  const int64_t head = part.row * p.heads + kv_head * group;
  for (int64_t g = 0; g < group; ++g)
    kn.prepare_float(p.q + (head + g) * p.size * size, p.dtype, p.size, queries + g * stride);
  const int64_t begin = part.number * kPartKeys, end = std::min(p.length, begin + kPartKeys);
  const int64_t cache = (part.row / p.tokens * p.kv_heads + kv_head) * p.length;
  int64_t seen[kPartKeys], count = 0;
  for (int64_t i = begin; i < end; ++i)
    if (p.sees(part.row, i)) seen[count++] = i;
  kn.dots(queries, stride, group, p.keys + cache * p.size * size, p.dtype, seen, count, p.size, scores,
          kPartKeys);
  for (int64_t g = 0; g < group; ++g)
    total[g] = kn.exponentiate(scores + g * kPartKeys, count, p.scale, &top[g]);
  kn.weighted_sums(p.values + cache * p.value_size * size, p.dtype, seen, scores, kPartKeys, group, count,
                   p.value_size, to);
}

// Adds up the parts of one query head, in their order. `sums` has room for a row of values.
void join_parts(const Problem& p, const Parts& parts, int64_t head, const float* made, float* sums) {
  const Kernels& kn = kernels();
  const int64_t group = p.group(), row = head / p.heads, g = head % group, kv_head = head % p.heads / group;
  const int64_t first = parts.first[row], count = parts.first[row + 1] - first;
  const auto part = [&](int64_t i) { return made + ((first + i) * p.kv_heads + kv_head) * p.part_values(); };
  const auto top = [&](int64_t i) { return part(i)[group * p.value_size + g]; };
  float highest = kNothing, sink = kNothing;
  if (p.sinks != nullptr) {
    float padded[padded_k(1)];
    kn.prepare_float(p.sinks + head % p.heads * dtype_size(p.dtype), p.dtype, 1, padded);
    highest = sink = padded[0];
  }
  for (int64_t i = 0; i < count; ++i) highest = top(i) > highest || top(i) != top(i) ? top(i) : highest;
  float total = sink == kNothing ? 0.f : std::exp(sink - highest);
  std::fill(sums, sums + p.value_size, 0.f);
  for (int64_t i = 0; i < count; ++i) {
    if (top(i) == kNothing) continue;  // all scores of the part are -infinity
    const float weight = std::exp(top(i) - highest);
    total += weight * part(i)[group * (p.value_size + 1) + g];
    kn.accumulate(part(i) + g * p.value_size, weight, p.value_size, sums);
  }
  if (total != 0.f)
    for (int64_t i = 0; i < p.value_size; ++i) sums[i] /= total;
  kn.convert(sums, p.value_size, p.out + head * p.value_size * dtype_size(p.dtype), p.dtype);
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
  const Parts parts(p);
  const int64_t units = parts.all.size() * p.kv_heads;
  const Buffer made(std::max<int64_t>(1, units * p.part_values()) * sizeof(float));
  const auto run = [&](int64_t begin, int64_t end) {
    const Buffer scratch(p.scratch_values() * sizeof(float));
    for (int64_t i = begin; i < end; ++i)
      run_part(p, parts.all[i / p.kv_heads], i % p.kv_heads, scratch.floats(),
               made.floats() + i * p.part_values());
  };
  const auto join = [&](int64_t begin, int64_t end) {
    const Buffer sums(padded_k(p.value_size) * sizeof(float));
    for (int64_t i = begin; i < end; ++i) join_parts(p, parts, i, made.floats(), sums.floats());
  };
  const auto grain = [](int64_t multiply_adds) {
    return std::max<int64_t>(1, fitted::grains::multiply_adds / std::max<int64_t>(1, multiply_adds));
  };
  run_phases({{units, grain(kPartKeys * p.group() * (p.size + p.value_size)), run},
              {p.rows() * p.heads, grain(p.value_size * (p.parts() + 1)), join}});
  return out;
}

Tensor cached_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                        const Tensor& sin, const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                        double eps, const Tensor& keys, const Tensor& values, const Tensor& start,
                        const OptionalTensor& mask, double scale, const OptionalTensor& sinks) {
  check_cached_attention(q, k, v, cos, sin, q_norm, k_norm, keys, values, start, mask, sinks);
  const Tensor rotated = update_cache(q, k, v, cos, sin, q_norm, k_norm, eps, keys, values, start);
  return attention(rotated, keys, values, mask, scale, sinks);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) {
  m.impl("attention", FP4_BOX(attention));
  m.impl("cached_attention", FP4_BOX(cached_attention));
}

}  // namespace fp4::cpu
