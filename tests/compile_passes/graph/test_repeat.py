"""Graphs that run twice for one call if the GPU reports late that weights have changed (graph/repeat.py)."""

from __future__ import annotations

import pytest
import torch
from conftest import more
from moe_models import Block, relative_error
from recorder import Recorder
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_ops.compile_passes import pipeline
from fp4_ops.compile_passes.graph.repeat import undo_of
from fp4_ops.compile_passes.weights import runtime

aten = torch.ops.aten
CACHE, POS, COUNT = torch.randn(6, 4), torch.tensor([2]), torch.tensor(3)
X, W = torch.randn(1, 4), torch.randn(4, 4)


def graph_of(f):
    return make_fx(f, tracing_mode="fake")(CACHE, POS, COUNT, X, W).graph


def into(write):
    """A graph that writes to the cache: `write(cache, pos, x @ w, w)` is what it holds then."""

    def f(cache, pos, count, x, w):
        new = write(cache, pos, x @ w, w)
        cache.copy_(new)
        return new.sum()

    return f


def counted(add):
    def f(cache, pos, count, x, w):
        y = (x @ w) * count
        count.copy_(add(count, y))
        return y

    return f


def a_cache_at_a_counters_place(cache, pos, count, x, w):
    new = aten.index_copy(cache, 0, pos + count, x @ w)
    cache.copy_(new)
    count.copy_(count + 1)
    return new @ w


def attention(dropout):
    def f(cache, pos, count, x, w):
        q = (x @ w).view(1, 1, 1, 4).expand(1, 2, 3, 4)
        return aten._scaled_dot_product_flash_attention_for_cpu(q, q + 1, q * 2, dropout)[0]

    return f


MAY = {
    "nothing is written": (lambda cache, pos, count, x, w: x @ w, ()),
    "index_copy": (into(lambda c, pos, y, w: aten.index_copy(c, 0, pos, y)), ()),
    "index_put": (into(lambda c, pos, y, w: aten.index_put(c, [pos], y)), ()),
    "slice_scatter": (into(lambda c, pos, y, w: aten.slice_scatter(c, y, 0, 2, 3)), ()),
    "select_scatter": (into(lambda c, pos, y, w: aten.select_scatter(c, y[0], 0, 2)), ()),
    "scatter": (into(lambda c, pos, y, w: aten.scatter(c, 0, pos.expand(1, 4), y)), ()),
    "all of it": (into(lambda c, pos, y, w: y.expand(6, 4).clone()), ()),
    "attention": (attention(0.0), ()),
    "dropout in evaluation": (lambda cache, pos, count, x, w: aten.native_dropout(x @ w, 0.5, False)[0], ()),
    "a counter": (counted(lambda count, y: count + 7), ((2, 7),)),
    "a counter, and the cache at its place": (a_cache_at_a_counters_place, ((2, 1),)),
}
MAY_NOT = {
    "a sum is added up": into(lambda c, pos, y, w: c + y),
    "index_put adds": into(lambda c, pos, y, w: aten.index_put(c, [pos], y, True)),
    "scatter adds": into(lambda c, pos, y, w: aten.scatter(c, 0, pos.expand(1, 4), y, reduce="add")),
    "what was there is read": into(lambda c, pos, y, w: aten.index_copy(c, 0, pos, y + c[:1])),
    "what was there moves": into(lambda c, pos, y, w: aten.index_copy(c.roll(1, 0), 0, pos, y)),
    "the weights say where": into(lambda c, pos, y, w: aten.index_copy(c, 0, w[0, :1].abs().long() % 6, y)),
    "a counter that a tensor is added to": counted(lambda count, y: count + (y > 0).sum()),
    "a counter that is doubled": counted(lambda count, y: count * 2),
    "attention with dropout": attention(0.1),
    "dropout": lambda cache, pos, count, x, w: aten.native_dropout(x @ w, 0.5, True)[0],
    "a number is drawn": lambda cache, pos, count, x, w: torch.rand_like(x) @ w,
}  # fmt: skip


@pytest.mark.parametrize("name", MAY)
def test_graphs_that_may_run_again(name):
    """Twice with other weights, after the undoing, leaves what once with the last weights leaves."""
    f, undo = MAY[name]
    assert undo_of(graph_of(f), 1) == undo
    once, twice = ([t.clone() for t in (CACHE, POS, COUNT, X)] for _ in range(2))
    want = f(*once, W)
    f(*twice, torch.randn(4, 4))
    for i, number in undo:
        twice[i].sub_(number)
    assert torch.equal(f(*twice, W), want)
    assert all(map(torch.equal, once, twice))


@pytest.mark.parametrize("name", MAY_NOT)
def test_graphs_that_may_not(name):
    assert undo_of(graph_of(MAY_NOT[name]), 1) is None


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("attention", ["sdpa", more("eager")])
def test_a_step_of_transformers_may_run_again(attention, monkeypatch):
    """With a static cache: its counters count back, its keys are written again."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    cache, undo = transformers.StaticCache(config, max_cache_len=16), []
    monkeypatch.setattr(pipeline, "undo_of", lambda *args: (undo.append(undo_of(*args)), undo[-1])[1])
    recorder = Recorder()
    with torch.no_grad():
        model(torch.randint(0, 32, (1, 5)), past_key_values=cache)
        torch.compile(model, backend=recorder)(torch.randint(0, 32, (1, 1)), past_key_values=cache)
    assert recorder.ops == ["fp4::moe"] * 2
    assert len(undo) == 1 and [number for _, number in undo[0]] == [1, 1]


class Decoder(torch.nn.Module):
    """Experts behind a cache of rows and its counter, both of which each call writes to."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.block = Block("grouped_mm")
        self.register_buffer("cache", torch.zeros(32, Block.H))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, self.count + torch.arange(len(x), device=x.device), self.block(x))
        self.count.add_(len(x))
        return self.cache.cumsum(0)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "device, mode",
    [
        ("cpu", None),
        *(pytest.param("cuda", m, marks=pytest.mark.gpu) for m in (None, "reduce-overhead")),
    ],
)
def test_weights_that_change_unseen_between_calls(device, mode, monkeypatch):
    """The graph runs again with the new weights; the cache and the counter are as if it had run once."""
    if device == "cpu":  # as on a GPU: the answer is asked for when the graph has run
        made = runtime._Met.__init__

        def late(self, *args):
            made(self, *args)
            self.on_gpu = True

        monkeypatch.setattr(runtime._Met, "__init__", late)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    asked = []
    differ = runtime._Unsure.differ
    monkeypatch.setattr(runtime._Unsure, "differ", lambda self: (asked.append(differ(self)), asked[-1])[1])
    model = Decoder(device)
    compiled = torch.compile(model, backend="fp4", dynamic=False, mode=mode)
    rows = []
    with torch.no_grad():
        for step in range(6):
            x = torch.randn(3, Block.H, device=device)
            if step in (2, 4):
                model.block.w13.data.mul_(-0.5)
                model.block.w2.data.mul_(1.5)
            got = compiled(x).clone()
            rows.append(model.block.twin()(x))
            want = torch.cat(rows).cumsum(0)
            assert relative_error(got[: len(want)], want) < 0.03
            assert model.count.item() == len(want)
            assert relative_error(model.cache[: len(want)], torch.cat(rows)) < 0.03
            assert not model.cache[len(want) :].any()
    assert asked.count(True) == 2, asked
