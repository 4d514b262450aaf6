"""The native kernels (csrc/device, csrc/sm90, csrc/sm80) by themselves: conversions of layouts, and a
launcher for each, for tests and measurements. Operators launch them in C++ (csrc/cuda)."""
