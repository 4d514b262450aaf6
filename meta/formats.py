"""Tables of 4-bit formats and activation functions. csrc/generate/tables.py writes the same rows for C++."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of an e2m1 code, by its low three bits. Bit 3 is the sign."""

ELEMENTS = {
    "e2m1": (*E2M1_VALUES, *(-v for v in E2M1_VALUES)),
    "int4": (*map(float, range(8)), *map(float, range(-8, 0))),
}
"""Value of each of the 16 codes, by element. int4 is two's complement."""

INT8_BLOCK = 32
"""Number of elements along K that share one float32 scale in int8 activations (as in ggml's Q8_0)."""


@dataclass(frozen=True)
class Format:
    """A 4-bit weight format: value = code x block scale (x global scale)."""

    name: str
    block: int
    """Number of elements along K that share one block scale. The last block of a row may be short."""
    scale_dtype: torch.dtype
    """Dtype of the block scales that `fp4::quantize` makes."""
    has_global_scale: bool = False
    """True if the block scales of each matrix are multiplied by one float32 factor."""
    element: str = "e2m1"
    """Meaning of a code: a key of `ELEMENTS`."""
    wide_scale_dtype: torch.dtype | None = None
    """Another dtype of block scales that the operators accept."""

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.scale_dtype, *([self.wide_scale_dtype] if self.wide_scale_dtype else ()))

    @property
    def packed_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of packed codes: uint8, and for e2m1 also torch's dtype for pairs of codes."""
        return (torch.uint8, torch.float4_e2m1fn_x2) if self.element == "e2m1" else (torch.uint8,)

    def num_blocks(self, k: int) -> int:
        return (k + self.block - 1) // self.block

    def bytes_per_weight(self) -> float:
        return 0.5 + self.scale_dtype.itemsize / self.block


FORMATS = {
    f.name: f
    for f in (
        Format("nvfp4", block=16, scale_dtype=torch.float8_e4m3fn, has_global_scale=True),
        Format("mxfp4", block=32, scale_dtype=torch.float8_e8m0fnu),
        *(
            Format(name, block, torch.bfloat16, element="int4", wide_scale_dtype=torch.float32)
            for name, block in (("int4", 128), ("int4_g64", 64), ("int4_g32", 32))
        ),
    )
}

FORMAT_NAMES = tuple(sorted(FORMATS))

SMALLEST_SIDE = 32
"""The smallest N and K of experts' matrices that are put into 4 bits: one block of mxfp4.

A narrower matrix, such as an adapter of rank 8 (LoRA), has few bytes, and its whole error would affect the
trained weights. The operators take any size."""

FP4_FORMATS = tuple(f.name for f in FORMATS.values() if f.element == "e2m1")
"""Formats that activations may have, too."""

FP4_NAMES = tuple(sorted(FP4_FORMATS))

INT4_FORMATS = tuple(f.name for f in FORMATS.values() if f.element == "int4")


@dataclass(frozen=True)
class Activation:
    """Function between an expert's two products: h = f(gate) * (up + up_offset), or h = f(up) without gate.

    `interleaved`: columns are gate0, up0, gate1, up1, ...; otherwise the first half is gate.
    """

    name: str
    function: str = "silu"
    """f: "silu", "gelu" (exact, erf), "gelu_tanh", "relu2" (the square of relu) or "situ" (see `caps`)."""
    interleaved: bool = False
    alpha: float = 1.0
    """f(g) = g * sigmoid(alpha * g) for the silu family."""
    limit: float | None = None
    """Bound of the clamps: gate <= limit and -limit <= up <= limit."""
    up_offset: float = 0.0
    """Constant that is added to up."""
    gated: bool = True
    """True if the first product computes gate and up, False if it computes only up."""
    caps: tuple[float, float] | None = None
    """Soft limits of gate and up in the function "situ". With s(x, c) = c * tanh(x / c), it is
    h = s(gate, caps[0]) * sigmoid(gate) * s(up, caps[1])."""

    @property
    def parts(self) -> int:
        """Number of rows of the first weight for each column of the second: 2 (gate and up) or 1 (up)."""
        return 2 if self.gated else 1

    @property
    def linear_in_up(self) -> bool:
        """True if a factor of up is the same factor of h."""
        return self.gated and self.limit is None and self.caps is None and not self.up_offset


