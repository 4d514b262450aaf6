"""Connects to transformers: `from_pretrained` of 4-bit folders, and `save_pretrained` of prepared models."""

from __future__ import annotations

import copy
import fnmatch
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_utils
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...checkpoints.dialects import (
    METHODS,
    Dialect,
    StoredWeight,
    check_four_bits,
    check_order,
    check_requantize,
    check_target,
    dialects_of,
    holds_fp4,
    is_eight_bits,
    needs_older,
    quantization_config,
    stored_config,
    with_older,
)
from ...checkpoints.families import has_fewer_layers, register_families
from ...checkpoints.files import OTHER_MODEL, CheckpointError, TensorInfo, read_json
from ...checkpoints.folder import Folder, headers
from ...checkpoints.gguf import GGUF, OTHER_CONFIG, dense_of, layers_of
from ...checkpoints.gguf import experts_of as gguf_experts
from ...checkpoints.load import LoadReport, detach_places, fill
from ...checkpoints.placement import Placement, place
from ...checkpoints.ranks import announce, divide, kinds_of
from ...checkpoints.shared import shared_experts
from ...checkpoints.source import four_bit_weights
from ...checkpoints.unexplained import refuse_codes
from ...experts.find import WHOLE_EXPERTS
from ...meta.formats import FORMATS, check_activation_choice
from ...meta.operand_checks import FLOATING_OR_DOUBLE
from ...models.arriving import ArrivingExperts
from ...models.expert_parallel import connect_model
from ...models.outside_experts import (
    KEEP,
    Kind,
    check_batch_invariant,
    check_gradients,
    chosen_formats,
    find_outside,
)
from ...models.pack_experts import pack_experts
from ...models.prepare_report import PrepareReport
from ...runtime.devices import usable_device
from . import expert_parallel
from .on_load import PackOnLoad, check_read, shared_names
from .save import name_failed_files, state_dict_for_saving
from .shards import any_index, read_any_index
from .unexplained import refuse_unexplained, unexplained_refused

METHOD = "fp4"
"""Our quant_method among transformers' quantizers."""


