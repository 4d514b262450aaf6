"""Dialects of NVIDIA's ModelOpt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..files import CheckpointError, TensorInfo
from .base import STACKS, Codes, Dialect, Read, StoredWeight
from .fp4 import FP4Dialect
from .fp8 import EightBits
from .keys import Keys, all_of, is_set

_KV = (".k_scale", ".v_scale", ".q_scale", ".k_bmm_quantizer._amax", ".v_bmm_quantizer._amax")
_FORBIDDEN = (".pre_quant_scale",)


@dataclass(frozen=True)
class FusedExperts(FP4Dialect):
    """Holds all experts in one transposed tensor: packed [E, K/2, N], block_scale [E, K/block, N], one global
    scale.

    ModelOpt writes this for families with one parameter [E, K, N] for all experts (Llama-4, GPT-OSS).
    """

    stacked: bool = True

    def is_packed(self, info: TensorInfo) -> bool:
        return super().is_packed(info) and len(info.shape) == 3 and info.name.endswith(STACKS)

    def shape(self, packed: TensorInfo) -> tuple[int, ...]:
        e, half, n = packed.shape
        return e, n, 2 * half

    def scale_shapes(self, packed: TensorInfo) -> tuple[tuple[int, ...], ...]:
        return tuple((e, blocks, n) for e, n, blocks in super().scale_shapes(packed))

    def check_scale(self, packed: TensorInfo, scale: TensorInfo) -> None:
        e, k, half = packed.shape
        if scale.shape not in self.scale_shapes(packed) and any(
            scale.shape == (e, k, -(-2 * half // block)) for block in (self.block, self.wider) if block
        ):
            raise CheckpointError(
                f"fp4: {packed} [E, K, N/2] and {scale} have their blocks along N, an expert's outputs; the "
                "operators need them along K, its inputs. ModelOpt exports experts like these so in this "
                "format: export it as NVFP4, or quantise the original weights with `python -m fp4_ops "
                "quantize`"
            )
        super().check_scale(packed, scale)

    def decode(self, stored: StoredWeight, read: Read) -> Codes:
        packed = read(stored.packed).view(torch.uint8).transpose(1, 2).contiguous()
        scale = self.read_block_scale(stored, read)
        scale = scale.view(torch.uint8).transpose(1, 2).contiguous().view(scale.dtype)
        return Codes(packed, self.each_block(scale, stored.shape[-1]), self.read_global_scale(stored, read))


MODELOPT_NVFP4 = FP4Dialect(
    "modelopt-nvfp4", "nvfp4", ".weight", ".weight_scale", ".weight_scale_2",
    unused=(".input_scale", *_KV), forbidden=_FORBIDDEN,
)  # fmt: skip
MODELOPT_NVFP4_FUSED = FusedExperts(
    "modelopt-nvfp4-fused", "nvfp4", "", "_weight_scale", "_weight_scale_2", unused=("_input_scale",)
)
# For FP8 activations, its blocks have 32 elements: two of our blocks with the same scale.
MODELOPT_W4A8_NVFP4 = replace(MODELOPT_NVFP4, name="modelopt-w4a8-nvfp4", wider=32)
MODELOPT_W4A8_NVFP4_FUSED = replace(MODELOPT_NVFP4_FUSED, name="modelopt-w4a8-nvfp4-fused", wider=32)
MODELOPT_MXFP4 = FP4Dialect(
    "modelopt-mxfp4", "mxfp4", ".weight", ".weight_scale", unused=(".input_scale", *_KV), forbidden=_FORBIDDEN
)
MODELOPT_MXFP4_FUSED = FusedExperts(
    "modelopt-mxfp4-fused", "mxfp4", "", "_weight_scale", unused=("_input_scale",)
)
MODELOPT_FP8 = EightBits(
    "modelopt-fp8", "fp8", ".weight", ".weight_scale", unused=(".input_scale", *_KV), forbidden=_FORBIDDEN
)
MODELOPT_FP8_FUSED = replace(
    MODELOPT_FP8, name="modelopt-fp8-fused", packed="", block_scale="_weight_scale", stacked=True,
    unused=("_input_scale",), forbidden=(),
)  # fmt: skip
# Exports that take weights in FP8 over from DeepSeek-like folders keep their name for the scale.
MODELOPT_FP8_BLOCKS = replace(MODELOPT_FP8, name="modelopt-fp8-blocks", block_scale=".weight_scale_inv")
_NVFP4 = (MODELOPT_NVFP4, MODELOPT_NVFP4_FUSED)
_W4A8_NVFP4 = (MODELOPT_W4A8_NVFP4, MODELOPT_W4A8_NVFP4_FUSED)
_MXFP4 = (MODELOPT_MXFP4, MODELOPT_MXFP4_FUSED)
_FP8 = (MODELOPT_FP8, MODELOPT_FP8_FUSED)
_FP8_BLOCKS = (*_FP8, MODELOPT_FP8_BLOCKS)
DIALECTS: tuple[Dialect, ...] = (*_NVFP4, *_W4A8_NVFP4, *_MXFP4, *_FP8_BLOCKS)

_ALGORITHMS: dict[str, tuple[Dialect, ...]] = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "W4A8_NVFP4_FP8": _W4A8_NVFP4,
    "MXFP4": _MXFP4,
    "W4A8_MXFP4_FP8": _MXFP4,
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8,
    "FP8_PB_WO": _FP8_BLOCKS,
    "FP8_BLOCK_SCALES": _FP8_BLOCKS,
    "MXFP8": _FP8,
}
"""The dialects of weights by `quant_algo`. Algorithms with AWQ are refused: they also scale inputs, which no
operator does.
"""

_IN_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
"""Algorithms with a scale for each square of `group_size` rows and columns (128 if the config names none)."""

_SCALED = is_set("it scales the inputs of layers, which no operator does")
_REFUSED = {
    "pre_quant_scale": _SCALED,
    "lora_rank": is_set("its products have a part of low rank beside them, which is not computed"),
    "has_zero_point": is_set("weights with zero points, which are not read"),
}
KEYS = Keys(
    "ModelOpt",
    ("quant_method", "quant_algo", "quantization", "quantized_layers", "config_groups"),
    ("ignore", "exclude_modules", "producer", "quant_library", "kv_cache_scheme", "kv_cache_quant_algo",
     "group_size", "version"),
    _REFUSED,
)  # fmt: skip
LAYER_KEYS = Keys("ModelOpt", ("quant_algo",), ("group_size",), _REFUSED)
GROUP_KEYS = Keys(
    "ModelOpt", (), ("targets", "weights", "input_activations", "output_activations", "quant_algo"), _REFUSED
)


def claims(config: dict[str, Any], where: str) -> tuple[Dialect, ...] | None:
    """Returns the dialects by `quant_algo`, which is in the config itself, or in its "quantization"
    (hf_quant_config.json).

    MIXED_PRECISION has a `quant_algo` for each of `quantized_layers`.
    """
    inner = config.get("quantization") or {}
    algorithm = config.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, dict) else None)
    if config.get("quant_method") != "modelopt" and not algorithm:
        return None
    for part in (config, inner if isinstance(inner, dict) else {}):
        KEYS.check(part, where)
        for of, own in all_of(part.get("quantized_layers")):
            LAYER_KEYS.check(own, where, of)
        for of, own in all_of(part.get("config_groups")):
            GROUP_KEYS.check(own, where, of)
    if algorithm == "MIXED_PRECISION":
        layers = config.get("quantized_layers") or inner.get("quantized_layers") or {}
        if not layers:
            raise CheckpointError(
                f"fp4: {where} has ModelOpt's quant_algo 'MIXED_PRECISION' and no quantized_layers, which "
                "say what each layer is in; put the export's hf_quant_config.json, which has them, beside it"
            )
    else:
        layers = {"": {**(inner if isinstance(inner, dict) else {}), **config, "quant_algo": algorithm}}
    found: dict[str, Dialect] = {}
    sizes = set()
    for layer, own in layers.items():
        name = (own or {}).get("quant_algo")
        name = str(name).upper() if name else name  # 0.47 writes "mxfp4"
        if name not in _ALGORITHMS:
            if name in (None, "NONE") and layer:
                continue  # a layer that is not quantised
            of = f" for {layer}" if layer else ""
            raise CheckpointError(
                f"fp4: {where} has ModelOpt's quant_algo {name!r}{of}; those that can be read are: "
                f"{', '.join(_ALGORITHMS)}, and MIXED_PRECISION of these. Export with one of them, or "
                "quantise the original weights with `python -m fp4_ops quantize`"
            )
        found |= {d.name: d for d in _ALGORITHMS[name]}
        if name in _IN_BLOCKS and own.get("group_size"):
            sizes.add(own["group_size"])
    if len(sizes) > 1:
        raise CheckpointError(
            f"fp4: {where} has FP8 weights in blocks of {' and '.join(map(str, sorted(sizes)))}; they must "
            "have one size. Export the layers with the same one"
        )
    size = sizes.pop() if sizes else 128
    blocks = (size, size)
    return tuple(replace(d, blocks=blocks) if isinstance(d, EightBits) else d for d in found.values())
