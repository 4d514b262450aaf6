"""Randomly changed graphs of experts: the rewritten graph computes the same, or the graph stays unchanged.

Each round changes edges or constants of a captured graph, and compares the graph with its rewritten form.
mxfp4 represents the weights exactly for every division into blocks. So a correct rewrite has exact results,
and a wrong one does not. FP4_FUZZ_SECONDS (0.25 if it is not set) is the time for each style.
"""

from __future__ import annotations

import os
import random
import time
from functools import partial
from typing import Any

import pytest
import torch
from conftest import SEED
from moe_models import Block
from moe_styles import STYLES
from test_styles import EACH_KIND_FIRST, NAMES
from torch import fx

from fp4_ops.compile_passes.dynamo.extend import extend_dynamo
from fp4_ops.compile_passes.options import parse
from fp4_ops.compile_passes.passes import rewrite
from fp4_ops.compile_passes.trace.capture import capture
from fp4_ops.compile_passes.weights.facts import Facts, ReadTwice
from fp4_ops.compile_passes.weights.runtime import runtime

SECONDS = float(os.environ.get("FP4_FUZZ_SECONDS", "0.25"))
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def poisoned(fresh_dynamo):
    """Makes uninitialised memory NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_the_grid(weight: torch.Tensor) -> torch.Tensor:
    """Random e2m1 values / 16 with a 4 in every 32 along any dimension: all blocks have the scale 1 / 16."""
    values = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
    w = values[torch.randint(len(values), weight.shape)]
    for d in range(1, weight.dim() + 1):
        w.movedim(-d, -1)[..., ::16] = 4.0
    return w / 16


class Captured:
    """Returns a module's aten graph and its inputs."""

    def __init__(self, module: torch.nn.Module, x: torch.Tensor) -> None:
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(on_the_grid(p))
        self.graph: fx.GraphModule | None = None
        extend_dynamo()
        torch.compile(module, backend=self._keep, dynamic=False, fullgraph=True)(x)

    def _keep(self, gm: fx.GraphModule, inputs: list[Any]) -> Any:
        self.graph, self.fake_mode, _ = capture(gm, inputs)
        self.inputs = list(inputs)
        return gm.forward

    _keep.sees_through_branches = True  # type: ignore[attr-defined]

    def copy(self) -> fx.GraphModule:
        assert self.graph is not None
        graph, nodes = fx.Graph(), {}
        out = graph.graph_copy(self.graph.graph, nodes)
        graph.output(out)
        return fx.GraphModule(self.graph, graph)

    def weights(self, gm: fx.GraphModule) -> set[fx.Node]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        return {n for n, x in zip(placeholders, self.inputs) if isinstance(x, torch.nn.Parameter)}


def tensors_like(node: fx.Node, before: list[fx.Node]) -> list[fx.Node]:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return []
    same = (str(val.shape), val.dtype)
    others = [n for n in before if n is not node and isinstance(n.meta.get("val"), torch.Tensor)]
    return [n for n in others if (str(n.meta["val"].shape), n.meta["val"].dtype) == same]


def rewire(gm: fx.GraphModule, rng: random.Random) -> bool:
    """One input of one node becomes another tensor of its shape."""
    nodes = list(gm.graph.nodes)
    node = rng.choice(nodes)
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    old = rng.choice(node.all_input_nodes)
    choices = tensors_like(old, nodes[: nodes.index(node)])
    if not choices:
        return False
    node.replace_input_with(old, rng.choice(choices))
    return True


def change_constant(gm: fx.GraphModule, rng: random.Random) -> bool:
    """Changes an expert, choice, divisor, factor or output index."""
    packets = (aten.eq, aten.le, aten.select, aten.floor_divide, aten.mul, aten.add, aten.histc, aten.clamp)
    nodes = [n for n in gm.graph.nodes if getattr(n.target, "overloadpacket", None) in packets]
    nodes += [n for n in gm.graph.nodes if "getitem" in str(n.target)]
    if not nodes:
        return False
    node = rng.choice(nodes)
    places = [i for i, a in enumerate(node.args) if isinstance(a, (int, float)) and i > 0]
    if node.target is aten.select.int or node.target is aten.histc.default:
        places = places[1:]
    if not places:
        return False
    place = rng.choice(places)
    new = node.args[place] + rng.choice([-1, 1, 2])
    if "getitem" in str(node.target):
        source = node.args[0].meta["val"]
        if not 0 <= new < len(source) or source[new].dtype != node.meta["val"].dtype:
            return False
    node.update_arg(place, new)
    return True


def run(fn: Any, inputs: list[Any]) -> torch.Tensor | str:
    """Returns the output, or the error in its place."""
    with torch.no_grad():
        try:
            out = fn(*inputs)
        except (IndexError, RuntimeError) as error:
            return str(error)
    return out[0] if isinstance(out, (tuple, list)) else out


def modules() -> dict[str, Any]:
    styles = {name: partial(STYLES[name], experts=3) for name in NAMES}
    forms = {form: lambda form=form: Block(form) for form in ("grouped_mm", "batched_mm")}
    return {**forms, **styles}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", *EACH_KIND_FIRST])
def test_surgery(name):
    rng = random.Random(f"{SEED} {name}")
    options = parse(None, {"format": "mxfp4", "activation": "bf16"})
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        module = modules()[name]()
        captured = Captured(module, torch.randn(9, module.H))

    def attempt(surgery: bool) -> bool | None:
        """Whether the graph was rewritten; None if the surgery killed it."""
        gm = captured.copy()
        if surgery:
            kinds = [rng.choice((rewire, change_constant)) for _ in range(rng.choice((1, 1, 2)))]
            if not any([kind(gm, rng) for kind in kinds]):
                return None
        gm.recompile()
        before = captured.copy() if not surgery else gm
        want = run(fx.Interpreter(before).run, captured.inputs)
        if isinstance(want, str):
            return None
        code = gm.code
        try:
            rewritten, *_ = rewrite(gm, Facts(captured.weights(gm)), options, captured.fake_mode)
        except ReadTwice:  # the pipeline then leaves these weights as they are
            rewritten = None
        if rewritten is None:
            return False
        got = run(runtime(rewritten.gm, rewritten.keep, rewritten.swaps), captured.inputs)
        if isinstance(got, str):  # transformers' fallback takes offsets that decrease; the operators do not
            assert got.startswith("offs"), f"{got}\n{code}"
            return None
        finite = torch.isfinite(want)
        scale = want[finite].abs().max().clamp(min=1e-3) if finite.any() else 1.0
        error = ((got - want)[finite].abs().max() / scale).item() if finite.any() else 0.0
        assert error < 1e-4, f"error {error}\n{code}\nbecame\n{rewritten.gm.code}"
        return True

    assert attempt(surgery=False) is True
    end, outcomes = time.monotonic() + SECONDS, []
    while time.monotonic() < end or (len(outcomes) < 200 and set(outcomes) <= {None}):
        outcomes.append(attempt(surgery=True))
    assert not set(outcomes) <= {None}, "no surgery survived"