class FP4Config(QuantizationConfigMixin):
    """Config for 4-bit experts: `from_pretrained(..., quantization_config=FP4Config("nvfp4"))`.

    A folder that is in 4 bits already keeps its formats. For it, all options except `format`, `attention`,
    `dense` and `head` apply. For other folders `model.hf_quantizer.report` is the report of `prepare`: what
    was packed, and what was left alone, with the reason.

    format: quantise a checkpoint that is not in 4 bits to this format when it is loaded.
    activation, attention, dense, head, batch_invariant: as in `fp4_ops.prepare`.
    stored: the quantization_config of a folder that is in 4 bits already.
    device: the device of a folder in 4 bits; None leaves it to transformers' device_map.
    requantize, trainable_inputs: as in `fp4_ops.load_checkpoint`.
    ep_group: the name of the group of `fp4_ops.load_checkpoint`.
    gguf: the GGUF file that `stored` describes.
    """

    def __init__(
        self,
        format: str = "nvfp4",
        activation: str = "auto",
        stored: dict[str, Any] | None = None,
        device: str | None = None,
        requantize: str | None = None,
        trainable_inputs: bool = False,
        ep_group: str | None = None,
        gguf: str | None = None,
        *,
        attention: str = KEEP,
        dense: str = KEEP,
        head: str = KEEP,
        batch_invariant: bool = False,
        **_: Any,
    ) -> None:
        self.quant_method: Any = METHOD
        register_quantizer()
        # In a folder in 4 bits, each weight keeps its own format.
        check_activation_choice(activation, None if stored else format)
        self.format, self.activation, self.stored, self.device = format, activation, stored, device
        self.requantize, self.trainable_inputs, self.ep_group = requantize, trainable_inputs, ep_group
        self.gguf = gguf
        self.attention, self.dense, self.head = attention, dense, head
        self.batch_invariant = batch_invariant
        if not stored:
            formats = chosen_formats(self.outside)
            check_gradients(formats, trainable_inputs)
            check_batch_invariant(formats, batch_invariant)

    @property
    def outside(self) -> dict[Kind, str]:
        """Returns the formats of linear layers outside the experts, by kind. "keep" leaves their dtype."""
        return {"attention": self.attention, "dense": self.dense, "head": self.head}

    def of_folder(self, stored: dict[str, Any], gguf: str | None = None) -> FP4Config:
        """Returns the same options for a folder in 4 bits, whose quantization_config is `stored`, or for a
        GGUF file."""
        made = copy.copy(self)
        made.stored, made.gguf = dict(stored), gguf
        return made

    def to_dict(self) -> dict[str, Any]:
        """Returns the config of a saved folder: the dialect of its files, which other tools read too."""
        return copy.deepcopy(self.stored) if self.stored else {**self.__dict__}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class FP4HfQuantizer(HfQuantizer):
    """Loads experts and linear layers that a folder stores in 4 bits into the model, without changing their
    values.

    transformers loads the rest.
    """

    requires_calibration = False
    quantization_config: FP4Config

    report: LoadReport | PrepareReport | None = None
    """Says what became of the experts: a LoadReport for a folder in 4 bits, else the report of `prepare`."""
    _pack: Any = None
    """A PackOnLoad, if the folder is in 16 bits."""
    _files: list[str]
    _dialects: tuple[Dialect, ...]
    _placement: Placement
    _kinds: dict[str, str]
    _dtypes: dict[str, torch.dtype]

    @property
    def stored(self) -> dict[str, Any] | None:
        return self.quantization_config.stored if self.pre_quantized else None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        _check_device_map(device_map)
        if self.quantization_config.device is not None:
            usable_device(self.quantization_config.device)
        if self.quantization_config.gguf is not None:
            check_target(self.quantization_config.requantize)
        elif self.stored is not None:
            self._dialects = dialects_of(self.stored)
            check_four_bits(self._dialects, "the config")
            check_requantize(self._dialects, self.quantization_config.requantize)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        _check_sizes(model, self.quantization_config.ep_group)
        self._files = list(checkpoint_files or ())
        if self.stored is None:
            _check_ordinary(model, self._files)
            how = self.quantization_config
            arriving = ArrivingExperts(
                model, how.format, how.activation, how.trainable_inputs, shared_names(model),
                shared_experts(model), how.batch_invariant,
            )  # fmt: skip
            self._pack = PackOnLoad(arriving)
            return
        self._dtypes = _dtypes_of(model)
        weights, tensors, fewer = self._stored_weights(model, checkpoint_files)
        try:
            self._placement = place(model, weights, tensors, self.quantization_config.requantize, fewer)
        except CheckpointError as error:
            if self.quantization_config.gguf is None or OTHER_MODEL not in str(error):
                raise
            raise CheckpointError(str(error).replace(OTHER_MODEL, OTHER_CONFIG)) from None
        self._kinds = kinds_of(model, self._placement)
        announce(model, self._placement, self._kinds)
        detach_places(model, self._placement)
        # We read these tensors, so transformers must not report them as unexpected.
        model._keys_to_ignore_on_load_unexpected = (
            set(model._keys_to_ignore_on_load_unexpected or ()) | self._placement.patterns
        )

    def _stored_weights(
        self, model: Any, checkpoint_files: list[str] | None
    ) -> tuple[dict[str, StoredWeight], Iterable[TensorInfo], bool]:
        """Returns the weights in 4 bits, the tensors that may hold the experts' other weights, and True if
        the model has fewer layers than the folder."""
        config = self.quantization_config
        if config.gguf is not None:
            file = GGUF.open(Path(config.gguf))
            weights, tensors = gguf_experts(file, config.requantize)
            return weights, tensors, has_fewer_layers(model.config, {"num_hidden_layers": layers_of(file)})
        if not checkpoint_files:
            raise CheckpointError(
                f"fp4: {type(model).__name__} is given no safetensors files; a 4-bit checkpoint must be "
                "loaded from such. "
                "Give from_pretrained the folder"
            )
        folder = Folder.of_files(checkpoint_files)
        weights = four_bit_weights(folder, self._dialects)
        return weights, folder.tensors.values(), has_fewer_layers(model.config, folder.config)

    def read_header(self, gguf_file: str) -> None:
        """Reads the file that `from_pretrained(gguf_file=...)` names."""
        self.quantization_config = self.quantization_config.of_folder({"quant_method": "gguf"}, gguf_file)
        self.pre_quantized = True
        self.validate_environment()

    def update_dtype(self, dtype: Any) -> Any:
        """Sets bfloat16 if nobody gives a dtype: a GGUF file does not say in which dtype its model
        computes."""
        if dtype is None and self.quantization_config.gguf is not None:
            return torch.bfloat16
        return dtype

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, torch.Tensor]:
        """Reads all of a GGUF file except the experts' matrices and biases."""
        return dense_of(GGUF.open(Path(checkpoint_file)), model.config, model.dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config = self.quantization_config
        if self.stored is None:
            self._pack_experts(model)
            return model
        if config.gguf is None:
            check_read(model, self._files)
        divide(model, self._placement, self._kinds, config.ep_group)
        _cast(model, self._dtypes)
        if config.device is not None:
            model.to(config.device)
        self.report = fill(
            model,
            self._placement,
            requantize=config.requantize,
            activation=config.activation,
            trainable_inputs=config.trainable_inputs,
            dtype=model.dtype,
            device_of=_device_of(model),
            batch_invariant=config.batch_invariant,
        )
        connect_model(model, model.dtype)
        return model

    def _pack_experts(self, model: Any) -> None:
        """Packs the experts of a 16-bit folder that were not packed as they arrived."""
        config = self.quantization_config
        if self._pack.error is not None:
            raise self._pack.error
        if self._files:
            check_read(model, self._files)
        outside = find_outside(model, config.outside, batch_invariant=config.batch_invariant)
        done = self._pack.arriving.finish(model)
        if done:
            _device_of(model)  # raises ValueError for experts that are to be offloaded
        report = None
        if not done or len(done) < len(self._pack.arriving.plans):
            report = pack_experts(
                model, config.format, config.activation, trainable_inputs=config.trainable_inputs,
                batch_invariant=config.batch_invariant,
            )  # fmt: skip
        self.report = prepared = self._pack.arriving.report(done, report)
        prepared.outside = outside.pack()
        if any(m.calls_moe for m in prepared.modules):
            attach(
                model, prepared, config.format, config.activation, config.trainable_inputs,
                config.batch_invariant,
            )  # fmt: skip

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Returns whether transformers passes the weight to `get_quantize_ops` as soon as it has read it."""
        return self.stored is None and self._pack is not None and self._pack.arriving.takes(param_name)

    def get_quantize_ops(self) -> Any:
        return self._pack

    @property
    def quantized_element_size(self) -> float | None:
        """Returns the bytes of a weight, with which transformers plans the memory of devices."""
        if self.stored is not None:
            return None
        fmt = FORMATS[self.quantization_config.format]
        return 0.5 + fmt.scale_dtype.itemsize / fmt.block

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        state, stored = state_dict_for_saving(model)
        self.quantization_config.stored = stored
        model.config.quantization_config = self.quantization_config
        return state, {}

    def is_serializable(self, **_: Any) -> bool:
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Refuses `model.dequantize()`, for which transformers would ask for an issue on GitHub."""
        raise NotImplementedError(
            "fp4: dequantize: weights in 4 bits do not become 16-bit ones again. Load the original folder. "
            "For the values of one expert weight, see FP4Tensor.dequantize and torch.ops.fp4.dequantize"
        )

    @property
    def is_trainable(self) -> bool:
        """Returns whether adapters may be trained, for transformers' Trainer."""
        return self.quantization_config.trainable_inputs

    @property
    def is_compileable(self) -> bool:
        return True


def _check_ordinary(model: Any, files: list[str]) -> None:
    """Raises CheckpointError for a folder that is quantised in a way that transformers does not know, and for
    codes of the model's weights that its config does not explain."""
    path = Path(files[0]).parent if files else None
    if path is not None and (path / "config.json").exists() and stored_config(path) is not None:
        raise CheckpointError(
            f"fp4: {path} is quantised already, by a tool that transformers does not know: call "
            "fp4_ops.register_with_transformers() before from_pretrained, or fp4_ops.load_checkpoint"
        )
    refuse_codes(model, headers(files))


def _dtypes_of(model: Any) -> dict[str, torch.dtype]:
    """Returns the dtype of each parameter before weights are read, except those that a half-precision model
    keeps in float32. transformers chooses the dtype of these."""
    in_float32 = [f"*{pattern}*" for pattern in model._get_dtype_plan(model.dtype)]
    return {
        name: p.dtype
        for name, p in model.named_parameters()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in in_float32)
    }


