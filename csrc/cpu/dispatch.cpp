// Which kernels this process uses: decided once, at the first call.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

namespace fp4::cpu {
namespace {

// Best first; the last runs anywhere.
constexpr const Kernels* kFamilies[] = {
#if defined(__x86_64__)
    &kAvx512Kernels, &kAvx2Kernels,
#endif
    &kScalarKernels};

const Kernels& choose() {
  const char* wanted = std::getenv("FP4_CPU_CAPABILITY");
  const bool any = wanted == nullptr || *wanted == '\0';
  std::string available;
  for (const Kernels* family : kFamilies) {
    if (!family->supported()) continue;
    if (any || std::string(wanted) == family->name) return *family;
    available += (available.empty() ? "" : ", ") + std::string(family->name);
  }
  throw std::runtime_error("the environment variable FP4_CPU_CAPABILITY is '" + std::string(wanted) +
                           "'; on this machine it must be one of: " + available);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace fp4::cpu
