"""Operators on unusual tensors (no dimension, empty, several ranks): each is read correctly, or not at all.

If a reader raised an error, the whole graph would be left to Inductor.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import torch
from conftest import SEED
from test_reading import evaluate
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_ops.compile_passes.graph.nodes import Canon, is_tensor
from fp4_ops.compile_passes.index.reader import Opaque, Reader
from fp4_ops.compile_passes.index.terms import ChosenRows, Const, Ref, Value, interning
from fp4_ops.compile_passes.refusal import Refused

SECONDS = float(os.environ.get("FP4_FUZZ_SECONDS", "2"))
SHAPES = [
    (), (0,), (1,), (3,), (1, 1), (2, 3), (3, 2), (0, 3), (2, 0), (1, 3), (2, 1),
    (2, 1, 3), (2, 0, 3), (2, 3, 2),
]  # fmt: skip


class Draw:
    """Random operands, of which many do not fit together."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.inputs: list[Tensor] = []

    def tensor(self, kind: str = "float") -> int:
        shape = self.rng.choice(SHAPES)
        if kind == "float":
            t = torch.randn(shape)
        elif kind == "bool":
            t = torch.rand(shape) < 0.5
        else:
            t = torch.randint(0, 2, shape)
        self.inputs.append(t)
        return len(self.inputs) - 1

    def dim(self) -> int:
        return self.rng.choice([0, 0, 1, -1, -2, 2])

    def sizes(self) -> list[int]:
        return list(self.rng.choice(SHAPES))


def made(d: Draw) -> Callable[..., Tensor]:
    """A call of an operator that is read, on tensors that were drawn."""
    a, b, c = d.tensor(), d.tensor(), d.tensor()
    i, j, m = d.tensor("int"), d.tensor("int"), d.tensor("bool")
    dim, other, sizes, n = d.dim(), d.dim(), d.sizes(), d.rng.choice([0, 1, 2, 3])
    keep, start = d.rng.random() < 0.5, d.rng.choice([0, 1, -1])
    aten = torch.ops.aten
    calls: list[Callable[..., Tensor]] = [
        lambda t: torch.cat([t[a], t[b]], dim),
        lambda t: torch.cat([t[a], t[b], t[c]], dim),
        lambda t: torch.cat([t[a]], dim),
        lambda t: torch.cat([t[i], t[j]], dim),
        lambda t: torch.stack([t[a], t[a] * 2.0], dim),
        lambda t: torch.stack([t[a]], dim),
        lambda t: torch.stack([t[i], t[i]], dim),
        lambda t: torch.cat([t[a], t[a], t[a]], dim).chunk(3, dim)[n % 3],
        lambda t: t[a].reshape(sizes),
        lambda t: t[a].view(-1),
        lambda t: t[a].unsqueeze(dim),
        lambda t: t[a].squeeze(dim),
        lambda t: t[a].squeeze(),
        lambda t: t[a].flatten(),
        lambda t: t[a].transpose(dim, other),
        lambda t: t[a].t(),
        lambda t: t[a].permute(*sorted(range(t[a].dim()), reverse=True)),
        lambda t: t[a].expand(sizes),
        lambda t: t[a].repeat(*sizes),
        lambda t: t[a].select(dim, start),
        lambda t: t[a].narrow(dim, 0, n),
        lambda t: aten.slice.Tensor(t[a], dim, start, None, max(n, 1)),
        lambda t: t[a].split(max(n, 1), dim)[0],
        lambda t: t[a].unbind(dim)[n],
        lambda t: t[a] + t[b],
        lambda t: t[a] + 1.0,
        lambda t: t[a] * t[b],
        lambda t: torch.where(t[m], t[a], 0.0),
        lambda t: torch.where(t[m], t[a], t[b]),
        lambda t: torch.where(t[m], t[a], torch.zeros_like(t[a])),
        lambda t: t[a].masked_fill(t[m], 0.0),
        lambda t: (t[i] == t[j]) * t[a],
        lambda t: (t[i] == n) * t[a],
        lambda t: (t[i] == n) & t[m],
        lambda t: (t[i].unsqueeze(-1) == torch.arange(2)) * 1.0,
        lambda t: t[a].sum(dim, keepdim=keep),
        lambda t: t[a].sum(),
        lambda t: t[a].mean(dim, keepdim=keep),
        lambda t: t[a].mean(),
        lambda t: t[m].any(dim, keepdim=keep),
        lambda t: (t[i] == n).any(dim, keepdim=keep) * 1.0,
        lambda t: (t[i] == n).any() * 1.0,
        lambda t: (t[i] == n).sum() * 1.0,
        lambda t: t[a] @ t[b],
        lambda t: torch.addmm(t[a], t[b], t[c]),
        lambda t: torch.baddbmm(t[a], t[b], t[c]),
        lambda t: torch.einsum("...i,...i->...", t[a], t[b]),
        lambda t: t[a][t[i]],
        lambda t: t[a][t[i], t[j]],
        lambda t: t[a][:, t[i]],
        lambda t: t[a][t[m]].sum(),
        lambda t: t[a].index_select(dim, t[i]),
        lambda t: t[a].gather(dim, t[i]),
        lambda t: torch.gather(t[a], dim, t[i].expand_as(t[a])),
        lambda t: t[a].index_add(dim, t[i], t[b]),
        lambda t: t[a].index_copy(dim, t[i], t[b]),
        lambda t: t[a].index_put([t[i]], t[b], accumulate=keep),
        lambda t: t[a].index_put([t[i], t[j]], t[b], accumulate=keep),
        lambda t: t[a].index_put([t[m]], t[b], accumulate=keep),
        lambda t: torch.zeros_like(t[a]).index_put([t[m]], t[b]),
        lambda t: t[a].scatter_add(dim, t[i], t[b]),
        lambda t: torch.zeros(sizes).scatter_add(dim, t[i], t[b]),
        lambda t: t[i].sort(dim)[n % 2] * 1.0,
        lambda t: t[i].argsort(dim, stable=True) * 1.0,
        lambda t: t[a].sort(dim)[n % 2] * 1.0,
        lambda t: t[i] // max(n, 1) * 1.0,
        lambda t: torch.div(t[a], n + 1.0),
        lambda t: torch.div(t[i], t[j] + 1, rounding_mode="floor") * 1.0,
        lambda t: aten.copy.default(t[a], t[b]),
        lambda t: t[i].to(torch.bool) * 1.0,
        lambda t: t[m].float() * t[a],
        lambda t: t[a].double().float(),
        lambda t: torch.zeros(sizes) + t[a],
        lambda t: torch.zeros((), dtype=torch.long) + t[i],
        lambda t: torch.full((), 0.0) * t[a],
        lambda t: torch.arange(n) * t[a],
        lambda t: torch.softmax(t[a], dim),
    ]  # fmt: skip
    outer = d.rng.choice([lambda y: y, lambda y: y * 2.0, lambda y: y.sum(), lambda y: torch.cat([y, y], 0)])
    call = d.rng.choice(calls)
    return lambda *t: outer(call(t))