def _cast(model: Any, dtypes: dict[str, torch.dtype]) -> None:
    """Gives parameters the requested dtype. From transformers 5.17 on, parameters with another name in the
    files arrive in the files' own dtype. A product cannot multiply two different dtypes."""
    for name, p in model.named_parameters():
        dtype = dtypes.get(name, p.dtype)
        if p.dtype != dtype and {p.dtype, dtype} <= {*FLOATING_OR_DOUBLE}:
            p.data = p.data.to(dtype)


def _check_sizes(model: Any, ep_group: str | None) -> None:
    """Raises ValueError if transformers divides a model in a way that 4-bit experts do not support."""
    config = getattr(model.config, "distributed_config", None)
    for name in ("pp_size", "tp_size", "ep_size"):
        size = getattr(config, name, None)
        if not isinstance(size, int) or size == 1:
            continue
        if name == "pp_size":
            raise ValueError(f"fp4: pp_size is {size}; it must be 1, because {WHOLE_EXPERTS}")
        if ep_group is not None:
            raise ValueError(f"fp4: {name} is {size}, and ep_group is given; give one of the two")
        if not hasattr(model, "_resolve_parallel_plans"):
            raise ValueError(
                f"fp4: {name} is {size}; this transformers does not say what it divides. Use 5.23 or later"
            )


