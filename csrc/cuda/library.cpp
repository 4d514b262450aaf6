#include "cuda/library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>

#ifndef FP4_KERNELS_FILE
#define FP4_KERNELS_FILE "_sm90.so"
#endif

namespace fp4::cuda {
namespace {

std::string beside_this_library() {
  Dl_info here = {};
  dladdr(reinterpret_cast<const void*>(&beside_this_library), &here);
  const std::string path = here.dli_fname ? here.dli_fname : "";
  return path.substr(0, path.rfind('/') + 1) + FP4_KERNELS_FILE;
}

Kernels load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw std::runtime_error(std::string("fp4: the Hopper kernels do not load: ") + dlerror());
  const auto find = [&]<class F>(F& to, const char* name) {
    to = reinterpret_cast<F>(dlsym(library, name));
    if (to == nullptr) {
      throw std::runtime_error("fp4: " + path + " has no " + name +
                               "; it is of another build than this library. Rebuild both: FP4_CUDA_ARCHS=90a "
                               "pip install --no-build-isolation -e .");
    }
  };
  Kernels k = {};
  find(k.device, "fp4_kernel_device");
  find(k.decode, "fp4_kernel_decode");
  find(k.gemv, "fp4_kernel_gemv");
  find(k.prefill, "fp4_kernel_prefill");
  find(k.prefill_workspace, "fp4_kernel_prefill_workspace");
  find(k.prefill_choose, "fp4_kernel_prefill_choose");
  find(k.route, "fp4_kernel_route");
  find(k.rows, "fp4_kernel_rows");
  find(k.rows_fp4, "fp4_kernel_rows_fp4");
  find(k.place, "fp4_kernel_place");
  find(k.combine, "fp4_kernel_combine");
  find(k.dequantize, "fp4_kernel_dequantize");
  return k;
}

Kernels& current() {
  static Kernels loaded = load(beside_this_library());
  return loaded;
}

}  // namespace

const Kernels& kernels() { return current(); }

void use_kernels(const std::string& path) { current() = load(path); }

void check_launch(int error, const char* what) {
  if (error != 0)
    throw std::runtime_error(std::string("fp4: ") + what + " failed with CUDA error " +
                             std::to_string(error));
}

DeviceKind device_kind(int index) {
  static std::mutex mutex;
  static std::map<int, DeviceKind> known;
  std::lock_guard lock(mutex);
  const auto [at, is_new] = known.try_emplace(index);
  if (is_new) {
    DeviceKind& kind = at->second;
    const int error = kernels().device(index, &kind.major, &kind.minor, &kind.sms);
    if (error != 0) known.erase(at);
    check_launch(error, "asking for the GPU's properties");
    kind.hopper = kind.major == 9 && kind.minor == 0;
  }
  return at->second;
}

}  // namespace fp4::cuda
