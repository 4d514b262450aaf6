"""Writes an AOTInductor package of a model in 4 bits, and example results that a program without Python must
reproduce.

    python examples/cpp/make_package.py build/cpp [--device cuda]

FOLDER/model.pt2 takes token ids [1, tokens], from 2 to 1024 tokens, and returns logits. The layout of weights
and the format of activations are those that are best on the device where the package is made, and it runs on
devices of that kind. FOLDER/expected.pt is a list of (ids, logits) that the package computed in Python.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import fp4_ops

TOKENS = (2, 3, 17, 130)
MOST_TOKENS = 1024


class Logits(nn.Module):
    """Computes logits from ids [1, tokens], without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="examples/demo_model", help="a folder, or a name on the hub")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    package = str((args.folder / "model.pt2").absolute())

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device).eval()
    fp4_ops.prepare(model, format="nvfp4")
    examples = [torch.randint(model.config.vocab_size, (1, n), device=args.device) for n in TOKENS]

    tokens = torch.export.Dim("tokens", min=2, max=MOST_TOKENS)
    program = torch.export.export(Logits(model), (examples[-1],), dynamic_shapes=({1: tokens},))
    torch._inductor.aoti_compile_and_package(program, package_path=package)

    run = torch._inductor.aoti_load_package(package)
    expected = [(ids, run(ids).clone()) for ids in examples]
    torch.save(expected, args.folder / "expected.pt")
    print(f"wrote {package} and {args.folder / 'expected.pt'}")


if __name__ == "__main__":
    main()
