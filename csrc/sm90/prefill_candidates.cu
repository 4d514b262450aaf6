// The candidates of the prefill kernels, and which of them is taken, for the tests and for the choice between
// prefill and decode (fp4_ops/sm90/choice.py).

#include "prefill_host.cuh"

using namespace fp4::sm90;

namespace {

Candidates candidates_of(int kernel) {
  return kernel == 0 ? w4a8_candidates() : kernel == 1 ? half_candidates() : int4_candidates();
}

}  // namespace

// kernel: 0 w4a8, 1 half, 2 int4.
extern "C" int fp4_sm90_prefill_configs(int kernel) { return candidates_of(kernel).count; }

extern "C" const char* fp4_sm90_prefill_config_name(int kernel, int config) {
  const Candidates candidates = candidates_of(kernel);
  return config >= 0 && config < candidates.count ? candidates.list[config].name : "";
}

// What config = -1 takes on a GPU of `sms` multiprocessors.
extern "C" Choice fp4_sm90_prefill_choose(int kernel, int mode, int groups, int m, int n, int kp, int sms) {
  return choose(candidates_of(kernel), static_cast<RowMode>(mode), groups, m, n, kp, sms);
}
