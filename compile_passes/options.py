"""Options of `torch.compile(model, backend="fp4", mode=..., options={...})`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import _library
from ..backends import check_activation
from ..experts.packed import auto_a_format
from ..meta import formats
from ..meta.formats import ACTIVATION_CHOICES, FORMATS, FP4_FORMATS, check_activation_choice
from ..meta.layouts import LAYOUTS
from ..models.outside_experts import KEEP, KINDS, Kind, chosen_formats


@dataclass(frozen=True)
class Options:
    format: str = "nvfp4"
    activation: str = "auto"
    """Format of activations, one of ACTIVATION_CHOICES. "bf16" keeps the model's dtype, "auto" chooses."""
    outside: Mapping[Kind, str] = field(default_factory=dict)
    """Formats of the linear layers outside the experts, by kind. Kinds that keep their dtype are left out."""
    strict: bool = False
    """True if experts that keep their original weights are an error."""
    inductor: dict[str, Any] = field(default_factory=dict)
    batch_invariant: bool = False
    """True if a row's bits must not depend on the other rows."""

    @property
    def cpp_wrapper(self) -> bool:
        """True if Inductor's wrapper is C++ code. It cannot pass lists of tensors to an operator: torch 2.13
        ends with an invalid PyCapsule, or a segmentation fault. AOTInductor's packages can."""
        from ..meta.torch_internals import inductor_config

        return bool(self.inductor.get("cpp_wrapper", inductor_config.cpp_wrapper))

    @property
    def wanted(self) -> str:
        """The a_format that the user asked for. The method `a_format` gives the one that a layout allows."""
        return ACTIVATION_CHOICES[self.activation]

    def a_format(self, device_type: str, layout: str = "plain") -> tuple[str, str]:
        """Return the operators' a_format, and why it was chosen."""
        if self.activation == "auto":
            chosen = auto_a_format(device_type, layout)
            return chosen, f"auto: {_AUTO[chosen]} on {device_type}"
        if self.activation in ("fp8", "int8"):
            check_activation(self.activation, device_type, layout)
            return self.activation, "asked for"
        if self.activation in FP4_FORMATS:
            if self.activation not in (LAYOUTS[layout].a_formats or FP4_FORMATS):
                raise ValueError(
                    f"fp4: activation is {self.activation!r}; no kernel takes it with weights in layout "
                    f"{layout!r}. Use activation='bf16' or 'auto'."
                )
            return self.activation, "asked for"
        return "none", "asked for"


_INSTEAD_OF_FP8 = (
    "The backend does not put layers into fp8: call fp4_ops.prepare(model, {kind}='fp8') before torch.compile"
)

_AUTO = {
    "int8": "the fast path",
    "none": "the model's own dtype",
    "auto": "the model's own dtype for few tokens, fp8 for many,",
    "fp8": "what the kernels of these weights read",
}


def parse(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Parse the options of the backend. Options that are not fp4's own must be Inductor's."""
    given = dict(options or {})
    format = given.pop("format", "nvfp4")
    if format not in FORMATS:
        raise ValueError(f"fp4: format is {format!r}; it must be one of: {', '.join(FORMATS)}")
    activation = given.pop("activation", "auto")
    check_activation_choice(activation, format)
    switches = {name: given.pop(name, False) for name in ("linear", "strict", "batch_invariant")}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"fp4: {name} is {value!r}; it must be True or False")
    if switches["linear"] and given.setdefault("dense", format) != format:
        raise ValueError(
            f"fp4: linear is True and dense is {given['dense']!r}; linear=True means dense={format!r}, the "
            "experts' format. Leave one of the two out"
        )
    outside = chosen_formats({kind: given.pop(kind, KEEP) for kind in KINDS}, _INSTEAD_OF_FP8)
    for kind_format in outside.values():
        check_activation_choice(activation, kind_format)

    from ..meta.torch_internals import inductor_config, list_mode_options

    # Inductor ignores a bare `mode` that reaches it from another backend, so it is expanded here.
    inductor = dict(list_mode_options(mode)) if mode else {}
    known = inductor_config.get_config_copy()
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ValueError(
                f"fp4: unknown option {key!r}. fp4's own options are format, activation, "
                f"{', '.join(KINDS)}, linear, strict and batch_invariant; "
                "all others must be Inductor's (torch._inductor.list_options())."
            )
        inductor[name] = value
    return Options(format, activation, outside, switches["strict"], inductor, switches["batch_invariant"])


@functools.cache
def version_hash() -> str:
    """Return a hash that changes when the operators or the passes change. Inductor's own cache keys do not
    include these."""
    meta, passes = Path(str(formats.__file__)).parent, Path(__file__).parent
    package = Path(str(_library.__file__)).parent
    digest = hashlib.sha256(torch.__version__.encode())
    files = {p for root in (meta, passes, package) for p in (*root.rglob("*.py"), *root.glob("_C*.so"))}
    for path in sorted(files):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def inductor_patches(options: Options) -> dict[str, Any]:
    """Return Inductor's options for one compilation. They make `version_hash` part of its cache keys."""
    from ..meta.torch_internals import CustomGraphPass, inductor_config

    slot = "post_grad_custom_pre_pass"
    users_own = options.inductor.get(slot, getattr(inductor_config, slot))
    if users_own is not None and not isinstance(users_own, CustomGraphPass):
        return options.inductor  # a pass without uuid turns Inductor's cache off

    class CacheKey(CustomGraphPass):
        """Does not change the graph. Only its uuid matters: it is part of Inductor's cache key."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            if users_own is not None:
                users_own(graph)

        def uuid(self) -> Any:
            theirs = users_own.uuid() if users_own is not None else ""
            if theirs is None:
                return None
            return f"fp4_ops {version_hash()} {theirs}"

    return {**options.inductor, slot: CacheKey()}
