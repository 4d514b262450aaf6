"""Plans the use of a GPU's memory: whether the experts fit, how many slots they get otherwise, and how long a
token then takes.

Every token reads the dense parts of a model and a few experts of each layer. The dense parts are on the GPU.
All experts are in host memory. The rest of the budget becomes slots for experts in use, for the same share of
each layer's experts. csrc/device/slots.cu keeps the last used experts in the slots.
"""

from __future__ import annotations

import functools
import math
import re
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..distributed.division import top_k_of
from ..experts.packed import slot_weights
from ..tensor import FP4Tensor
from .fp8_linear import CODES

_UNITS = {
    **{"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}
RESERVE_SHARE, RESERVE_LEAST = 10, 256 << 20
"""A tenth of the budget, or 256 MiB, stays free: half of it for the cache of keys and values, half for
activations."""
WORKSPACE = 48 << 20
"""The part of the activations' memory that cuBLAS and small tensors take."""
SLOT_ROWS = 16384
"""Rows, one for each token and expert, that `fp4::moe_slots` multiplies at once; kMostRows of
csrc/cuda/slots.cpp."""
TOKENS_LEAST = 64
RECENCY = 5
"""In text, a token is often routed like the tokens before it. With a share f of the experts in slots, LRU
finds a share 1 - (1 - f)^5 of the experts that a token needs. For f = 40 % this is 92 %; published
measurements are 90 to 95 %."""


def parse_bytes(value: int | str) -> int:
    """Return a number of bytes, given as a number or as text with a unit: "20GiB", "500 MB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?i?b?)\s*", value.lower())
        if found and found[2] in _UNITS and (size := int(float(found[1]) * _UNITS[found[2]])) > 0:
            return size
    raise ValueError(
        f"fp4: gpu_memory is {value!r}; it must be a number of bytes above 0, or a text such as '20GiB' or "
        "'500MB'"
    )


@dataclass(frozen=True)
class Rates:
    """Bytes per second of the GPU's memory, and of the link between host and GPU."""

    memory: float
    link: float

    def __str__(self) -> str:
        memory, link = self.memory / 1e9, self.link / 1e9
        return f"{memory:.0f} GB/s of GPU memory and {link:.0f} GB/s of the link, assumed"


ASSUMED = Rates(memory=1000e9, link=25e9)
"""Rates of a desktop GPU with 16 lanes of PCIe 4.0. They are used if there is no GPU to measure."""


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer. Each expert has `expert_bytes` bytes in 4 bits."""

    name: str
    experts: int
    top_k: int
    expert_bytes: int

    @property
    def nbytes(self) -> int:
        return self.experts * self.expert_bytes

    def slots(self, share: float) -> int:
        """Returns the number of slots for a share of the experts. It is at least the number of experts of one
        token."""
        return min(self.experts, max(self.top_k, int(share * self.experts)))


@dataclass(frozen=True)
class Activations:
    """Bytes of a prompt's activations in the layer with the largest activations, without weights and cache.

    token_bytes: for each token.
    row_bytes: for each of its top_k rows while these are multiplied.
    """

    token_bytes: int
    row_bytes: int
    top_k: int

    def tokens(self, room: int, most_rows: int | None) -> int:
        """Returns how many tokens fit into `room`.

        most_rows: rows that are multiplied at once; None: all.
        """
        room = max(0, room - WORKSPACE)
        count = room // (self.token_bytes + self.top_k * self.row_bytes)
        if most_rows is not None and count * self.top_k > most_rows:
            count = (room - most_rows * self.row_bytes) // self.token_bytes
        return max(TOKENS_LEAST, count // TOKENS_LEAST * TOKENS_LEAST)


@dataclass(frozen=True)
class MemoryPlan:
    """A plan that says where the weights are stored, within a budget of GPU memory."""

    budget: int
    dense_bytes: int
    layers: tuple[LayerExperts, ...]
    rates: Rates = ASSUMED
    activations: Activations | None = None
    cache_token_bytes: int | None = None
    """Bytes of the keys and values of a token in all layers. None if unknown."""

    def __post_init__(self) -> None:
        least = self.dense_bytes + sum(layer.expert_bytes * layer.top_k for layer in self.layers)
        if self.budget - self.reserve < least:
            most = sum(layer.expert_bytes * layer.top_k for layer in self.layers)
            # The reserve grows with the budget, so the budget that is needed is found from it.
            need = max(least + RESERVE_LEAST, -(-least * RESERVE_SHARE // (RESERVE_SHARE - 1)))
            raise ValueError(
                f"fp4: gpu_memory is {size(self.budget)}; it must be at least {size(need)}: the parts "
                f"outside the experts take {size(self.dense_bytes)}, the experts of one token {size(most)}, "
                f"and {size(need - least)} stay free for activations and the cache of keys and values. Give "
                "more, or pack the parts outside the experts (attention=, dense=, head=)"
            )

    @property
    def reserve(self) -> int:
        return max(RESERVE_LEAST, self.budget // RESERVE_SHARE)

    @property
    def expert_bytes(self) -> int:
        """Returns the number of bytes of all experts."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def resident(self) -> bool:
        """True if all experts fit, so that none needs a slot."""
        return self.budget - self.reserve - self.dense_bytes >= self.expert_bytes

    @functools.cached_property
    def share(self) -> float:
        """Returns the largest share of each layer's experts that can have slots. A layer has at least top_k
        slots."""
        if self.resident:
            return 1.0
        room, fits, too_much = self.budget - self.reserve - self.dense_bytes, 0.0, 1.0
        for _ in range(40):
            share = (fits + too_much) / 2
            taken = sum(layer.slots(share) * layer.expert_bytes for layer in self.layers)
            fits, too_much = (share, too_much) if taken <= room else (fits, share)
        return fits

    def slots(self, layer: LayerExperts) -> int:
        """Returns the number of slots of a layer."""
        return layer.slots(self.share)

    @property
    def prompt_tokens(self) -> int | None:
        """Returns the largest number of prompt tokens whose activations fit at once. None if unknown."""
        if self.activations is None:
            return None
        return self.activations.tokens(self.reserve // 2, None if self.resident else SLOT_ROWS)

    @property
    def gpu_bytes(self) -> int:
        """Returns the bytes of weights on the GPU."""
        return self.dense_bytes + sum(self.slots(layer) * layer.expert_bytes for layer in self.layers)

    def seconds(self, recency: bool) -> float:
        """Returns the time of one token by the rates: the time to read its weights from GPU memory, and the
        time to fetch missing experts over the link.

        recency: True if routing repeats, as in text. False means uniform routing, the worst case.
        """
        read, missed = float(self.dense_bytes), 0.0
        for layer in self.layers:
            f = self.slots(layer) / layer.experts
            misses = 0.0 if self.resident else (1 - f) ** (RECENCY if recency else 1)
            read += layer.top_k * layer.expert_bytes
            missed += layer.top_k * layer.expert_bytes * misses
        return read / self.rates.memory + missed / self.rates.link

    def __str__(self) -> str:
        lines = [
            f"GPU memory {size(self.budget)}: {size(self.dense_bytes)} outside the experts, "
            f"{size(self.gpu_bytes - self.dense_bytes)} of experts, {size(self.reserve)} kept free",
        ]
        if self.resident:
            lines.append(f"  all experts ({size(self.expert_bytes)}) fit")
        else:
            kinds = {(self.slots(layer), layer.experts): 0 for layer in self.layers}
            for layer in self.layers:
                kinds[self.slots(layer), layer.experts] += 1
            slots = "; ".join(
                f"{slots} slots for {experts} experts in each of {count} layers"
                for (slots, experts), count in kinds.items()
            )
            lines.append(f"  {slots}; all experts ({size(self.expert_bytes)}) in pinned memory of the host")
        if self.prompt_tokens is not None:
            cache = ""
            if self.cache_token_bytes:
                fit = self.reserve // 2 // self.cache_token_bytes
                cache = f"; keys and values of {fit} tokens fit beside them"
            lines.append(
                f"  prompts: at most {self.prompt_tokens} tokens at once, so generate takes longer ones in "
                f"parts{cache}"
            )
        text, worst = (1 / self.seconds(recency) for recency in (True, False))
        lines.append(
            f"  tokens a second by bandwidth alone: at most {text:.1f} where routing repeats as in text, "
            f"{worst:.1f} where it is uniform ({self.rates})"
        )
        return "\n".join(lines)


def size(count: int) -> str:
    """Returns a number of bytes as text with a unit."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= (scale := _UNITS[unit.lower()]):
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"


def plan_memory(model: nn.Module, gpu_memory: int | str) -> MemoryPlan:
    """Plan a budget of GPU memory for a model whose experts are in 4 bits.

    Raises ValueError if the parts outside the experts and the experts of one token do not fit.
    """
    budget = parse_bytes(gpu_memory)
    layers: list[LayerExperts] = []
    packed: set[int] = set()
    for name, module in model.named_modules():
        recipe = getattr(module, "_fp4_recipe", None)
        if recipe is None or id(module._modules[recipe.form.gate_up]) in packed:
            continue  # a module without experts, or with those of an earlier one
        weights = [module._modules[n] for n in (recipe.form.gate_up, recipe.form.down)]
        held = [t for t in slot_weights(module) if t is not None]
        experts = held[0].shape[0]
        top_k = min(experts, top_k_of(model) or experts)
        layers.append(LayerExperts(name, experts, top_k, sum(t.nbytes for t in held) // experts))
        packed.update(id(t) for w in weights for t in (w, *w.buffers(), *w.parameters()))
    if not layers:
        raise ValueError(
            "fp4: gpu_memory was given, and no experts of the model run by fp4::moe, so none could get a "
            "slot. Leave gpu_memory out"
        )
    others: Iterable[Any] = (t for t in (*model.parameters(), *model.buffers()) if id(t) not in packed)
    return MemoryPlan(
        budget, _unique_bytes(others), tuple(layers), ASSUMED, _activations(model), _cache_bytes(model)
    )


def _cache_bytes(model: Any) -> int | None:
    """Returns the bytes of a token's keys and values in all layers, None for attention of another kind."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    numbers = [n for name in names if isinstance(n := getattr(config, name, None), int)]
    if len(numbers) < len(names) or getattr(config, "kv_lora_rank", None) is not None:
        return None
    return 2 * math.prod(numbers) * _element_size(model)


def _element_size(model: Any) -> int:
    """Returns the size of an element of the largest weight outside the experts, in bytes. It stands for the
    activations, so weights in fp8 do not count."""
    floats = (p for p in model.parameters() if p.is_floating_point() and p.dtype != CODES)
    largest: Any = max(floats, key=lambda p: p.numel(), default=None)
    return 2 if largest is None else largest.element_size()


def _activations(model: Any) -> Activations:
    """Estimates the activations of a prompt, without masks, which grow with the tokens in the cache.

    For each token, a layer holds some vectors of the hidden size (residual, norm, their float32 forms), some
    that are as wide as the widest layer outside the experts (queries before and after rotation, a gate and an
    up), and a row of results for each expert. The output head runs only for the last token.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    widths = [m.out_features for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    size = _element_size(model)
    token_bytes, row_bytes, most_top_k = 0, 0, 1
    for module in model.modules():
        recipe: Any = getattr(module, "_fp4_recipe", None)
        if recipe is None:
            continue
        down: Any = module._modules[recipe.form.down]
        experts, hidden = down.packed.shape[:2]
        top_k = min(experts, top_k_of(model) or experts)
        vectors = (top_k + 12) * hidden + 6 * max(widths, default=hidden)
        token_bytes = max(token_bytes, size * vectors)
        row_bytes = max(row_bytes, 4 * hidden + 6 * down.k)
        most_top_k = max(most_top_k, top_k)
    return Activations(token_bytes, row_bytes, most_top_k)


def memory_plan_of(model: Any) -> MemoryPlan | None:
    """Returns the plan by which a model was placed, None if it was not."""
    found: MemoryPlan | None = getattr(model, "__dict__", {}).get("_fp4_memory_plan")
    return found


def _unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors. Shared memory is counted once."""
    sizes = {}
    for t in tensors:
        for part in (t.packed, t.block_scale, t.global_scale) if isinstance(t, FP4Tensor) else (t,):
            if part is not None:
                sizes[part.data_ptr() or id(part)] = part.nbytes
    return sum(sizes.values())


def cannot_pin(size_needed: int, error: int) -> str:
    """Returns an error message. `error` is the CUDA error of the attempt to pin `size_needed` bytes of host
    memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "no limit" if limit == resource.RLIM_INFINITY else size(limit)
    available = _available()
    free = "unknown" if available is None else size(available)
    return (
        f"fp4: the host could not pin {size(size_needed)} of experts (CUDA error {error}): {free} of its "
        f"memory are available, and this process may lock {locked} (`ulimit -l`). Free memory, raise the "
        "limit (`ulimit -l unlimited`, in a container --ulimit memlock=-1), or give a gpu_memory in which "
        "all experts fit"
    )


def _available() -> int | None:
    try:
        with open("/proc/meminfo") as file:
            found = re.search(r"MemAvailable:\s+(\d+) kB", file.read())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
