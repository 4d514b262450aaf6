"""Writes the tables of meta/formats.py and meta/layouts.py as C++.

csrc/common/formats.h explains the fields. Names are sorted, because error messages list them so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from meta.formats import (
    A_FORMAT_NAMES,
    ACTIVATION_NAMES,
    ACTIVATIONS,
    ELEMENTS,
    FORMAT_NAMES,
    FORMATS,
    FP4_NAMES,
    INT8_BLOCK,
    LIMITS,
)
from meta.layouts import A_LAYOUTS, LAYOUT_NAMES, LAYOUTS, TILE16_K, TILE16_ROWS

from .header import header

SCALAR_TYPES = {
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float8_e4m3fn: "Float8_e4m3fn",
    torch.float8_e8m0fnu: "Float8_e8m0fnu",
    torch.float4_e2m1fn_x2: "Float4_e2m1fn_x2",
}

SCALES = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e8m0fnu: "e8m0",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
}
"""Dtypes of block scales. The C++ kernels are compiled for each, under this name."""

KEYWORDS = {"auto": "automatic"}


def tables() -> str:
    """Returns the text of build/tables.h."""
    numbers = [
        f"inline constexpr int kInt8Block = {INT8_BLOCK};",
        f"inline constexpr int kTile16Rows = {TILE16_ROWS}, kTile16K = {TILE16_K};",
    ]
    return header(
        "csrc/generate/tables.py; common/formats.h includes it.",
        [*_enums(), *_formats(), *_layouts(), *_activations(), *numbers],
    )


def _enum(name: str, values: Iterable[str]) -> str:
    return f"enum class {name} : uint8_t {{ {', '.join(KEYWORDS.get(v, v) for v in values)} }};"


def _names(name: str, values: Iterable[str]) -> str:
    listed = tuple(values)
    text = ", ".join(f'"{v}"' for v in listed)
    return f"inline constexpr std::array<std::string_view, {len(listed)}> {name} = {{{text}}};"


def _dtypes(name: str, dtypes: Iterable[torch.dtype]) -> str:
    text = ", ".join(map(_scalar_type, dtypes))
    return f"inline constexpr ScalarType {name}[] = {{{text}}};"


def _scalar_type(dtype: torch.dtype) -> str:
    return f"ScalarType::{SCALAR_TYPES[dtype]}"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _float(value: float) -> str:
    return f"{value!r}f"


def _table(kind: str, name: str, rows: Iterable[Iterable[str]]) -> list[str]:
    return [f"inline constexpr {kind} {name}[] = {{", *(f"    {{{', '.join(r)}}}," for r in rows), "};", ""]


def _enums() -> list[str]:
    return [
        _enum("Element", ELEMENTS),
        _enum("Scale", SCALES.values()),
        _enum("Order", dict.fromkeys(layout.order for layout in LAYOUTS.values())),
        _enum("AFormat", A_FORMAT_NAMES),
        _enum("GateFunction", dict.fromkeys(a.function for a in ACTIVATIONS.values())),
        "",
    ]


def _formats() -> list[str]:
    element_of = {s: f.element for f in FORMATS.values() for s in f.scale_dtypes}
    lines, rows = [], []
    for f in FORMATS.values():
        scales, packed = f"k_{f.name}_scale_dtypes", f"k_{f.name}_packed_dtypes"
        lines += [_dtypes(scales, f.scale_dtypes), _dtypes(packed, f.packed_dtypes)]
        row = [f'"{f.name}"', f"Element::{f.element}", str(f.block), f"Scale::{SCALES[f.scale_dtype]}"]
        rows.append([*row, scales, packed, _bool(f.has_global_scale)])
    # A value times `unit` is an integer. The last number is the offset that makes these integers unsigned.
    codes = []
    for values in ELEMENTS.values():
        unit = next(u for u in (1, 2, 4) if all((v * u).is_integer() for v in values))
        codes.append(("{" + ", ".join(map(_float, values)) + "}", str(unit), str(int(-min(values) * unit))))
    return [
        *_table("Codes", "kCodes", codes),
        *lines,
        *_table("Format", "kFormats", rows),
        *_table(
            "ScaleKind",
            "kScales",
            ((_scalar_type(d), f"Element::{element_of[d]}", str(d.itemsize)) for d in SCALES),
        ),
        _names("kFormatNames", FORMAT_NAMES),
        _names("kFp4Names", FP4_NAMES),
        "",
    ]


def _layouts() -> list[str]:
    lines: list[str] = []
    rows = []

    def array(name: str, write: Callable[[str, Any], str], values: tuple[Any, ...]) -> str:
        if values:
            lines.append(write(name, values))
        return name if values else "{}"

    for layout in LAYOUTS.values():
        own = f"k_{layout.name}"
        rows.append(
            (
                f'"{layout.name}"',
                f"Order::{layout.order}",
                *map(str, (layout.n_multiple, layout.k_multiple, layout.k_padding)),
                _scalar_type(layout.scale_dtype) if layout.scale_dtype else "std::nullopt",
                array(f"{own}_scale_dtypes", _dtypes, layout.scale_dtypes),
                _bool(layout.has_factor),
                array(f"{own}_formats", _names, layout.formats),
                array(f"{own}_a_formats", _names, layout.a_formats),
                array(f"{own}_a_dtypes", _dtypes, layout.a_dtypes),
                f'"{layout.a_layout}"',
                _bool(layout.native),
                _bool(layout.batch_invariant),
            )
        )
    return [
        *lines,
        *_table("Layout", "kLayouts", rows),
        _names("kLayoutNames", LAYOUT_NAMES),
        _names("kALayouts", A_LAYOUTS),
        "",
    ]


def _activations() -> list[str]:
    rows = (
        (
            f'"{a.name}"',
            f"GateFunction::{a.function}",
            _bool(a.interleaved),
            *(_float(v) for v in (a.alpha, a.limit or 0.0, a.up_offset)),
            _bool(a.gated),
            *(_float(v) for v in a.caps or (0.0, 0.0)),
        )
        for a in ACTIVATIONS.values()
    )
    return [
        *_table("Activation", "kActivations", rows),
        f"inline constexpr double kLeastLimit = {LIMITS[0]!r}, kMostLimit = {LIMITS[1]!r};",
        _names("kActivationNames", ACTIVATION_NAMES),
        _names("kAFormatNames", A_FORMAT_NAMES),
        "",
    ]
