"""A router's fp4::linears and the fp4::top_experts of its result become one fp4::router."""

from __future__ import annotations

import operator
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import SEED
from moe_models import Recorder, relative_error
from one_pass import OnePass
from test_step import logits_of_steps, qwen3
from torch import fx, nn

from fp4_ops.backends.hopper import trust
from fp4_ops.compile_passes.neighbours import topk
from fp4_ops.compile_passes.step import linears, router
from fp4_ops.compile_passes.step.linears import HOPPER, write_linears
from fp4_ops.compile_passes.step.router import write_router
from fp4_ops.runtime import native

expecttest = pytest.importorskip("expecttest")
fp4 = torch.ops.fp4
K, BF16 = 128, torch.bfloat16


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    """The CPU stands for a GPU with all kernels."""
    monkeypatch.setattr(topk, "DEVICES", ("cpu",))
    monkeypatch.setattr(topk, "has_kernel", lambda device: True)
    monkeypatch.setattr(linears, "limits", lambda device: replace(HOPPER, dtypes=(BF16, torch.float16)))
    monkeypatch.setattr(router, "has_kernel", lambda device: True)
    monkeypatch.setattr(router, "WHOLE", ())


def write_all(graph: fx.Graph) -> list[str]:
    topk.write_topk(graph)
    write_linears(graph, set(graph.find_nodes(op="placeholder")))
    return write_router(graph)


def run(module: nn.Module, *args: Any, dynamic: bool = False, ids: bool = False) -> OnePass:
    """`module` rewritten computes what it does, up to rounding. `ids`: it chooses the same experts."""
    torch._dynamo.reset()
    done = OnePass(write_all)
    with torch.no_grad():
        got = torch.compile(module, backend=done, dynamic=dynamic, fullgraph=True)(*args)
        want = module(*args)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.is_floating_point():
            assert relative_error(a, b.double()) < 1e-2
        elif ids:
            assert torch.equal(a, b)
    return done


def counts(done: OnePass) -> tuple[int, int, int]:
    names = "router", "linears", "top_experts"
    return tuple(len(done.calls(getattr(fp4, name).default)) for name in names)


class Router(nn.Module):
    """As Qwen3-MoE has it: a sum, a norm, a router, and its choice."""

    def __init__(self, experts: int = 32, bias: bool = False, late: bool = False) -> None:
        super().__init__()
        self.norm, self.late = nn.Parameter(torch.randn(K)), late
        self.gate = nn.Linear(K, experts, bias=bias)
        self.top = min(4, experts)

    def normed(self, x):
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.norm * scaled).to(x.dtype) if self.late else self.norm * scaled.to(x.dtype)

    def choose(self, logits):
        values, ids = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), self.top, dim=-1)
        values = values / values.sum(dim=-1, keepdim=True)
        return values.to(logits.dtype), ids

    def forward(self, x, y):
        x = x + y
        h = self.normed(x).view(-1, K)
        return (x, h * 2, *self.choose(self.gate(h)))


class GptOss(Router):
    """The softmax of the chosen logits, of a router with a bias."""

    def __init__(self) -> None:
        super().__init__(experts=16, bias=True, late=True)

    def choose(self, logits):
        values, ids = torch.topk(logits, self.top, dim=-1)
        return F.softmax(values, dim=1, dtype=values.dtype), ids


class Mixtral(Router):
    """Nothing but the choice reads the norm's result; the layer returns its logits."""

    def __init__(self) -> None:
        super().__init__(experts=8)

    def forward(self, x, y):
        logits = self.gate(self.normed(x).view(-1, K))
        return (*self.choose(logits), logits)


