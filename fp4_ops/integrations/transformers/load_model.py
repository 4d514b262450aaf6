"""Defines `load_checkpoint`, which builds a model from a 4-bit folder or a GGUF file and checks the files
first."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ...checkpoints.dialects import check_four_bits, check_requantize, check_target, dialects_of
from ...checkpoints.families import config_of, model_class
from ...checkpoints.files import CheckpointError, read_json
from ...checkpoints.folder import Folder, check_name
from ...checkpoints.gguf import GGUF, dense_of, experts_of, find_gguf, gguf_config
from ...checkpoints.load import check_info
from ...checkpoints.source import four_bit_weights, storage
from ...experts.find import named
from ...models.expert_slots import check_placement, default_device, place_experts
from .quantizer import METHOD, register_quantizer
from .shards import any_index


def load_checkpoint(
    model_or_config: PreTrainedModel | PretrainedConfig | None,
    path: str | os.PathLike[str],
    *,
    activation: str = "auto",
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = "auto",
    requantize: str | None = None,
    trainable_inputs: bool = False,
    trust_remote_code: bool = False,
    distributed_config: Any = None,
    ep_group: Any = None,
    batch_invariant: bool = False,
    gpu_memory: int | str | None = None,
) -> PreTrainedModel:
    """Builds a model whose expert weights are the 4-bit ones of a checkpoint folder or a GGUF file.

    model_or_config: the model to build: a transformers config, or a model whose class and config are used
        (not its weights; it may be on the meta device). None: use the folder's config.
    path: a folder of safetensors files and a config.json that names its dialect (docs/checkpoints.md);
        or a GGUF file, any file of a split one, or a folder with one. If there is no config.json beside it,
        its metadata give the config.
    activation: as in `fp4_ops.prepare`.
    device, dtype: the model's device, and the dtype of weights that are not quantised.
    requantize: for int4 folders: "nvfp4" or "mxfp4" requantises the weights to this format, matrix by matrix
        (lossy). None keeps them exactly, and is an error for groups that no int4 format's block (32, 64, 128)
        divides. Weights in nvfp4 or mxfp4 are never converted to another format. GGUF files need it for
        experts in types other than MXFP4, NVFP4 and Q4_0. It then applies to all experts that are not in that
        format.
    trainable_inputs: as in `fp4_ops.prepare`, for adapters on frozen experts.
    trust_remote_code: True runs the folder's own code if transformers does not have the family. transformers
        has Kimi K2, for example.
    distributed_config: transformers' `DistributedConfig(tp_size, ep_size)`. This process then reads its own
        experts, or its part of each expert. See docs/several_gpus.md.
    ep_group: as in `fp4_ops.prepare`; only the experts are divided.
    batch_invariant: as in `fp4_ops.prepare`.
    gpu_memory: as in `fp4_ops.prepare`, for models whose experts exceed the GPU. Weights are read into host
        memory. `device` then names the GPU; with "cpu" it is the current GPU, if there is one.

    Every file is checked first. A truncated file, a missing scale, a wrong shape or an unknown dialect raises
    a CheckpointError that names file and tensor, and nothing is loaded. Weights are read one expert at a
    time, directly to `device`. `model.hf_quantizer.report` says what was loaded.
    """
    gpu: torch.device | None = None
    if gpu_memory is not None:
        check_placement(gpu_memory, trainable_inputs, ep_group or distributed_config)
        gpu, device = torch.device(device), "cpu"
        gpu = default_device() if gpu.index is None else gpu
    if (file := find_gguf(Path(path))) is not None:
        model = _load_gguf(
            file, model_or_config, activation=activation, device=device, dtype=dtype, requantize=requantize,
            trainable_inputs=trainable_inputs, distributed_config=distributed_config, ep_group=ep_group,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        return _placed(model, gpu_memory, gpu)
    folder = Folder(path)
    check_name(folder.path)
    stored = storage(folder)
    if stored is None:
        raise CheckpointError(
            f"fp4: {folder.path} is not quantised (its config.json has no quantization_config). Use "
            "`python -m fp4_ops quantize`, or load it and call fp4_ops.prepare"
        )
    dialects = dialects_of(stored, str(folder.path / "config.json"))
    check_four_bits(dialects, str(folder.path))
    check_requantize(dialects, requantize)
    four_bit_weights(folder, dialects)

    cls, config = _class_and_config(
        model_or_config, lambda: config_of(folder.path, folder.config.get("model_type"), trust_remote_code)
    )
    _say_how(config, stored, activation, device, requantize, trainable_inputs, ep_group, batch_invariant)
    trusted: dict[str, Any] = {"trust_remote_code": trust_remote_code} if cls is AutoModelForCausalLM else {}
    if distributed_config is not None:
        trusted["distributed_config"] = distributed_config
    with any_index():
        model, info = cls.from_pretrained(
            folder.path, config=config, dtype=dtype, output_loading_info=True, **trusted
        )
    check_info(info, folder.path)
    return _placed(model, gpu_memory, gpu)


def _placed(model: Any, gpu_memory: int | str | None, gpu: torch.device | None) -> PreTrainedModel:
    """Returns the model, moved to a GPU within a budget of its memory if there is one."""
    if gpu_memory is not None:
        model.hf_quantizer.report.memory = place_experts(model, gpu_memory, gpu)
    return cast(PreTrainedModel, model)


def _load_gguf(
    path: Path,
    model_or_config: PreTrainedModel | PretrainedConfig | None,
    *,
    dtype: torch.dtype | str,
    distributed_config: Any,
    **how: Any,
) -> PreTrainedModel:
    """Builds the model of a GGUF file. A config.json beside it takes precedence over the file's metadata."""
    check_target(how["requantize"])
    file = GGUF.open(path)
    experts_of(file, how["requantize"])  # raises before anything is built if a type cannot be read

    def own_config() -> PretrainedConfig:
        if not (path.parent / "config.json").is_file():
            return gguf_config(file)
        return config_of(path.parent, read_json(path.parent / "config.json").get("model_type"), False)

    cls, config = _class_and_config(model_or_config, own_config)
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.bfloat16
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    _say_how(config, {"quant_method": "gguf"}, gguf=str(path), **how)
    more = {} if distributed_config is None else {"distributed_config": distributed_config}
    dense = dense_of(file, config, dtype)
    model, info = cls.from_pretrained(
        None, config=config, state_dict=dense, dtype=dtype, output_loading_info=True, **more
    )
    check_info(info, path)
    return model


