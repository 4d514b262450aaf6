// The kernels' library, `_sm90.so`, which lies beside this one: found, loaded, and its launchers.
#pragma once

#include <string>

#include "device/interface.h"

namespace fp4::cuda {

struct Kernels {
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
  decltype(&fp4_kernel_dequantize) dequantize;
};

// Throws std::runtime_error where the library does not load.
const Kernels& kernels();

// For measurements: from now on the kernels of another build, in this file.
void use_kernels(const std::string& path);

struct DeviceKind {
  bool hopper = false;  // the kernels run there: compute capability 9.0
  int sms = 0, major = 0, minor = 0;
};

// Asked once for each GPU.
DeviceKind device_kind(int index);

// Throws where a launcher returned an error.
void check_launch(int error, const char* what);

}  // namespace fp4::cuda
