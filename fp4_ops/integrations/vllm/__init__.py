"""Plugin for vLLM: the entry point of group `vllm.general_plugins`. vLLM calls it in each of its processes.

It registers a quantisation config. It leaves vLLM as it is if `FP4_VLLM=0` is set, if this release of vLLM
was not tested, or if our kernels do not run. docs/serving.md says which models it takes.
"""

from __future__ import annotations

import logging
import os

NAME = "fp4_ops"
"""Our name among vLLM's quantisation methods (`--quantization fp4_ops`)."""
SWITCH = "FP4_VLLM"
"""The environment variable that turns the plugin off, if it is 0."""
TESTED = ("0.26", "0.32")
"""Releases of vLLM with which the plugin was tested."""

LOG = logging.getLogger("vllm.fp4_ops")  # vLLM shows loggers below its own name


def register() -> None:
    """Registers the quantisation config. If it cannot, a warning says why vLLM stays as it is."""
    if os.environ.get(SWITCH, "1") == "0":
        return
    if reason := why_not():
        LOG.warning("fp4_ops: vLLM keeps its own kernels: %s", reason)
        return
    from . import config  # noqa: F401  registers itself, and is a module because vLLM pickles its class


def why_not() -> str:
    """Returns the reason to leave vLLM as it is, or "" if there is none."""
    import vllm

    version = vllm.__version__
    if ".".join(version.split(".")[:2]) not in TESTED:
        return (
            f"this is vLLM {version}, and fp4_ops was tested with {', '.join(TESTED)}. Install one of these, "
            f"or set {SWITCH}=0 to hide this message"
        )
    try:
        _try_kernels()
        from . import config  # noqa: F401
    except Exception as error:  # the server must start after any error
        return f"fp4_ops does not run here: {type(error).__name__}: {error}"
    return ""


def _try_kernels() -> None:
    """Runs one small expert block on the CPU. This fails if our library was built for another torch or
    processor.
    """
    import torch

    import fp4_ops  # noqa: F401

    weight = torch.ops.fp4.quantize(torch.ones(1, 32, 16), "nvfp4")
    ids, one = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    down = torch.ops.fp4.quantize(torch.ones(1, 16, 16), "nvfp4")
    torch.ops.fp4.moe(torch.ones(1, 16), ids, one, *weight, *down, format="nvfp4")
