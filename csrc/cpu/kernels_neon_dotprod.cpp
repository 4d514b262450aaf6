// NEON with sdot (Armv8.2's dot products: Neoverse N1, Cortex-A76 and later).
#include <sys/auxv.h>

#include "cpu/neon_dot.h"

namespace fp4::cpu {
namespace {

template <Scale scale>
struct DotTiles {
  template <int count>
  static void run(const Panel& panel, const uint8_t* const* rows, float* tile) {
    multiply_panel<DotTile<scale, count>>(panel, rows, count, tile);
  }
};

bool supported() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

}  // namespace

const Kernels kNeonDotprodKernels = with_neon_rows({
    .name = "neon_dotprod",
    .supported = supported,
    .panels = {{panel_kernel<DotTiles<Scale::e4m3>>, panel_kernel<FloatTiles<Scale::e4m3>>},
               {panel_kernel<DotTiles<Scale::e8m0>>, panel_kernel<FloatTiles<Scale::e8m0>>},
               {panel_kernel<DotTiles<Scale::bf16>>, panel_kernel<FloatTiles<Scale::bf16>>},
               {panel_kernel<DotTiles<Scale::f32>>, panel_kernel<FloatTiles<Scale::f32>>}},
});

}  // namespace fp4::cpu
