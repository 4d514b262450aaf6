"""Registers the Triton kernels of every operator for CUDA."""
