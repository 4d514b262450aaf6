"""Loads `_nvlink.so`, the kernels of csrc/nvlink behind a plain C interface, and launches them."""

from __future__ import annotations

import ctypes
import functools
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..runtime import cuda_errors
from ..runtime.libraries import REBUILD, function_of

FILE = "_nvlink.so"
MOST_RANKS, SLOTS, MOST_TOP_K = 16, 2048, 32
"""kMaxRanks, kSlots and kMaxTopK of csrc/nvlink/interface.h."""

POINTER, INT, LONG, WORD = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KINDS = ("gather", "reduce", "all_reduce")


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Failure(ctypes.Structure):
    _fields_ = _fields(WORD, "reason kind rank epoch theirs ours")


class Space(ctypes.Structure):
    """Workspace of interface.h."""

    _fields_ = [
        ("base", POINTER * MOST_RANKS),
        *_fields(LONG, "headers flags words parts rows factors ids weights word_stride part_stride"),
        *_fields(POINTER, "counters failure"),
        *_fields(LONG, "patience"),
        *_fields(INT, "rank ranks"),
    ]


class GatherParams(ctypes.Structure):
    _fields_ = [
        ("space", Space),
        *_fields(POINTER, "x factor ids weights"),
        *_fields(INT, "own tokens row_bytes top_k experts ids64 weight_type words blocks"),
        *_fields(WORD, "signature"),
    ]


class ReduceParams(ctypes.Structure):
    _fields_ = [
        ("space", Space),
        *_fields(POINTER, "y position ids weights own_ids own_weights out"),
        *_fields(
            INT,
            "own tokens columns top_k experts ids64 weight_type type y_type fused words blocks turns early",
        ),
        *_fields(WORD, "signature"),
    ]


class AllReduceParams(ctypes.Structure):
    _fields_ = [
        ("space", Space),
        *_fields(POINTER, "x out"),
        *_fields(LONG, "units"),
        *_fields(INT, "type words blocks turns two_steps"),
        *_fields(WORD, "signature"),
    ]


STRUCTURES = (Space, GatherParams, ReduceParams, AllReduceParams, Failure)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the kernels, or None if they were not built (setup.py says when they are)."""
    path = Path(__file__).parent.parent / FILE
    if not path.exists():
        return None
    loaded = ctypes.CDLL(str(path))
    for name, params in zip(KINDS, STRUCTURES[1:]):
        function_of(loaded, f"fp4_nvlink_{name}").argtypes = [ctypes.POINTER(params), POINTER]
    size_of = function_of(loaded, "fp4_nvlink_sizes")
    for i, structure in enumerate(STRUCTURES):
        if size_of(i) != ctypes.sizeof(structure):
            raise ImportError(
                f"fp4_ops: {path} and this Python package come from different builds. {REBUILD}"
            )
    return loaded


def launch(name: str, params: ctypes.Structure, stream: int | None) -> None:
    loaded = library()
    assert loaded is not None
    error = getattr(loaded, f"fp4_nvlink_{name}")(ctypes.byref(params), stream)
    if error != 0:
        raise cuda_errors.failed(f"fp4_nvlink_{name}", error)


def signature(kind: int, tokens: int, *rest: object) -> int:
    """Returns a number that describes a call.

    Ranks compare it; different calls must have different numbers.
    """
    return kind << 30 | min(tokens, 2**22 - 1) << 8 | zlib.crc32(repr(rest).encode()) & 255


def described(value: int) -> str:
    """Describes a signature in words."""
    kind, tokens = value >> 30, value >> 8 & (2**22 - 1)
    if kind == KINDS.index("all_reduce"):
        return f"the sum of {16 * tokens} bytes"
    return f"{tokens} tokens a rank"


def dtype_code(t: Tensor) -> int:
    return TYPES[t.dtype]
