"""Lists the weights that a folder stores in 4 and 8 bits, by the names of vLLM's layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.dialects import Codes, Dialect, StoredWeight, dialects_of, stored_config, stored_weights
from ...checkpoints.dialects.fp4 import StackedBlocks
from ...checkpoints.files import CheckpointError, TensorInfo, tensor_info
from ...checkpoints.folder import Folder
from ...experts.names import MATRICES
from ...meta.formats import FORMATS

VLLM_KEYS = ("total_num_heads", "total_num_kv_heads")
"""Keys that vLLM adds to a folder's config."""
METHODS = {"modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "gpt_oss_mxfp4": "mxfp4"}
"""The `quant_method` that folders use, by vLLM's name of it."""
CACHES = (".k_scale", ".v_scale", ".q_scale", "_bmm_quantizer._amax")
"""Name endings of the kv cache's scales. They do not belong to a linear layer."""


def described(config: Mapping[str, Any]) -> tuple[Dialect, ...]:
    """Returns the dialects of a `quantization_config` that vLLM passes. Raises CheckpointError if it cannot
    be read.
    """
    own = {key: value for key, value in config.items() if key not in VLLM_KEYS}
    method = own.get("quant_method")
    return dialects_of(own | {"quant_method": METHODS.get(str(method), method)})


def why_not(dialects: Iterable[Dialect]) -> str:
    """Returns why vLLM's layers cannot run weights in these dialects, or "" if they can."""
    for dialect in dialects:
        if dialect.is_dense:
            continue
        if dialect.format not in FORMATS:
            return f"{dialect.name} holds {dialect.format}, which no operator computes with"
        if dialect.name.startswith("deepseek"):
            return f"vLLM loads {dialect.name} with a model class that does not use quantisation methods"
        if isinstance(dialect, StackedBlocks) and not hands_over_stacks():
            return f"this release of vLLM loads {dialect.name} without quantisation methods"
    return ""


def hands_over_stacks() -> bool:
    """Returns whether vLLM's GPT-OSS gives its stacks of experts to a method. Releases before 0.32 do not."""
    from vllm.model_executor.models import gpt_oss

    return hasattr(gpt_oss, "GptOssRoutedExperts")


def tensors_of(model: str, metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Returns the tensors of a folder. For a model of the hub, reads the headers that vLLM fetched."""
    if Path(model).is_dir():
        return Folder(model).tensors
    where = Path(model)
    return {name: tensor_info(name, entry, where, 0)[0] for name, entry in metadata.items()}


@dataclass(frozen=True)
class Entry:
    """One stored weight."""

    stored: StoredWeight
    suffixes: tuple[str, ...]
    """Name endings of all its tensors, including those that are not read."""

    @cached_property
    def needed(self) -> set[str]:
        return {info.name.removeprefix(self.stored.name) for info in self.stored.tensors}


Entries = dict[tuple[int | None, str, str], Entry]
"""The weights of an experts layer. A key is (expert, or None for all in one; "gate_up" or "down"; "gate",
"up" or "").
"""


@dataclass
class Stored:
    """All stored weights of a folder, by the names of vLLM's layers."""

    entries: dict[str, Entry]
    """Weights by the name of their tensor of codes."""
    ends: frozenset[str] = frozenset()
    """Endings of these names."""

    @classmethod
    def read(cls, model: str, config: Mapping[str, Any], metadata: Mapping[str, Any]) -> Stored:
        """Reads the headers. Raises CheckpointError for parts that are missing or misshapen."""
        tensors = tensors_of(model, metadata)
        if not tensors:
            raise CheckpointError(
                f"fp4: the headers of {model}'s safetensors files cannot be read, and only they say which "
                "layers are in 4 bits. Fetch the model first (`hf download`), and give the folder"
            )
        own = stored_config(Path(model)) if Path(model).is_dir() else None
        entries = {}
        for name, stored in stored_weights(tensors, described(own or config)).items():
            suffixes = (s for s in stored.dialect.suffixes if name + s in tensors and not s.endswith(CACHES))
            entries[stored.packed.name] = Entry(stored, tuple(suffixes))
        return cls(entries, frozenset(e.stored.dialect.packed for e in entries.values()))

    def rename(self, mapper: Any) -> None:
        """Renames the weights by a model's `hf_to_vllm_mapper`."""
        self.entries = mapper.apply_dict(self.entries)

    def experts(self, prefix: str) -> Entries:
        """Returns the weights of an experts layer."""
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
        """Returns the stored weights that a linear layer joins, by name. None stands for a weight in 16 bits.

        fused: for a layer that vLLM's model joins, the names that the files have in its place.
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

    def add(
        self, key: Any, suffix: str, tensor: Tensor,
        device: torch.device | None = None, into: Tensor | None = None,
    ) -> Entry | None:  # fmt: skip
        """Keeps a tensor. Returns the entry of the weight that is whole now.

        device: the device that keeps and decodes the tensor; by default the tensor's own.
        into: memory to copy it to.
        """
        entry = self.entries[key]
        if suffix not in entry.needed:
            return None
        # Make a copy, because the loader may reuse the memory for the next tensor.
        parts = self._parts.setdefault(key, {})
        tensor = tensor.detach()
        if tensor.shape in ((), (1,)):
            device = None  # A number is checked faster where it is.
        parts[suffix] = tensor.to(device, copy=True) if into is None else into.copy_(tensor)
        return entry if parts.keys() == entry.needed else None

    def take(self, key: Any) -> Codes:
        """Returns a complete weight as codes for the operators. Raises CheckpointError for damaged scales."""
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
                    "transforms weights of this model in a way that is not possible with 4-bit weights"
                )
        return stored.dialect.decode(stored, read)

    def dense(self, key: Any, dtype: torch.dtype) -> Tensor:
        """Returns a complete 8-bit weight as an ordinary tensor."""
        stored, parts = self.entries[key].stored, self._parts.pop(key)
        return stored.dialect.dequantize(
            stored, lambda info: parts[info.name.removeprefix(stored.name)], dtype
        )

    def missing(self) -> list[str]:
        """Returns the names of weights of which only some tensors have arrived."""
        return [self.entries[key].stored.name for key in self._parts]


def is_stack(entry: Entry) -> bool:
    """Returns whether an entry is one tensor for all experts, in GPT-OSS's order, which is the order in which
    vLLM passes them.
    """
    return isinstance(entry.stored.dialect, StackedBlocks)
