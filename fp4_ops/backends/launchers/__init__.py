"""Launches native kernels (csrc/device, csrc/sm90, csrc/sm80) from Python: layout conversions, row kernels.

Operators launch all kernels in C++ (csrc/cuda). fp4_ops.dev launches the kernels of products.
"""