def can_be_evaluated(value: Value) -> bool:
    """Whether a value can be evaluated: every element was written, and no rows were selected."""
    todo, seen = [value.term], set()
    while todo:
        t = todo.pop()
        if t is Const(None):
            return False
        if t not in seen:
            seen.add(t)
            todo += t.children()
    return not any(isinstance(a, ChosenRows) for a in value.axes)


def read_all(f: Callable[..., Tensor], inputs: list[Tensor]) -> int:
    """Reads every node of f's graph at every level; how many terms were compared with what f computes."""
    try:
        f(*inputs)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return 0  # not what the operator takes
    try:
        traced = make_fx(f, tracing_mode="fake", decomposition_table={})(*inputs)
    except Exception:
        return 0  # of a size that only the data knows
    seen: dict[fx.Node, Tensor] = {}

    class Keep(fx.Interpreter):
        def run_node(self, n: fx.Node):
            seen[n] = out = super().run_node(n)
            return out

    Keep(traced).run(*inputs)
    compared = 0
    with interning():
        reader = Reader(traced.graph, Canon(traced.graph), lambda n: n.op == "placeholder")
        for node in traced.graph.nodes:
            for level in range(3):
                try:
                    value = reader._read(node, level)
                except (Opaque, Refused):
                    continue
                assert is_tensor(node)
                if not can_be_evaluated(value):
                    continue
                got = evaluate(value, seen)
                want = seen[node].double()
                torch.testing.assert_close(got.view(want.shape), want, rtol=1e-4, atol=1e-5, equal_nan=True)
                compared += 1
    return compared


def test_every_operator_on_odd_tensors():
    seed, compared, until = SEED, 0, time.monotonic() + SECONDS
    # However slow the machine is: about each second draw is compared.
    while time.monotonic() < until or (compared <= 20 and seed < SEED + 500):
        seed += 1
        d = Draw(seed)
        f = made(d)
        try:
            compared += read_all(f, d.inputs)
        except Exception as error:
            raise AssertionError(f"draw {seed}, inputs {[tuple(t.shape) for t in d.inputs]}") from error
    assert compared > 20


def test_a_result_of_an_operator_on_a_list_is_itself(caplog):
    gm = make_fx(lambda x: torch._foreach_add([x, x], 1.0)[1] * 2)(torch.randn(3))
    with interning():
        reader = Reader(gm.graph, Canon(gm.graph), lambda n: False)
        results = [n for n in gm.graph.nodes if n.op == "call_function" and is_tensor(n)]
        values = [reader.value(n, 2) for n in results]
    assert results and isinstance(values[0].term, Ref) and values[0].term.node in results
    assert "report it" not in caplog.text
