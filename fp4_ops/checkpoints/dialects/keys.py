"""Checks the keys of a `quantization_config`: which are known, and which are refused.

If a key changes what the weights mean and is ignored, the model is silently wrong. So each maker's keys are
listed: keys that are read, keys that change no weight, and keys that are refused for some values. A key in no
list is refused, unless its value is null, false or empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..files import CheckpointError

BESIDE = ("expert_dtype",)
"""Keys that are copied from the model's config into `quantization_config`."""

Reason = Callable[[Any], str]
"""Returns why a value of a key is refused, or "" if it is accepted."""


@dataclass(frozen=True)
class Keys:
    """The known keys of one object in a maker's config."""

    maker: str
    read: tuple[str, ...]
    harmless: tuple[str, ...]
    """Keys that change no weight: how weights were chosen, which layers are not quantised, and settings of
    activations and caches.
    """
    refused: Mapping[str, Reason] = field(default_factory=dict)

    def check(self, config: Any, where: str, of: str = "") -> None:
        """Raises CheckpointError for a key that is refused or unknown.

        of: which of several configs this is, for the message.
        """
        for key, value in (config if isinstance(config, dict) else {}).items():
            reason = self.refused[key](value) if key in self.refused else ""
            known = key in (*self.refused, *self.read, *self.harmless, *BESIDE) or key.startswith("_")
            if not known and value not in (None, False, 0, "", [], {}):
                reason = (
                    f"{str(value)[:80]}, which fp4_ops does not know: it may change what the weights mean. "
                    "If you know that it does not, remove the key from the config"
                )
            if reason:
                error = CheckpointError(
                    f"fp4: {where} has {key}{of} ({self.maker}): {reason}. Export the model without it, or "
                    "quantise the original weights with `python -m fp4_ops quantize`"
                )
                error.unknown_meaning = True
                raise error


ROTATED = "its weights need inputs that are rotated while the model runs, which no operator does"


def is_set(reason: str) -> Reason:
    """Refuses every value except null, false and empty ones."""
    return lambda value: reason if value not in (None, False, 0, "", [], {}) else ""


def other_than(*values: Any, reason: str) -> Reason:
    """Refuses all values except these and null."""
    return lambda value: f"{value!r}, {reason}" if value is not None and value not in values else ""


def transforms(value: Any) -> str:
    """Checks compressed-tensors' transform_config. Transforms that are applied only to weights are accepted,
    because the stored weights contain them.
    """
    groups = value.get("config_groups", value) if isinstance(value, dict) else value
    if not groups:
        return ""
    if not isinstance(groups, dict):
        return ROTATED
    places = [a.get("location") for g in groups.values() for a in (g or {}).get("apply") or ()]
    online = [place for place in places if place not in ("weight_input", "weight_output")]
    return f"{ROTATED} (location {online[0]!r})" if online or not places else ""


_ONLINE = ("r3", "r4", "online_r1_rotation", "online_config")
"""Flags of SpinQuant's rotations that are applied while a model runs. (r1 and r2 are folded into weights.)"""


def rotation(value: Any) -> str:
    """Checks AutoRound's and Quark's description of one or several rotations."""
    if isinstance(value, list):
        return next((reason for one in value if (reason := rotation(one))), "")
    if not value:
        return ""
    if not isinstance(value, dict):
        return ROTATED
    name = value.get("name") or value.get("algorithm")
    if name in ("rotation", "spinquant", "quarot"):
        # Quark's older "quarot" uses r3 and r4 by default
        online = [flag for flag in _ONLINE if value.get(flag, name == "quarot" and flag in ("r3", "r4"))]
        return f"{ROTATED} ({online[0]})" if online else ""
    if value.get("backend") == "inplace" and value.get("allow_online_rotation") is False:
        return ""
    return ROTATED


ROTATIONS: dict[str, Reason] = {
    "rotation_config": rotation,
    "rotation_configs": rotation,
    "spinquant_config": rotation,
    "hadamard_config": rotation,
}
"""AutoRound's keys. They are in its own configs, and in configs of other tools that it writes."""

TUNING = (
    "amp", "autoround_version", "batch_size", "dataset", "enable_alg_ext", "enable_minmax_tuning",
    "enable_norm_bias_tuning", "enable_quanted_input", "gradient_accumulate_steps", "ignore_layers",
    "iters", "low_gpu_mem_usage", "lr", "minmax_lr", "nsamples", "provider", "quant_block_list",
    "quant_lm_head", "regex_config", "scale_dtype", "seed", "seqlen", "static_attention_dtype",
    "static_attention_granularity", "static_kv_dtype", "static_kv_granularity", "supported_types",
    "to_quant_block_names", "act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym",
)  # fmt: skip
"""AutoRound's keys that change no weight: how it chose the weights, and settings of activations."""

_FOLDED = ("awq", "smooth", "smoothquant", "autosmoothquant", "gptq", "gptaq", "qronos", "autoround")


def algorithms(value: Any) -> str:
    """Checks Quark's algo_config: rotations, and algorithms after which the weights are ordinary."""
    for one in value if isinstance(value, list) else [value] if value else []:
        name = one.get("name") if isinstance(one, dict) else one
        if name in ("rotation", "quarot"):
            if reason := rotation(one):
                return reason
        elif name not in _FOLDED:
            return f"algorithm {name!r}, which fp4_ops does not know: it may change what the weights mean"
    return ""


def sparsity(value: Any) -> str:
    """Checks compressed-tensors' sparsity_config. Sparse weights that are stored as dense tensors are
    accepted.
    """
    format = value.get("format", "dense") if isinstance(value, dict) else value
    return "" if not format or format == "dense" else f"format {format!r}: weights are stored without zeros"


def all_of(parts: Any) -> Iterable[tuple[str, Any]]:
    """Yields the name of each entry of an object of objects, for errors, and the entry."""
    return ((f" of {name!r}", part) for name, part in parts.items()) if isinstance(parts, dict) else ()
