#include "cuda/constants.h"

#include <deque>
#include <mutex>

namespace fp4::cuda {
namespace {

struct Tuned {
  std::string device;
  KernelFamily family;
  PlannerConstants constants;
};

struct All {
  std::mutex mutex;
  std::deque<Tuned> sets;  // a reference to one stays good while others are added
};

All& all() {
  static All tuned;
  return tuned;
}

}  // namespace

const PlannerConstants& constants_of(const Gpu& gpu) {
  if (gpu.constants > 0) {
    std::lock_guard lock(all().mutex);
    if (size_t(gpu.constants) <= all().sets.size()) return all().sets[gpu.constants - 1].constants;
  }
  const KernelLibrary* library = library_of(gpu.family);
  return (library ? *library : kKernelLibraries[0]).planner;
}

int add_tuned(const std::string& device, KernelFamily family, const PlannerConstants& constants) {
  std::lock_guard lock(all().mutex);
  all().sets.push_back({device, family, constants});
  return int(all().sets.size());
}

int tuned_for(const std::string& device, KernelFamily family) {
  std::lock_guard lock(all().mutex);
  for (size_t i = all().sets.size(); !device.empty() && i > 0; --i)
    if (all().sets[i - 1].device == device && all().sets[i - 1].family == family) return int(i);
  return 0;
}

}  // namespace fp4::cuda
