"""Rewrites the part of a decoding step between the expert blocks, so that it takes fewer kernels."""
