"""Expert blocks in vLLM: turns weights into 4-bit operands as they arrive, and runs the blocks with
`fp4::moe`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.utils import set_weight_attrs

from ...checkpoints.dialects import Codes, scale_dtype
from ...checkpoints.fold import Folds, joined, share_scale
from ...experts.packed import auto_a_format, interleave
from ...meta.formats import ACTIVATIONS, FORMATS, activation_name, known_activation
from ...meta.layouts import LAYOUTS, byte_view, preferred_layout
from ...runtime.relayout import Operands, relayout
from . import LOG, shards
from .stored import Entries, Gathered, is_stack

GATES = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "swigluoai": "swigluoai",
    "swigluoai_uninterleave": "swigluoai_halves", "relu2_no_mul": "relu2",
}  # fmt: skip
"""Our names of activations, by vLLM's names."""
OFF = "--quantization with vLLM's own method, or FP4_VLLM=0, keeps vLLM's kernels"
SHARDS = {"w1": ("gate_up", "gate"), "w3": ("gate_up", "up"), "w2": ("down", "")}
"""vLLM's names of an expert's matrices."""
STEMS = {"gate_up": "w13", "down": "w2"}


def gate_of(layer: Any) -> str:
    """Returns the layer's activation by its name in `fp4::moe`. Raises NotImplementedError if there is
    none.
    """
    named = layer.activation.value
    own = GATES.get(named)
    limit, alpha, beta = (
        getattr(layer, name, None) for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
    )
    name: str | None = own
    if own is not None:
        act = ACTIVATIONS[own]
        if act.gated and own.startswith(("silu", "swigluoai")):
            act = replace(
                act,
                limit=act.limit if limit is None else float(limit),
                alpha=act.alpha if alpha is None else float(alpha),
                up_offset=act.up_offset if beta is None else float(beta),
            )
        elif any(value is not None for value in (limit, alpha, beta)):
            own = None
        name = activation_name(act) if own is not None else None
    if name is None:
        numbers = f" (limit {limit}, alpha {alpha}, beta {beta})" * (limit is not None or alpha is not None)
        raise NotImplementedError(
            f"fp4: {layer.layer_name} has the activation {named!r}{numbers}, which fp4::moe does not "
            f"compute; it must be one of: {', '.join(GATES)}. {OFF}"
        )
    return name


def check(layer: Any) -> None:
    """Raises NotImplementedError for layers that these methods do not support, before any weight is read."""
    gate_of(layer)
    config = layer.moe_config
    if config.is_lora_enabled:
        raise NotImplementedError(
            f"fp4: LoRA is enabled, and {layer.layer_name} has 4-bit experts, which vLLM's LoRA layers "
            f"cannot wrap. Serve without --enable-lora. {OFF}"
        )
    if layer.apply_router_weight_on_input and layer.top_k != 1:
        raise NotImplementedError(
            f"fp4: {layer.layer_name} scales the inputs of {layer.top_k} experts a token by their routing "
            f"weights; fp4_ops does so for one. {OFF}"
        )


