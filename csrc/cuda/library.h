// Finds and loads the kernels' libraries `_sm90.so` and `_sm80.so`, which lie beside this one. Returns their
// launchers.
#pragma once

#include <string>

#include "cuda/gpu.h"
#include "device/attention.h"
#include "device/linears.h"
#include "device/router.h"
#include "device/slots.h"
#include "device/top_experts.h"
#include "device/update_cache.h"

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
  decltype(&fp4_kernel_slots_plan_halves) slots_plan_halves;
  decltype(&fp4_kernel_slots_fetch) slots_fetch;
  decltype(&fp4_kernel_slots_collect) slots_collect;
  decltype(&fp4_kernel_side_fork) side_fork;
  decltype(&fp4_kernel_side_join) side_join;
  decltype(&fp4_kernel_dequantize) dequantize;
  decltype(&fp4_kernel_linears) linears;      // only in _sm90.so
  decltype(&fp4_kernel_attention) attention;  // only in _sm90.so
  // The same, with a sink for each head of q: csrc/sm90/attention.cu. Only in _sm90.so.
  int (*attention_with_sinks)(const device::AttentionParams*, const void* sinks, int sms, void* stream);
  decltype(&fp4_kernel_cached_attention) cached_attention;        // only in _sm90.so
  decltype(&fp4_kernel_top_experts) top_experts;                  // only in _sm90.so
  decltype(&fp4_kernel_router) router;                            // only in _sm90.so
  decltype(&fp4_kernel_update_cache) update_cache;                // only in _sm90.so
  decltype(&fp4_kernel_prefill_most_shared) prefill_most_shared;  // only in _sm80.so
};

// Returns the kernels of a family. Throws std::runtime_error if the library does not load.
const Kernels& kernels(KernelFamily family);

// For tests and measurements: from now on every GPU runs the kernels of the file `path`, which another build
// made. The planner takes at most `shared_bytes` of shared memory for a thread block; 0: as much as the GPU
// has. Returns the family of these kernels.
KernelFamily use_kernels(const std::string& path, int shared_bytes);

struct DeviceKind {
  int major = 0, minor = 0;
  Gpu gpu;
};

// Returns the kind of a GPU. The GPU is asked once.
DeviceKind device_kind(int index);

// Forgets the kinds of all GPUs, so that new tuned constants are seen.
void forget_devices();

// Throws if a launcher returned an error.
void check_launch(int error, const char* what);

}  // namespace fp4::cuda
