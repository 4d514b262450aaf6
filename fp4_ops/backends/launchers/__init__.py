"""The native kernels (csrc/device, csrc/sm90, csrc/sm80) as they are loaded: conversions of layouts, and the
kernels that bring rows into order. Operators launch them in C++ (csrc/cuda); fp4_ops.dev has a launcher for
the products'."""
