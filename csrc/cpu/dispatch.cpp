// Which kernels this process uses: decided once, at the first call.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

namespace fp4::cpu {
namespace {

struct Capability {
  const Kernels* kernels;
  bool supported;
};

// Best first. __builtin_cpu_supports asks the operating system too whether it saves the wide registers.
const Kernels& choose() {
  const Capability capabilities[] = {
      {&kScalarKernels, true},
  };
  const char* wanted = std::getenv("FP4_CPU_CAPABILITY");
  const bool any = wanted == nullptr || *wanted == '\0';
  std::string available;
  for (const Capability& c : capabilities) {
    if (!c.supported) continue;
    if (any || std::string(wanted) == c.kernels->name) return *c.kernels;
    available += (available.empty() ? "" : ", ") + std::string(c.kernels->name);
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
