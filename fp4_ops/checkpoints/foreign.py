"""Recognises folders that this package does not read: which tool wrote them, and what to do.

A tool is recognised by its config, by the names of its files, or by the names of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import hub

PROGRESS = ".fp4_quantize.json"
"""The file in which `quantize` notes its progress. It is removed when the result is complete."""

QUANTIZE = "Quantise the original bf16 weights with `python -m fp4_ops quantize`"
SAVE = "Load it with the tool that wrote it and save it with save_pretrained, which writes safetensors files"
_BEGUN = (".part", ".partial", ".incomplete", ".crdownload", ".aria2", ".download")
"""Ends of the names of files whose download has not finished."""
GGUF = "fp4_ops.load_checkpoint reads it, and save_pretrained then writes safetensors files"


@dataclass(frozen=True)
class Foreign:
    """A kind of folder that is not read."""

    what: str
    advice: str
    methods: tuple[str, ...] = ()
    """`quant_method`s of its config."""
    config_key: str = ""
    """A key that only its config has."""
    tensor: str = ""
    """A pattern for the ends of tensor names that only this tool uses."""
    file: str = ""
    """A pattern for the names of its files, if it has no safetensors files with transformers' names."""

    def refusal(self, folder: Path, tensor: str) -> str:
        """Returns the error's text for a folder with a tensor that only this tool writes."""
        return f"fp4: {folder} is quantised by {self.what}: it has {tensor}. That is not read. {self.advice}"


FOREIGN = (
    Foreign("bitsandbytes", QUANTIZE, ("bitsandbytes",), tensor=r"\.quant_state\.bitsandbytes__\w+|\.SCB"),
    Foreign("ExLlama's EXL2", QUANTIZE, ("exl2",), tensor=r"\.q_scale_max|\.q_group_map"),
    Foreign("ExLlama's EXL3", QUANTIZE, ("exl3",), tensor=r"\.trellis|\.suh"),
    Foreign("HQQ", QUANTIZE, ("hqq",), tensor=r"\.W_q", file=r"qmodel\.pt"),
    Foreign("MLX", QUANTIZE, (), "quantization", tensor=r"\.biases"),
    Foreign("torchao", QUANTIZE, ("torchao",)),
    Foreign("quanto", QUANTIZE, ("quanto",), tensor=r"\.weight\._(data|scale|shift)"),
    Foreign("Quark's older format", QUANTIZE, tensor=r"\.weight_quantizer\.scale"),
    Foreign("GGUF", "Give fp4_ops.load_checkpoint the .gguf file itself", ("gguf",)),
    Foreign("GGUF", GGUF, file=r".*\.gguf"),
    Foreign("torch.save (pickles)", SAVE, file=r".*\.(bin|pt|pth|ckpt)"),
    Foreign("TensorFlow, Flax or ONNX", SAVE, file=r".*\.(h5|msgpack|onnx)"),
)  # fmt: skip


def of_config(config: dict[str, Any], stored: dict[str, Any] | None) -> Foreign | None:
    """Returns the unreadable kind of folder that a model's config and quantization_config describe, or
    None."""
    method = str((stored or {}).get("quant_method", "")).lower()
    for kind in FOREIGN:
        if method and method in kind.methods:
            return kind
        own = config.get(kind.config_key) if kind.config_key else None
        if not method and isinstance(own, dict) and "bits" in own:
            return kind
    return None


def of_tensors(names: Iterable[str]) -> tuple[Foreign, str] | None:
    """Returns the kind of folder that has tensors with such names, and one of the names."""
    patterns = [(kind, re.compile(f"(?:{kind.tensor})$")) for kind in FOREIGN if kind.tensor]
    for name in names:
        for kind, pattern in patterns:
            if pattern.search(name):
                return kind, name
    return None


def why_no_config(path: Path) -> str:
    """Says what a folder without a config.json is, and what to do. Returns "" if that is not known."""
    if (path / PROGRESS).is_file():
        return "it is the unfinished result of `quantize`. Run the same command again to complete it"
    if (path / "adapter_config.json").is_file():
        return "it is an adapter (PEFT), not a model. Give the folder of the model that it is for"
    if (path / "model_index.json").is_file():
        return "it is a pipeline of diffusers, not a model"
    if why := hub.why_no_config(path):
        return why
    below = sorted(path.glob("*/config.json"))
    if below:
        return f"its folder {below[0].parent.name} has one. Give that"
    if any(path.glob("*.safetensors")):
        return "it holds only weights. Fetch the config.json from the same place, too"
    return "" if any(path.iterdir()) else "it is empty"


_INDEX_OF_VARIANT = re.compile(r"(model\.safetensors\.index)\.(.+)(\.json)")
_OF_VARIANT = re.compile(r"(model)\.(.+)(\.safetensors)")
_SHARD = re.compile(r"model(\..+)?-\d+-of-\d+(\..+)?\.safetensors")


def _why_a_variant(named: re.Match[str]) -> str:
    """Says what a file is that `save_pretrained(..., variant=...)` wrote, and what to do."""
    return (
        f'{named[0]} is of variant "{named[2]}", which transformers reads with from_pretrained(..., '
        f'variant="{named[2]}"). fp4_ops reads no variants: rename that file to {named[1]}{named[3]}'
    )


def why_no_weights(path: Path) -> str:
    """Says what a folder without transformers' safetensors files holds instead, and what to do."""
    files = sorted(f.name for f in path.iterdir() if f.is_file() or f.is_symlink())
    tensors = [name for name in files if name.endswith(".safetensors")]
    if index := next(filter(None, map(_INDEX_OF_VARIANT.fullmatch, files)), None):
        return _why_a_variant(index)
    if shard := next(filter(_SHARD.fullmatch, tensors), None):
        return f"{shard} and the like need the index. Fetch it from the same place, too"
    if "adapter_model.safetensors" in tensors:
        return "it is an adapter (PEFT), not a model. Give the folder of the model that it is for"
    if any(name.startswith("consolidated") for name in tensors):
        return (
            f"{tensors[0]} has Mistral's own names of weights, not transformers'. Fetch model.safetensors, "
            "or the shards and their index, from the same place"
        )
    if single := next(filter(None, map(_OF_VARIANT.fullmatch, tensors)), None):
        return _why_a_variant(single)
    if tensors:
        names = ", ".join(tensors[:3])
        return (
            f"its weights are called {names}, which transformers does not find either. Rename a single file "
            'to model.safetensors, or name it in config.json ("transformers_weights")'
        )
    begun = next((name for name in files if name.endswith(_BEGUN)), None)
    if begun or hub.is_unfinished(path):
        return f"a download{f', {begun},' if begun else ''} has not finished. Fetch the folder again"
    for kind in FOREIGN:
        if kind.file and (found := next((n for n in files if re.fullmatch(kind.file, n)), None)):
            return f"{found} is not read: {kind.what}. {kind.advice}"
    below = sorted(f.parent.name for f in path.glob("*/model.safetensors*"))
    if below:
        return f"its folder {below[0]} has one. Give that"
    return "it holds no weights. Fetch or export the folder again, with all its files"
