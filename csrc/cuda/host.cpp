#include "cuda/host.h"

#include <dlfcn.h>

namespace fp4::cuda {
namespace {

int32_t dtype_code(ScalarType dtype) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  return to<int32_t>(from(dtype));
}

// Returns the device's current stream. A CUDA build of libtorch brings the function. If the program's
// libtorch does not link it, it is looked up in libtorch_cuda.so.
[[maybe_unused]] void* current_stream(int32_t device) {
  static const auto function = [] {
    auto found = &aoti_torch_get_current_cuda_stream;
    if (found == nullptr) {
      void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      if (library != nullptr)
        found = reinterpret_cast<decltype(found)>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
    }
    return found;
  }();
  if (function == nullptr) fail("fp4: this libtorch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(function(device, &stream));
  return stream;
}

}  // namespace

Here::Here(const Tensor& t) {
#ifndef FP4_EMULATED
  index_ = t.get_device_index();
  int32_t current = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_device_index(&current));
  if (current != index_) guard_.emplace(index_);
  stream_ = current_stream(index_);
#endif
  kind_ = device_kind(index_);
  if (kind_.gpu.family != KernelFamily::kNone) kernels_ = &cuda::kernels(kind_.gpu.family);
}

Tensor Here::empty(std::initializer_list<int64_t> shape, ScalarType dtype) const {
  std::array<int64_t, 8> strides;
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= std::max<int64_t>(1, shape.begin()[i]))
    strides[i] = stride;
#ifdef FP4_EMULATED
  const int32_t device = aoti_torch_device_type_cpu();
#else
  const int32_t device = aoti_torch_device_type_cuda();
#endif
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(int64_t(shape.size()), shape.begin(), strides.data(), dtype_code(dtype),
                               device, index_, &handle) != AOTI_TORCH_SUCCESS)
    fail_from_torch(text("CUDA out of memory. fp4 asked for a tensor of shape ",
                         shape_text({shape.begin(), shape.size()}), " and dtype ", dtype_name(dtype),
                         " on cuda:", index_));
  return Tensor(handle);
}

Tensor Here::zeros(std::initializer_list<int64_t> shape, ScalarType dtype) const {
  Tensor made = empty(shape, dtype);
  return torch::stable::zero_(made);
}

void fail_from_torch(const std::string& what) {
  if (torch_exception_get_what_without_backtrace != nullptr) {
    const char* said = torch_exception_get_what_without_backtrace();
    if (said != nullptr && *said != 0) throw std::runtime_error(said);
  }
  fail(what, "; torch printed its own message to stderr");
}

void call_stack(const std::string& name, const char* overload, StableIValue* stack) {
  if (torch_call_dispatcher(name.c_str(), overload, stack, TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS)
    fail_from_torch(text("fp4: ", name, " failed. The most frequent cause is: CUDA out of memory."));
}

Tensor to_dtype(const Tensor& t, ScalarType dtype) {
  return call("aten::to", "dtype", t, dtype, false, false, std::optional<torch::headeronly::MemoryFormat>());
}

}  // namespace fp4::cuda
