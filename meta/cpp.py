"""The tables of formats.py and layouts.py as C++: setup.py writes them to build/tables.h.

csrc/common/formats.h says what the fields mean. Names stand sorted, as error messages list them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .formats import A_FORMATS, ACTIVATIONS, ELEMENTS, FORMATS, FP4_FORMATS, INT8_BLOCK, LIMITS
from .layouts import A_LAYOUTS, LAYOUTS, TILE16_K, TILE16_ROWS

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
"""Dtypes of block scales, by the names of the C++ kernels that are compiled for them."""

KEYWORDS = {"auto": "automatic"}


def header() -> str:
    return "\n".join(
        [
            "// Made by setup.py of meta/formats.py and meta/layouts.py, and included by common/formats.h.",
            "#pragma once",
            "",
            "namespace fp4 {",
            "",
            *_enums(),
            *_formats(),
            *_layouts(),
            *_activations(),
            f"inline constexpr int kInt8Block = {INT8_BLOCK};",
            f"inline constexpr int kTile16Rows = {TILE16_ROWS}, kTile16K = {TILE16_K};",
            "",
            "}  // namespace fp4",
            "",
        ]
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
        _enum("Order", LAYOUTS),
        _enum("AFormat", sorted(A_FORMATS)),
        _enum("GateFunction", dict.fromkeys(a.function for a in ACTIVATIONS.values())),
        "",
    ]


def _formats() -> list[str]:
    element_of = {s: f.element for f in FORMATS.values() for s in f.scale_dtypes}
    rows = (
        (
            f'"{f.name}"',
            f"Element::{f.element}",
            str(f.block),
            f"Scale::{SCALES[f.scale_dtypes[0]]}",
            f"Scale::{SCALES[f.scale_dtypes[-1]]}",
            _bool(f.has_global_scale),
        )
        for f in FORMATS.values()
    )
    # `unit` makes every value an integer; `offset` makes these unsigned.
    codes = []
    for values in ELEMENTS.values():
        unit = next(u for u in (1, 2, 4) if all((v * u).is_integer() for v in values))
        codes.append(("{" + ", ".join(map(_float, values)) + "}", str(unit), str(int(-min(values) * unit))))
    return [
        *_table("Codes", "kCodes", codes),
        *_table("Format", "kFormats", rows),
        *_table(
            "ScaleKind",
            "kScales",
            ((_scalar_type(d), f"Element::{element_of[d]}", str(d.itemsize)) for d in SCALES),
        ),
        _names("kFormatNames", sorted(FORMATS)),
        _names("kFp4Names", sorted(FP4_FORMATS)),
        "",
    ]


def _layouts() -> list[str]:
    lines, rows = [], []
    for layout in LAYOUTS.values():
        formats, a_formats, a_dtypes = (
            f"k_{layout.name}_{what}" for what in ("formats", "a_formats", "a_dtypes")
        )
        lines.append(_names(formats, sorted(layout.formats)))
        if layout.a_formats:
            lines.append(_names(a_formats, layout.a_formats))
        if layout.a_dtypes:
            lines.append(_dtypes(a_dtypes, layout.a_dtypes))
        rows.append(
            (
                f'"{layout.name}"',
                f"Order::{layout.name}",
                *map(str, (layout.n_multiple, layout.k_multiple, layout.k_padding)),
                _scalar_type(layout.scale_dtype) if layout.scale_dtype else "std::nullopt",
                _bool(layout.has_factor),
                formats,
                a_formats if layout.a_formats else "{}",
                a_dtypes if layout.a_dtypes else "{}",
                f'"{layout.a_layout}"',
                _bool(layout.hopper),
            )
        )
    return [
        *lines,
        *_table("Layout", "kLayouts", rows),
        _names("kLayoutNames", sorted(LAYOUTS)),
        _names("kALayoutNames", A_LAYOUTS),
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
        )
        for a in ACTIVATIONS.values()
    )
    return [
        *_table("Activation", "kActivations", rows),
        f"inline constexpr double kLeastLimit = {LIMITS[0]!r}, kMostLimit = {LIMITS[1]!r};",
        _names("kActivationNames", sorted(ACTIVATIONS)),
        _names("kAFormatNames", sorted(A_FORMATS)),
        "",
    ]
