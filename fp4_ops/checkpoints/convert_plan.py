"""Plans what `quantize` reads and writes, from the headers of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..meta.formats import FORMATS
from ..models.outside_experts import Kind, kind_of
from .check import Header
from .dialects import EXPERTS_TARGET, Codes, Dialect, describe, encode, writing_dialect
from .files import DAMAGED, INCOMPLETE, CheckpointError, TensorInfo
from .folder import Folder
from .source import MATRIX, PARTNER, eight_bits, stack_of

if TYPE_CHECKING:
    from .calibrated import CalibratedLayers

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Unit:
    """A step of the work: what is read, and the resulting tensors."""

    reads: list[tuple[TensorInfo, ...]]
    """Each entry is one matrix [N, K], or two that are quantised as one [gate; up]."""
    names: list[str]
    """Names of the resulting weights: one name, or those of gate and up. If another file has gate or up, its
    name here is "". The list is empty if `reads` is one tensor that is copied as it is."""
    outputs: list[Header]
    dialect: Dialect | None = None
    """How the result is stored; None for tensors that are not quantised."""
    transposed: bool = False
    """True if the matrices are stored as [K, N]."""
    dequantized: bool = False
    """True if the tensor is in 8 bits, and is written in the model's dtype instead of copied."""
    rounded: bool = False
    """True for a linear layer outside the experts. It is rounded, whatever the experts' method is."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read from this step's own source file. A partner in another file is not counted."""
        if self.names and not all(self.names):
            return self.reads[0][self.names.index("") ^ 1].nbytes
        return sum(info.nbytes for read in self.reads for info in read)