def _class_and_config(
    given: PreTrainedModel | PretrainedConfig | None, own: Callable[[], PretrainedConfig]
) -> tuple[Any, PretrainedConfig]:
    """Returns the class to build and its config, from the caller's argument. None means the checkpoint's
    own config."""
    if isinstance(given, PreTrainedModel):
        return type(given), copy.deepcopy(given.config)
    if given is not None and not isinstance(given, PretrainedConfig):
        raise ValueError(
            f"fp4: model_or_config is {named(given)}; it must be a config or a model of transformers, or "
            "None for the folder's config. The folder is the next argument: load_checkpoint(None, FOLDER)"
        )
    config = copy.deepcopy(given) if given is not None else own()
    return model_class(config), config


def _say_how(
    config: PretrainedConfig, stored: dict[str, Any], activation: str, device: str | torch.device,
    requantize: str | None, trainable_inputs: bool, ep_group: Any, batch_invariant: bool,
    gguf: str | None = None,
) -> None:  # fmt: skip
    """Writes into a config how `from_pretrained` must load the checkpoint."""
    register_quantizer()
    config.quantization_config = {
        "quant_method": METHOD, "activation": activation, "stored": stored, "device": str(device),
        "requantize": requantize, "trainable_inputs": trainable_inputs,
        "ep_group": None if ep_group is None else ep_group.group_name, "gguf": gguf,
        "batch_invariant": batch_invariant,
    }  # fmt: skip
