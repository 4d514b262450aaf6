"""Rewrites what stands beside experts in a graph, attention and routers, for torch's fastest kernels."""
