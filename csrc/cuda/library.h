// Finds and loads the kernels' libraries `_sm90.so` and `_sm80.so`, which lie beside this one, and gives
// their launchers.
#pragma once

#include <string>

#include "cuda/gpu.h"
#include "device/linears.h"

namespace fp4::cuda {

struct Kernels {
  decltype(&fp4_kernel_family) family;
  decltype(&fp4_kernel_runs) runs;
  decltype(&fp4_kernel_device) device;
  decltype(&fp4_kernel_decode) decode;
  decltype(&fp4_kernel_gemv) gemv;
  decltype(&fp4_kernel_prefill) prefill;
  decltype(&fp4_kernel_prefill_workspace) prefill_workspace;
  decltype(&fp4_kernel_prefill_choose) prefill_choose;
  decltype(&fp4_kernel_route) route;
  decltype(&fp4_kernel_rows) rows;
  decltype(&fp4_kernel_rows_fp4) rows_fp4;
  decltype(&fp4_kernel_place) place;
  decltype(&fp4_kernel_combine) combine;
  decltype(&fp4_kernel_slots_plan) slots_plan;
  decltype(&fp4_kernel_slots_fetch) slots_fetch;
  decltype(&fp4_kernel_dequantize) dequantize;
  decltype(&fp4_kernel_linears) linears;                          // of _sm90.so alone
  decltype(&fp4_kernel_prefill_most_shared) prefill_most_shared;  // of _sm80.so alone
};

// Those of a family. Throws std::runtime_error where the library does not load.
const Kernels& kernels(KernelFamily family);

// For tests and measurements: from now on every GPU runs the kernels of another build, in this file, and the
// planner takes no more than `shared_bytes` of shared memory for a thread block; 0: what the GPU has. Returns
// their family.
KernelFamily use_kernels(const std::string& path, int shared_bytes);

struct DeviceKind {
  int major = 0, minor = 0;
  Gpu gpu;
};

// Asked once for each GPU.
DeviceKind device_kind(int index);

// Asks GPUs again: tuned constants were added.
void forget_devices();

// Throws where a launcher returned an error.
void check_launch(int error, const char* what);

}  // namespace fp4::cuda
