"""Loads the compiled operators. Registers their fakes, the kernels that are written in Python, and the
backend."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import torch

from .runtime.libraries import library_path


def load() -> None:
    path = library_path()
    if path is None:
        raise ImportError(
            "fp4_ops: the compiled operators are missing (no _C.so beside fp4_ops/__init__.py). "
            "Build them with: pip install --no-build-isolation -e ."
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"fp4_ops: {path.name} does not load in torch {torch.__version__} (it needs 2.11 or later "
            f"on the platform it was built for). Rebuild: pip install --no-build-isolation -e . -- {error}"
        ) from None

    try:
        _register()
    except AttributeError as error:
        if "_OpNamespace" not in str(error):
            raise
        raise ImportError(
            f"fp4_ops: {path} is older than the Python files, as after a git pull: it lacks an operator. "
            f"Rebuild: pip install --no-build-isolation -e . -- {error}"
        ) from None


def register_backend() -> None:
    """Makes the backend `fp4` known to Dynamo where no entry point does: in a source tree or a copied folder.

    Dynamo loads it when it is first used, as by an entry point: fp4_ops/backend.py changes Dynamo.
    """
    group, name = "torch_dynamo_backends", "fp4"
    if name in entry_points(group=group).names:
        return
    from .meta.torch_internals import dynamo_backends  # takes a second

    dynamo_backends.setdefault(name, EntryPoint(name, "fp4_ops.backend:fp4", group))


def _register() -> None:
    # These register operators of torch's own operations.
    from . import distributed, step_operators  # noqa: F401
    from .backends import operators
    from .meta import dtensors, fakes, gradients  # noqa: F401  registers fakes, and kernels that refuse calls

    operators.register()
