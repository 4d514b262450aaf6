"""Runs code in a fresh process that another process has precompiled: `python load_precompiled.py FOLDER`.

For each case, FOLDER has `NAME.bin`, the precompiled forward, and `NAME.pt`: (module, arguments of its calls,
their results). The script prints a line for each difference, and "compiled" if anything is compiled here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def main(folder: Path) -> None:
    torch._dynamo.config.enable_aot_compile = True
    torch.set_num_threads(1)
    for file in sorted(folder.glob("*.pt")):
        module, calls, results = torch.load(file, weights_only=False)
        with file.with_suffix(".bin").open("rb") as f, torch.no_grad():
            forward = torch.compiler.load_compiled_function(f)
            for args, want in zip(calls, results, strict=True):
                got = forward(module, *args)
                print(file.stem, "same" if torch.equal(got, want) else f"differs: {(got - want).norm()}")
    if (
        torch._dynamo.utils.counters["stats"]["unique_graphs"]
        or "fp4_ops.compile_passes.passes" in sys.modules
    ):
        print("compiled")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
