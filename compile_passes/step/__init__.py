"""Writes what stands between the experts of a decoding step with fewer kernels."""