def _device_of(model: nn.Module) -> Any:
    """Returns a function from a module's name to the device that transformers gave it."""
    devices: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    _check_device_map(devices)
    only = next(iter(model.parameters())).device

    def device_of(name: str) -> torch.device:
        while name and name not in devices:
            name = name.rpartition(".")[0]
        return torch.device(devices[name]) if name in devices else only

    return device_of


def _check_device_map(devices: Any) -> None:
    """Raises ValueError if a device_map offloads modules to the CPU or to disk."""
    if not isinstance(devices, dict):
        return  # a name such as "auto": checked once transformers has chosen the devices
    kinds = {str(device) for device in devices.values()}
    offloads = "disk" if "disk" in kinds else "cpu" if len(kinds) > 1 else ""
    for name, device in devices.items():
        if str(device) == offloads:
            raise ValueError(
                f"fp4: device_map puts {name or 'the model'} on {offloads!r}, and no part of a model whose "
                "experts are in 4 bits can be offloaded while it is loaded. For experts that exceed the GPU "
                "leave out device_map: fp4_ops.load_checkpoint(None, FOLDER, gpu_memory='20GiB') loads a "
                "folder in 4 "
                "bits, and fp4_ops.prepare(model, gpu_memory='20GiB') packs a model that was loaded in 16 "
                "bits. For offloading by accelerate load without device_map, and call "
                "accelerate.dispatch_model(..., offload_buffers=True)"
            )


class _Dispatch:
    """Replaces a config class of transformers: folders that fp4_ops runs become FP4Config, others stay.

    A folder with 4-bit floats that fp4_ops cannot read is an error; it is not left to transformers.
    """

    def __init__(self, other: Any) -> None:
        self.other = other

    def from_dict(self, config: dict[str, Any], **kwargs: Any) -> Any:
        try:
            dialects = dialects_of(config)
            ours = _is_ours(dialects)
        except CheckpointError as error:
            # transformers cannot replace us: it ignores the global scales of compressed-tensors' nvfp4
            # experts. It also ignores keys that we do not know.
            unknown = error.unknown_meaning and not is_eight_bits(config)
            if self.other is None or holds_fp4(config) or unknown:
                raise
            ours = False
        else:
            if not ours:
                check_order(dialects)
        return FP4Config(stored=config) if ours else self.other.from_dict(config, **kwargs)


def _is_ours(dialects: tuple[Dialect, ...]) -> bool:
    """Returns whether something is in 4 bits, and nothing is in a format that no operator supports."""
    kinds = [d.format in FORMATS for d in dialects if not d.is_dense]
    return bool(kinds) and all(kinds)


def _merge() -> Any:
    """Wraps `AutoHfQuantizer.merge_quantization_configs` so that an FP4Config applies to folders in 4
    bits."""
    original: Any = auto.AutoHfQuantizer.__dict__["merge_quantization_configs"].__func__

    @functools.wraps(original)
    def merge_quantization_configs(cls: Any, stored: Any, given: Any) -> Any:
        if isinstance(given, FP4Config) and isinstance(stored, dict) and stored.get("quant_method") != METHOD:
            return given.of_folder(stored)
        return original(cls, stored, given)

    merge_quantization_configs._fp4_original = original  # type: ignore[attr-defined]
    made: Any = merge_quantization_configs
    return classmethod(made)


def _with_gguf() -> Any:
    """Wraps `get_hf_quantizer`, so that it takes a GGUF file with our quantizer, not only with its own."""
    original: Any = modeling_utils.get_hf_quantizer

    @functools.wraps(original)
    def get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(quantization_config, FP4Config) and "gguf_file" in kwargs:
            kwargs["gguf_file"] = None
        return original(config, quantization_config, *args, **kwargs)

    get_hf_quantizer._fp4_original = original  # type: ignore[attr-defined]
    return get_hf_quantizer