class Plan:
    """Plan of the files that `quantize_checkpoint` writes, made from the source's headers alone."""

    def __init__(self, folder: Folder, format: str, kinds: Mapping[Kind, str]) -> None:
        """kinds: the linear layers outside the experts that are quantised, too, with their formats."""
        self.folder, self.format = folder, format
        tensors = folder.tensors
        for info in tensors.values():
            if info.foreign:
                raise CheckpointError(
                    f"fp4: {info} has dtype {info.foreign}, which cannot be copied. Quantise the original "
                    "weights"
                )
        self.eight = eight_bits(folder)
        """The source's weights in 8 bits, by the tensor of their codes. They are dequantised on the way."""
        self._scales = {
            w.name + s for w in self.eight.values() for s in w.dialect.suffixes if s != w.dialect.packed
        }
        name = folder.config.get("dtype") or folder.config.get("torch_dtype") or "bfloat16"
        self.dtype = getattr(torch, str(name).removeprefix("torch."), torch.bfloat16)
        """The dtype for weights in 8 bits that do not belong to experts."""
        places = {place: n for n, info in tensors.items() if (place := stack_of(info)) is not None}
        self.stacks = {n: self._is_transposed(owner, places) for (owner, _), n in places.items()}
        """Says for each stack whether it is stored as [E, K, N]."""
        singles = [n for n in tensors if MATRIX.match(n)]
        self.gated = any(MATRIX.sub(r"\2", n) in ("gate_proj", "w1") for n in singles)
        if not singles and not self.stacks:
            other = next((n for n in tensors if "expert" in n), None)
            family = folder.config.get("model_type") or "model of no known type"
            raise CheckpointError(
                f"fp4: {folder.path}, a {family}, has no expert weights (...experts.N.gate_proj.weight and "
                "the like, or ...experts.gate_up_proj)"
                + f", and {other} has no such name"
                * bool(other)
                + ": nothing was written. If it is a Mixture of Experts, load it and compile it with "
                "torch.compile(model, backend='fp4')"
            )
        self.outside = _find_outside(folder, kinds)
        k: dict[str, set[int]] = {}
        for name, own in [*((n, format) for n in (*singles, *self.stacks)), *self.outside.items()]:
            k.setdefault(own, set()).add(self._check(tensors[name], own))
        self.dialects = {
            own: writing_dialect(own, folder.config.get("model_type"), sizes, not self.outside)
            for own, sizes in k.items()
        }
        """The dialect of each format of the result. The experts' is the first."""
        self.dialect = self.dialects[format]
        if self.dialect.stacked and singles:
            raise CheckpointError(
                f"fp4: {folder.path} has expert weights both stacked and one by one; all must be stored "
                "one way"
            )
        self.weights = (*singles, *self.stacks)
        """The tensors that hold experts' weights."""
        self.matrices = len(singles) + sum(tensors[n].shape[0] for n in self.stacks)

    def _is_transposed(self, owner: str, places: dict[tuple[str, str], str]) -> bool:
        """Returns whether the stacks are [E, K, N], judged by the sizes of gate_up (or up alone) and down."""
        names = [places.get((owner, part)) for part in ("gate_up_proj", "up_proj", "down_proj")]
        parts, up, down = 2 if names[0] else 1, names[0] or names[1], names[2]
        if up is None or down is None:
            one = self.folder.tensors[up or down or ""]
            raise CheckpointError(
                f"fp4: {one} has no counterpart (gate_up_proj or up_proj, down_proj) beside it. {INCOMPLETE}"
            )
        first, second = self.folder.tensors[up], self.folder.tensors[down]
        (e, a, b), (e2, c, d) = first.shape, second.shape
        if e == e2 and (a, b) == (parts * d, c):
            return False
        if e == e2 and (b, a) == (parts * c, d):
            return True
        raise CheckpointError(
            f"fp4: {first} {list(first.shape)} does not fit {second.name} {list(second.shape)}"
        )

    def _check(self, info: TensorInfo, format: str) -> int:
        """Checks a weight that is to be in `format` and returns its K."""
        if info.dtype not in SOURCE_DTYPES and info.name not in self.eight:
            raise CheckpointError(
                f"fp4: {info} is {info.dtype}; it must be bfloat16, float16 or float32. Quantise the "
                "original weights"
            )
        if len(info.shape) != (3 if info.name in self.stacks else 2):
            raise CheckpointError(f"fp4: {info} has shape {list(info.shape)}; it must be [N, K]")
        k = info.shape[-2 if self.stacks.get(info.name) else -1]
        if k % (block := FORMATS[format].block):
            raise CheckpointError(
                f"fp4: {info} has K = {k}; {format} files need a multiple of {block}. Use another format"
            )
        self._partner(info)
        return k

    def _partner(self, info: TensorInfo) -> TensorInfo | None:
        """Returns the up matrix of a gate, or the gate of an up."""
        match = MATRIX.match(info.name)
        if match is None or match[2] not in PARTNER:
            return None
        if not self.gated:  # an up without a gate
            return None
        name = f"{match[1]}{PARTNER[match[2]]}.weight"
        partner = self.folder.tensors.get(name)
        if partner is None:
            raise CheckpointError(f"fp4: {info} has no {name} beside it. {INCOMPLETE}")
        if partner.shape != info.shape:
            raise CheckpointError(
                f"fp4: {info} has shape {list(info.shape)} and {name} {list(partner.shape)}; they must be "
                f"alike. {DAMAGED}"
            )
        if partner.dtype != info.dtype:
            raise CheckpointError(
                f"fp4: {info} is {info.dtype} and {name} {partner.dtype}; both are read as one matrix. "
                "Save the folder in one dtype: from_pretrained(..., dtype=torch.bfloat16).save_pretrained"
            )
        return partner

    @property
    def stored(self) -> dict[str, Any]:
        """The `quantization_config` of the result."""
        targets: dict[str, list[str]] = {self.format: [EXPERTS_TARGET]}
        for name, format in self.outside.items():
            targets.setdefault(format, []).append(name.removesuffix(".weight"))
        groups = [(self.dialects[format], names) for format, names in targets.items()]
        linears = (n for n in self.folder.tensors if _is_linear(self.folder, n) and n not in self.outside)
        return describe(groups, sorted(n.removesuffix(".weight") for n in linears))

    def layers(self, file: Path, calibrated: CalibratedLayers) -> set[int]:
        """Returns the layers that must be done before the result of a source file can be written."""
        reads = (read[0].name for unit in self.units(file) if unit.names for read in unit.reads)
        return {calibrated.layer(name) for name in reads if name in calibrated}

    def units(self, file: Path) -> Iterator[Unit]:
        """Yields the work for one source file, in the order in which its result is written."""
        taken: set[str] = set()
        for info in self.folder.of_file(file):
            if info.name in taken or info.name in self._scales:
                continue
            if info.name in self.stacks:
                yield from self._stack(info)
            elif MATRIX.match(info.name):
                partner = self._partner(info)
                pair = [info, partner] if partner else [info]
                pair.sort(key=lambda t: t.name.endswith((".up_proj.weight", ".w3.weight")))
                taken.update(t.name for t in pair)
                names = [t.name.removesuffix(".weight") if t.file == file else "" for t in pair]
                outputs = [o for name in names if name for o in outputs_of(name, info.shape, self.dialect)]
                yield Unit([tuple(pair)], names, outputs, self.dialect)
            elif info.name in self.outside:
                name = info.name.removesuffix(".weight")
                own = self.dialects[self.outside[info.name]]
                yield Unit([(info,)], [name], outputs_of(name, info.shape, own), own, rounded=True)
            elif info.name in self.eight:
                yield Unit([(info,)], [], [(info.name, self.dtype, info.shape)], dequantized=True)
            else:
                yield Unit([(info,)], [], [(info.name, info.dtype, info.shape)])

    def _stack(self, info: TensorInfo) -> Iterator[Unit]:
        e, a, b = info.shape
        transposed = self.stacks[info.name]
        shape = (b, a) if transposed else (a, b)
        rows: list[tuple[TensorInfo, ...]] = [(info.row(i),) for i in range(e)]
        if self.dialect.stacked:
            outputs = outputs_of(info.name, (e, *shape), self.dialect)
            yield Unit(rows, [info.name], outputs, self.dialect, transposed)
            return
        place = stack_of(info)
        assert place is not None
        for i, row in enumerate(rows):
            name = f"{place[0]}.{i}.{place[1]}"
            yield Unit([row], [name], outputs_of(name, shape, self.dialect), self.dialect, transposed)


