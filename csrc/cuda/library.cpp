#include "cuda/library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>

#include "cuda/constants.h"

// The kernels' libraries lie beside this one. For the development module (release/dev_module.py) they lie in
// FP4_KERNELS_FOLDER.
#ifndef FP4_KERNELS_FOLDER
#define FP4_KERNELS_FOLDER ""
#endif

namespace fp4::cuda {
namespace {

std::string beside_this_library(const std::string& file) {
  Dl_info here = {};
  dladdr(reinterpret_cast<const void*>(&beside_this_library), &here);
  const std::string path = here.dli_fname ? here.dli_fname : "";
  return path.substr(0, path.rfind('/') + 1) + file;
}

// Returns advice about a number that a launcher returned: a cudaError_t or a LaunchError.
// fp4_ops/runtime/cuda_errors.py has the same text.
const char* advice(int error) {
  switch (error) {
    case -1:
      return "the kernel takes no such sizes or addresses, and fp4_ops should not have chosen it. Send the "
             "maintainers this message and the sizes of the operands";
    case -2:
      return "the GPU's driver has no cuTensorMapEncodeTiled, which came with CUDA 12. Update the driver";
    case -3:
      return "a thread block of this GPU may not have as much shared memory as any of these kernels needs. "
             "Convert the weights to layout=\"plain\", which has other kernels";
    case 2:
      return "the GPU's memory is full. Free some, or run fewer tokens at once";
    case 35:
    case 222:
      return "the GPU's driver is older than this CUDA needs. Update the driver";
    case 98:
    case 209:
      return "this build of fp4_ops has no code for this GPU. Build it again with FP4_CUDA_ARCHS=all, and "
             "see "
             "`python -m fp4_ops info`";
    case 700:
    case 702:
    case 715:
    case 716:
    case 719:
      return "a kernel before this one, of any library, read or wrote where it must not, or was stopped. "
             "Nothing runs on the GPU in this process any more. Start it again with CUDA_LAUNCH_BLOCKING=1 "
             "to "
             "see which kernel it is";
    default:
      return "The number is a cudaError_t. It may come from a kernel before this one: run again with "
             "CUDA_LAUNCH_BLOCKING=1 to see which, and send the maintainers what `python -m fp4_ops info` "
             "prints";
  }
}

Kernels load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw std::runtime_error(std::string("fp4: the CUDA kernels do not load: ") + dlerror() +
                             ". To build them: FP4_CUDA_ARCHS=all pip install --no-build-isolation -e .");
  const auto find = [&]<class F>(F& to, const char* name) {
    to = reinterpret_cast<F>(dlsym(library, name));
    if (to == nullptr) {
      throw std::runtime_error("fp4: " + path + " has no " + name +
                               "; it comes from another build than this library. Rebuild both: pip install "
                               "--no-build-isolation -e ., with the same FP4_CUDA_ARCHS");
    }
  };
  Kernels k = {};
  find(k.family, "fp4_kernel_family");
  find(k.runs, "fp4_kernel_runs");
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
  find(k.slots_plan, "fp4_kernel_slots_plan");
  find(k.slots_plan_halves, "fp4_kernel_slots_plan_halves");
  find(k.slots_fetch, "fp4_kernel_slots_fetch");
  find(k.slots_collect, "fp4_kernel_slots_collect");
  find(k.side_fork, "fp4_kernel_side_fork");
  find(k.side_join, "fp4_kernel_side_join");
  find(k.dequantize, "fp4_kernel_dequantize");
  if (KernelFamily(k.family()) == KernelFamily::kHopper) {
    find(k.linears, "fp4_kernel_linears");
    find(k.attention, "fp4_kernel_attention");
    find(k.attention_with_sinks, "fp4_kernel_attention_with_sinks");
    find(k.cached_attention, "fp4_kernel_cached_attention");
    find(k.top_experts, "fp4_kernel_top_experts");
    find(k.router, "fp4_kernel_router");
    find(k.update_cache, "fp4_kernel_update_cache");
  } else {
    find(k.prefill_most_shared, "fp4_kernel_prefill_most_shared");
  }
  return k;
}

// The libraries that were loaded, and the facts about each GPU that was asked.
struct Loaded {
  std::recursive_mutex mutex;
  std::map<KernelFamily, Kernels> kernels;
  KernelFamily only = KernelFamily::kNone;  // set by use_kernels
  int shared_bytes = 0;
  std::map<int, DeviceKind> devices;
};

Loaded& loaded() {
  static Loaded all;
  return all;
}

std::string file_of(KernelFamily family) {
  const std::string name = "sm" + std::to_string(int(family));
#ifdef FP4_EMULATED
  return beside_this_library(name + "_emulated.so");
#else
  return beside_this_library(FP4_KERNELS_FOLDER "_" + name + ".so");
#endif
}

bool is_there(KernelFamily family) {
  return loaded().kernels.count(family) > 0 || access(file_of(family).c_str(), R_OK) == 0;
}

// Returns the driver's name of the device, or an empty string if the driver is not loaded.
std::string device_name(int index) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return "";
  const auto get = reinterpret_cast<int (*)(int*, int)>(dlsym(driver, "cuDeviceGet"));
  const auto name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
  char text[256] = "";
  int device = 0;
  const bool told = get && name && get(&device, index) == 0 && name(text, sizeof(text) - 1, device) == 0;
  dlclose(driver);
  return told ? text : "";
}

