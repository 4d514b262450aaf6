"""Writes a tool's folders, and a line of JSON for each to OUT/results.jsonl: python -m writer MAKER OUT

OUT/cases.json lists schemes and families. A case's folder gets `original`, a tiny random model in bf16;
`folder`, the tool's result; and `second_opinion.safetensors`, if the tool can read its own folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import families
import torch
from cases import Case, Tool, load

CHANGES: dict[str, dict[str, Any]] = {
    family: {"num_key_value_heads": 4}
    for family in ("axk2", "deepseek_v32", "glm_moe_dsa", "mistral_large4_text")
}
"""Settings that a family's tiny config needs to run forward."""


def model(family: str) -> Any:
    made: Any = families.tiny(family, **CHANGES.get(family, {})).to(torch.bfloat16)
    made.config.dtype = torch.bfloat16
    made.config.architectures = [type(made).__name__]
    with torch.no_grad():
        for name, p in made.named_parameters():
            if p.dim() == 2 and "embed" not in name:
                p.normal_(0, 0.05)
    return made


def write(tool: Tool, case: Case, where: Path) -> None:
    where.mkdir()
    original = model(case.family)
    original.save_pretrained(where / "original")
    fresh = type(original).from_pretrained(where / "original", dtype=torch.bfloat16)
    tool.write(fresh, case.scheme, where / "original", where / "folder")
    assert any((where / "folder").glob("*.safetensors")), "the tool wrote no safetensors"
    if tool.second_opinion:
        from safetensors.torch import load_file, save_file

        files = (where / "folder").glob("*.safetensors")
        tensors = {name: t for file in files for name, t in load_file(file).items()}
        values = tool.second_opinion(tensors, where / "folder")
        save_file({name: t.contiguous() for name, t in values.items()}, where / "second_opinion.safetensors")


def main(maker: str, out: str) -> None:
    torch.set_num_threads(1)
    tool = load(maker)
    seed = int(os.environ["FP4_TEST_SEED"])
    for scheme, family in json.loads((Path(out) / "cases.json").read_text()):
        case, began = Case(maker, scheme, family), time.time()
        torch.manual_seed(seed ^ zlib.crc32(str(case).encode()))
        result: dict[str, Any] = {"scheme": scheme, "family": family}
        try:
            write(tool, case, Path(out) / case.folder)
        except Exception as error:
            result["raised"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"== {case}", file=sys.stderr)
            traceback.print_exc(file=sys.stderr)
        with open(Path(out) / "results.jsonl", "a") as results:  # tools print to stdout, too
            results.write(json.dumps(result | {"seconds": round(time.time() - began, 2)}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
