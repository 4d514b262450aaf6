// Work that is shared among torch's threads: phases, each of which begins when the one before it has ended.
//
// All phases of one call are one parallel region. To begin a region costs more than to wait for each other in
// it, and between the two products of a block of one token there is little else.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace fp4::cpu {

struct Phase {
  // run(begin, end) is called for parts of [0, count) that together are all of it. A thread takes part where
  // there is `grain` for it. A phase may be empty.
  int64_t count = 0, grain = 1;
  std::function<void(int64_t begin, int64_t end)> run = nullptr;
  // Or null: what a thread may do for its part while it waits for the phase before. It may ask for memory.
  std::function<void(int64_t begin, int64_t end)> ahead = nullptr;
};

// Runs the phases one after another, each by up to torch.get_num_threads() threads. What a part throws, this
// throws; later phases do not run then.
void run_phases(const std::vector<Phase>& phases);

}  // namespace fp4::cpu
