#include "cpu/activations.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <vector>

#include "cpu/quantize.h"

namespace fp4::cpu {
namespace {

// make(i, begin, end, row) writes the values [begin, end) of row i. It is kept until the phase runs, so it
// must hold what it needs by value.
template <typename F>
Activations owned_rows(RowKind kind, int64_t rows, int64_t stride, int64_t work, Pieces pieces,
                       const F& make) {
  Buffer owned(rows * stride);
  uint8_t* to = owned.data();
  const int64_t each = pieces.each();
  Phase fill{rows * each, rows_per_thread(work) * each, [=](int64_t begin, int64_t end) {
               for (int64_t i = begin; i < end; ++i) {
                 const int64_t row = pieces.row(i);
                 make(row, pieces.begin(i), pieces.end(i), to + row * stride);
               }
             }};
  return {kind, to, stride, std::move(owned), std::move(fill), pieces};
}

// Float32 rows, padded with zeros. fill(i, begin, end, to) writes the values [begin, end) of row i.
template <typename F>
Activations float_rows(int64_t rows, int64_t k, Pieces pieces, const F& fill) {
  const int64_t kp = padded_k(k), stride = kp * sizeof(float);
  const auto arrange = kernels().arrange_float;
  return owned_rows(RowKind::floating, rows, stride, stride, pieces,
                    [=](int64_t i, int64_t begin, int64_t end, uint8_t* to) {
                      float* row = reinterpret_cast<float*>(to) + begin;
                      const int64_t count = end - begin, padded = padded_k(count);
                      fill(i, begin, end, row);
                      std::fill(row + count, row + padded, 0.f);
                      if (arrange != nullptr) arrange(row, padded);
                    });
}

// Float32 rows that must be filled as a whole, because their values depend on each other.
template <typename F>
Activations whole_float_rows(int64_t rows, int64_t k, const F& fill) {
  return float_rows(rows, k, {k, std::max<int64_t>(k, 1)},
                    [=](int64_t i, int64_t, int64_t, float* row) { fill(i, row); });
}

// Rows for the int8 kernels.
template <typename F>
Activations int8_rows(int64_t rows, int64_t k, Scale weight, const F& prepare) {
  const int64_t stride = (Int8Row::bytes(padded_k(k), step_of(weight)) + 63) / 64 * 64;
  return owned_rows(RowKind::int8, rows, stride, k, {k, Pieces::kPiece}, prepare);
}

// Quantises one row of x to FP4 and back. The row is a matrix of its own, so no row depends on another. A row
// with a NaN or an infinity, which have no code, becomes NaN.
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

int64_t rows_per_thread(int64_t row_bytes) {
  return std::max<int64_t>(1, fitted::grains::row_bytes / (row_bytes + 1));
}

Buffer::Buffer(int64_t bytes) {
  void* p = std::aligned_alloc(64, (std::max<int64_t>(bytes, 1) + 63) / 64 * 64);
  if (p == nullptr) throw std::bad_alloc();
  data_.reset(static_cast<uint8_t*>(p));
}

void Buffer::Free::operator()(uint8_t* p) const { std::free(p); }

Activations prepare_float(const void* x, DType dtype, int64_t rows, int64_t k) {
  const Kernels& kn = kernels();
  if (dtype == DType::f32 && k == padded_k(k) && kn.arrange_float == nullptr)
    return {RowKind::floating,  static_cast<const uint8_t*>(x), k * int64_t(sizeof(float)), Buffer(), Phase(),
            {k, Pieces::kPiece}};
  return float_rows(rows, k, {k, Pieces::kPiece}, [=, &kn](int64_t i, int64_t begin, int64_t end, float* to) {
    kn.prepare_float(static_cast<const uint8_t*>(x) + (i * k + begin) * dtype_size(dtype), dtype, end - begin,
                     to);
  });
}

Activations prepare_floating(const void* x, DType dtype, int64_t rows, int64_t k) {
  const Bf16Kernels* bf16 = kernels().bf16;
  if (bf16 == nullptr || dtype != DType::bf16) return prepare_float(x, dtype, rows, k);
  const int64_t stride = (padded_k(k) * bf16->value_bytes + 63) / 64 * 64;
  return owned_rows(RowKind::bf16, rows, stride, stride, {k, Pieces::kPiece},
                    [=](int64_t i, int64_t begin, int64_t end, uint8_t* row) {
                      bf16->prepare(static_cast<const uint16_t*>(x) + i * k + begin, end - begin,
                                    row + begin * bf16->value_bytes);
                    });
}

Activations prepare_int8(const int8_t* codes, const float* scales, int64_t rows, int64_t k, Scale weight) {
  const Kernels& kn = kernels();
  const int64_t blocks = padded_k(k) / kInt8Block;
  return int8_rows(rows, k, weight, [=, &kn](int64_t i, int64_t begin, int64_t end, uint8_t* row) {
    kn.prepare_int8(codes + i * k + begin, scales + i * blocks + begin / kInt8Block, begin, end, k, weight,
                    row);
  });
}

Activations prepare_int8_as_float(const int8_t* codes, const float* scales, int64_t rows, int64_t k) {
  const int64_t blocks = padded_k(k) / kInt8Block;
  return whole_float_rows(rows, k, [=](int64_t i, float* row) {
    for (int64_t j = 0; j < k; ++j) row[j] = codes[i * k + j] * scales[i * blocks + j / kInt8Block];
  });
}

Activations prepare_fp8(const uint8_t* codes, const float* scales, int64_t rows, int64_t k) {
  return whole_float_rows(
      rows, k, [=](int64_t i, float* row) { dequantize_row_fp8(codes + i * k, k, scales[i], row); });
}

Activations prepare_packed(const Format& format, const uint8_t* codes, const uint8_t* scales,
                           const float* factors, int64_t rows_per_factor, int64_t rows, int64_t k) {
  const int64_t blocks = (k + format.block - 1) / format.block;
  return whole_float_rows(rows, k, [=, &format](int64_t i, float* row) {
    const float factor = factors != nullptr ? factors[i / rows_per_factor] : 1.f;
    dequantize_row_to_float(format, codes + i * (k / 2), scales + i * blocks, k, factor, row);
  });
}

Activations quantize_and_prepare(AFormat a_format, const void* x, DType dtype, int64_t rows, int64_t k,
                                 Scale weight) {
  const Kernels& kn = kernels();
  const auto row_of = [=](int64_t i) { return static_cast<const uint8_t*>(x) + i * k * dtype_size(dtype); };
  switch (a_format) {
    case AFormat::none:
      return prepare_floating(x, dtype, rows, k);
    case AFormat::automatic:  // the fastest on a CPU is int8
    case AFormat::int8:
      return int8_rows(rows, k, weight, [=, &kn](int64_t i, int64_t begin, int64_t end, uint8_t* row) {
        int8_t codes[Pieces::kPiece];
        float scales[Pieces::kPiece / kInt8Block];
        kn.quantize_int8(row_of(i) + begin * dtype_size(dtype), dtype, end - begin, codes, scales);
        kn.prepare_int8(codes, scales, begin, end, k, weight, row);
      });
    case AFormat::fp8:
      return whole_float_rows(rows, k, [=](int64_t i, float* row) {
        std::vector<uint8_t> codes(k);
        const float scale = quantize_row_fp8(row_of(i), dtype, k, codes.data());
        dequantize_row_fp8(codes.data(), k, scale, row);
      });
    default:  // the others are names of formats
      break;
  }
  const Format& format = entry(kFormats, kAFormatNames[int(a_format)]);
  return whole_float_rows(
      rows, k, [=, &format](int64_t i, float* row) { round_trip_packed(format, row_of(i), dtype, k, row); });
}

}  // namespace fp4::cpu
