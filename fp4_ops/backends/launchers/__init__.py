"""Launches native kernels (csrc/device, csrc/sm90, csrc/sm80) from Python: layout conversions, row kernels.

The operators in C++ (csrc/cuda) launch all kernels themselves. fp4_ops.dev launches the kernels of products
from Python.
"""
