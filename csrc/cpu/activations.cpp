#include "cpu/activations.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <vector>

#include "cpu/quantize.h"

namespace fp4::cpu {
namespace {

// A thread should get this many bytes to convert before it is worth waking.
constexpr int64_t kBytesPerThread = 1 << 15;

// Rows of float32, padded with zeros; fill(i, row) writes the k values of row i.
template <typename F>
Activations float_rows(int64_t rows, int64_t k, const F& fill) {
  const int64_t kp = padded_k(k), stride = kp * sizeof(float);
  Buffer owned(rows * stride);
  const auto arrange = kernels().arrange_float;
  torch::stable::parallel_for(0, rows, rows_per_thread(stride), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* row = owned.floats() + i * kp;
      fill(i, row);
      std::fill(row + k, row + kp, 0.f);
      if (arrange != nullptr) arrange(row, kp);
    }
  });
  return {RowKind::floating, owned.data(), stride, std::move(owned)};
}

// Rows for the int8 kernels; codes(i, scratch, &scales) gives the codes and scales of row i.
template <typename F>
Activations int8_rows(int64_t rows, int64_t k, Scale weight, const F& prepare) {
  const int64_t kp = padded_k(k), stride = (Int8Row::bytes(kp, step_of(weight)) + 63) / 64 * 64;
  Buffer owned(rows * stride);
  torch::stable::parallel_for(0, rows, rows_per_thread(k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) prepare(i, owned.data() + i * stride);
  });
  return {RowKind::int8, owned.data(), stride, std::move(owned)};
}

// One row of x to FP4 and back: a matrix of its own, so that no row depends on another. A row with a NaN or
// an infinity, which have no code, becomes NaN.
void round_trip_packed(const Format& format, const void* x, DType dtype, int64_t k, float* row) {
  bool finite = true;
  const float amax = max_magnitude(x, dtype, k, &finite);
  if (!finite) return std::fill(row, row + k, std::numeric_limits<float>::quiet_NaN()), void();
  const float factor = format.has_global_scale ? global_scale_for(amax) : 1.f;
  std::vector<uint8_t> codes(k / 2), scales((k + format.block - 1) / format.block);
  quantize_row(format, x, dtype, k, factor, codes.data(), scales.data());
  dequantize_row_to_float(format, codes.data(), scales.data(), k, factor, row);
}

}  // namespace

int64_t rows_per_thread(int64_t row_bytes) { return std::max<int64_t>(1, kBytesPerThread / (row_bytes + 1)); }

Buffer::Buffer(int64_t bytes) {
  void* p = std::aligned_alloc(64, (std::max<int64_t>(bytes, 1) + 63) / 64 * 64);
  if (p == nullptr) throw std::bad_alloc();
  data_.reset(static_cast<uint8_t*>(p));
}

void Buffer::Free::operator()(uint8_t* p) const { std::free(p); }

Activations prepare_float(const void* x, DType dtype, int64_t rows, int64_t k) {
  const Kernels& kn = kernels();
  if (dtype == DType::f32 && k == padded_k(k) && kn.arrange_float == nullptr)
    return {RowKind::floating, static_cast<const uint8_t*>(x), k * int64_t(sizeof(float)), Buffer()};
  return float_rows(rows, k, [&](int64_t i, float* row) {
    kn.prepare_float(static_cast<const uint8_t*>(x) + i * k * dtype_size(dtype), dtype, k, row);
  });
}

Activations prepare_floating(const void* x, DType dtype, int64_t rows, int64_t k) {
  const Bf16Kernels* bf16 = kernels().bf16;
  if (bf16 == nullptr || dtype != DType::bf16) return prepare_float(x, dtype, rows, k);
  const int64_t stride = (padded_k(k) * 2 + 63) / 64 * 64;
  Buffer owned(rows * stride);
  torch::stable::parallel_for(0, rows, rows_per_thread(stride), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      bf16->prepare(static_cast<const uint16_t*>(x) + i * k, k,
                    reinterpret_cast<uint16_t*>(owned.data() + i * stride));
  });
  return {RowKind::bf16, owned.data(), stride, std::move(owned)};
}

Activations prepare_int8(const int8_t* codes, const float* scales, int64_t rows, int64_t k, Scale weight) {
  const Kernels& kn = kernels();
  const int64_t blocks = padded_k(k) / kInt8Block;
  return int8_rows(rows, k, weight, [&](int64_t i, uint8_t* row) {
    kn.prepare_int8(codes + i * k, scales + i * blocks, k, weight, row);
  });
}

Activations prepare_int8_as_float(const int8_t* codes, const float* scales, int64_t rows, int64_t k) {
  const int64_t blocks = padded_k(k) / kInt8Block;
  return float_rows(rows, k, [&](int64_t i, float* row) {
    for (int64_t j = 0; j < k; ++j) row[j] = codes[i * k + j] * scales[i * blocks + j / kInt8Block];
  });
}

Activations prepare_fp8(const uint8_t* codes, const float* scales, int64_t rows, int64_t k) {
  return float_rows(rows, k,
                    [&](int64_t i, float* row) { dequantize_row_fp8(codes + i * k, k, scales[i], row); });
}

Activations prepare_packed(const Format& format, const uint8_t* codes, const uint8_t* scales,
                           const float* factors, int64_t rows_per_factor, int64_t rows, int64_t k) {
  const int64_t blocks = (k + format.block - 1) / format.block;
  return float_rows(rows, k, [&](int64_t i, float* row) {
    const float factor = factors != nullptr ? factors[i / rows_per_factor] : 1.f;
    dequantize_row_to_float(format, codes + i * (k / 2), scales + i * blocks, k, factor, row);
  });
}

Activations quantize_and_prepare(AFormat a_format, const void* x, DType dtype, int64_t rows, int64_t k,
                                 Scale weight) {
  const Kernels& kn = kernels();
  const auto row_of = [&](int64_t i) { return static_cast<const uint8_t*>(x) + i * k * dtype_size(dtype); };
  switch (a_format) {
    case AFormat::none:
      return prepare_floating(x, dtype, rows, k);
    case AFormat::automatic:  // the fast path here
    case AFormat::int8:
      return int8_rows(rows, k, weight, [&](int64_t i, uint8_t* row) {
        std::vector<int8_t> codes(padded_k(k));
        std::vector<float> scales(padded_k(k) / kInt8Block);
        kn.quantize_int8(row_of(i), dtype, k, codes.data(), scales.data());
        kn.prepare_int8(codes.data(), scales.data(), k, weight, row);
      });
    case AFormat::fp8:
      return float_rows(rows, k, [&](int64_t i, float* row) {
        std::vector<uint8_t> codes(k);
        const float scale = quantize_row_fp8(row_of(i), dtype, k, codes.data());
        dequantize_row_fp8(codes.data(), k, scale, row);
      });
    default:  // the name of a format
      break;
  }
  const Format& format = entry(kFormats, kAFormatNames[int(a_format)]);
  return float_rows(rows, k,
                    [&](int64_t i, float* row) { round_trip_packed(format, row_of(i), dtype, k, row); });
}

}  // namespace fp4::cpu