def register_quantizer() -> None:
    """Registers quant_method and ep_implementation "fp4" in transformers.

    It also wraps `save_pretrained`, so that an error of the disk names the file for models with fp4's
    quantizer, and two functions that choose the quantizer, for FP4Config. Other models behave as before.
    """
    expert_parallel.register()
    name_failed_files(FP4HfQuantizer)
    if not hasattr(auto.AutoHfQuantizer.merge_quantization_configs, "_fp4_original"):
        auto.AutoHfQuantizer.merge_quantization_configs = _merge()  # type: ignore[method-assign]
    if not hasattr(modeling_utils.get_hf_quantizer, "_fp4_original"):
        modeling_utils.get_hf_quantizer = _with_gguf()
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = FP4Config
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = FP4HfQuantizer


def _with_all_it_says() -> Any:
    """Wraps `PretrainedConfig.get_config_dict`: its quantization_config then has everything that a folder
    says about its weights.

    ModelOpt's older exports say it only in hf_quant_config.json. DeepSeek-V4's `expert_dtype` is outside
    quantization_config, where transformers 5.17 does not look.
    """
    original: Any = PretrainedConfig.__dict__["get_config_dict"].__func__

    @functools.wraps(original)
    def get_config_dict(cls: Any, name: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        config, rest = original(cls, name, **kwargs)
        stored = quantization_config(config) if config else None
        if stored is not None and (config.get("quantization_config") or config.get("compression_config")):
            config["quantization_config"] = _named(stored)
        if config and needs_older(stored):
            where = {
                k: kwargs[k] for k in ("cache_dir", "token", "revision", "local_files_only") if k in kwargs
            }
            raises = dict.fromkeys(("missing_entries", "connection_errors", "gated_repo"), False)
            file = cached_file(
                name, "hf_quant_config.json", **where,
                **{f"_raise_exceptions_for_{k}": v for k, v in raises.items()},
            )  # fmt: skip
            if file is not None:
                older = read_json(Path(file))
                config["quantization_config"] = {**with_older(stored, older), "quant_method": "modelopt"}
        return config, rest

    get_config_dict._fp4_original = original  # type: ignore[attr-defined]
    made: Any = get_config_dict
    return classmethod(made)


def _named(stored: dict[str, Any]) -> dict[str, Any]:
    """Adds the quant_method that some exports of ModelOpt lack."""
    modelopt = not stored.get("quant_method") and (stored.get("quant_algo") or stored.get("quantization"))
    return {**stored, "quant_method": "modelopt"} if modelopt else stored


def register_with_transformers() -> None:
    """Makes transformers' `from_pretrained` load 4-bit folders with fp4_ops, in this process from now on.

    fp4_ops then loads the dialects in the table of docs/checkpoints.md that need no `requantize`, in place of
    transformers' own loaders if there are any. Other folders of the same tools stay with transformers.
    `from_pretrained` raises CheckpointError, naming file and tensor, for a folder that cannot be read. A
    second call changes nothing.
    """
    register_quantizer()
    if not hasattr(PretrainedConfig.get_config_dict, "_fp4_original"):
        PretrainedConfig.get_config_dict = _with_all_it_says()  # type: ignore[method-assign]
    read_any_index()
    refuse_unexplained()
    register_families()
    mapping: dict[str, Any] = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    for method in METHODS:
        if not isinstance(mapping.get(method), _Dispatch):
            mapping[method] = _Dispatch(mapping.get(method))
        auto.AUTO_QUANTIZER_MAPPING.setdefault(method, FP4HfQuantizer)


@contextmanager
def registered() -> Iterator[None]:
    """Applies `register_with_transformers` inside the context only."""
    mappings: tuple[dict[str, Any], ...] = (
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING,
        auto.AUTO_QUANTIZER_MAPPING,
    )
    before = [dict(m) for m in mappings]
    configs = PretrainedConfig.__dict__["get_config_dict"]
    try:
        with any_index(), unexplained_refused():
            register_with_transformers()
            yield
    finally:
        for mapping, old in zip(mappings, before):
            mapping.clear()
            mapping.update(old)
        PretrainedConfig.get_config_dict = configs  # type: ignore[method-assign]
        register_quantizer()


def attach(
    model: nn.Module,
    report: PrepareReport,
    format: str,
    activation: str,
    trainable_inputs: bool = False,
    batch_invariant: bool = False,
) -> None:
    """Makes `save_pretrained` of a model that `prepare` changed write a 4-bit folder, and keeps the report in
    `model.hf_quantizer.report`."""
    if isinstance(model, PreTrainedModel):
        config = FP4Config(
            format, activation, trainable_inputs=trainable_inputs, batch_invariant=batch_invariant
        )
        quantizer = FP4HfQuantizer(config, pre_quantized=False)
        quantizer.report = report
        model.hf_quantizer = quantizer  # type: ignore[assignment]
