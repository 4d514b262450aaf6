"""The constants of fp4_ops/backends/*/constants.json as C++: of the planner, and of the choice of tiles."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from .header import header

ROOT = Path(__file__).parents[2]
TILES = {"hopper": "sm90", "mma": "sm80"}
"""Backends, and the folder of csrc whose kernels have their constants of tiles."""


def _reader() -> ModuleType:
    """fp4_ops/fitted.py, without the package, which is not built yet."""
    spec = importlib.util.spec_from_file_location("fitted", ROOT / "fp4_ops/fitted.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "{" + ", ".join(map(_value, value)) + "}"
    return repr(float(value))


def constants() -> str:
    """The text of build/fitted.h."""
    groups = {name: _reader().groups(name) for name in TILES}
    planners = {name: of["planner"].values for name, of in groups.items()}
    names = {
        name: {k: len(v) if isinstance(v, list) else 0 for k, v in p.items()} for name, p in planners.items()
    }
    fields = names.pop(next(iter(TILES)))
    for name, own in names.items():
        assert own == fields, f"the planner's constants of {name} differ in their names or lengths"
    lines = ["struct PlannerConstants {"]
    lines += [f"  double {name}{f'[{n}]' if n else ''};" for name, n in fields.items()]
    lines += ["};", ""]
    for name, values in planners.items():
        lines.append(f"inline constexpr PlannerConstants k_{name}_planner = {{")
        lines += [f"    {_value(value)},  // {key}" for key, value in values.items()]
        lines += ["};", ""]
    for name, folder in TILES.items():
        lines.append(f"namespace {folder}::fitted {{")
        for key, value in groups[name]["prefill"].values.items():
            size = f"[{len(value)}]" if isinstance(value, list) else ""
            lines.append(f"inline constexpr double {key}{size} = {_value(value)};")
        lines += [f"}}  // namespace {folder}::fitted", ""]
    return header(
        "csrc/generate/constants.py; csrc/cuda/constants.h and the kernels include it.",
        lines,
    )
