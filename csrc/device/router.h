// A router of few rows: a linear layer and the choice of experts by its results. The arguments of a launch.
// Needs neither torch nor CUDA.
#pragma once

#include "linears.h"
#include "top_experts.h"

namespace fp4::device {

constexpr int kMostRouted = 128;     // experts: a tile for each block of the cluster
constexpr int kMostRouterRows = 8;   // of x: a block of the cluster chooses for each
constexpr int kMostRouterDepth = 8;  // steps of a warp. All are in flight at once.

struct RouterParams {
  LinearsParams product;    // of one weight, without a residual
  TopExpertsParams choice;  // its logits are those of `product`: it needs no pointer to them
};

// Completes a launch: one cluster of eight blocks. Returns its bytes of shared memory. Its depth is larger
// than kMostRouterDepth if the kernel cannot run it.
inline int complete_router(RouterParams& r, int sms) {
  LinearsParams& p = r.product;
  const int blocks = 1 << kMostLinearClusterBits;
  // With fewer tiles, more warps share a tile. More than two in a block would leave much to add up.
  p.config.group = p.weight[0].n <= 64 ? kLinearWarps / 2 : kLinearWarps;
  p.config.cluster_bits = kMostLinearClusterBits;
  p.config.clusters = 1;
  const int steps = (p.k / kLinearStepK + blocks - 1) / blocks;
  const int warps = kLinearWarps / p.config.group;
  p.config.depth = (steps + warps - 1) / warps;
  const int shared = complete_linears(p, sms);
  return shared + kMostRouted * 2;  // the logits of a row
}

}  // namespace fp4::device

extern "C" {
int fp4_kernel_router(const fp4::device::RouterParams* params, int sms, void* stream);
}
