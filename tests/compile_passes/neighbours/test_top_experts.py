"""A router's topk, with the softmax before it and the weights after it, becomes fp4::top_experts."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_ops.compile_passes.neighbours import topk
from fp4_ops.compile_passes.neighbours import topk as module
from fp4_ops.compile_passes.neighbours.topk import write_topk

expecttest = pytest.importorskip("expecttest")
aten, fp4 = torch.ops.aten, torch.ops.fp4
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    """The CPU stands for a GPU with the kernel."""
    monkeypatch.setattr(module, "DEVICES", ("cpu",))
    monkeypatch.setattr(topk, "has_kernel", lambda device: True)


def rewritten(router, x) -> torch.fx.GraphModule:
    """The graph computes what the router does, up to rounding."""
    gm = make_fx(lambda x: router(x), decomposition_table={})(x)
    (gm.meta["said"],) = write_topk(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert not gm.graph.find_nodes(op="call_function", target=aten.topk.default)
    for got, want in zip(gm(x), router(x), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-2 if want.dtype == BF16 else 1e-5, atol=1e-6)
    return gm


def options(gm: torch.fx.GraphModule) -> tuple[bool, bool, torch.dtype]:
    (node,) = gm.graph.find_nodes(op="call_function", target=fp4.top_experts.default)
    return tuple(node.kwargs.get(name, False) for name in ("softmax", "normalize", "out_dtype"))


def others(gm: torch.fx.GraphModule) -> list[str]:
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    return [str(n.target) for n in calls if n.target is not fp4.top_experts.default]


def qwen3(x, normalize=True, keepdim=True):
    values, ids = torch.topk(F.softmax(x, dtype=torch.float, dim=-1), 4, dim=-1)
    if normalize:
        values = values / values.sum(dim=-1, keepdim=keepdim)
    return values.to(x.dtype), ids


def gpt_oss(x):
    values, ids = torch.topk(x, 4, dim=-1)
    return F.softmax(values, dim=1, dtype=values.dtype), ids


def wide(x):
    values, ids = torch.topk(x, 4, dim=-1)
    return F.softmax(values, dim=-1, dtype=torch.float32).to(x.dtype), ids


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "router, softmax, normalize",
    [(qwen3, True, True), (lambda x: qwen3(x, False), True, False), (gpt_oss, True, True), (wide, True, True),
     (lambda x: tuple(torch.topk(x, 3)), False, False)],
)  # fmt: skip
def test_routers(router, softmax, normalize, dtype):
    # Logits that differ: of equal ones torch may choose any.
    x = torch.rand(7, 32).argsort(-1).to(dtype) / 4
    gm = rewritten(router, x)
    assert options(gm) == (softmax, normalize, dtype)
    assert others(gm) == [] and "top_experts" in gm.meta["said"]


def test_a_softmax_in_16_bits_is_not_one_of_the_logits():
    """It rounds the scores among which topk chooses."""

    def router(x):
        return torch.topk(F.softmax(x, dim=-1), 3)

    gm = rewritten(router, torch.rand(5, 16).argsort(-1).to(BF16))
    assert options(gm) == (False, False, BF16) and others(gm) == ["aten._softmax.default"]


def other(kind: str):
    def router(x):
        scores = F.softmax(x, 0 if kind == "softmax of tokens" else -1)
        values, ids = torch.topk(scores, 3)
        if kind == "sum of tokens":
            values = values / values.sum(0, keepdim=True)
        elif kind == "with epsilon":
            values = values / (values.sum(-1, keepdim=True) + 1e-20)
        elif kind == "sum of others":
            values = values / values.exp().sum(-1, keepdim=True)
        elif kind == "inverse":
            values = values.sum(-1, keepdim=True) / values
        elif kind == "rounded":
            values = torch.div(values, values.sum(-1, keepdim=True), rounding_mode="floor")
        elif kind == "softmax twice":
            values = F.softmax(values, -1)
        elif kind == "total, too":
            total = values.sum(-1, keepdim=True)
            return values / total, total, ids
        elif kind == "values, too":
            return values / values.sum(-1, keepdim=True), values.exp(), ids
        else:
            assert kind == "softmax of tokens"
        return values, ids

    return router


@pytest.mark.parametrize(
    "kind",
    ["softmax of tokens", "sum of tokens", "with epsilon", "sum of others", "inverse", "rounded",
     "softmax twice", "total, too", "values, too"],
)  # fmt: skip
def test_what_stays(kind):
    gm = rewritten(other(kind), torch.rand(5, 16).argsort(-1).float() / 4)
    assert options(gm) == (kind != "softmax of tokens", False, torch.float32)
    assert others(gm)


def test_ids_alone():
    gm = rewritten(lambda x: (torch.topk(x.softmax(-1), 2).indices,), torch.rand(5, 16))
    assert options(gm) == (True, False, torch.float32) and others(gm) == []


def written_on_cpu(router, *shape: int, dtype=BF16, dynamic: bool = False) -> int:
    """Returns how many calls a step on a CPU has, as users have it."""
    x = torch.rand(shape).argsort(-1).to(dtype) / 4
    gm = make_fx(lambda x: router(x), decomposition_table={}, tracing_mode="symbolic" if dynamic else "real")(
        x
    )
    write_topk(gm.graph, on_cpu=True)
    gm.recompile()
    for got, want in zip(gm(x), router(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-6)
    return len(gm.graph.find_nodes(op="call_function", target=fp4.top_experts.default))


def test_a_step_on_the_cpu(monkeypatch):
    monkeypatch.undo()
    assert written_on_cpu(qwen3, 1, 128) == written_on_cpu(gpt_oss, 4, 32) == 1
    assert written_on_cpu(qwen3, 2, 2, 16) == 1
    assert written_on_cpu(qwen3, 5, 32) == 0 and written_on_cpu(qwen3, 2, 32, dynamic=True) == 0
    assert written_on_cpu(qwen3, 1, 32, dtype=torch.float32) == 0
    assert written_on_cpu(lambda x: torch.topk(x.float().sigmoid(), 3), 1, 32) == 0
    assert written_on_cpu(lambda x: torch.topk(x, 3, largest=False), 1, 32) == 0
    gm = make_fx(lambda x: qwen3(x), decomposition_table={})(torch.randn(1, 32).to(BF16))
    assert write_topk(gm.graph) == []


class TestGolden(expecttest.TestCase):
    def test_qwen3(self) -> None:
        gm = rewritten(qwen3, torch.rand(5, 16).argsort(-1).to(BF16) / 4)
        calls = [n for n in gm.graph.nodes if n.op == "call_function"]
        calls = [f"{n} = {n.args} {n.kwargs}" for n in calls]
        self.assertExpectedInline(
            "\n".join(calls),
            """\
top_experts_default = (x_1, 4) {'softmax': True, 'normalize': True, 'out_dtype': torch.bfloat16}
getitem_2 = (top_experts_default, 0) {}
getitem_3 = (top_experts_default, 1) {}""",
        )
