"""Intel's AutoRound, without its iterations, in the layouts of GPTQ, AWQ and llm-compressor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cases import Scheme, Tool

SOME = (
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "minimax_m2",
    "ernie4_5_moe",
    "glm4_moe",
    "hunyuan_v1_moe",
)

NVFP4 = tuple(family for family in SOME if family != "ernie4_5_moe")
"""Families in which it calibrates each expert with some tokens."""

SCHEMES = {
    "W4A16, groups of 32:auto_gptq": Scheme(SOME, draw=1),
    "W4A16, groups of 32:auto_awq": Scheme(SOME, draw=1),
    "W4A16, asymmetric:auto_gptq": Scheme(SOME, draw=1, refused="asymmetric int4", requantize="nvfp4"),
    "W4A16, asymmetric:auto_awq": Scheme(SOME, draw=1, refused="asymmetric int4", requantize="mxfp4"),
    "MXFP4:auto_round": Scheme(SOME, draw=1),
    "MXFP4:llm_compressor": Scheme(SOME, draw=1),
    "NVFP4:auto_round": Scheme(NVFP4, draw=1),
    "NVFP4:llm_compressor": Scheme(NVFP4, draw=1),
    "W2A16:auto_round": Scheme(SOME, draw=1, refused="of 2 bits"),
}


class _Tokenizer:
    """AutoRound needs a tokenizer object, although the calibration text already consists of token ids."""

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        pass


def write(model: Any, scheme: str, source: Path, out: Path) -> None:
    from auto_round import AutoRound

    name, _, layout = scheme.partition(":")
    own = {"group_size": 32, "sym": "asymmetric" not in name} if "W4A16" in name else {}
    rounding = AutoRound(
        model,
        tokenizer=_Tokenizer(),
        scheme=name.partition(",")[0],
        iters=0,
        disable_opt_rtn=True,
        device_map="cpu",
        dataset=[torch.randint(0, 128, (1, 64)) for _ in range(8)],
        seqlen=64,
        nsamples=8,
        **own,
    )
    made = out.parent / "made"
    rounding.quantize_and_save(str(made), format=layout)
    inside = [f.parent for f in made.rglob("config.json")]
    inside[0].rename(out)


TOOL = Tool(
    "AutoRound",
    (
        "auto-round==0.16.1", "datasets==5.2.0", "py-cpuinfo==9.0.0", "requests==2.34.2",
        "certifi==2026.10.19.post1",
        "charset-normalizer==3.5.3", "dill==0.4.1", "multiprocess==0.70.19", "pyarrow==26.0.1",
        "urllib3==2.8.0", "pandas==3.1.1", "xxhash==4.1.0", "python-dateutil==4.0.0", "tzdata==2026.6",
    ),
    SCHEMES,
    write,
    draw=4,
)  # fmt: skip
