"""The quantisation config `fp4_ops` for vLLM. It decides which folders, and which of their layers, fp4_ops
runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_safetensors_params_metadata

from ...checkpoints.dialects import check_four_bits
from ...checkpoints.files import CheckpointError
from . import LOG, NAME
from .experts import DequantizedExperts, QuantizedExperts, StoredExperts
from .linear import DequantizedLinear, StoredLinear, why_not
from .stored import Stored, described, is_stack
from .stored import why_not as why_not_format

ONLINE = "nvfp4"
"""The format that experts in 16 bits get, as with `fp4_ops.prepare`."""


def why_not_device() -> str:
    """Returns why fp4_ops takes no folders on this device unless `--quantization fp4_ops` is given; "" if it
    does.
    """
    if current_platform.is_cpu():
        return ""
    # On a GPU vLLM's own kernels serve these folders, too. On Hopper its engine is faster with ours, but only
    # one model was measured with all its layers (docs/serving.md).
    return f"fp4_ops takes folders by itself only on CPUs; --quantization {NAME} asks for it on a GPU"


@register_quantization_config(NAME)
class Fp4Config(QuantizationConfig):
    """Config of a folder in 4 bits, which our dialects read, or of a folder in 16 bits, which is quantised
    while it loads.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.config = config
        self.stored: Stored | None = None
        self.taken: Counter[str] = Counter()
        self.left: dict[str, list[str]] = {}
        self.told = False

    @classmethod
    def get_name(cls) -> str:
        """Returns our name among vLLM's methods."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Returns the dtypes in which a model may run."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns the least compute capability of a GPU: 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Returns no files, because vLLM reads config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp4Config:
        """Returns the config for a folder's `quantization_config`."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Returns our name for folders that fp4_ops reads and runs, unless the user names another method."""
        if user_quant not in (None, NAME):
            return None
        try:
            dialects = described(hf_quant_cfg)
        except CheckpointError as error:
            if user_quant == NAME:
                raise
            LOG.debug("fp4_ops: %s", error)
            return None
        if all(d.is_dense for d in dialects):
            if user_quant == NAME:
                check_four_bits(dialects, "the folder's config")
            return None
        if reason := why_not_format(dialects):
            if user_quant == NAME:
                raise CheckpointError(f"fp4: {reason}. Serve the folder without --quantization {NAME}")
        elif user_quant is None:
            reason = why_not_device()
        if reason:
            LOG.info("fp4_ops: leaves this 4-bit folder to vLLM: %s", reason)
            return None
        return NAME

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Returns a mapper that drops no tensors, because a dialect checks the order of columns (g_idx)."""
        return WeightsMapper()

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Reads the headers of the folder's files. They say which weights are in 4 bits."""
        if self.config is not None:
            metadata = get_safetensors_params_metadata(model_name, revision=revision)
            self.stored = Stored.read(model_name, self.config, metadata)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames the stored weights to the names of the model's layers in vLLM."""
        if self.stored is not None:
            self.stored.rename(hf_to_vllm_mapper)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Returns the method of a layer, or None for a layer that vLLM runs without one."""
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            return self._linear(layer, prefix)
        return None

    def _experts(self, layer: Any, prefix: str) -> Any:
        if self.stored is None:
            self.taken[f"expert blocks, quantised to {ONLINE}"] += 1
            return QuantizedExperts(layer, ONLINE, self.tell)
        entries = self.stored.experts(prefix)
        formats = {entry.stored.dialect.format for entry in entries.values()}
        if not formats:
            self._leave("stored in 16 bits", prefix)
            return UnquantizedFusedMoEMethod(layer.moe_config)
        dense = {entry.stored.dialect.is_dense for entry in entries.values()}
        if dense == {True}:
            self._leave("stored in 8 bits, dequantised", prefix)
            return DequantizedExperts(layer, entries)
        if len(formats) > 1:
            raise NotImplementedError(
                f"fp4: experts of {prefix} are in {' and '.join(sorted(formats))}; they must be in one "
                "format. Export them again with the same one"
            )
        stacked = [entry for entry in entries.values() if entry.stored.dialect.stacked]
        own = type(layer).weight_loader is not RoutedExperts.weight_loader
        if any(not is_stack(entry) for entry in stacked) or own != bool(stacked):
            name = next(iter(entries.values())).stored.dialect.name
            raise NotImplementedError(
                f"fp4: experts of {prefix} are stored as {name}, which vLLM's loader of "
                f"{type(layer).__name__} does not hand over. Quantise the original weights with `python -m "
                "fp4_ops quantize`, or serve the folder with `transformers serve`"
            )
        (format,) = formats
        self.taken[f"expert blocks in {format}"] += 1
        return StoredExperts(layer, entries, self.tell)

    def _linear(self, layer: Any, prefix: str) -> Any:
        plain = None if isinstance(layer, ParallelLMHead) else UnquantizedLinearMethod()
        parts = {} if self.stored is None else self.stored.linear(prefix, self.packed_modules_mapping)
        entries = {name: entry for name, entry in parts.items() if entry is not None}
        if not entries:
            if self.stored is not None:
                self._leave("stored in 16 bits", prefix)
            return plain
        formats = {entry.stored.dialect.format for entry in entries.values()}
        if len(formats) > 1 or len(entries) < len(parts):
            kinds = " and ".join(sorted(formats)) + " and 16 bits" * (len(entries) < len(parts))
            raise NotImplementedError(
                f"fp4: {prefix} is put together from {', '.join(parts)}, which are in {kinds}; vLLM needs "
                "them in one format. Leave all of them in 16 bits when you quantise, or quantise all"
            )
        if reason := why_not(layer):
            raise NotImplementedError(
                f"fp4: {prefix} is stored in 4 or 8 bits: {reason}. Leave it in 16 bits when you quantise"
            )
        (format,) = formats
        if all(entry.stored.dialect.is_dense for entry in entries.values()):
            self._leave("stored in 8 bits, dequantised", prefix)
            return DequantizedLinear(entries)
        self.taken[f"linear layers in {format}"] += 1
        return StoredLinear(entries, self.tell)

    def _leave(self, why: str, prefix: str) -> None:
        self.left.setdefault(why, []).append(prefix)

    def tell(self) -> None:
        """Logs once what fp4_ops runs. It is called when weights are packed, because all layers are known
        then.
        """
        if not self.told:
            self.told = True
            LOG.info("%s", self)

    def __str__(self) -> str:
        """Lists the layers that fp4_ops runs, and the other layers with the reason."""
        took = ", ".join(f"{n} {what}" for what, n in self.taken.items()) or "no layers"
        left = "; ".join(f"{len(names)} {why} ({names[0]}, ...)" for why, names in self.left.items())
        return f"fp4_ops runs {took}" + f"; left to vLLM: {left}" * bool(left)
