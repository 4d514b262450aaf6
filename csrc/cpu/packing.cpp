// Quantisation and dequantisation on the CPU.
#include <atomic>
#include <tuple>

#include "common/boxed.h"
#include "cpu/parallel.h"
#include "cpu/prepack.h"
#include "cpu/quantize.h"
#include "cpu/sm90_layout.h"

namespace fp4::cpu {
namespace {

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, const std::string& format,
                                            const OptionalTensor& global_scale) {
  const Format& fmt = check_format(format);
  check_quantize(x, global_scale, fmt);
  const int64_t k = x.size(x.dim() - 1), rows = num_rows(x), blocks = ceil_div(k, fmt.block);
  const int64_t per_matrix = x.dim() >= 2 ? x.size(x.dim() - 2) : 1;
  Shape packed_shape = shape_of(x), scale_shape = shape_of(x), global_shape = {0};
  packed_shape.back() = k / 2;
  scale_shape.back() = blocks;
  if (fmt.has_global_scale)
    global_shape.assign(scale_shape.begin(), scale_shape.end() - std::min<size_t>(2, scale_shape.size()));
  const int64_t scale_bytes = scale_size(fmt.scale);
  const Tensor packed = empty(packed_shape, ScalarType::Byte);
  const Tensor scales = empty(scale_shape, fmt.scale_dtypes[0]);
  const Tensor global = empty(global_shape, ScalarType::Float);

  const Tensor source = as_contiguous(x);
  const DType dtype = dtype_of(source.scalar_type());
  const auto row = [&](int64_t i) { return data<uint8_t>(source) + i * k * dtype_size(dtype); };
  std::vector<float> amax(rows);
  std::atomic<bool> all_finite = true;
  parallel_for(0, rows, grain_for(k), [&](int64_t begin, int64_t end) {
    bool finite = true;
    for (int64_t i = begin; i < end; ++i) amax[i] = max_magnitude(row(i), dtype, k, &finite);
    if (!finite) all_finite = false;
  });
  if (!all_finite) fail("x has NaN or infinite values; they have no 4-bit code");

  std::vector<float> factor(per_matrix > 0 ? rows / per_matrix : 0, 1.f);
  if (fmt.has_global_scale) {
    const OptionalTensor given = as_contiguous(global_scale);
    for (size_t g = 0; g < factor.size(); ++g) {
      const auto first = amax.begin() + g * per_matrix;
      factor[g] =
          given ? data<float>(*given)[g] : global_scale_for(*std::max_element(first, first + per_matrix));
    }
    // A matrix without rows has a global scale too.
    float* to = mutable_data<float>(global);
    for (int64_t g = 0, count = global.numel(); g < count; ++g)
      to[g] = g < int64_t(factor.size()) ? factor[g] : given ? data<float>(*given)[g] : 1.f;
  }
  parallel_for(0, rows, grain_for(k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      quantize_row(fmt, row(i), dtype, k, factor[i / per_matrix], mutable_data<uint8_t>(packed) + i * (k / 2),
                   mutable_data<uint8_t>(scales) + i * blocks * scale_bytes);
  });
  return {packed, scales, global};
}

std::tuple<Tensor, Tensor> quantize_int8(const Tensor& x) {
  check_quantize_int8(x);
  const int64_t k = x.size(x.dim() - 1), rows = num_rows(x), blocks = ceil_div(k, kInt8Block);
  Shape scale_shape = shape_of(x);
  scale_shape.back() = blocks;
  const Tensor codes = empty(shape_of(x), ScalarType::Char);
  const Tensor scales = empty(scale_shape, ScalarType::Float);
  const Tensor source = as_contiguous(x);
  const DType dtype = dtype_of(source.scalar_type());
  const Kernels& kn = kernels();
  parallel_for(0, rows, grain_for(k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kn.quantize_int8(data<uint8_t>(source) + i * k * dtype_size(dtype), dtype, k,
                       mutable_data<int8_t>(codes) + i * k, mutable_data<float>(scales) + i * blocks);
  });
  return {codes, scales};
}

std::tuple<Tensor, Tensor> quantize_fp8(const Tensor& x, const std::string& layout) {
  const Layout& order = check_quantize_fp8(x, layout);
  const int64_t k = x.size(x.dim() - 1), kp = order.padded(k), rows = num_rows(x);
  Shape shape = shape_of(x);
  const Tensor scales = empty(Shape(shape.begin(), shape.end() - 1), ScalarType::Float);
  shape.back() = kp;
  const Tensor codes = empty(shape, ScalarType::Float8_e4m3fn);
  const Tensor source = as_contiguous(x);
  const DType dtype = dtype_of(source.scalar_type());
  parallel_for(0, rows, grain_for(k), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> row(kp, 0);
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* from = data<uint8_t>(source) + i * k * dtype_size(dtype);
      uint8_t* to = mutable_data<uint8_t>(codes) + i * kp;
      mutable_data<float>(scales)[i] = quantize_row_fp8(from, dtype, k, row.data());
      for (int64_t j = 0; j < kp; ++j) to[order.order == Order::plain ? j : sm90_position(j)] = row[j];
    }
  });
  return {codes, scales};
}

