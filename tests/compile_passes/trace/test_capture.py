"""The capture copies the parts that calls have in common, and gives the same graph as a complete trace.

recognise/test_styles.py compares both graphs for every style.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from both_captures import Both
from conftest import SEED, more
from moe_models import FAMILIES, build, tokens
from moe_styles import STYLES
from torch import nn

from fp4_ops.compile_passes.dynamo.extend import CAPTURE
from fp4_ops.compile_passes.trace import capture as module
from fp4_ops.compile_passes.trace.copier import Copier

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def check(monkeypatch, f, *inputs, copied: bool = True, dynamic: bool = True) -> Both:
    both = Both(monkeypatch)
    with torch.no_grad():
        compiled = torch.compile(f, backend=both, dynamic=dynamic, fullgraph=True)
        compiled(*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs))
    assert both.runs and set(both.copied) == {copied}
    return both


# Experts written in either form, attention in every family's own. qwen3_moe and olmoe, whose attention is the
# same but for the norms of q and k, are drawn in turn.
DRAWN = ("qwen3_moe", "olmoe")[SEED % 2]
FORMS = [
    (family, form)
    for family, form in zip(FAMILIES, itertools.cycle(("grouped_mm", "batched_mm")))
    if family not in ("qwen3_moe", "olmoe") or family == DRAWN
]


@pytest.mark.more
@pytest.mark.parametrize(("family", "implementation"), FORMS)
def test_families(monkeypatch, family, implementation):
    copied = family != "deepseek_v3"  # its attention writes to slices of a new tensor
    # A second layer is copied from the first, or has attention of another kind.
    layers = 2 if family in ("mixtral", "gpt_oss") else 1
    model = build(family, torch.float32, implementation, num_hidden_layers=layers)
    check(monkeypatch, lambda ids: model(ids, use_cache=False).logits, tokens(2, 9), copied=copied)


def test_a_call_is_traced_once(monkeypatch):
    """As many traces for 6 experts as for 3."""

    def backend(gm, inputs):
        module.capture(gm, inputs)
        return gm

    counts = []
    trace = Copier._trace
    monkeypatch.setattr(Copier, "_trace", lambda self, call: counts.append(call) or trace(self, call))
    monkeypatch.setattr(module, "_whole", None)
    for name in ("where loop", "token mask loop", "one-hot loop (transformers 4)"):
        found = []
        for experts in (3, 6):
            counts.clear()
            torch._dynamo.reset()
            style = STYLES[name](experts=experts)
            with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
                torch.compile(style, backend=backend, dynamic=True, fullgraph=True)(torch.randn(9, 32))
            found.append(len(counts))
        assert found[0] == found[1] > 0, name


X = torch.arange(24.0).reshape(4, 6)


def into_the_whole(x):
    y = x * 2
    y.add_(1)
    z = y + 1
    y[1] = 5
    y.mul_(z)
    return y, z


def into_an_input(x):
    x.index_copy_(0, torch.tensor([2]), torch.ones(1, 6))
    y = x.transpose(0, 1) @ x
    x.add_(1)
    return y


def with_the_same_view(x):
    y = x * 2
    v = y.view_as(y)
    y.add_(1)
    v.add_(1)
    return y * 3, v * 3


def views_of_what_was_written(x):
    y = torch.zeros_like(x)
    for i in range(4):
        y[i] = x[i] * i
        y += 1
    return y.view(-1) + 1, y.t() * 2


def numbers(x):
    rows = [x[i] * (x[:, -1 - i] == i).sum() for i in range(4)]
    return torch.stack([*rows, rows[0]]), x[-1] + x[2], x[0:2] + x[1:3]


def parts(x):
    a, b = x.chunk(2, -1)
    c = torch.cat([a, b, a], 0)
    value, index = c.topk(2)
    return c, value, index, torch.where(x > 3)[0]


def one_mask_twice(x):
    mask = x[:, 0] > 3
    return x[mask] + x[mask] * 2, x[~mask], torch.nonzero(mask)


def sizes(x):
    n = x.shape[0]
    y = x.reshape(n // 2, -1)
    return y * (n * 2), y.expand(3, *y.shape).reshape(-1, n), torch.arange(n * 2)


def random_numbers(x):
    return F.dropout(x, 0.5) + F.dropout(x, 0.5), torch.rand_like(x) + torch.rand_like(x)


def lower_precision(x):
    with torch.autocast("cpu", torch.bfloat16):
        a = x @ x.t()
        with torch.autocast("cpu", enabled=False):
            b = x @ x.t()
    return a, b, x @ x.t()


def nothing_done(x):
    return x, x.contiguous(), x.to(x.dtype) + 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "f",
    [
        into_the_whole, into_an_input, with_the_same_view, views_of_what_was_written, numbers, parts,
        one_mask_twice, sizes, random_numbers, lower_precision, nothing_done,
    ],
)  # fmt: skip
@pytest.mark.parametrize("dynamic", [more(False), True])
def test_copied(monkeypatch, f, dynamic):
    check(monkeypatch, f, X, dynamic=dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("copied", [True, False])
def test_constants_on_a_gpu(monkeypatch, copied):
    def f(x):
        if not copied:
            x = through_a_view(x)
        rows, one = torch.tensor([2, 1], device=x.device), torch.tensor([-1], device=x.device)
        return x[rows] + x[one], x * torch.tensor(0.5, device=x.device)

    check(monkeypatch, f, X.cuda(), copied=copied)
    got = torch.compile(f, backend="fp4", fullgraph=True)(X.cuda())
    assert all(torch.equal(g, w) for g, w in zip(got, f(X.cuda())))


def through_a_view(x):
    y = x * 2
    y[1].add_(1)
    return y


def seen_by_a_view(x):
    y = x * 2
    v = y[1]
    y.add_(1)
    return v + 1, y


def through_the_view_of_an_input(x):
    x.view(-1).add_(1)
    return x * 2


def memory(x):
    return x.as_strided((2, 2), (1, 2)) + 1


@pytest.mark.parametrize("f", [through_a_view, seen_by_a_view, through_the_view_of_an_input, memory])
def test_left_to_a_trace_of_the_whole(monkeypatch, f):
    check(monkeypatch, f, X, copied=False, dynamic=False)


def test_an_autocast_region_ends_with_a_graph_that_is_not_copied(monkeypatch):
    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.t()
            return seen_by_a_view(y), x @ x.t()

    check(monkeypatch, f, X, copied=False)
    assert not torch.is_autocast_enabled("cpu")


def test_two_copies_are_not_one_input(monkeypatch):
    """Copies share what stands for their results, which as inputs of one call are still different tensors."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.list = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            ys = [F.silu(e(x)) for e in self.list]
            return torch.stack(ys), ys[1] - ys[2], torch.cat([ys[3], ys[0], ys[3]])

    check(monkeypatch, Experts(), X)
