// Turns tensors into the plain pointers that the kernels take.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <vector>

#include "common/checks.h"
#include "cpu/gemm.h"

namespace fp4::cpu {

// The fewest rows of k values that are worth waking a thread to pack or unpack them.
inline int64_t grain_for(int64_t k) { return std::max<int64_t>(1, fitted::grains::packed_values / (k + 1)); }

inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

inline OptionalTensor as_contiguous(const OptionalTensor& t) {
  return t ? OptionalTensor(as_contiguous(*t)) : std::nullopt;
}

// A new, uninitialised CPU tensor, made by a direct call without the dispatcher.
inline Tensor empty(const Shape& shape, ScalarType dtype) {
  Shape strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= std::max<int64_t>(1, shape[i])) strides[i] = stride;
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(shape.size()), shape.data(), strides.data(),
                                                  to<int32_t>(from(dtype)), aoti_torch_device_type_cpu(), 0,
                                                  &handle));
  return Tensor(handle);
}

template <typename T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

// memcpy and memset that accept the null pointer of a tensor without elements. C allows no null pointer, even
// for no bytes.
inline void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

inline void zero_bytes(void* to, int64_t bytes) {
  if (bytes > 0) std::memset(to, 0, bytes);
}

inline DType dtype_of(ScalarType dtype) {
  return dtype == ScalarType::Float ? DType::f32 : dtype == ScalarType::BFloat16 ? DType::bf16 : DType::f16;
}

// A weight operand made contiguous, and the view of it that gemm takes.
class WeightOperand {
 public:
  WeightOperand(const WeightShape& shape, const Tensor& b, const Tensor& b_scale,
                const OptionalTensor& b_global_scale, const OptionalTensor& bias)
      : b_(as_contiguous(b)),
        scale_(as_contiguous(b_scale)),
        global_(as_contiguous(b_global_scale)),
        bias_(as_contiguous(bias)) {
    view_ = {.format = shape.format,
             .order = shape.layout->order,
             .batch_invariant = shape.layout->batch_invariant,
             .scale = scale_kind(shape.scale_dtype),
             .groups = shape.groups,
             .n = shape.n,
             .k = shape.k,
             .codes = data<uint8_t>(b_),
             .scales = data<uint8_t>(scale_),
             .global_scale = shape.format->has_global_scale ? data<float>(*global_) : nullptr,
             .bias = bias_ ? bias_->data_ptr() : nullptr,
             .bias_dtype = bias_ ? dtype_of(bias_->scalar_type()) : DType::f32};
  }
  const Weight& view() const { return view_; }

 private:
  Tensor b_, scale_;
  OptionalTensor global_, bias_;
  Weight view_;
};

// Activations made contiguous and prepared for the panel kernels. `as_float` asks for float32 rows, also for
// int8 codes.
class ActivationOperand {
 public:
  ActivationOperand(const Tensor& a, const OptionalTensor& a_scale, const OptionalTensor& a_global_scale,
                    std::string_view a_format, const WeightShape& w, bool as_float = false)
      : a_(as_contiguous(a)), scale_(as_contiguous(a_scale)), global_(as_contiguous(a_global_scale)) {
    const int64_t rows = num_rows(a_);
    const ScalarType dtype = a_.scalar_type();
    if (!a_format.empty()) {
      const Format& format = entry(kFormats, a_format);
      const bool factors = format.has_global_scale;
      const int64_t per_factor =
          factors ? std::max<int64_t>(1, rows / std::max<int64_t>(1, global_->numel())) : 1;
      view_ = prepare_packed(format, data<uint8_t>(a_), data<uint8_t>(*scale_),
                             factors ? data<float>(*global_) : nullptr, per_factor, rows, w.k);
    } else if (dtype == ScalarType::Char) {
      view_ = as_float ? prepare_int8_as_float(data<int8_t>(a_), data<float>(*scale_), rows, w.k)
                       : prepare_int8(data<int8_t>(a_), data<float>(*scale_), rows, w.k,
                                      scale_kind(w.scale_dtype));
    } else if (dtype == ScalarType::Float8_e4m3fn) {
      view_ = prepare_fp8(data<uint8_t>(a_), data<float>(*scale_), rows, w.k);
    } else {
      view_ = as_float ? prepare_float(a_.data_ptr(), dtype_of(dtype), rows, w.k)
                       : prepare_floating(a_.data_ptr(), dtype_of(dtype), rows, w.k);
    }
  }
  const Activations& view() const { return view_; }

 private:
  Tensor a_;
  OptionalTensor scale_, global_;
  Activations view_;
};

// int32 or int64 indices, widened.
inline std::vector<int64_t> indices(const Tensor& t) {
  const Tensor c = as_contiguous(t);
  const int64_t n = c.numel();
  if (c.scalar_type() == ScalarType::Long) return {data<int64_t>(c), data<int64_t>(c) + n};
  return {data<int32_t>(c), data<int32_t>(c) + n};
}

}  // namespace fp4::cpu
