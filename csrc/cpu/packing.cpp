// Quantisation, dequantisation and weight layouts on the CPU.
#include <torch/csrc/stable/library.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <cstring>
#include <tuple>

#include "cpu/quantize.h"
#include "cpu/tensors.h"

namespace fp4::cpu {
namespace {

int64_t grain_for(int64_t k) { return std::max<int64_t>(1, 8192 / (k + 1)); }

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
  const Tensor packed = empty(packed_shape, ScalarType::Byte);
  const Tensor scales = empty(scale_shape, scale_dtype(fmt));
  const Tensor global = empty(global_shape, ScalarType::Float);

  const Tensor source = as_contiguous(x);
  const DType dtype = dtype_of(source.scalar_type());
  const auto row = [&](int64_t i) { return data<uint8_t>(source) + i * k * dtype_size(dtype); };
  std::vector<float> amax(rows);
  std::atomic<bool> all_finite = true;
  torch::stable::parallel_for(0, rows, grain_for(k), [&](int64_t begin, int64_t end) {
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
  torch::stable::parallel_for(0, rows, grain_for(k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      quantize_row(fmt, row(i), dtype, k, factor[i / per_matrix], mutable_data<uint8_t>(packed) + i * (k / 2),
                   mutable_data<uint8_t>(scales) + i * blocks);
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
  torch::stable::parallel_for(0, rows, grain_for(k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kn.quantize_int8(data<uint8_t>(source) + i * k * dtype_size(dtype), dtype, k,
                       mutable_data<int8_t>(codes) + i * k, mutable_data<float>(scales) + i * blocks);
  });
  return {codes, scales};
}

// Asks for huge pages under a large new tensor: weights are streamed, and page walks would slow that down.
void advise_huge_pages(const Tensor& t) {
#if defined(__linux__)
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(t.data_ptr()) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(t.data_ptr()) + t.numel()) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // may be refused
#endif
}

// The same bytes in the other order. f(codes, scales, to_codes, to_scales) moves one panel of 16 rows; what
// tile16 keeps plain is copied.
template <typename F>
std::tuple<Tensor, Tensor> reorder(const Tensor& packed, const Tensor& block_scale, FormatAndLayout target,
                                   const F& f) {
  const Tensor to = empty(shape_of(packed), ScalarType::Byte);
  advise_huge_pages(to);
  const Tensor to_scale = empty(shape_of(block_scale), scale_dtype(*target.format));
  const Tensor from = as_contiguous(packed), from_scale = as_contiguous(block_scale);
  const int64_t dim = packed.dim(), n = packed.size(dim - 2), row_bytes = packed.size(dim - 1);
  const int64_t k = row_bytes * 2, blocks = ceil_div(k, target.format->block);
  const int64_t matrices = dim == 3 ? packed.size(0) : 1, panels = ceil_div(n, kPanelRows);
  const uint8_t *codes = data<uint8_t>(from), *scales = data<uint8_t>(from_scale);
  uint8_t *to_codes = mutable_data<uint8_t>(to), *to_scales = mutable_data<uint8_t>(to_scale);
  torch::stable::parallel_for(0, matrices * panels, grain_for(k * kPanelRows),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t i = begin; i < end; ++i) {
                                  const int64_t row = i % panels * kPanelRows, first = i / panels * n + row;
                                  const int64_t at = first * row_bytes, scale_at = first * blocks;
                                  if (target.layout == Layout::tile16 && is_panel(row, n, k)) {
                                    f(codes + at, scales + scale_at, to_codes + at, to_scales + scale_at, k);
                                  } else {
                                    const int64_t count = std::min<int64_t>(kPanelRows, n - row);
                                    std::memcpy(to_codes + at, codes + at, count * row_bytes);
                                    std::memcpy(to_scales + scale_at, scales + scale_at, count * blocks);
                                  }
                                }
                              });
  return {to, to_scale};
}

// The scale bytes that stand for NaN: a weight with one is damaged, and kernel layouts refuse it.
void check_scales_finite(const Tensor& block_scale, const Format& fmt) {
  const Tensor c = as_contiguous(block_scale);
  const uint8_t* bytes = data<uint8_t>(c);
  std::atomic<bool> damaged = false;
  torch::stable::parallel_for(0, c.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
    bool nan = false;
    for (int64_t i = begin; i < end; ++i)
      nan |= fmt.scale == Scale::e4m3 ? (bytes[i] & 0x7f) == 0x7f : bytes[i] == 0xff;
    if (nan) damaged = true;
  });
  if (damaged) fail("block_scale has NaN values; the weight is damaged");
}

std::tuple<Tensor, Tensor> prepack(const Tensor& packed, const Tensor& block_scale, const std::string& format,
                                   const std::string& layout) {
  const FormatAndLayout target = check_prepack(packed, block_scale, format, layout);
  check_scales_finite(block_scale, *target.format);
  return reorder(
      packed, block_scale, target,
      [&](const uint8_t* codes, const uint8_t* scales, uint8_t* to, uint8_t* to_scales, int64_t k) {
        pack_panel(codes, scales, kPanelRows, k, target.format->block, to, to_scales);
      });
}

std::tuple<Tensor, Tensor> unpack(const Tensor& packed, const Tensor& block_scale, const std::string& format,
                                  const std::string& layout) {
  const FormatAndLayout target = check_prepack(packed, block_scale, format, layout);
  return reorder(packed, block_scale, target,
                 [&](const uint8_t* codes, const uint8_t* scales, uint8_t* to, uint8_t* to_scales,
                     int64_t k) { unpack_panel(codes, scales, k, target.format->block, to, to_scales); });
}

Tensor dequantize(const Tensor& packed, const Tensor& block_scale, const OptionalTensor& global_scale,
                  const std::string& format, ScalarType dtype, const std::string& layout) {
  const auto [fmt, order] = check_dequantize(packed, block_scale, global_scale, format, dtype, layout);
  Tensor codes = packed, block_scales = block_scale;
  if (order != Layout::plain) std::tie(codes, block_scales) = unpack(packed, block_scale, format, layout);
  const Tensor from = as_contiguous(codes), from_scale = as_contiguous(block_scales);
  const OptionalTensor global = as_contiguous(global_scale);
  const int64_t k = packed.size(packed.dim() - 1) * 2, rows = num_rows(packed),
                blocks = ceil_div(k, fmt->block);
  const int64_t per_matrix = packed.dim() >= 2 ? packed.size(packed.dim() - 2) : 1;
  Shape shape = shape_of(packed);
  shape.back() = k;
  const Tensor out = empty(shape, dtype);
  const Format& f = *fmt;
  torch::stable::parallel_for(0, rows, grain_for(k), [&](int64_t begin, int64_t end) {
    std::vector<double> values(k);
    for (int64_t i = begin; i < end; ++i) {
      const double factor = f.has_global_scale ? data<float>(*global)[i / per_matrix] : 1.;
      double* to = dtype == ScalarType::Double ? mutable_data<double>(out) + i * k : values.data();
      dequantize_row(f, data<uint8_t>(from) + i * (k / 2), data<uint8_t>(from_scale) + i * blocks, k, factor,
                     to);
      if (dtype != ScalarType::Double)
        store_values(to, k, dtype_of(dtype),
                     mutable_data<uint8_t>(out) + i * k * dtype_size(dtype_of(dtype)));
    }
  });
  return out;
}

std::string cpu_capability() { return kernels().name; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) {
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("quantize_int8", TORCH_BOX(&quantize_int8));
  m.impl("prepack", TORCH_BOX(&prepack));
  m.impl("unpack", TORCH_BOX(&unpack));
}

// It takes no tensor, so no backend's key would lead here.
STABLE_TORCH_LIBRARY_IMPL(fp4, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&cpu_capability));
}

}  // namespace fp4::cpu