def outputs_of(name: str, shape: tuple[int, ...], dialect: Dialect) -> list[Header]:
    """Returns the headers of a weight's tensors in a dialect."""
    *rows, k = shape
    format = FORMATS[dialect.format]
    with torch.device("meta"):
        packed = torch.empty((*rows, k // 2), dtype=torch.uint8)
        block_scale = torch.empty((*rows, format.num_blocks(k)), dtype=format.scale_dtype)
    codes = Codes(packed, block_scale, torch.ones(()) if format.has_global_scale else None)
    return [(key, t.dtype, tuple(t.shape)) for key, t in encode(name, codes, dialect).items()]


# --- linear layers outside the experts ---


def _is_linear(folder: Folder, name: str) -> bool:
    """True for the weight of a linear layer outside the experts."""
    matrix = name.endswith(".weight") and len(folder.tensors[name].shape) == 2
    return matrix and not MATRIX.match(name) and "embed" not in name


def _find_outside(folder: Folder, formats: Mapping[Kind, str]) -> dict[str, str]:
    """Map the names of the weights of some kinds to their formats.

    Raises CheckpointError for a kind that has no weight.
    """
    linears = {name: kind_of(name) for name in folder.tensors if _is_linear(folder, name)}
    for kind in formats:
        if kind not in linears.values():
            tied = " (one that shares the embeddings' weight has none of its own)" * (kind == "head")
            raise CheckpointError(
                f"fp4: {folder.path} has no linear layer of kind {kind!r}{tied}. Leave it out"
            )
    return {name: formats[kind] for name, kind in linears.items() if kind is not None and kind in formats}
