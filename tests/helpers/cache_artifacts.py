"""A fresh process that compiles a model and saves torch's caches, or loads them.

`python cache_artifacts.py PHASE FOLDER`: PHASE is a path that ends in "save" or "load". Both phases use the
same FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from moe_styles import STYLES


def main(phase: str, folder: Path) -> None:
    torch.set_num_threads(1)
    if phase == "save":
        module = STYLES["dense einsum"]()
        x = torch.randn(9, module.H)
    else:
        module, x, want = torch.load(folder / "model.pt", weights_only=False)
        torch.compiler.load_cache_artifacts((folder / "artifacts").read_bytes())
    with torch.no_grad():
        got = torch.compile(module, backend="fp4")(x)
        exact = torch.allclose(got, module(x), rtol=1e-4, atol=1e-5)
    print("original weights" if exact else "4 bits")
    print("hit" if torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] else "missed")
    if phase == "save":
        torch.save((module, x, got), folder / "model.pt")
        (folder / "artifacts").write_bytes(torch.compiler.save_cache_artifacts()[0])
    else:
        print("same" if torch.equal(got, want) else f"differs: {(got - want).norm()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).name, Path(sys.argv[2]))
