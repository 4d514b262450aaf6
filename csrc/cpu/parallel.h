// Divides work among torch's threads. Work has phases; each begins when the one before it has ended.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace fp4::cpu {

struct Phase {
  // run(begin, end) is called for parts that together cover [0, count). Each thread should get at least
  // `grain`. A phase may be empty.
  int64_t count = 0, grain = 1;
  std::function<void(int64_t begin, int64_t end)> run = nullptr;
};

// Calls body(begin, end) for parts of [begin, end), as torch's parallel_for does. If parts throw, this throws
// the first exception. torch's own function would lose the message, because its C interface carries no
// exception.
void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  const std::function<void(int64_t begin, int64_t end)>& body);

// torch.get_num_threads(), but no more than the processors that this process may use: its affinity and the
// quota of its container. More threads would wait for each other.
int64_t num_threads();

// Runs the phases one after another, each with up to num_threads() threads. If a part throws, this throws the
// same exception, and later phases do not run.
void run_phases(const std::vector<Phase>& phases);

}  // namespace fp4::cpu