def draw(*shape: int, dtype=BF16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def draw_apart(module: Router, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns two inputs whose chosen logits lie apart: of almost equal ones, rounding decides."""
    seen: list[torch.Tensor] = []
    hook = module.gate.register_forward_hook(lambda module, given, out: seen.append(out[0].float()))
    kept = []
    while len(kept) < rows:
        pair = draw(1, 1, K, dtype=dtype), draw(1, 1, K, dtype=dtype)
        module(*pair)
        best = seen.pop().sort(descending=True).values[: module.top + 1]
        if bool((-best.diff() > best.abs().max() / 64).all()):
            kept.append(pair)
    hook.remove()
    return [torch.cat(rows) for rows in zip(*kept, strict=True)]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("kind", [Router, GptOss, Mixtral])
def test_routers(kind, dtype):
    module = kind().to(dtype)
    done = run(module, *draw_apart(module, random.Random(SEED).randint(1, 8), dtype), ids=True)
    assert counts(done) == (1, 0, 0)
    (call,) = done.calls(fp4.router.default)
    assert (call.args[2] is not None, call.args[5] is not None) == (kind is GptOss, kind is not Mixtral)
    of = {
        name: call.kwargs.get(name, False) for name in ("softmax", "normalize", "keep_norm", "norm_in_float")
    }
    assert of == {
        "softmax": True, "normalize": True, "keep_norm": kind is not Mixtral, "norm_in_float": kind is GptOss,
    }  # fmt: skip
    assert done.said == [
        "decoding step (1x): a router's fp4::linears and fp4::top_experts are one operator (fp4::router)"
    ]


class Two(Router):
    """A shared expert's gate reads the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(K, 1, bias=False)

    def forward(self, x, y):
        h = self.normed(x).view(-1, K)
        return (*self.choose(self.gate(h)), self.other(h))


class Added(Router):
    """A choice after a residual: no norm, and a sum after the product."""

    def __init__(self) -> None:
        super().__init__(experts=K)

    def forward(self, x, y):
        return self.choose(x.view(-1, K) + self.gate(y.view(-1, K)))


class Changed(Router):
    """The logits that are chosen among are not the product's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def choose(self, logits):
        if self.how == "scaled":
            return super().choose(logits * 2)
        if self.how == "wide":
            return torch.topk(logits.float(), self.top)
        if self.how == "sigmoid":
            return torch.topk(logits.sigmoid(), self.top)
        if self.how == "some":
            return super().choose(logits[:, :16])
        assert self.how == "folded"  # other rows: each has the logits of half of the experts
        return super().choose(logits.view(-1, 16))


@pytest.mark.parametrize("how", ["scaled", "wide", "sigmoid", "some", "folded"])
def test_logits_that_changed(how):
    assert counts(run(Changed(how).to(BF16), draw(3, 1, K), draw(3, 1, K))) == (0, 1, 1)


def test_look_alikes():
    x, y = draw(3, 1, K), draw(3, 1, K)
    assert counts(run(Two().to(BF16), x, y)) == (0, 1, 1)
    assert counts(run(Added().to(BF16), x, y)) == (0, 1, 1)
    assert counts(run(Router().to(BF16), draw(9, 1, K), draw(9, 1, K))) == (0, 1, 1)
    assert counts(run(Router().to(BF16), x, y, dynamic=True))[0] == 0
    assert counts(run(Router(experts=129).to(BF16), x, y)) == (0, 1, 1)


def test_a_weight_that_the_kernel_does_not_hold(monkeypatch):
    x, y = draw(1, 1, K), draw(1, 1, K)
    for experts, held in ((16, 64), (65, 128)):
        monkeypatch.setattr(router, "MAX_BYTES", held * K * 2)
        assert counts(run(Router(experts).to(BF16), x, y)) == (1, 0, 0)
        monkeypatch.setattr(router, "MAX_BYTES", held * K * 2 - 1)
        assert counts(run(Router(experts).to(BF16), x, y)) == (0, 1, 1)


def test_a_device_without_the_kernel(monkeypatch):
    monkeypatch.setattr(router, "has_kernel", lambda device: False)
    done = run(Router().to(BF16), draw(1, 1, K), draw(1, 1, K))
    assert counts(done) == (0, 1, 1) and done.said == []
    monkeypatch.undo()
    assert not router.has_kernel(torch.device("cpu"))
    monkeypatch.setattr(native, "is_hopper", lambda device: True)
    for right in (True, False):
        monkeypatch.setattr(router, "router_kernel", lambda index, right=right: right)
        assert router.has_kernel(torch.device("cuda", 1)) is right


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_check_of_the_first_use(monkeypatch, dtype):
    """By torch's operations; then with other experts, other weights, and a wrong logit in a hundred."""
    assert max(trust._router_error(dtype, "cpu", rows) for rows in (1, 8)) < trust.BOUND
    right = fp4.router

    def wrong(result: int, change: Any) -> Any:
        def run(*given, **options):
            made = right(*given, **options)
            made[result] = change(made[result])
            return made

        return run

    def spoilt(logits):
        logits[:, ::100] += 1
        return logits

    for result, change in ((0, spoilt), (1, lambda w: w * 1.1), (2, lambda ids: ids.flip(-1))):
        monkeypatch.setattr(fp4, "router", wrong(result, change))
        assert trust._router_error(dtype, "cpu", 1) > 10 * trust.BOUND


@pytest.mark.slow
def test_a_model(monkeypatch):
    """The whole backend, for a step of a CPU."""
    monkeypatch.undo()
    transformers, model = qwen3("cpu")
    tokens = torch.randint(0, 128, (2, 7))
    plain = logits_of_steps(transformers, model, tokens)
    ours = logits_of_steps(transformers, model, tokens, recorder := Recorder())
    assert relative_error(ours, plain.double()) < 3e-2
    names = [str(n.target) for n in recorder.graphs[0].graph.nodes]
    # Two layers: q, k and v; the output and the residual. Then the head.
    assert [names.count(f"fp4.{name}.default") for name in ("router", "linears", "top_experts")] == [2, 5, 0]
    assert sum("(fp4::router)" in said for said in recorder.frames[0].also) == 1


class TestGolden(expecttest.TestCase):
    def test_qwen3(self) -> None:
        done = run(Router().to(BF16), draw(3, 1, K), draw(3, 1, K))
        calls = [n for n in done.graph.nodes if n.op == "call_function"]
        assert all("val" in n.meta for n in calls if n.target not in (fp4.router.default, operator.getitem))
        text = "\n".join(f"{n} = {n.target}{n.args}\n  {n.kwargs}" for n in calls if n.kwargs) + "\n"
        text += "\n".join(f"{n} = {n.target}{n.args}" for n in calls if not n.kwargs)
        self.assertExpectedInline(
            text,
            """\
router_default = fp4.router.default(arg0_1, arg3_1, None, arg2_1, 1e-06, arg1_1, 4)
  {'keep_norm': True, 'softmax': True, 'normalize': True, 'out_dtype': torch.bfloat16}
getitem_6 = <built-in function getitem>(router_default, 4)
getitem_4 = <built-in function getitem>(router_default, 3)
view = aten.view.default(getitem_4, [-1, 128])
mul_2 = aten.mul.Tensor(view, 2)
getitem_7 = <built-in function getitem>(router_default, 1)
reshape_default_1 = aten.reshape.default(getitem_7, [3, 4])
getitem_8 = <built-in function getitem>(router_default, 2)
reshape_default_2 = aten.reshape.default(getitem_8, [3, 4])""",
        )
