"""GPTQModel. One of its packages is built from source, which needs a C compiler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from cases import Scheme, Tool

SOME = ("qwen3_moe", "olmoe", "qwen2_moe")
"""Families that work. In others it cannot find the experts of tiny folders, or its own code fails."""

SCHEMES = {
    "GPTQ, symmetric": Scheme(SOME, draw=1, far=0.5),
    "GPTQ, desc_act": Scheme(SOME, draw=1, far=0.5, refused="out of order", requantize="nvfp4"),
    "GPTQ, asymmetric": Scheme(SOME, draw=1, far=0.5, refused="asymmetric int4", requantize="mxfp4"),
    "GPTQ, gptq_v2": Scheme(SOME, draw=1, far=0.5),
}


def write(model: Any, scheme: str, source: Path, out: Path) -> None:
    # Its thread pool needs two threads, even with one core.
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"
    from gptqmodel import GPTQModel, QuantizeConfig
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(i): i for i in range(128)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="0").save_pretrained(source)
    options: dict[str, Any] = {"bits": 4, "group_size": 32}
    options |= {"sym": "asymmetric" not in scheme, "desc_act": "desc_act" in scheme}
    if "v2" in scheme:
        options["format"] = "gptq_v2"
    made = GPTQModel.load(str(source), QuantizeConfig(**options), device="cpu")
    text = [
        {"input_ids": torch.randint(0, 128, (1, 32)), "attention_mask": torch.ones(1, 32, dtype=torch.long)}
        for _ in range(8)
    ]
    made.quantize(text, batch_size=1)
    made.save(str(out))


TOOL = Tool(
    "GPTQModel",
    (
        "gptqmodel==7.7.0", "defuser==0.0.28", "pypcre==0.6.4", "device-smi==0.5.7", "tokenicer==0.0.14",
        "logbar==0.4.15", "threadpoolctl==3.8.0", "dill==0.4.1", "requests==2.34.2",
        "certifi==2026.10.19.post1",
        "charset-normalizer==3.5.3", "urllib3==2.8.0", "datasets==5.2.0", "pyarrow==26.0.1",
        "multiprocess==0.70.19", "pandas==3.1.1", "python-dateutil==4.0.0", "xxhash==4.1.0", "tzdata==2026.6",
        "maturin==1.16.0", "protobuf==7.36.2", "pillow==13.0.0",
    ),
    SCHEMES,
    write,
    draw=2,
)  # fmt: skip
