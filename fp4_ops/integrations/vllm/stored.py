"""Index of what a folder stores in 4 and 8 bits, by the names that vLLM gives its layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.dialects import Codes, Dialect, StoredWeight, dialects_of, stored_config, stored_weights
from ...checkpoints.dialects.fp4 import StackedBlocks
from ...checkpoints.files import CheckpointError, TensorInfo, tensor_info
from ...checkpoints.folder import Folder
from ...expert_names import MATRICES
from ...meta.formats import FORMATS

VLLM_KEYS = ("total_num_heads", "total_num_kv_heads")
"""Keys that vLLM adds to a config."""
METHODS = {"modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "gpt_oss_mxfp4": "mxfp4"}
"""vLLM's names of methods, and the names that folders use."""
CACHES = (".k_scale", ".v_scale", ".q_scale", "_bmm_quantizer._amax")
"""Ends of the names of scales of the cache, which belong to no linear layer."""


def described(config: Mapping[str, Any]) -> tuple[Dialect, ...]:
    """The dialects of a `quantization_config` as vLLM hands it over. Raises CheckpointError."""
    own = {key: value for key, value in config.items() if key not in VLLM_KEYS}
    method = own.get("quant_method")
    return dialects_of(own | {"quant_method": METHODS.get(str(method), method)})


def why_not(dialects: Iterable[Dialect]) -> str:
    """Why the engine's layers cannot run weights in these dialects; "" if they can."""
    for dialect in dialects:
        if dialect.is_dense:
            continue
        if dialect.format not in FORMATS:
            return f"{dialect.name} holds {dialect.format}, which no operator computes with"
        if dialect.name.startswith("deepseek"):
            return f"{dialect.name} is loaded by a model of vLLM's own, which asks no quantisation method"
    return ""


def tensors_of(model: str, metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The tensors of a folder, or those of a model of the hub by the headers that vLLM fetched."""
    if Path(model).is_dir():
        return Folder(model).tensors
    where = Path(model)
    return {name: tensor_info(name, entry, where, 0)[0] for name, entry in metadata.items()}


@dataclass(frozen=True)
class Entry:
    """One stored weight."""

    stored: StoredWeight
    suffixes: tuple[str, ...]
    """Ends of the names of its tensors, those that are not read, too."""

    @property
    def needed(self) -> set[str]:
        return {info.name.removeprefix(self.stored.name) for info in self.stored.tensors}


Entries = dict[tuple[int | None, str, str], Entry]
"""An experts layer's weights by expert (None: all in one), "gate_up" or "down", and "gate", "up" or ""."""


@dataclass
class Stored:
    """All stored weights of a folder, by the names that vLLM's layers have."""

    entries: dict[str, Entry]
    """By the name of the tensor of codes."""
    ends: frozenset[str] = frozenset()
    """Ends of these names."""

    @classmethod
    def read(cls, model: str, config: Mapping[str, Any], metadata: Mapping[str, Any]) -> Stored:
        """Reads the headers. Raises CheckpointError for parts that are missing or misshapen."""
        tensors = tensors_of(model, metadata)
        if not tensors:
            raise CheckpointError(
                f"fp4: the headers of {model}'s safetensors files cannot be read, and they say which layers "
                "are in 4 bits. Fetch the model first (`hf download`), and give the folder"
            )
        own = stored_config(Path(model)) if Path(model).is_dir() else None
        entries = {}
        for name, stored in stored_weights(tensors, described(own or config)).items():
            suffixes = (s for s in stored.dialect.suffixes if name + s in tensors and not s.endswith(CACHES))
            entries[stored.packed.name] = Entry(stored, tuple(suffixes))
        return cls(entries, frozenset(e.stored.dialect.packed for e in entries.values()))

    def rename(self, mapper: Any) -> None:
        """Takes the names that a model's `hf_to_vllm_mapper` gives."""
        self.entries = mapper.apply_dict(self.entries)

    def experts(self, prefix: str) -> Entries:
        """The weights of an experts layer."""
        found: Entries = {}
        for name, entry in self.entries.items():
            if not name.startswith(prefix + "."):
                continue
            rest = name.removeprefix(prefix + ".").removesuffix(entry.stored.dialect.packed)
            number, _, matrix = rest.rpartition(".")
            matrix = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}.get(matrix, matrix)
            if matrix in MATRICES and (number.isdigit() or not number):
                found[int(number) if number else None, *MATRICES[matrix]] = entry
        return found

    def linear(self, prefix: str, fused: Mapping[str, list[str]]) -> dict[str, Entry | None]:
        """The parts that a linear layer's weight is put together from, None for those in 16 bits.

        fused: a layer's own name to those that the files have in its place, as vLLM's models say.
        """
        above, _, own = prefix.rpartition(".")
        names = fused.get(own, [own])
        for parts in (names, [own]):
            found = {part: self._of(f"{above}.{part}" if above else part) for part in parts}
            if any(found.values()):
                return found
        return dict.fromkeys(names)

    def _of(self, name: str) -> Entry | None:
        return next((self.entries[name + end] for end in self.ends if name + end in self.entries), None)


@dataclass
class Gathered:
    """Tensors that arrive one at a time, in any order, until each weight is whole."""

    entries: Mapping[Any, Entry]
    _parts: dict[Any, dict[str, Tensor]] = field(default_factory=dict)

    def add(self, key: Any, suffix: str, tensor: Tensor) -> Entry | None:
        """Keeps a tensor. Returns the entry of the weight that is whole now."""
        entry = self.entries[key]
        if suffix not in entry.needed:
            return None
        # A copy: the memory that a loader hands over may be the next tensor's.
        parts = self._parts.setdefault(key, {})
        parts[suffix] = tensor.detach().clone()
        return entry if parts.keys() == entry.needed else None

    def take(self, key: Any) -> Codes:
        """A weight that is whole, in the operators' terms. Raises CheckpointError for damaged scales."""
        stored = self.entries[key].stored
        parts = self._parts.pop(key)

        def read(info: TensorInfo) -> Tensor:
            tensor = parts[info.name.removeprefix(stored.name)]
            return tensor.view(info.dtype) if tensor.dtype != info.dtype else tensor

        for info in stored.tensors:
            got = parts[info.name.removeprefix(stored.name)]
            if tuple(got.shape) != info.shape and got.numel() != 1:
                raise CheckpointError(
                    f"fp4: {info} has shape {list(info.shape)}; vLLM's loader gave {list(got.shape)}. It "
                    "changes weights of this model in a way that 4-bit ones do not bear"
                )
        return stored.dialect.decode(stored, read)

    def dense(self, key: Any, dtype: torch.dtype) -> Tensor:
        """A whole weight in 8 bits, as an ordinary one."""
        stored, parts = self.entries[key].stored, self._parts.pop(key)
        return stored.dialect.dequantize(
            stored, lambda info: parts[info.name.removeprefix(stored.name)], dtype
        )

    def missing(self) -> list[str]:
        """Returns the names of weights of which only some tensors have arrived."""
        return [self.entries[key].stored.name for key in self._parts]


def is_stack(entry: Entry) -> bool:
    """Whether an entry is GPT-OSS's: all experts in one, in the order that vLLM hands over."""
    return isinstance(entry.stored.dialect, StackedBlocks)
