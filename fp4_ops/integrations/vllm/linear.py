"""Linear layers in vLLM whose weights the folder stores in 4 bits (run by `fp4::mm`) or in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.utils import set_weight_attrs

from ...checkpoints.dialects import Codes
from ...meta.layouts import preferred_layout
from ...runtime.relayout import relayout
from . import shards
from .stored import Entry, Gathered

KINDS: tuple[type, ...] = (
    ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear,
    ParallelLMHead,
)  # fmt: skip
"""Classes of layers for which this file knows how vLLM divides them among processes."""


def why_not(layer: Any) -> str:
    """Returns why this layer cannot hold 4-bit weights, or "" if it can."""
    kind = next(k for k in type(layer).__mro__ if k in KINDS or k is torch.nn.Module)
    if kind is torch.nn.Module or type(layer).weight_loader is not kind.weight_loader:  # type: ignore[attr-defined]
        return f"fp4_ops does not know how vLLM divides a {type(layer).__name__}"
    return ""


def rows_of(layer: Any, shard: Any) -> list[tuple[int, range]]:
    """Returns the rows of a stored matrix that this process has, as (place in the layer's weight, rows).

    shard: vLLM's name of one of the matrices that make up the layer's weight. None: all of them in one
    matrix.
    """
    rank, size = int(getattr(layer, "tp_rank", 0)), int(getattr(layer, "tp_size", 1))
    if isinstance(layer, QKVParallelLinear):
        head, value = layer.head_size, layer.v_head_size
        totals = {
            "q": layer.total_num_heads * head,
            "k": layer.total_num_kv_heads * head,
            "v": layer.total_num_kv_heads * value,
        }
        own = {"q": layer.num_heads * head, "k": layer.num_kv_heads * head, "v": layer.num_kv_heads * value}
        start, found = 0, []
        for place, name in enumerate("qkv"):
            if shard in (None, name):
                of = (rank if name == "q" else rank // layer.num_kv_head_replicas) * own[name]
                found.append((place, range(start + of, start + of + own[name])))
            start += totals[name] if shard is None else 0
        return found
    if isinstance(layer, MergedColumnParallelLinear):
        places = range(len(layer.output_sizes)) if shard is None else shard
        start, found = 0, []
        for place in [places] if isinstance(places, int) else places:
            n = layer.output_sizes[place] // size
            found.append((place, range(start + rank * n, start + (rank + 1) * n)))
            start += layer.output_sizes[place]
        return found
    if isinstance(layer, ParallelLMHead):
        own_rows = layer.shard_indices
        return [(0, range(own_rows.org_vocab_start_index, own_rows.org_vocab_end_index))]
    if isinstance(layer, ColumnParallelLinear):
        n = layer.output_size_per_partition
        return [(0, range(rank * n, (rank + 1) * n))]
    return [(0, range(layer.output_size))]


def part_of(layer: Any, shard: Any, names: list[str]) -> str:
    """Returns the name of the stored weight from which a shard of a layer comes."""
    if len(names) == 1:
        return names[0]
    place = "qkv".find(shard) if isinstance(shard, str) else shard
    if not isinstance(place, int) or not 0 <= place < len(names):
        raise NotImplementedError(
            f"fp4: {layer.prefix} loads {shard!r} of its weight, which is stored as {', '.join(names)}: "
            "fp4_ops does not know which of them that is. Use --quantization with vLLM's own method"
        )
    return names[place]


class StoredLinear(LinearMethodBase):
    """Method for a linear layer that is stored in 4 bits, as one weight or as several that it joins."""

    def __init__(self, entries: Mapping[str, Entry], tell: Callable[[], None]) -> None:
        self.gathered, self.tell = Gathered(entries), tell
        (self.format,) = {entry.stored.dialect.format for entry in entries.values()}
        self.layout, self.front, self.back, self.pieces = "", 0, 0, 0
        self._made: dict[int, Codes] = {}

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers an empty parameter for each tensor of the files. Its loader gathers the data."""
        self.k = input_size_per_partition
        self.sizes = output_partition_sizes
        for suffix in sorted({s for entry in self.gathered.entries.values() for s in entry.suffixes}):
            parameter = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            layer.register_parameter(suffix.removeprefix("."), parameter)
            set_weight_attrs(parameter, {"weight_loader": self._loader(layer, suffix)})

    def _loader(self, layer: Any, suffix: str) -> Any:
        names = list(self.gathered.entries)

        def load(param: Any, loaded_weight: Tensor, shard_id: Any = None) -> None:
            name = part_of(layer, shard_id, names)
            if self.gathered.add(name, suffix, loaded_weight, param.device) is not None:
                self._put(layer, shard_id, self.gathered.take(name))

        return load

    def _put(self, layer: Any, shard: Any, codes: Codes) -> None:
        for place, rows in rows_of(layer, shard):
            part = shards.rows(codes, [rows]) if len(rows) < codes.packed.shape[0] else codes
            if isinstance(layer, RowParallelLinear) and layer.tp_size > 1:
                first = layer.tp_rank * self.k
                part, self.front = shards.columns(part, range(first, first + self.k), self.format)
            self._made[place] = shards.add_rows(part, self.sizes[place])

    def process_weights_after_loading(self, layer: Any) -> None:
        """Joins weights that have one global scale, and packs them into the layout that the device reads
        fastest.
        """
        self.tell()
        places = range(len(self.sizes))
        if gone := [place for place in places if place not in self._made]:
            raise ValueError(
                f"fp4: {layer.prefix}: the files have no whole weight for part {gone[0]} of "
                f"{len(self.sizes)}. Fetch or export the folder again, with all its files"
            )
        device = next(p.device for p in layer.parameters(recurse=False))
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if parameter.numel() == 0:
                delattr(layer, name)
        pieces = joined([self._made.pop(place) for place in places])
        self.pieces = len(pieces)
        k = 2 * pieces[0].packed.shape[1]
        self.layout = preferred_layout(
            device.type, *((codes.packed.shape[0], k) for codes in pieces),
            dtype=layer.params_dtype, format=self.format,
        )  # fmt: skip
        for i, codes in enumerate(pieces):
            factor = None if codes.global_scale is None else codes.global_scale.to(device)
            operands = codes.packed.to(device), codes.block_scale.to(device), factor
            made = relayout(operands, self.format, k, "plain", self.layout)
            for name, tensor in zip(("weight_packed", "weight_scale", "weight_factor"), made):
                parameter = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
                layer.register_parameter(name + f"_{i}" * (i > 0), parameter)
        self.back = k - self.k - self.front

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x @ weight.T + bias."""
        rows = x.reshape(-1, x.shape[-1])
        if self.front or self.back:  # zeros for columns of a shared block that another process has
            rows = F.pad(rows, (self.front, self.back))
        out, start = [], 0
        for i in range(self.pieces):
            end = f"_{i}" * (i > 0)
            names = ("weight_packed", "weight_scale", "weight_factor")
            packed, scale, factor = (getattr(layer, name + end) for name in names)
            part = None if bias is None else bias[start : start + packed.shape[0]]
            options = {"format": self.format, "layout": self.layout}
            out.append(torch.ops.fp4.mm(rows, packed, scale, factor, None, part, **options))
            start += packed.shape[0]
        whole = out[0] if len(out) == 1 else torch.cat(out, -1)
        return whole.reshape(*x.shape[:-1], whole.shape[-1])

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Raises an error, because a 16-bit embedding cannot be tied to a 4-bit output head."""
        raise NotImplementedError(
            f"fp4: {layer.prefix} is stored in 4 bits, and the config ties it to the embedding. Set "
            "tie_word_embeddings to false in config.json"
        )


def joined(parts: list[Codes]) -> list[Codes]:
    """Joins neighbouring matrices that have the same global scale and the same dtype of block scales."""
    found = parts[:1]
    for part in parts[1:]:
        last = found[-1]
        same = last.block_scale.dtype == part.block_scale.dtype and (
            last.global_scale is None
            or part.global_scale is None
            or bool(last.global_scale == part.global_scale)
        )
        if same:
            packed = torch.cat([last.packed, part.packed])
            found[-1] = Codes(packed, shards.cat(last.block_scale, part.block_scale), last.global_scale)
        else:
            found.append(part)
    return found


class DequantizedLinear(UnquantizedLinearMethod):
    """Method for a linear layer that the folder stores in 8 bits. vLLM runs it in the model's dtype."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__()
        self.gathered = Gathered(entries)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Registers vLLM's own parameter, and an empty parameter for each kind of scale."""
        own = getattr(layer, "weight_loader_v2", layer.weight_loader)
        names = list(self.gathered.entries)

        def loader(suffix: str) -> Any:
            def load(param: Any, loaded_weight: Tensor, shard_id: Any = None) -> None:
                name = part_of(layer, shard_id, names)
                if self.gathered.add(name, suffix, loaded_weight) is None:
                    return
                dense = self.gathered.dense(name, layer.weight.dtype)
                own(layer.weight, dense, *(() if shard_id is None else (shard_id,)))

            return load

        super().create_weights(layer, *args, **{**kwargs, "weight_loader": loader(".weight")})
        for suffix in {s for entry in self.gathered.entries.values() for s in entry.suffixes} - {".weight"}:
            parameter = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            layer.register_parameter(suffix.removeprefix("."), parameter)
            set_weight_attrs(parameter, {"weight_loader": loader(suffix)})

    def process_weights_after_loading(self, layer: Any) -> None:
        """Drops the scales' parameters, then does what vLLM's method does."""
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if parameter.numel() == 0:
                delattr(layer, name)
        super().process_weights_after_loading(layer)
