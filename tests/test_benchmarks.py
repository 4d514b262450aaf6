"""The scripts under benchmarks/ still find what they take from the package and from each other.

What they measure needs a GPU, a peer or minutes; names that moved show at import.
"""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
PEERS = {"ggml", "humming"}
"""Packages that nothing here installs: a script that needs one says how to get it."""


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_imports(name, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in PEERS:
            raise
        pytest.skip(f"needs {error.name}")
