"""Defines a backend that records its rewrites, and the arithmetic of twins. It needs only torch and
fp4_ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from reference import relative_error as relative_error

from fp4_ops.compile_passes.dynamo.extend import extend_dynamo
from fp4_ops.compile_passes.options import parse
from fp4_ops.compile_passes.pipeline import compile_graph
from fp4_ops.compile_passes.report import Frame, Site


def fake_quantised(weight: torch.Tensor, format: str, transposed: bool = False) -> torch.Tensor:
    """Return the values of the packed weight in the weight's own layout, float32."""
    w = weight.detach().transpose(1, 2).contiguous() if transposed else weight.detach()
    w = torch.ops.fp4.dequantize(*torch.ops.fp4.quantize(w, format), format, torch.float32)
    return w.transpose(1, 2).contiguous() if transposed else w


def token_errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Return the relative error of the typical token (the median over all but the last dimension), and of the
    whole tensor.

    Rounding may change a value halfway between two codes, or the choice between two experts with nearly equal
    scores. This changes one or two tokens very much, and the tokens that attend to them. A real error changes
    all tokens.
    """
    assert torch.isfinite(got).all() and got.shape == want.shape
    a, b = (t.double().flatten(0, -2) for t in (got, want))
    each = (a - b).norm(dim=-1) / b.norm(dim=-1)
    return each.median().item(), relative_error(got, want)


class Recorder:
    """A backend that runs the rewritten graph without Inductor, and records what was done.

    run: a function in place of Inductor; by default the graph runs without changes.
    """

    sees_through_branches = True

    def __init__(self, run: Callable[..., Any] | None = None, **options: Any) -> None:
        extend_dynamo()
        self.run = run
        self.options = parse(None, options)
        self.compilations = 0
        self.frames: list[Frame] = []
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], config_patches: Any) -> Any:
            self.graphs.append(graph)
            return graph if self.run is None else self.run(graph, inputs, config_patches=config_patches)

        self.compilations += 1
        return compile_graph(gm, inputs, self.options, run_graph, self.frames.append)

    @property
    def sites(self) -> list[Site]:
        assert not [f.note for f in self.frames if f.note]
        return [s for f in self.frames for s in f.sites]

    @property
    def ops(self) -> list[str]:
        return [s.op for s in self.sites if s.op is not None]

    @property
    def reasons(self) -> str:
        return " | ".join(s.reason for s in self.sites)


@torch.no_grad()
def check_lengths(
    recorder: Recorder, module: torch.nn.Module, exact: torch.nn.Module, inputs: Iterable[torch.Tensor]
) -> None:
    """Compares one module, compiled for any length, with `exact` in float64; with itself if nothing is
    rewritten."""
    run = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    for x in inputs:
        got = run(x)
        assert relative_error(got, exact(x.double()) if recorder.ops else module(x)) < 1e-5
