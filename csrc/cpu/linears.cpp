// Linear layers of few rows on the CPU, with weights in x's dtype or in fp8, the norm before them and the
// residual after.
//
// With few rows, torch's products of bfloat16 take longer than reading the weights. docs/kernels.md has the
// times.
#include <algorithm>
#include <cmath>

#include "common/boxed.h"
#include "cpu/parallel.h"
#include "cpu/step.h"

namespace fp4::cpu {
namespace {

// The rows of a weight in one unit of work, and the rows of x that a product takes at a time.
constexpr int64_t kUnitRows = 8, kBlockRows = 16;

// The most rows of x for which weights in fp8 are converted as they are multiplied. For more, a weight's row
// is converted once. So it is for odd sizes, because Kernels::dot_e4m3 takes only whole steps of K.
constexpr int64_t kConvertedRows = 4, kConvertedStep = 32;

bool converts_once(int64_t rows, int64_t k) { return rows > kConvertedRows || k % kConvertedStep != 0; }

// The operands of one call. x and addend are [rows, k].
struct Input {
  DType dtype;
  int64_t rows, k;
  const uint8_t *x, *addend, *norm_weight;  // addend and norm_weight may be null
  float eps;
  bool norm_in_float;

  int64_t stride() const { return padded_k(k); }
  int64_t row_bytes() const { return k * dtype_size(dtype); }
};

// Rounds `values` [k] to the dtype and back. Writes the rounded values to `to`, too, unless it is null.
void round_values(const Input& in, float* values, uint8_t* scratch, uint8_t* to) {
  const Kernels& kn = kernels();
  uint8_t* const rounded = to != nullptr ? to : scratch;
  kn.convert(values, in.k, rounded, in.dtype);
  kn.prepare_float(rounded, in.dtype, in.k, values);
}

// Writes row i of what is multiplied to `values`, as float32. `sum` and `normed` may be null.
void prepare_row(const Input& in, int64_t i, float* values, uint8_t* sum, uint8_t* normed) {
  const Kernels& kn = kernels();
  const int64_t at = i * in.row_bytes();
  const Buffer other(in.stride() * sizeof(float)), scratch(in.row_bytes());
  kn.prepare_float(in.x + at, in.dtype, in.k, values);
  if (in.addend != nullptr) {
    kn.prepare_float(in.addend + at, in.dtype, in.k, other.floats());
    kn.accumulate(other.floats(), 1.f, in.k, values);
    round_values(in, values, scratch.data(), sum == nullptr ? nullptr : sum + at);
  }
  if (in.norm_weight == nullptr) return;
  float squares;
  kn.dot(values, in.k, 1, values, DType::f32, in.k, &squares);
  const float factor = 1.f / std::sqrt(squares / float(in.k) + in.eps);
  for (int64_t j = 0; j < in.k; ++j) values[j] *= factor;
  if (!in.norm_in_float) round_values(in, values, scratch.data(), nullptr);
  kn.prepare_float(in.norm_weight, in.dtype, in.k, other.floats());
  for (int64_t j = 0; j < in.k; ++j) values[j] *= other.floats()[j];
  round_values(in, values, scratch.data(), normed == nullptr ? nullptr : normed + at);
}

struct Linear {
  int64_t n, first_unit;
  const uint8_t *weight, *bias, *residual;  // bias and residual may be null
  const float* scale;                       // null unless the weight is in fp8
  uint8_t* out;
};

// Stores up to kUnitRows results of one row: sums * scale + bias, rounded, + residual, rounded again.
void store_results(const Linear& linear, DType dtype, int64_t row, int64_t begin, int64_t count,
                   float* sums) {
  const Kernels& kn = kernels();
  const int64_t size = dtype_size(dtype), at = (row * linear.n + begin) * size;
  float other[padded_k(kUnitRows)];
  if (linear.scale != nullptr)
    for (int64_t n = 0; n < count; ++n) sums[n] *= linear.scale[begin + n];
  if (linear.bias != nullptr) {
    kn.prepare_float(linear.bias + begin * size, dtype, count, other);
    kn.accumulate(other, 1.f, count, sums);
  }
  kn.convert(sums, count, linear.out + at, dtype);
  if (linear.residual == nullptr) return;
  float values[padded_k(kUnitRows)];
  kn.prepare_float(linear.out + at, dtype, count, values);
  kn.prepare_float(linear.residual + at, dtype, count, other);
  kn.accumulate(other, 1.f, count, values);
  kn.convert(values, count, linear.out + at, dtype);
}

// `widened` has room for kUnitRows rows of float32, if weights in fp8 are converted once.
void multiply(const Input& in, const Linear& linear, int64_t unit, const float* rows, float* widened) {
  const Kernels& kn = kernels();
  const bool fp8 = linear.scale != nullptr, widen = fp8 && converts_once(in.rows, in.k);
  const int64_t begin = unit * kUnitRows, count = std::min(kUnitRows, linear.n - begin);
  const int64_t weight_bytes = fp8 ? in.k : in.row_bytes();
  const uint8_t* const weight = linear.weight + begin * weight_bytes;
  if (widen)
    for (int64_t n = 0; n < count; ++n) kn.widen_e4m3(weight + n * in.k, in.k, widened + n * in.stride());
  for (int64_t first = 0; first < in.rows; first += kBlockRows) {
    const int64_t block = std::min(kBlockRows, in.rows - first);
    const float* const x = rows + first * in.stride();
    float sums[kBlockRows][kUnitRows], column[kBlockRows];
    for (int64_t n = 0; n < count; ++n) {
      if (widen)
        kn.dot(x, in.stride(), int(block), widened + n * in.stride(), DType::f32, in.k, column);
      else if (fp8)
        kn.dot_e4m3(x, in.stride(), int(block), weight + n * weight_bytes, in.k, column);
      else
        kn.dot(x, in.stride(), int(block), weight + n * weight_bytes, in.dtype, in.k, column);
      for (int64_t m = 0; m < block; ++m) sums[m][n] = column[m];
    }
    for (int64_t m = 0; m < block; ++m) store_results(linear, in.dtype, first + m, begin, count, sums[m]);
  }
}

const uint8_t* bytes(const OptionalTensor& t) { return t ? data<uint8_t>(*t) : nullptr; }

}  // namespace

std::vector<Tensor> linears(const Tensor& x, const std::vector<Tensor>& weights,
                            const std::vector<OptionalTensor>& biases, const OptionalTensor& norm_weight,
                            double eps, const OptionalTensor& residual, const OptionalTensor& addend,
                            const std::optional<std::vector<Tensor>>& weight_scales, bool /*early*/,
                            bool keep_norm, bool norm_in_float) {
  const int64_t scales = weight_scales ? int64_t(weight_scales->size()) : 0;
  check_linears(x, norm_weight, residual, addend, int64_t(weights.size()), int64_t(biases.size()), keep_norm,
                norm_in_float, scales);
  for (size_t i = 0; i < weights.size(); ++i)
    check_linear(x, weights[i], biases[i], residual,
                 scales > 0 ? OptionalTensor((*weight_scales)[i]) : std::nullopt);
  const int64_t k = x.size(x.dim() - 1), rows = k > 0 ? x.numel() / k : x.numel() == 0 ? num_rows(x) : 0;
  const Tensor x_ = as_contiguous(x);
  const OptionalTensor added = as_contiguous(addend), norm = as_contiguous(norm_weight),
                       kept = as_contiguous(residual);
  const Input in{dtype_of(x.scalar_type()),
                 rows,
                 k,
                 data<uint8_t>(x_),
                 bytes(added),
                 bytes(norm),
                 float(eps),
                 norm_in_float};
  Shape shape(x.sizes().begin(), x.sizes().end());
  std::vector<Tensor> operands, made;
  std::vector<Linear> all;
  int64_t units = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    shape.back() = weights[i].size(0);
    made.push_back(empty(shape, x.scalar_type()));
    const auto keep = [&](const Tensor& t) { return data<uint8_t>(operands.emplace_back(as_contiguous(t))); };
    all.push_back({shape.back(), units, keep(weights[i]), biases[i] ? keep(*biases[i]) : nullptr, bytes(kept),
                   scales > 0 ? reinterpret_cast<const float*>(keep((*weight_scales)[i])) : nullptr,
                   mutable_data<uint8_t>(made.back())});
    units += (shape.back() + kUnitRows - 1) / kUnitRows;
  }
  shape.back() = k;
  uint8_t *normed = nullptr, *sum = nullptr;
  for (const auto& [wanted, to] : {std::pair(keep_norm, &normed), std::pair(addend.has_value(), &sum)})
    if (wanted) *to = mutable_data<uint8_t>(made.emplace_back(empty(shape, x.scalar_type())));
  const Buffer values(std::max<int64_t>(1, rows * in.stride()) * sizeof(float));
  const auto prepare = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) prepare_row(in, i, values.floats() + i * in.stride(), sum, normed);
  };
  const auto run = [&](int64_t begin, int64_t end) {
    size_t at = 0;
    const bool widen = scales > 0 && converts_once(rows, k);
    const Buffer widened(widen ? kUnitRows * in.stride() * sizeof(float) : 0);
    for (int64_t unit = begin; unit < end; ++unit) {
      while (at + 1 < all.size() && all[at + 1].first_unit <= unit) ++at;
      multiply(in, all[at], unit - all[at].first_unit, values.floats(), widened.floats());
    }
  };
  const int64_t unit_bytes = std::max<int64_t>(1, kUnitRows * (scales > 0 ? k : in.row_bytes()));
  run_phases({{rows, grain_for(k), prepare},
              {rows > 0 ? units : 0, std::max<int64_t>(1, fitted::grains::row_bytes / unit_bytes), run}});
  return made;
}

namespace {

Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                  const OptionalTensor& bias) {
  check_fp8_linear(x, weight, weight_scale, bias);
  return linears(x, {weight}, {bias}, {}, 0, {}, {}, {{weight_scale}}, false, false, false)[0];
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) {
  m.impl("linears", FP4_BOX(linears));
  m.impl("fp8_linear", FP4_BOX(fp8_linear));
}

}  // namespace fp4::cpu