class Experts(FusedMoEMethodBase):
    """Base class of the methods for `RoutedExperts`. It handles biases, layouts, the call, and the parts of
    several processes.

    A subclass says which tensors vLLM loads, and turns them into codes.
    """

    def __init__(self, layer: Any, format: str, tell: Callable[[], None]) -> None:
        super().__init__(layer.moe_config)
        check(layer)
        self.tell = tell
        self.format, self.gate = format, gate_of(layer)
        self.gated = known_activation(self.gate).gated
        self.interleaved = known_activation(self.gate).interleaved
        self.layout = self.a_format = ""
        self._made: dict[str, shards.Stack] = {}
        self._halves: dict[int, dict[str, Any]] = {}

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Returns None, because vLLM's kernels are not used."""

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Returns the sizes unchanged, because our operators take any size."""
        return hidden_size, intermediate_size_per_partition

    @property
    def is_monolithic(self) -> bool:
        """Returns whether the kernel includes the router."""
        return False

    @property
    def supports_eplb(self) -> bool:
        """Returns whether experts may move between processes. If not, vLLM refuses the option."""
        return False

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers an empty parameter for each tensor of the files. Its loader gathers the data."""
        self.num_experts, self.params_dtype = num_experts, params_dtype
        self.device = torch.device(layer.moe_config.device)
        self._made = {matrix: shards.Stack(num_experts, self.device) for matrix in STEMS}
        for name in self.parameters(layer):
            self._register(layer, name, torch.empty(0), self._loader(layer))
        if self.moe.has_bias:
            width = (2 if self.gated else 1) * intermediate_size_per_partition
            for name, n in (("w13_bias", width), ("w2_bias", hidden_size)):
                bias = torch.zeros(num_experts, n, dtype=params_dtype)
                self._register(layer, name, bias, self._bias_loader(layer, name))

    @abstractmethod
    def parameters(self, layer: Any) -> list[str]:
        """Returns the names of the parameters that vLLM's loaders look for."""

    @abstractmethod
    def arrived(self, layer: Any, name: str, expert: int, matrix: str, half: str, tensor: Tensor) -> None:
        """Takes one tensor of one expert. `expert` is its number among the experts of all processes."""

    def _register(self, layer: Any, name: str, data: Tensor, loader: Any) -> None:
        parameter = torch.nn.Parameter(data, requires_grad=False)
        layer.register_parameter(name, parameter)
        set_weight_attrs(parameter, {"weight_loader": loader})

    def _loader(self, layer: Any) -> Any:
        def load(
            param: Any, loaded_weight: Tensor, weight_name: str = "", shard_id: Any = None,
            expert_id: int | None = None, return_success: bool = False,
        ) -> bool | None:  # fmt: skip
            name = weight_name.rsplit(".", 1)[-1]
            if expert_id is None:
                self.stack_arrived(name, loaded_weight)
            elif layer._map_global_expert_id_to_local_expert_id(expert_id) == -1:
                return False if return_success else None
            else:
                matrix, half = SHARDS.get(shard_id) or (
                    ("gate_up" if name.startswith("w13") else "down"), ""
                )  # fmt: skip
                self.arrived(layer, name, expert_id, matrix, "" if not self.gated else half, loaded_weight)
            return True if return_success else None

        load.supports_moe_loading = True  # type: ignore[attr-defined]
        return load

    def stack_arrived(self, name: str, tensor: Tensor) -> None:
        """Takes one tensor that holds all experts of this process."""
        raise NotImplementedError(
            f"fp4: {name} holds all experts in one tensor; in this dialect each expert has its own"
        )

    def _bias_loader(self, layer: Any, name: str) -> Any:
        def load(
            param: Any, loaded_weight: Tensor, weight_name: str = "", shard_id: Any = None,
            expert_id: int | None = None, return_success: bool = False,
        ) -> bool | None:  # fmt: skip
            if expert_id is None:  # the biases of all experts of this process, already cut
                param.data = loaded_weight.detach().to(param.dtype).to(param.device, copy=True)
                return True if return_success else None
            local = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if local == -1:
                return False if return_success else None
            if name == "w2_bias":
                # Only one process adds the bias, because the processes' results are added up.
                param.data[local] = loaded_weight if self._rank(layer) == 0 else 0
            else:
                part = self._share(layer, loaded_weight.shape[0] // (2 if shard_id not in SHARDS else 1))
                if shard_id in SHARDS:
                    half = len(part) if shard_id == "w3" else 0
                    param.data[local, half : half + len(part)] = loaded_weight[part.start : part.stop]
                else:
                    param.data[local, : 2 * len(part)] = loaded_weight[2 * part.start : 2 * part.stop]
            return True if return_success else None

        return load

    def _rank(self, layer: Any) -> int:
        return int(layer.moe_config.tp_rank)

    def _share(self, layer: Any, inner: int) -> range:
        size = int(layer.moe_config.tp_size)
        return range(inner) if size == 1 else shards.share(inner, self.format, size, self._rank(layer))

    def scale_dtype(self, matrix: str) -> torch.dtype:
        """Returns the dtype of the block scales of all experts."""
        return FORMATS[self.format].scale_dtype

    def put(self, layer: Any, expert: int, matrix: str, *parts: Codes) -> None:
        """Keeps this process's part of a whole matrix. w13 comes as gate and up, or as one part."""
        local = layer._map_global_expert_id_to_local_expert_id(expert)
        if matrix == "down":
            (codes,) = parts
            part = self._share(layer, 2 * codes.packed.shape[-1])
            if len(part) < 2 * codes.packed.shape[-1]:
                parts = (shards.columns(codes, part, self.format)[0],)
        else:
            n = sum(codes.packed.shape[0] for codes in parts)
            inner = n // 2 if self.gated else n
            part = self._share(layer, inner)
            if len(part) < inner:
                parts = (shards.rows(joined(parts), self._rows(part, inner)),)
        self._made[matrix].write(local, parts, self.scale_dtype(matrix))

    def _rows(self, part: range, inner: int) -> list[range]:
        """Returns the rows of gate and up that belong to columns `part` of down."""
        if len(part) == 0:  # rows of the single block of zeros
            part = range(min(FORMATS[self.format].block, inner))
        if not self.gated:
            return [part]
        if self.interleaved:
            return [range(2 * part.start, 2 * part.stop)]
        return [part, range(inner + part.start, inner + part.stop)]

    def stacks(self, layer: Any) -> dict[str, Operands]:
        """Returns both operands in layout plain. Raises ValueError for experts whose weights did not
        arrive.
        """
        found: dict[str, Operands] = {}
        for matrix, made in self._made.items():
            if gone := made.missing:
                raise ValueError(
                    f"fp4: {layer.layer_name}: the files have no whole {STEMS[matrix]} for {len(gone)} of "
                    f"this process's {self.num_experts} experts, the first {gone[0]}. Fetch or export the "
                    "folder again, with all its files"
                )
            found[matrix] = made.operand()
        self._made = {}
        return found

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the weights into the layout that this device's kernels read fastest."""
        self.tell()
        stacks = self.stacks(layer)
        for name in [n for n, _ in layer.named_parameters(recurse=False) if not n.endswith("_bias")]:
            if name.startswith(("w13", "w2")):
                delattr(layer, name)
        device = self.device
        sizes = [(p.shape[1], 2 * p.shape[2]) for p, _, _ in stacks.values()]
        wanted = preferred_layout(
            device.type, *sizes, dtype=self.moe.in_dtype, format=self.format, a_format="auto"
        )
        try:
            made = self._in_layout(stacks, wanted)
        except (RuntimeError, ValueError) as error:  # scales that the layout cannot express
            LOG.info("fp4_ops: %s stays in layout plain: %s", layer.layer_name, error)
            wanted = "plain"
            made = self._in_layout(stacks, wanted)
        if self._turned(wanted):
            self.gate = activation_name(replace(known_activation(self.gate), interleaved=True)) or self.gate
            if getattr(layer, "w13_bias", None) is not None:
                layer.w13_bias.data = interleave(layer.w13_bias.data)
        self.layout, self.a_format = wanted, auto_a_format(device.type, wanted)
        for matrix, operands in made.items():
            for end, tensor in zip(("weight_packed", "weight_scale", "weight_factor"), operands):
                parameter = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
                layer.register_parameter(f"{STEMS[matrix]}_{end}", parameter)

    def _turned(self, layout: str) -> bool:
        """Returns whether gate and up rows alternate in this layout. (They arrive as two halves.)"""
        return LAYOUTS[layout].interleaved and self.gated and not self.interleaved

    def _in_layout(self, stacks: dict[str, Operands], layout: str) -> dict[str, Operands]:
        made = {}
        for matrix, (packed, scale, factor) in stacks.items():
            if matrix == "gate_up" and self._turned(layout):
                packed, scale = interleave(packed), interleave(byte_view(scale)).view(scale.dtype)
            operands = packed, scale, factor
            made[matrix] = relayout(operands, self.format, 2 * packed.shape[-1], "plain", layout)
        return made

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Returns the routed experts' sum for each token. Ids of other processes' experts add nothing."""
        # Some callers in vLLM pass flat ids. A reshape with -1 would fail if there are no tokens.
        chosen = topk_ids.numel() // x.shape[0] if x.shape[0] else layer.top_k
        ids, weights = (t.view(x.shape[0], chosen) for t in (topk_ids, topk_weights))
        if layer.expert_map is not None:
            own = layer.expert_map[ids.clamp(min=0).long()]
            ids = torch.where(ids < 0, -1, own)
        if layer.apply_router_weight_on_input:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        out: Tensor = torch.ops.fp4.moe(
            x, ids if ids.dtype in (torch.int32, torch.int64) else ids.int(), weights,
            layer.w13_weight_packed, layer.w13_weight_scale, layer.w13_weight_factor,
            layer.w2_weight_packed, layer.w2_weight_scale, layer.w2_weight_factor,
            getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None),
            format=self.format, layout=self.layout, activation=self.gate, a_format=self.a_format,
        )  # fmt: skip
        return out


class StoredExperts(Experts):
    """Method for experts that the folder stores in 4 bits."""

    def __init__(self, layer: Any, entries: Entries, tell: Callable[[], None]) -> None:
        super().__init__(layer, next(iter(entries.values())).stored.dialect.format, tell)
        if not self.gated:  # up is the whole weight
            entries = {(expert, matrix, ""): entry for (expert, matrix, _), entry in entries.items()}
        self.gathered = Gathered(entries)
        self.is_stack = any(is_stack(entry) for entry in entries.values())
        self._stacks: dict[str, Tensor] = {}
        self._scale_dtypes: dict[str, torch.dtype] = {}

    def scale_dtype(self, matrix: str) -> torch.dtype:
        """Returns a dtype that holds the block scales of all experts, as the files store them."""
        if matrix not in self._scale_dtypes:
            stored = [entry.stored for (_, m, _), entry in self.gathered.entries.items() if m == matrix]
            self._scale_dtypes[matrix] = scale_dtype(stored)
        return self._scale_dtypes[matrix]

    def parameters(self, layer: Any) -> list[str]:
        """Returns one parameter name for each kind of tensor."""
        if self.is_stack:
            return [f"{stem}_{end}" for stem in STEMS.values() for end in ("weight", "weight_scale")]
        return sorted(
            {
                f"{STEMS[matrix]}{suffix.replace('.', '_')}"
                for (_, matrix, _), entry in self.gathered.entries.items()
                for suffix in entry.suffixes
            }
        )

    def arrived(self, layer: Any, name: str, expert: int, matrix: str, half: str, tensor: Tensor) -> None:
        """Decodes a matrix when all of its tensors have arrived, and gives gate and up one global scale."""
        key = (expert, matrix, half)
        suffix = "." + name.removeprefix(STEMS[matrix] + "_")
        into = self._place(layer, key, suffix, tensor)
        if self.gathered.add(key, suffix, tensor, self.device, into) is None:
            return
        codes = self.gathered.take(key)
        if half:
            halves = self._halves.setdefault(expert, {})
            halves[half] = codes
            if len(halves) < 2:
                return
            del self._halves[expert]
            names = tuple(self.gathered.entries[expert, matrix, h].stored.name for h in ("gate", "up"))
            both = share_scale(halves["gate"], halves["up"], Folds(), (names[0], names[1]))
            self.put(layer, expert, matrix, *both)
        else:
            self.put(layer, expert, matrix, codes)

    def _place(self, layer: Any, key: tuple[int, str, str], suffix: str, tensor: Tensor) -> Tensor | None:
        """Returns the part of the operand into which a tensor's bytes can be copied unchanged.

        None if the tensor has another shape, or if this process has only a part of it.
        """
        expert, matrix, half = key
        stored = self.gathered.entries[key].stored
        which = [stored.dialect.packed, stored.dialect.block_scale]
        if suffix not in which or layer.moe_config.tp_size > 1:
            return None
        local, (n, k) = layer._map_global_expert_id_to_local_expert_id(expert), stored.shape
        rows, blocks = n * (2 if half else 1), FORMATS[self.format].num_blocks(k)
        places = self._made[matrix].place(local, rows, k, blocks, self.scale_dtype(matrix))
        first = n if half == "up" else 0
        place = places[which.index(suffix)][first : first + n]
        if suffix == stored.dialect.packed:
            width = place.shape[-1] // tensor.itemsize
            return place.view(tensor.dtype) if tensor.shape == (n, width) else None
        alike = place.dtype == tensor.dtype or place.itemsize == tensor.itemsize == 1
        return place.view(tensor.dtype) if alike and place.shape == tensor.shape else None

    def stack_arrived(self, name: str, tensor: Tensor) -> None:
        """Keeps GPT-OSS's stacks. vLLM's loader has already cut them to this process's part."""
        self._stacks[name] = tensor.detach().to(self.device, copy=True)

    def stacks(self, layer: Any) -> dict[str, Operands]:
        """Returns both operands in layout plain."""
        if not self.is_stack:
            return super().stacks(layer)
        found: dict[str, Operands] = {}
        for (_, matrix, _), entry in self.gathered.entries.items():
            stem = STEMS[matrix]
            packed, scale = (self._stacks.pop(f"{stem}_{end}") for end in ("weight", "weight_scale"))
            blocks = packed.reshape(*packed.shape[:2], -1, 16)
            of = replace(
                entry.stored,
                packed=replace(entry.stored.packed, shape=tuple(blocks.shape)),
                block_scale=replace(entry.stored.block_scale, shape=tuple(scale.shape)),
            )
            parts = {of.packed.name: blocks, of.block_scale.name: scale}
            codes = of.dialect.decode(of, lambda info, parts=parts: parts[info.name])  # type: ignore[misc]
            found[matrix] = codes.packed, codes.block_scale, None
        return {matrix: found[matrix] for matrix in STEMS}


class QuantizedExperts(Experts):
    """Method for experts that the folder stores in 16 bits. It quantises them as they arrive, like
    `fp4_ops.prepare`.
    """

    def __init__(self, layer: Any, format: str, tell: Callable[[], None]) -> None:
        super().__init__(layer, format, tell)
        own = type(layer).weight_loader
        self.streams = getattr(own, "supports_moe_loading", False)

    def parameters(self, layer: Any) -> list[str]:
        """Returns the names of the two weights."""
        return ["w13_weight", "w2_weight"]

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Registers the parameters. If a model's loader writes into them itself, they are as large as the
        weights.
        """
        super().create_weights(layer, *args, **kwargs)
        if self.streams:
            return
        inner = layer.intermediate_size_per_partition
        e, h, n = self.num_experts, layer.hidden_size, (2 if self.gated else 1) * inner
        for name, shape in (("w13_weight", (e, n, h)), ("w2_weight", (e, h, inner))):
            delattr(layer, name)
            data = torch.zeros(shape, dtype=self.params_dtype)
            self._register(layer, name, data, kwargs["weight_loader"])

    def arrived(self, layer: Any, name: str, expert: int, matrix: str, half: str, tensor: Tensor) -> None:
        """Quantises a matrix; gate and up are one matrix."""
        tensor = tensor.detach().to(self.device, copy=True)
        if half:
            halves = self._halves.setdefault(expert, {})
            halves[half] = tensor
            if len(halves) < 2:
                return
            del self._halves[expert]
            tensor = torch.cat([halves["gate"], halves["up"]])
        self.put(layer, expert, matrix, self._quantize(layer, matrix, expert, tensor))

    def _quantize(self, layer: Any, matrix: str, expert: int, weight: Tensor) -> Codes:
        if not weight.isfinite().all():
            raise ValueError(
                f"fp4: {layer.layer_name}: {STEMS[matrix]} of expert {expert} holds NaN or infinity, which "
                "have no 4-bit code. Correct it before it is served"
            )
        packed, scale, factor = torch.ops.fp4.quantize(weight.contiguous(), self.format)
        return Codes(packed, scale, factor if factor.numel() else None)

    def stacks(self, layer: Any) -> dict[str, Operands]:
        """Returns both operands in layout plain."""
        if not self.streams:
            for matrix, stem in STEMS.items():
                for expert, weight in enumerate(getattr(layer, f"{stem}_weight").data):
                    codes = self._quantize(layer, matrix, expert, weight)
                    self._made[matrix].write(expert, [codes], self.scale_dtype(matrix))
        return super().stacks(layer)


class DequantizedExperts(UnquantizedFusedMoEMethod):
    """Method for experts that the folder stores in 8 bits, if other layers are in 4. vLLM runs them in the
    model's dtype.
    """

    def __init__(self, layer: Any, entries: Entries) -> None:
        super().__init__(layer.moe_config)
        self.gathered = Gathered(entries)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Registers vLLM's own parameters, and an empty parameter for each kind of scale."""
        super().create_weights(layer, *args, **kwargs)
        own = kwargs["weight_loader"]

        def load(
            param: Any, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
            return_success: bool = False,
        ) -> bool | None:  # fmt: skip
            matrix, half = SHARDS[shard_id]
            name = weight_name.rsplit(".", 1)[-1]
            key = (expert_id, matrix, half if layer.moe_config.is_act_and_mul else "")
            suffix = "." + name.removeprefix(STEMS[matrix] + "_")
            if self.gathered.add(key, suffix, loaded_weight) is None:
                return True if return_success else None
            weight = getattr(layer, f"{STEMS[matrix]}_weight")
            dense = self.gathered.dense(key, weight.dtype)
            done: bool | None = own(weight, dense, weight_name, shard_id, expert_id, return_success)
            return done

        ends = {(m, s) for (_, m, _), entry in self.gathered.entries.items() for s in entry.suffixes}
        for matrix, suffix in ends:
            name = f"{STEMS[matrix]}{suffix.replace('.', '_')}"
            if not hasattr(layer, name):
                layer.register_parameter(name, torch.nn.Parameter(torch.empty(0), requires_grad=False))
            getattr(layer, name).weight_loader = load

    def process_weights_after_loading(self, layer: Any) -> None:
        """Drops the scales' parameters, then does what vLLM's method does."""
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if parameter.numel() == 0:
                delattr(layer, name)
        super().process_weights_after_loading(layer)
