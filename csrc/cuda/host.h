// Gives access to torch: device, stream, memory, and other operators.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "common/boxed.h"
#include "common/checks.h"
#include "cuda/library.h"

// The emulator of tests/ compiles these sources with a namespace of its own. Its tensors are in host memory.
#ifdef FP4_EMULATED
#define FP4_LIBRARY fp4_emulated
#define FP4_PARTS_LIBRARY fp4_emulated_parts
#define FP4_DISPATCH_KEY CPU
#else
#define FP4_LIBRARY fp4
#define FP4_PARTS_LIBRARY fp4_parts
#define FP4_DISPATCH_KEY CUDA
#endif
#define FP4_REGISTER(library, key, m) STABLE_TORCH_LIBRARY_IMPL(library, key, m)

extern "C" {
// From libtorch_cuda. It is weak, so that this library also loads with a libtorch without CUDA; its operators
// are not called then.
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
// In torch 2.13 and later: the message of the last error that a function of the stable ABI returned.
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
}

namespace fp4::cuda {

// Makes a tensor's device the current one, and holds its kind and its current stream.
class Here {
 public:
  explicit Here(const Tensor& t);

  const DeviceKind& kind() const { return kind_; }
  const Gpu& gpu() const { return kind_.gpu; }
  const Kernels& kernels() const { return *kernels_; }
  int sms() const { return kind_.gpu.sms; }
  void* stream() const { return stream_; }

  // Returns a new tensor on the device. empty() does not initialise it.
  Tensor empty(std::initializer_list<int64_t> shape, ScalarType dtype) const;
  Tensor zeros(std::initializer_list<int64_t> shape, ScalarType dtype) const;

 private:
  int index_ = 0;
  DeviceKind kind_;
  const Kernels* kernels_ = nullptr;  // of the device's family, if it has one
  void* stream_ = nullptr;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// --- other operators, through the dispatcher ---

// Throws with torch's message if this torch returns it; else with `what`.
[[noreturn]] void fail_from_torch(const std::string& what);

// Calls the operator `name`. Its results replace the arguments, from stack[0] on; the caller owns them.
void call_stack(const std::string& name, const char* overload, StableIValue* stack);

template <class Result = Tensor, class... Arguments>
Result call(const std::string& name, const char* overload, const Arguments&... arguments) {
  // Results replace arguments. No operator here has more than four results.
  std::array<StableIValue, std::max<size_t>(sizeof...(Arguments), 4)> stack = {
      torch::stable::detail::from(arguments)...};
  call_stack(name, overload, stack.data());
  using torch::stable::detail::to;
  if constexpr (std::is_same_v<Result, Tensor> || std::is_same_v<Result, std::vector<Tensor>>) {
    return to<Result>(stack[0]);
  } else {  // a tuple of tensors
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return Result(to<Tensor>(stack[i])...);
    }(std::make_index_sequence<std::tuple_size_v<Result>>());
  }
}

// --- tensors ---

// Returns a contiguous copy. It goes through `call`, because errors of torch::stable's functions name only
// their own line.
inline Tensor copy_of(const Tensor& t) {
  return call("aten::clone", "", t,
              std::optional(torch::headeronly::MemoryFormat(torch::headeronly::MemoryFormat::Contiguous)));
}

inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : copy_of(t); }
inline OptionalTensor as_contiguous(const OptionalTensor& t) {
  return t ? OptionalTensor(as_contiguous(*t)) : std::nullopt;
}

template <class T = void>
const T* pointer(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T = void>
const T* pointer(const OptionalTensor& t) {
  return t ? pointer<T>(*t) : nullptr;
}
template <class T = void>
T* mutable_pointer(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Returns a tensor that kernels can fetch 16 bytes at a time: contiguous, and aligned to 16 bytes. Copies it
// if it is not.
inline Tensor as_operand(const Tensor& t) {
  return t.is_contiguous() && reinterpret_cast<uintptr_t>(pointer(t)) % 16 == 0 ? t : copy_of(t);
}
inline OptionalTensor as_operand(const OptionalTensor& t) {
  return t ? OptionalTensor(as_operand(*t)) : std::nullopt;
}

// Returns the kernels' number of a dtype.
inline device::DType code_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return device::DType::kBFloat16;
    case ScalarType::Half:
      return device::DType::kFloat16;
    case ScalarType::Float8_e4m3fn:
      return device::DType::kFloat8;
    default:
      return device::DType::kFloat32;
  }
}

inline device::DType code_of(const OptionalTensor& t) {
  return t ? code_of(t->scalar_type()) : device::DType::kFloat32;
}

Tensor to_dtype(const Tensor& t, ScalarType dtype);

}  // namespace fp4::cuda
