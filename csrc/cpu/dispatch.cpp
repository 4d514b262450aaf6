// Decides which kernels this process uses, once, at the first call.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

namespace fp4::cpu {
namespace {

#if defined(__x86_64__)
// Built here because initialising static data in the kernels' file might execute instructions that the
// processor lacks.
const Kernels& with_bf16() {
  static const Kernels kernels = [] {
    Kernels k = kAvx512Kernels;
    k.name = "avx512_bf16";
    k.bf16 = &kAvx512Bf16;
    k.tiles = &kAvx512Bf16Tiles;
    return k;
  }();
  return kernels;
}

// Few bfloat16 rows use vfmadd: see `preferred`.
const Kernels& with_tiles() {
  static const Kernels kernels = [] {
    Kernels k = kAvx512Kernels;
    k.name = "amx_bf16";
    k.bf16 = &kAvx512WidenedBf16;
    k.tiles = &kAmxBf16;
    return k;
  }();
  return kernels;
}
#elif defined(__aarch64__)
const Kernels& with_bf16() {
  static const Kernels kernels = [] {
    Kernels k = kNeonI8mmKernels;
    k.name = "neon_bf16";
    k.bf16 = &kNeonBf16;
    return k;
  }();
  return kernels;
}
#endif

bool supported(const Kernels& k) {
  return k.supported() && (k.bf16 == nullptr || k.bf16->supported()) &&
         (k.tiles == nullptr || k.tiles->supported());
}

// False for kernels that run only on request. On Intel's processors vdpbf16ps is slower than vfmadd: 74
// GFLOP/s instead of 106 on one thread of an Emerald Rapids (docs/kernels.md).
bool preferred([[maybe_unused]] const Kernels& k) {
#if defined(__x86_64__)
  if (&k == &with_bf16()) return !__builtin_cpu_is("intel");
#endif
  return true;
}

const Kernels& choose() {
  // The best are first. The last runs on any processor.
  const Kernels* const families[] = {
#if defined(__x86_64__)
      &with_tiles(), &with_bf16(), &kAvx512Kernels, &kAvx2Kernels,
#elif defined(__aarch64__)
      &with_bf16(), &kNeonI8mmKernels, &kNeonDotprodKernels, &kNeonKernels,
#endif
      &kScalarKernels};
  const char* wanted = std::getenv("FP4_CPU_CAPABILITY");
  const bool any = wanted == nullptr || *wanted == '\0';
  std::string available;
  for (const Kernels* family : families) {
    if (!supported(*family)) continue;
    if (any ? preferred(*family) : std::string(wanted) == family->name) return *family;
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
