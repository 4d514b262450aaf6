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


def run(layer: Layer) -> OnePass:
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
    assert done.said == ["decoding step (1x): attention of one token begins early (fp4::attention)"]
    assert done.undone[0] == done.undone[1]


@pytest.mark.parametrize(
    "kind", ["two tokens", "added mask", "mask of heads", "keys apart", "float32", "small heads", "long"]
)
def test_what_stays(kind, monkeypatch):
    if kind == "long":
        monkeypatch.setattr(attention, "MAX_BYTES", 1000)
    done = run(Layer(kind))
    assert not done.calls(fp4.attention.default) and done.said == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_check_of_the_first_use(monkeypatch, dtype):
    """By torch's operations, which serve a CPU; then with results that see every key."""
    assert max(trust._attention_error(dtype, "cpu", n) for n in (1, 4)) < trust.BOUND
    right = fp4.attention
    monkeypatch.setattr(
        fp4, "attention", lambda q, keys, values, mask, scale: right(q, keys, values, None, scale)
    )
    assert trust._attention_error(dtype, "cpu", 1) > 10 * trust.BOUND
