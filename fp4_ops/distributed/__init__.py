"""Experts of several processes: operators over torch.distributed, and which part of a model a process has."""

from . import ops  # noqa: F401  registers the kernels
