"""A registry of look-alikes for their tests, and a loop in which each step can be replaced.

A look-alike is a style of moe_styles with one change. With the change it is not a mixture of experts, or it
is a different one. If the compiler understands the change, it may rewrite the program. In any case the result
must be that of the changed program.
"""

from __future__ import annotations

import re

import torch
from moe_models import Recorder, relative_error
from moe_styles import ListStyle
from torch import Tensor, nn

GRAPHS_OWN = re.compile(
    r"\b(?:arg|primals|mm|bmm|addmm|mul|add|view|index|clone|getitem|t|sum)_\d+\b|aten\.|__dict__|_modules"
)
"""Finds texts that no message may contain: names of nodes, and Dynamo's paths."""

CHANGES: dict[str, tuple[type[nn.Module], str, str]] = {}


def lookalike(reason: str, change: str = ""):
    """Register a look-alike with the reason and change that the report must give. reason: "" if it is
    rewritten."""

    def add(cls):
        CHANGES[cls.__name__] = (cls, reason, change)
        return cls

    return add


def names(module: str) -> list[str]:
    """Return the look-alikes of a file."""
    return [name for name, (cls, *_) in CHANGES.items() if cls.__module__ == module]


def check(name: str, experts: int = 4) -> None:
    cls, reason, change = CHANGES[name]
    module, recorder = cls(experts=experts), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (10, 8):
            x = torch.randn(n, module.H)
            want, exact = module.twin()(x), module(x)
            got = compiled(x)
            blocks = [s.op for s in recorder.sites if s.op in ("fp4::moe", "fp4::indexed_mm")]
            if recorder.ops:
                assert relative_error(got, want) < 1e-5
            else:
                torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)  # may be zeros
    told = [(s.reason, s.change) for s in recorder.sites if s.reason]
    if reason:
        assert not blocks, blocks
        assert any(reason in why and change in instead for why, instead in told), told
    else:
        assert recorder.ops, told
    assert all(instead for _, instead in told), told
    assert not any(GRAPHS_OWN.search(why) for why, _ in told), told


class Loop(ListStyle):
    """A where loop. A look-alike may replace any of its steps."""

    def masked(self, ids: Tensor, e: int) -> Tensor:
        return ids == e

    def rows(self, x: Tensor, token: Tensor, e: int) -> Tensor:
        return x[token]

    def scale(self, weights: Tensor, token: Tensor, slot: Tensor, e: int) -> Tensor:
        return weights[token, slot, None]

    def steps(self) -> list[tuple[int, nn.Module]]:
        return list(enumerate(self.list))

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in self.steps():
            token, slot = torch.where(self.masked(ids, e))
            y = expert(self.rows(x, token, e)) * self.scale(weights, token, slot, e)
            out = out.index_add(0, token, y)
        return out


class Switch(Loop):
    """One expert a token, by argmax: ids [T]."""

    def ids(self, scores: Tensor, e: int) -> Tensor:
        return scores.argmax(-1)

    def score(self, scores: Tensor, ids: Tensor) -> Tensor:
        return scores.gather(-1, ids[:, None])

    def forward(self, x):
        scores, out = torch.softmax(self.router(x), -1), torch.zeros_like(x)
        weights = self.score(scores, self.ids(scores, 0))
        for e, expert in enumerate(self.list):
            (token,) = torch.where(self.ids(scores, e) == e)
            out = out.index_add(0, token, expert(x[token]) * weights[token])
        return out
