"""Loading the backend does not change Dynamo for programs that compile with other backends."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import json, sys, threading
import torch
import torch.nn.functional as F

def nonzero(x): return x.nonzero().sum() + 1
def mask(x): return x[x > 0].sum() * 2
def branch(x):
    rows = torch.where(x > 9)[0]
    return x + 1 if len(rows) else x - 1
def numbers(x): return [n + 1 for n in (x > 0).sum(0).tolist()]
def one(x): return x * x.argmax().item()
def unique(x): return sum(x[i] for i in (x > 0).long().sum(1).unique())
def classes(x):
    ids = (x > 0).long().sum(1)
    return F.one_hot(ids, ids.max() + 1).sum(0)
def index(x): return x[None, (x[0] > 0).nonzero().flatten().tolist()]
def text(x): return f"{x.sum() > 0}", x + 1
def array(x): return (x > 0).sum(0).cumsum(0).numpy().tolist(), x + 1
def checks(x):
    assert torch.isfinite(x).all(), f"{x.shape} is not finite"
    return x.sin()
def splits(x): return [p.sum() for p in x.split((x > 0).sum(0).tolist() + [5 - int((x > 0).sum())])]
def loop(x):
    out = torch.zeros_like(x)
    for e in (x > 0).any(0).nonzero():
        out += x * e
    return out
def empty(x): pass

def behaviour(name, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(int(sys.argv[1]))
    run = torch.compile(globals()[name], backend=backend, dynamic=name < "l", fullgraph=name == "mask")
    try:
        result = [str(run(torch.randn(5, 3))) for _ in range(2)]
    except Exception as error:
        result = [type(error).__name__, str(error).split(chr(10))[0]]
    found = {k: dict(v) for k, v in torch._dynamo.utils.counters.items() if v}
    reasons = {k.split(chr(10))[0]: n for k, n in found.pop("graph_break", {}).items()}
    for cached in ("inductor", "aot_autograd"):  # what was compiled once is found in their caches
        found.pop(cached, None)
    return [name, backend, result, reasons, str(found)]

def settings():
    import torch._dynamo.config as config
    defaults = {f"{k}!": str(e.default) for k, e in getattr(config, "_config", {}).items()}
    return {k: str(v) for k, v in config.get_config_copy().items()} | defaults

def everything():
    found = [behaviour(*pair.split(":")) for pair in sys.argv[2:]]
    threaded = []
    thread = threading.Thread(target=lambda: threaded.append(settings()))
    thread.start(); thread.join()
    return json.dumps([found, settings(), threaded], indent=0).splitlines()

before = everything()
backend = torch._dynamo.lookup_backend("fp4")
assert backend.sees_through_branches
def ours(gm, inputs):
    assert torch._dynamo.config.capture_dynamic_output_shape_ops
    return gm.forward
ours.sees_through_branches = True
captured = torch.compile(mask, backend=ours, fullgraph=True)(torch.ones(3, 4))  # its rules have run
assert captured.item() == 24
print(json.dumps([before, everything()]))
"""
NAMES = (
    *("nonzero", "mask", "branch", "numbers", "one", "unique", "classes", "index", "text", "array", "checks"),
    *("splits", "loop", "empty"),
)


def run_before_and_after(programs: list[str]) -> tuple[list[str], list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(torch.initial_seed() % 2**31), *programs],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    return before, after


def test_dynamo_is_as_it_was():
    """Settings, counters, graph breaks and results, before the backend is loaded and after."""
    before, after = run_before_and_after([f"{name}:eager" for name in NAMES])
    assert after == before


@pytest.mark.more
@pytest.mark.slow
def test_dynamo_is_as_it_was_with_inductor():
    chosen = random.Random(torch.initial_seed()).sample(NAMES, 3)
    before, after = run_before_and_after([f"{name}:inductor" for name in chosen])
    assert after == before
