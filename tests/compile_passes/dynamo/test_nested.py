"""A module compiled with backend="fp4" inside a module of another backend: one message names it."""

import logging

import pytest
import torch
import torch.nn.functional as F
from recorder import Recorder
from torch import nn

E, H, FFN, K = 4, 64, 48, 2


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.gate_up = nn.Parameter(torch.randn(E, 2 * FFN, H) / 8)
        self.down = nn.Parameter(torch.randn(E, H, FFN) / 7)

    def forward(self, x):
        weights, ids = torch.topk(self.router(x).softmax(-1), K)
        gate, up = torch.einsum("td,tknd->tkn", x, self.gate_up[ids]).chunk(2, -1)
        y = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.down[ids])
        return (y * weights[..., None]).sum(1)


class Decorated(Moe):
    @torch.compile(backend="fp4")
    def forward(self, x):
        return Moe.forward(self, x)


class Breaking(Moe):
    def forward(self, x):
        torch._dynamo.graph_break()
        return Moe.forward(self, x)


class Outer(nn.Module):
    def __init__(self, moe, call=None):
        super().__init__()
        self.before, self.moe, self.call = nn.Linear(H, H), moe, call

    def forward(self, x):
        return self.before(x) + (self.moe(x) if self.call is None else self.call(self.moe, x))


def in_place(moe):
    moe.compile(backend="fp4")
    return moe


def its_forward(moe):
    moe.forward = torch.compile(moe.forward, backend="fp4")
    return moe


@torch.compile(backend="fp4")
def call(moe, x):
    return moe(x)


FORMS = {
    "module": lambda **kw: Outer(torch.compile(Moe(), backend="fp4", **kw)),
    "in place": lambda: Outer(in_place(Moe())),
    "forward": lambda: Outer(its_forward(Moe())),
    "decorated": lambda: Outer(Decorated()),
    "function": lambda: Outer(Moe(), call),
    "three": lambda: nn.Sequential(*(in_place(Moe()) for _ in range(3))),
}


@pytest.fixture
def said(caplog):
    torch._dynamo.reset()

    def run(model, backend="eager", rows=(5, 7)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fp4_ops"), torch.no_grad():
            compiled = torch.compile(model, backend=backend)
            for n in rows:
                compiled(torch.randn(n, H))
        return [r.getMessage() for r in caplog.records if r.name == "fp4_ops"]

    return run


@pytest.mark.parametrize("form", FORMS)
def test_inner_is_named(said, form):
    model = FORMS[form]()
    (text,) = said(model)  # two calls, two graphs
    name = {"three": "0 (Moe), 1 (Moe), 2 (Moe)", "decorated": "moe (Decorated)", "function": "call"}
    assert f"no effect on {name.get(form, 'moe (Moe)')}: what calls it" in text
    assert 'compiled with backend="eager"' in text and "change: compile the whole" in text
    assert form == "function" or not said(model), "said once"


def test_strict_is_an_error(said):
    with pytest.raises(RuntimeError, match=r"(?s)strict=True.*no effect on moe \(Moe\)"):
        said(FORMS["module"](options={"strict": True}))


def test_the_outer_backend_is_ours(said):
    assert not said(FORMS["module"](), outer := Recorder(), (5,))
    assert outer.ops == ["fp4::moe"]


def test_compiled_once_more(said):
    (text,) = said(torch.compile(Moe(), backend="fp4"), rows=(5,))
    assert 'no effect on Moe, because it is compiled once more, with backend="eager"' in text


def test_another_backend_inside(said):
    """Its experts would have been in no graph of fp4's, and no graph broke."""
    model = Moe()
    model.compile(backend="eager")
    (text,) = said(model, Recorder(), (5,))
    assert 'compiled with backend="eager"' in text and "(2 parameters of torch.float32)" in text


def test_nothing_is_said(said):
    beside = Outer(Moe())
    torch.compile(beside, backend="fp4")
    own = in_place(Moe())
    dense = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(H, H)), backend="fp4"))
    broken = Outer(torch.compile(Breaking(), backend=(inner := Recorder())))
    for model in (beside, own.forward, dense, broken):
        assert not said(model, rows=(5,))
    assert inner.ops == ["fp4::moe"]
    training = torch.compile(FORMS["module"](), backend="eager")
    training(torch.randn(5, H)).sum().backward()