ACTIVATIONS = {
    a.name: a
    for a in (
        *(Activation(f, f) for f in ("silu", "gelu", "gelu_tanh")),
        *(Activation(f"{f}_interleaved", f, interleaved=True) for f in ("silu", "gelu", "gelu_tanh")),
        # GPT-OSS: gate.clamp(max=7) * sigmoid(1.702 gate) * (up.clamp(-7, 7) + 1), interleaved.
        Activation("swigluoai", interleaved=True, alpha=1.702, limit=7.0, up_offset=1.0),
        Activation("swigluoai_halves", alpha=1.702, limit=7.0, up_offset=1.0),
        Activation("relu2", "relu2", gated=False),  # Nemotron's: relu(up)^2
        Activation("situ", "situ", caps=(4.0, 25.0)),  # Kimi-K3
        Activation("situ_interleaved", "situ", interleaved=True, caps=(4.0, 25.0)),
    )
}
"""Activations by name. An activation with a gate and without caps may have another limit, as in
`silu(limit=10)`; see `find_activation`."""

ACTIVATION_NAMES = tuple(sorted(ACTIVATIONS))

_LIMITED = re.compile(r"(\w+)\(limit=(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\)", re.ASCII)
LIMITS = 1e-30, 1e30
"""The smallest and the largest limit. float32 can represent both."""


@functools.cache
def find_activation(name: str) -> Activation | None:
    """Returns the activation of a name, with or without a limit in brackets, or None."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    written = _LIMITED.fullmatch(name)
    base = ACTIVATIONS.get(written[1]) if written else None
    if written is None or base is None or not base.gated or base.caps:
        return None
    limit = float(written[2])
    return replace(base, name=name, limit=limit) if LIMITS[0] < limit < LIMITS[1] else None


def known_activation(name: str) -> Activation:
    """Returns the activation of a valid name."""
    found = find_activation(name)
    assert found is not None, name
    return found


def activation_name(activation: Activation) -> str | None:
    """Returns a name for which `find_activation` gives the same function, or None if there is none."""
    for a in ACTIVATIONS.values():
        if replace(a, name=activation.name) == activation:
            return a.name
    for a in ACTIVATIONS.values():
        if replace(a, name=activation.name, limit=activation.limit) == activation:
            name = f"{a.name}(limit={activation.limit!r})".replace(".0)", ")")
            return name if find_activation(name) else None
    return None


A_FORMATS = ("none", "auto", "int8", "fp8", *FP4_FORMATS)
"""Ways in which `moe` quantises activations before each product. The caller chooses one.

"int8" on a GPU (layout mma_bf16) has blocks of 128 and is used only for many tokens: docs/operators.md.

"auto" is the fastest way on the device: int8 on a CPU; on Hopper "none" for few tokens and "fp8" for many.

"nvfp4" gives every row its own global scale, so that a token's result does not depend on its batch.
"""

A_FORMAT_NAMES = tuple(sorted(A_FORMATS))

ACTIVATION_CHOICES = {"auto": "auto", "bf16": "none", **{n: n for n in ("fp8", "int8", *FP4_FORMATS)}}
"""Values of the option `activation` of a whole model, each with its `a_format` of `fp4::moe`."""


def check_activation_choice(activation: str, format: str | None) -> None:
    """Raises ValueError if `activation` is unknown or does not fit weights of `format` (None: not known yet).

    The operators can multiply FP4 rows by any weights, but no tensor core takes two formats.
    """
    if activation not in ACTIVATION_CHOICES:
        raise ValueError(
            f"fp4: activation is {activation!r}; it must be one of: {', '.join(ACTIVATION_CHOICES)}"
        )
    if activation in FP4_FORMATS and format not in (None, activation):
        instead = f"activation={format!r}" if format in FP4_FORMATS else "activation='bf16' or 'auto'"
        raise ValueError(
            f"fp4: activation is {activation!r} and the weights' format is {format!r}; FP4 activations "
            f"need weights of the same format. Use {instead}, or weights in {activation!r}"
        )
