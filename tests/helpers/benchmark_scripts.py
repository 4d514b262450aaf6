"""Imports the scripts under benchmarks/ for their tests, and runs them on the CPU."""

import importlib
import itertools
import json
import types

import pytest
import torch
from places import ROOT

FOLDER = ROOT / "benchmarks"
PEERS = {"ggml", "humming"}
"""Packages that no setup here installs. A script that needs one says how to get it."""


def imported(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name not in (*PEERS, "fp4_ops.dev"):
            raise
        pytest.skip(f"needs {error.name}")


class OnCpu(torch.overrides.TorchFunctionMode):
    """Gives the CPU to code that asks for device "cuda"."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def first_rows(name: str, arguments: list[str], count: int = 40) -> list[dict]:
    record, module = imported("record"), imported(name)
    args = record.parser_of(module.__doc__, module.add_arguments).parse_args(arguments)
    with OnCpu():
        found = list(itertools.islice(module.rows(args), count))
    json.dumps(found)
    assert found and all("table" in row for row in found)
    return found
