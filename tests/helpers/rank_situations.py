"""Helpers of scripts that run in several processes: their situations, and the models of a folder.

The script's first argument is FOLDER. Each function under `situation` is one situation, by its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

SITUATIONS: dict[str, Callable[..., Any]] = {}
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
IDS = torch.arange(14).reshape(2, 7)


def situation(function: Callable[..., Any]) -> Callable[..., Any]:
    SITUATIONS[function.__name__] = function
    return function


def load(folder: str, **kwargs: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER / folder, dtype=torch.float32, **kwargs)


def split(folder: str, quantization: Any = None, **sizes: Any) -> Any:
    from transformers.distributed import DistributedConfig

    more = {"quantization_config": quantization} if quantization is not None else {}
    return load(folder, distributed_config=DistributedConfig(**sizes), **more)


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    out = model(input_ids=ids, use_cache=False).logits
    return out.full_tensor() if isinstance(out, DTensor) else out
