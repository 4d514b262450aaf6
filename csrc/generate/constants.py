"""Writes the data of fp4_ops/backends/*/kernels.json and constants.json as C++."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from .header import header

ROOT = Path(__file__).parents[2]


def _reader() -> ModuleType:
    """Loads fp4_ops/runtime/fitted.py by its path, because the package is not built yet."""
    spec = importlib.util.spec_from_file_location("fitted", ROOT / "fp4_ops/runtime/fitted.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "{" + ", ".join(map(_value, value)) + "}"
    return repr(float(value))


def fitted() -> str:
    """Returns the text of build/fitted.h: constants with which the prefill kernels choose a tile."""
    reader, lines = _reader(), []
    for f in reader.families():
        lines.append(f"namespace sm{f.family}::fitted {{")
        for key, value in reader.groups(f.name)["prefill"].values.items():
            size = f"[{len(value)}]" if isinstance(value, list) else ""
            lines.append(f"inline constexpr double {key}{size} = {_value(value)};")
        lines += [f"}}  // namespace sm{f.family}::fitted", ""]
    return header("csrc/generate/constants.py; the prefill kernels include it.", lines)


def kernel_libraries() -> str:
    """Returns the text of build/kernel_libraries.h: what the planner knows about each library of kernels."""
    reader = _reader()
    families = reader.families()
    planners = {f.name: reader.groups(f.name)["planner"].values for f in families}
    fields = _lengths(planners[families[0].name])
    for name, values in planners.items():
        own = _lengths(values)
        assert own == fields, f"the planner's constants of {name} differ in their names or lengths"
    lines = ["struct PlannerConstants {"]
    lines += [f"  double {name}{f'[{n}]' if n else ''};" for name, n in fields.items()]
    lines += ["};", "", _LIBRARY, ""]
    for family in families:
        lines.append(f"inline constexpr PlannerConstants k_{family.name}_planner = {{")
        lines += [f"    {_value(v)},  // {key}" for key, v in planners[family.name].items()]
        lines += [
            "};",
            f"inline constexpr std::string_view k_{family.name}_layouts[] = {{{_names(family.layouts)}}};",
        ]
        lines += [
            f"inline constexpr std::string_view k_{family.name}_{layout}_rows[] = {{{_names(dtypes)}}};"
            for layout, dtypes in family.rows.items()
        ]
        of = ", ".join(f'{{"{layout}", k_{family.name}_{layout}_rows}}' for layout in family.rows)
        size = len(family.rows)
        lines += [
            f"inline constexpr std::array<RowsOfLayout, {size}> k_{family.name}_rows = {{{{{of}}}}};",
            "",
        ]
    lines.append("inline constexpr KernelLibrary kKernelLibraries[] = {")
    for f in families:
        words = ", ".join([*map(str, f.capability), str(f.and_later).lower(), f'"{f.capability_words}"'])
        lines.append(f"    {{{f.family}, {words}, k_{f.name}_layouts, k_{f.name}_rows, k_{f.name}_planner}},")
    lines += ["};", "", "// Numbers for linear layers with few rows.", "struct LinearsConstants {"]
    linears = reader.groups("hopper")["linears"].values
    lines += [f"  double {name};" for name in linears]
    lines += ["};", "inline constexpr LinearsConstants k_linears = {"]
    lines += [f"    {_value(value)},  // {name}" for name, value in linears.items()]
    text = header("csrc/generate/constants.py; cuda/gpu.h includes it.", [*lines, "};"])
    return text.replace(
        "#pragma once\n", "#pragma once\n\n#include <array>\n#include <span>\n#include <string_view>\n", 1
    )


def cpu(changed: Mapping[str, Mapping[str, int]] = MappingProxyType({})) -> str:
    """Returns the text of build/cpu_constants.h: thresholds and sizes of csrc/cpu.

    `changed`: values that replace those of the file, by the name of their group.
    """
    lines = []
    for name, group in _reader().groups("cpu").items():
        lines.append(f"namespace cpu::fitted::{name} {{")
        values = {**group.values, **changed.get(name, {})}
        lines += [f"inline constexpr int64_t {key} = {int(value)};" for key, value in values.items()]
        lines += [f"}}  // namespace cpu::fitted::{name}", ""]
    text = header("csrc/generate/constants.py; the CPU kernels include it.", lines)
    return text.replace("#pragma once\n", "#pragma once\n\n#include <cstdint>\n", 1)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


_LIBRARY = """\
// Dtypes of unquantised rows that the kernels read with a layout, if they are fewer than it allows.
struct RowsOfLayout {
  std::string_view layout;
  std::span<const std::string_view> dtypes;
};

// A library of native kernels: the GPUs that run it, and the layouts and rows that it reads.
struct KernelLibrary {
  int family;
  int major, minor;  // the compute capability of the GPUs that run them,
  bool and_later;    // and whether later ones do, too
  std::string_view capability;
  std::span<const std::string_view> layouts;
  std::span<const RowsOfLayout> rows;
  const PlannerConstants& planner;

  bool of(int a_major, int a_minor) const {
    const int here = 10 * a_major + a_minor, first = 10 * major + minor;
    return and_later ? here >= first : here == first;
  }
};"""


def _lengths(values: dict[str, Any]) -> dict[str, int]:
    return {name: len(v) if isinstance(v, list) else 0 for name, v in values.items()}
