"""Runs a group's cases and prints a line of JSON for each: python -m worker GROUP ["PACKAGE WHAT" ...]

A case's module is compiled with the passes of backend="fp4" and compared with its twin, the same module over
`quantize(w).dequantize()` of its experts' weights, for several sizes of the batch and lengths in turn. In a
test, one of RETRACED cases, others each time, is traced again with Inductor's decompositions. The other cases
run the rewritten graph directly.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import time
import traceback
from collections import Counter
from typing import Any

import draws
import torch
from groups import Case, H, load
from recorder import Recorder, fake_quantised, relative_error
from retraced import retraced
from torch import nn

FORMAT = "mxfp4"  # gate and up can be quantised separately: they share no scale
VOCABULARY = 128
RETRACED = 4
"""One case in this number of cases is traced again."""


def is_drawn(case: Case) -> bool:
    """Whether FP4_TEST_SEED, which a failing run prints, says that this case is traced again."""
    seed = os.environ.get("FP4_TEST_SEED")
    return seed is not None and draws.is_drawn(seed, f"{case.package} {case.what}", RETRACED)


def again(graph: torch.fx.GraphModule, inputs: Any, config_patches: Any = None) -> Any:
    """Traces a graph again, unless it draws random numbers: Inductor's operators draw other numbers than
    torch."""
    draws = torch.Tag.nondeterministic_seeded
    if any(draws in getattr(node.target, "tags", ()) for node in graph.graph.nodes):
        return graph
    return retraced(graph, inputs)


def randomise(module: nn.Module, std: float) -> None:
    """Gives a module random weights that are large enough for experts to have influence beside the residual
    stream. Biases, which are often zeros, become random, too."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() >= 2:
                p.normal_(0, std)
            elif "bias" in name or not torch.isfinite(p).all():
                p.normal_(0, 0.1)


def twin_of(module: nn.Module, case: Case) -> nn.Module:
    twin, found = copy.deepcopy(module), 0
    with torch.no_grad():
        for name, p in twin.named_parameters():
            if p.dim() < 2 or re.search(case.but, name):
                continue
            transposed = bool(re.search(case.transposed, name))
            if transposed or re.search(case.experts, name):
                found += 1
                w = p if p.dim() == 3 else p[None]
                exact = fake_quantised(w, FORMAT, transposed)
                p.copy_(exact if p.dim() == 3 else exact[0])
    assert found, f"no parameter is an expert's: {[n for n, _ in module.named_parameters()]}"
    return twin


def inputs(case: Case, b: int, t: int) -> Any:
    if callable(case.takes):
        return case.takes(b, t)
    if case.takes == "ids":
        return torch.randint(0, VOCABULARY, (b, t))
    x = torch.randn(b, t, H)
    return x.flatten(0, 1) if case.takes == "rows" else x


def first(out: Any) -> torch.Tensor:
    """Returns the first tensor of a module's result."""
    while not isinstance(out, torch.Tensor):
        out = out["logits"] if isinstance(out, dict) and "logits" in out else next(iter(_parts(out)))
    return out.float()


def _parts(out: Any) -> Any:
    if isinstance(out, dict):
        return out.values()
    return out if isinstance(out, (tuple, list)) else vars(out).values()


def called(module: Any, x: Any) -> torch.Tensor:
    torch.manual_seed(1)  # a module and its twin draw the same numbers
    return first(module(*x) if isinstance(x, tuple) else module(**x) if isinstance(x, dict) else module(x))


def run(case: Case) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = case.make().eval()
    randomise(module, case.std)
    twin = twin_of(module, case)
    recorder = Recorder(again if is_drawn(case) else None, activation="bf16", format=FORMAT)
    compiled = torch.compile(module, backend=recorder)
    errors, moved, far = [], [], []
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for b, t in case.sizes:
            x = inputs(case, b, t)
            got, want, original = called(compiled, x), called(twin, x), called(module, x)
            errors.append(relative_error(got, want))
            moved.append(relative_error(got, original))
            far.append(relative_error(original, want))
    sites = [s for f in recorder.frames for s in f.sites]
    reasons = [s.reason for s in sites if not s.op] + [f.note for f in recorder.frames if f.note]
    return {
        "ops": Counter(s.op for s in sites if s.op),
        "error": max(errors),
        "moved": max(moved),
        "far": min(far),
        "reasons": list(dict.fromkeys(reasons)),
        "compilations": recorder.compilations,
        "breaks": [str(r.reason) for r in torch._dynamo.utils.graph_break_reasons],
        "retraced": is_drawn(case),
        "failed": next((f.note for f in recorder.frames if " failed: " in f.note), ""),
    }


def main(name: str, *only: str) -> None:
    torch.set_num_threads(1)
    for case in load(name).cases:
        if only and str(case) not in only:
            continue
        began = time.time()
        torch.manual_seed(0)
        try:
            result = run(case)
        except Exception as error:
            result = {"raised": f"{type(error).__name__}: {str(error)[:300]}"}
            traceback.print_exc(file=sys.stderr)
        result |= {"what": case.what, "package": case.package, "seconds": round(time.time() - began, 1)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
