"""Imports the scripts under benchmarks/ for their tests."""

import importlib
import types

import pytest
from places import ROOT

FOLDER = ROOT / "benchmarks"
PEERS = {"ggml", "humming"}
"""Packages that nothing here installs: a script that needs one says how to get it."""


def imported(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name not in (*PEERS, "fp4_ops.dev"):
            raise
        pytest.skip(f"needs {error.name}")
