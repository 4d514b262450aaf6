// panels FAMILY ACTIVATIONS FORMAT ROWS REPEATS: products of one panel (16 x 2048 weights) with so many rows.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/kernels.h"

using namespace fp4;
using namespace fp4::cpu;

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const std::string family = argv[1], activations = argv[2];
  const int rows = std::atoi(argv[4]), repeats = std::atoi(argv[5]);
  constexpr int64_t k = 2048;
  const Format& format = entry(kFormats, argv[3]);

  const Kernels* chosen = nullptr;
  for (const Kernels* kernels : {&kScalarKernels, &kNeonKernels, &kNeonDotprodKernels, &kNeonI8mmKernels})
    if (family == kernels->name) chosen = kernels;
  if (family == "neon_bf16") chosen = &kNeonI8mmKernels;
  if (chosen == nullptr) return 2;
  const PanelKernel multiply = activations == "bf16"   ? kNeonBf16.panels[int(format.scale)]
                               : activations == "int8" ? chosen->panels[int(format.scale)].int8
                                                       : chosen->panels[int(format.scale)].floating;

  // Any bytes will do, as no branch depends on them; these are ordinary numbers in every type.
  std::vector<uint8_t> codes(k / 2 * kPanelRows, 0x3c), scales(k / format.block * kPanelRows * 4, 0x3c);
  std::vector<std::vector<uint8_t>> memory(rows, std::vector<uint8_t>(4 * k + 64, 0x3c));
  std::vector<const uint8_t*> row;
  for (const auto& bytes : memory) row.push_back(bytes.data());
  float tile[kTokenBlock * kPanelRows];
  for (int i = 0; i < repeats; ++i)
    for (int m = 0; m < rows; m += kTokenBlock)
      multiply({codes.data(), scales.data(), k, format.block}, row.data() + m,
               std::min(kTokenBlock, rows - m), tile);
}