Tensor dequantize(const Tensor& packed, const Tensor& block_scale, const OptionalTensor& global_scale,
                  const std::string& format, ScalarType dtype, const std::string& layout) {
  const auto [fmt, order] = check_dequantize(packed, block_scale, global_scale, format, dtype, layout);
  Tensor codes = packed, block_scales = block_scale;
  OptionalTensor factors = global_scale;
  if (order->order != Order::plain)
    std::tie(codes, block_scales, factors) = to_plain(packed, block_scale, global_scale, {fmt, order});
  const Tensor from = as_contiguous(codes), from_scale = as_contiguous(block_scales);
  const OptionalTensor global = as_contiguous(factors);
  const int64_t k = packed.size(packed.dim() - 1) * 2, rows = num_rows(packed),
                row_scales = ceil_div(k, fmt->block) * scale_size(scale_kind(from_scale.scalar_type()));
  const int64_t per_matrix = packed.dim() >= 2 ? packed.size(packed.dim() - 2) : 1;
  Shape shape = shape_of(packed);
  shape.back() = k;
  const Tensor out = empty(shape, dtype);
  const Format& f = *fmt;
  parallel_for(0, rows, grain_for(k), [&](int64_t begin, int64_t end) {
    std::vector<double> values(k);
    for (int64_t i = begin; i < end; ++i) {
      const double factor = f.has_global_scale ? data<float>(*global)[i / per_matrix] : 1.;
      double* to = dtype == ScalarType::Double ? mutable_data<double>(out) + i * k : values.data();
      dequantize_row(f, scale_kind(from_scale.scalar_type()), data<uint8_t>(from) + i * (k / 2),
                     data<uint8_t>(from_scale) + i * row_scales, k, factor, to);
      if (dtype != ScalarType::Double)
        store_values(to, k, dtype_of(dtype),
                     mutable_data<uint8_t>(out) + i * k * dtype_size(dtype_of(dtype)));
    }
  });
  return out;
}

std::string cpu_capability() { return kernels().name; }

int64_t cpu_threads() { return num_threads(); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) {
  m.impl("quantize", FP4_BOX(quantize));
  m.impl("dequantize", FP4_BOX(dequantize));
  m.impl("quantize_int8", FP4_BOX(quantize_int8));
  m.impl("quantize_fp8", FP4_BOX(quantize_fp8));
}

// These take no tensor, so no tensor's dispatch key selects a kernel.
STABLE_TORCH_LIBRARY_IMPL(fp4, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", FP4_BOX(cpu_capability));
  m.impl("cpu_threads", FP4_BOX(cpu_threads));
}

}  // namespace fp4::cpu