// Returns the family whose code this GPU runs.
KernelFamily family_for(int index, const device::DeviceFacts& facts) {
  if (loaded().only != KernelFamily::kNone) return loaded().only;
  for (const KernelLibrary& library : kKernelLibraries) {
    const KernelFamily family{library.family};
    if (library.of(facts.major, facts.minor) && is_there(family) && kernels(family).runs(index))
      return family;
  }
  return KernelFamily::kNone;
}

}  // namespace

void forget_devices() {
  std::lock_guard lock(loaded().mutex);
  loaded().devices.clear();
}

const Kernels& kernels(KernelFamily family) {
  std::lock_guard lock(loaded().mutex);
  const auto found = loaded().kernels.find(family);
  if (found != loaded().kernels.end()) return found->second;
  return loaded().kernels.emplace(family, load(file_of(family))).first->second;
}

KernelFamily use_kernels(const std::string& path, int shared_bytes) {
  std::lock_guard lock(loaded().mutex);
  const Kernels found = load(path);
  loaded().only = KernelFamily(found.family());
  loaded().kernels.insert_or_assign(loaded().only, found);
  loaded().shared_bytes = shared_bytes;
  if (found.prefill_most_shared != nullptr) found.prefill_most_shared(shared_bytes);
  loaded().devices.clear();
  return loaded().only;
}

DeviceKind device_kind(int index) {
  std::lock_guard lock(loaded().mutex);
  const auto known = loaded().devices.find(index);
  if (known != loaded().devices.end()) return known->second;
  device::DeviceFacts facts;
  const auto first_there =
      std::find_if(std::begin(kKernelLibraries), std::prev(std::end(kKernelLibraries)),
                   [](const KernelLibrary& library) { return is_there(KernelFamily(library.family)); });
  const KernelFamily any{first_there->family};  // any library can ask for the properties of a GPU
  const std::string asking = "asking for the properties of cuda:" + std::to_string(index);
  check_launch(kernels(any).device(index, &facts), asking.c_str());
  DeviceKind kind{facts.major, facts.minor, gpu_of(facts, family_for(index, facts))};
  if (loaded().only ==
      KernelFamily::kNone)  // tuned constants hold for the usual kernels, not for those of use_kernels
    kind.gpu.constants = tuned_for(device_name(index), kind.gpu.family);
  if (loaded().shared_bytes > 0)
    kind.gpu.shared_bytes = std::min(kind.gpu.shared_bytes, loaded().shared_bytes);
  return loaded().devices.emplace(index, kind).first->second;
}

void check_launch(int error, const char* what) {
  if (error != 0)
    throw std::runtime_error(std::string("fp4: ") + what +
                             (error < 0 ? " launched nothing, reason " : " failed with CUDA error ") +
                             std::to_string(error) + ": " + advice(error));
}

}  // namespace fp4::cuda
