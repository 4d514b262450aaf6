"""Attention of one token over a static cache becomes fp4::attention, but only if it matches exactly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from moe_models import relative_error
from one_pass import OnePass
from torch._guards import detect_fake_mode

from fp4_ops.backends.hopper import trust
from fp4_ops.compile_passes.neighbours.attention import write_attention as write_groups
from fp4_ops.compile_passes.step import attention

aten, fp4 = torch.ops.aten, torch.ops.fp4
BF16 = torch.bfloat16
B, Q, K, D, LENGTH = 3, 4, 2, 64, 6


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The CPU stands for a GPU with the kernel."""
    monkeypatch.setattr(attention, "runs", lambda device: True)


class Layer(torch.nn.Module):
    """The attention of a layer, with the cache's write. `kind` names what is different."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        dtype = torch.float32 if kind == "float32" else BF16
        size = 32 if kind == "small heads" else D
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(B, K, LENGTH, size).to(dtype))
        self.register_buffer("count", torch.tensor(2))
        self.q = torch.randn(B, 2 if kind == "two tokens" else 1, Q, size).to(dtype)

    def forward(self, q):
        kind, tokens = self.kind, q.shape[1]
        places = torch.arange(tokens) + self.count
        self.values.index_copy_(2, places, q[:, :, :K].transpose(1, 2))
        mask = (torch.arange(LENGTH) <= places[:, None])[None, None].expand(B, -1, tokens, LENGTH)
        if kind == "added mask":
            mask = torch.zeros(B, 1, tokens, LENGTH, dtype=BF16).masked_fill(~mask, -1e9)
        if kind == "mask of heads":
            mask = mask & (torch.arange(Q)[:, None, None] > 0)
        if kind == "no mask":
            mask = None
        keys, values = self.keys, self.values
        if kind == "keys apart":
            keys = keys.transpose(2, 3).contiguous().transpose(2, 3)
        if kind == "repeated":  # as transformers does
            keys, values = (x[:, :, None].expand(-1, -1, Q // K, -1, -1) for x in (keys, values))
            keys, values = keys.reshape(B, Q, LENGTH, D), values.reshape(B, Q, LENGTH, D)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            is_causal=kind == "no mask" and tokens > 1,
            scale=0.3 if kind == "scale" else None,
            enable_gqa=kind != "repeated",
        )
        return y.transpose(1, 2).reshape(B, tokens, -1)


def both(graph: torch.fx.Graph) -> list[str]:
    """The pass, after the one that finds heads that share keys."""
    mode = detect_fake_mode([n.meta["val"] for n in graph.find_nodes(op="placeholder")])
    assert mode is not None
    write_groups(graph, mode)
    return attention.write_attention(graph)


def run(layer: Layer | Sunk) -> OnePass:
    torch._dynamo.reset()
    held = {name: x.clone() for name, x in layer.state_dict().items()}
    with torch.no_grad():
        want = layer(layer.q)
        layer.load_state_dict(held)
        done = OnePass(both)
        got = torch.compile(layer, backend=done, fullgraph=True)(layer.q)
    assert got.shape == want.shape and relative_error(got, want.double()) < 1e-2
    return done


@pytest.mark.parametrize("kind", ["", "scale", "no mask", "repeated"])
def test_a_layer_is_one_call(kind):
    done = run(Layer(kind))
    (call,) = done.calls(fp4.attention.default)
    assert call.args[4] == (0.3 if kind == "scale" else D**-0.5)
    if kind != "no mask":  # a mask that sequences share is not copied for each
        assert call.args[3].meta["val"].shape == (1, 1, 1, LENGTH)
    assert done.said == [
        "decoding step (1x): attention of one token over a cache is one kernel (fp4::attention)"
    ]
    assert done.undone[0] == done.undone[1]


@pytest.mark.parametrize(
    "kind", ["two tokens", "added mask", "mask of heads", "keys apart", "float32", "small heads"]
)
def test_what_stays(kind):
    done = run(Layer(kind))
    assert not done.calls(fp4.attention.default) and done.said == []


class Sunk(torch.nn.Module):
    """Attention with sinks, as gpt-oss writes it. `kind` names what is different."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        heads = Q if kind == "one head each" else K
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(B, heads, LENGTH, D).to(BF16))
        self.register_buffer("count", torch.tensor(2))
        sinks = torch.randn(Q).to(BF16)
        self.sinks = torch.nn.Parameter(sinks.float() if kind == "sinks in float32" else sinks)
        self.q = torch.randn(B, 2 if kind == "two tokens" else 1, Q, D).to(BF16)

    def mask(self, tokens):
        kind, low = self.kind, torch.finfo(BF16).min
        seen = (torch.arange(LENGTH) <= torch.arange(tokens)[:, None] + self.count)[None, None]
        if kind == "window":
            seen = seen & (torch.arange(LENGTH) > self.count - 2)
        if kind == "mask of heads":
            seen = seen & (torch.arange(Q)[:, None, None] > 0)
        if kind == "inverted":
            seen = ~seen
        if kind == "mask of sequences":
            seen = seen & (torch.arange(B)[:, None, None, None] + torch.arange(LENGTH) > 0)
        seen = seen.expand(B, -1, tokens, LENGTH)
        zero, low = torch.zeros((), dtype=BF16), torch.full((), low, dtype=BF16)
        if kind == "5.17":
            zero = torch.tensor(0.0, dtype=BF16)
        if kind == "a bias":
            zero = torch.full((), 0.5, dtype=BF16)
        if kind == "not low":
            low = torch.full((), -5.0, dtype=BF16)
        if kind == "low of float16":
            low = torch.full((), -65504.0, dtype=BF16)
        if kind == "infinite":
            low = torch.full((), -torch.inf, dtype=BF16)
        return torch.where(seen, low, zero) if kind == "swapped" else torch.where(seen, zero, low)

    def forward(self, q):
        kind, tokens = self.kind, q.shape[1]
        self.values.index_copy_(
            2, torch.arange(tokens) + self.count, q[:, :, : self.keys.shape[1]].transpose(1, 2)
        )
        keys, values = self.keys, self.values
        if kind != "one head each":
            keys, values = (x[:, :, None].expand(B, K, Q // K, LENGTH, D) for x in (keys, values))
            if kind == "repeated apart":
                values = values.transpose(1, 2)
            keys, values = keys.reshape(B, Q, LENGTH, D), values.reshape(B, Q, LENGTH, D)
        logits = torch.matmul(q.transpose(1, 2), keys.transpose(2, 3)) * 0.3
        if kind == "scaled later":
            logits = logits * self.count
        if kind != "no mask":
            logits = logits + self.mask(tokens)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(B, -1, tokens, -1)
        if kind == "sinks of tokens":
            sinks = sinks * (torch.arange(B)[:, None, None, None] + 1).to(BF16)
        if kind == "two sinks":
            sinks = torch.cat([sinks, sinks], -1)
        both = [sinks, logits] if kind == "sinks first" else [logits, sinks]
        logits = torch.cat(both, -1)
        if kind == "less the first":
            logits = logits - logits[..., :1]
        elif kind == "less the smallest":
            logits = logits - logits.min(dim=-1, keepdim=True).values
        elif kind == "less all":
            logits = logits - logits.max(dim=1, keepdim=True).values
        elif kind != "not less":
            logits = logits - logits.max(dim=-1, keepdim=True).values
        weights = F.softmax(logits, dim=1 if kind == "of heads" else -1, dtype=logits.dtype)
        weights = weights[..., 1:] if kind in ("sinks first", "first dropped") else weights[..., :LENGTH]
        out = torch.matmul(weights.to(BF16), values).transpose(1, 2).contiguous()
        return out.reshape(B, tokens, -1).contiguous()


@pytest.mark.parametrize(
    "kind",
    ["", "5.17", "window", "no mask", "infinite", "not less", "one head each", "mask of sequences"],
)
def test_attention_with_sinks_is_one_call(kind):
    done = run(Sunk(kind))
    (call,) = done.calls(fp4.attention.default)
    assert call.args[1].meta["val"].shape == (B, Q if kind == "one head each" else K, LENGTH, D)
    assert call.args[4] == 0.3 and call.args[5].meta["val"].shape == (Q,)
    if kind == "no mask":
        assert call.args[3] is None
    else:
        assert call.args[3].meta["val"].shape == (B if kind == "mask of sequences" else 1, 1, 1, LENGTH)
    left = {n.target for n in done.graph.nodes}
    assert not left & {aten.bmm.default, aten._softmax.default, aten.cat.default, aten.where.self}
    assert done.undone[0] == done.undone[1]


@pytest.mark.parametrize(
    "kind",
    [
        "two tokens", "mask of heads", "a bias", "not low", "low of float16", "sinks in float32",
        "repeated apart", "scaled later", "sinks of tokens", "two sinks", "sinks first", "first dropped",
        "less the first", "less the smallest", "less all", "of heads",
    ],
)  # fmt: skip
def test_attention_with_sinks_that_stays(kind):
    done = run(Sunk(kind))
    assert not done.calls(fp4.attention.default) and done.said == []


def test_a_mask_that_hides_what_another_shows():
    (call,) = run(Sunk("inverted")).calls(fp4.attention.default)
    assert call.args[3].target is not aten.le.Tensor


def test_a_mask_of_hidden_keys_is_inverted():
    (call,) = run(Sunk("swapped")).calls(fp4.attention.default)
    assert call.args[3].target is aten.logical_not.default


class Written(torch.nn.Module):
    """Attention as products and a softmax. `kind` names what is different."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(B, K, LENGTH, D).to(BF16))
        self.register_buffer("count", torch.tensor(2))
        self.q = torch.randn(B, 1, Q, D).to(BF16)

    def hide(self, scores):
        kind, low = self.kind, -torch.inf
        seen = (torch.arange(LENGTH) <= self.count)[None, None, None]
        if kind == "finite":
            low = torch.finfo(BF16).min
        if kind == "not low":
            return scores.masked_fill(~seen, -5.0)
        if kind == "== 0":
            return scores.masked_fill(seen == 0, low)
        if kind == "where":
            return torch.where(seen, scores, low)
        if kind == "where hidden":
            return torch.where(self.count < torch.arange(LENGTH)[None, None, None], low, scores)
        if kind == "multiplied":
            return scores * seen
        if kind == "mask first":
            return torch.zeros(1, 1, 1, LENGTH, dtype=BF16).masked_fill(~seen, low) + scores
        if kind == "biases":
            return scores + torch.arange(LENGTH).to(BF16)
        return scores.masked_fill(~seen, low)

    def forward(self, q):
        kind = self.kind
        self.values.index_copy_(2, self.count[None], q[:, :, :K].transpose(1, 2))
        keys, values = (x[:, :, None].expand(B, K, Q // K, LENGTH, D) for x in (self.keys, self.values))
        keys, values = keys.reshape(B, Q, LENGTH, D), values.reshape(B, Q, LENGTH, D)
        scores = q.transpose(1, 2) @ keys.transpose(2, 3)
        if kind == "scale of data":
            scores = scores * self.count
        elif kind == "divided":
            scores = scores / 4.0
        else:
            scores = scores * 0.25
        if kind == "soft cap":
            scores = torch.tanh(scores / 5.0) * 5.0
        if kind not in ("no mask", "later", "halves"):
            scores = self.hide(scores)
        if kind == "halves":
            scores = scores.view(B, Q, 2, LENGTH // 2)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32 if kind == "float32" else None).to(BF16)
        weights = weights.view(B, Q, 1, LENGTH)
        if kind == "later":
            weights = weights * (torch.arange(LENGTH) <= self.count)
        return (weights @ values).transpose(1, 2).reshape(B, 1, -1)


@pytest.mark.parametrize(
    "kind",
    ["", "no mask", "divided", "float32", "== 0", "where", "where hidden", "mask first"],
)
def test_products_and_a_softmax_are_one_call(kind):
    done = run(Written(kind))
    (call,) = done.calls(fp4.attention.default)
    assert call.args[1].meta["val"].shape == (B, K, LENGTH, D) and call.args[4] == 0.25
    assert (call.args[3] is None) == (kind == "no mask")
    assert not {n.target for n in done.graph.nodes} & {aten.bmm.default, aten._softmax.default}


class Layers(torch.nn.Module):
    """Layers that hide the same keys. `kind` says who computes the mask."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Written(kind) for _ in range(3))
        self.register_buffer("count", torch.tensor(2))
        self.q = torch.randn(B, 1, Q, D).to(BF16)
        if kind == "given":
            for layer in self.layers:
                layer.hide = lambda scores: scores.masked_fill(self.hidden, -torch.inf)

    def forward(self, q):
        self.hidden = (self.count < torch.arange(LENGTH))[None, None, None]
        return sum(layer(q) for layer in self.layers)


@pytest.mark.parametrize(("kind", "inversions"), [("given", 1), ("", 0), ("== 0", 0)])
def test_hidden_keys_are_inverted_once(kind, inversions):
    done = run(Layers(kind))
    assert len(done.calls(fp4.attention.default)) == 3
    masks = {call.args[3] for call in done.calls(fp4.attention.default)}
    assert len(masks) == (1 if kind == "given" else 3)
    assert sum(mask.target is aten.logical_not.default for mask in masks) == inversions


@pytest.mark.parametrize(
    "kind", ["finite", "not low", "multiplied", "biases", "scale of data", "soft cap", "later", "halves"]
)
def test_products_and_a_softmax_that_stay(kind):
    done = run(Written(kind))
    assert not done.calls(fp4.attention.default) and done.said == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_check_of_the_first_use(monkeypatch, dtype):
    """By torch's operations, which serve a CPU; then with results that see every key, and without sinks."""
    monkeypatch.setattr(trust, "KEYS", {1: (20, 50), 4: (20, 30)})
    assert max(trust._attention_error(dtype, "cpu", n) for n in (1, 4)) < trust.BOUND
    right = fp4.attention
    wrong = [
        lambda q, keys, values, mask, scale, sinks: right(q, keys, values, None, scale, sinks),
        lambda q, keys, values, mask, scale, sinks: right(q, keys, values, mask, scale),
    ]
    for one in wrong:
        monkeypatch.setattr(fp4, "attention", one)
        assert trust._attention_error(dtype, "cpu", 1) > 10 * trust.BOUND
