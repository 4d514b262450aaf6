"""The operators before the attention in a layer become fp4::update_cache, but only if they match exactly."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import SEED, more
from families import tiny
from moe_models import relative_error, tokens
from one_pass import OnePass
from recorder import Recorder, token_errors
from torch._inductor.utils import run_and_get_code

import fp4_ops
from fp4_ops.compile_passes.step import cache
from fp4_ops.meta.torch_internals import compile_fx

expecttest = pytest.importorskip("expecttest")
aten, fp4 = torch.ops.aten, torch.ops.fp4
BF16 = torch.bfloat16
D, HIDDEN, LENGTH = 64, 32, 6
Q, K = 4, 2
"""Numbers of heads."""


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The CPU stands for a GPU with the kernel, too."""
    monkeypatch.setattr(cache, "runs", lambda device: True)
    monkeypatch.setitem(cache.DTYPES, "cpu", cache.DTYPES["cuda"])


def norm(x, weight, eps=1e-6):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def turned(x):
    d = x.shape[-1] // 2
    return torch.cat((-x[..., d:], x[..., :d]), dim=-1)


class Layer(torch.nn.Module):
    """The part of an attention layer, as transformers writes it. `kind` names what is different."""

    def __init__(self, kind: str = "", k_norm: bool = True, dtype=BF16, sequences=3, tokens=1) -> None:
        super().__init__()
        self.kind, self.k_norm, self.tokens = kind, k_norm, tokens

        def held(name, *shape):
            self.register_buffer(name, torch.randn(*shape).to(dtype))

        for name, n in (("wq", Q), ("wk", K), ("wv", K)):
            held(name, n * D, HIDDEN)
        held("nq", D), held("nk", D), held("nwq", Q * D), held("nwk", K * D)
        angles = D // 2 if kind.startswith("halves") else D
        held("cos", 1, tokens, angles), held("sin", 1, tokens, angles)
        held("keys", sequences, K, LENGTH, D), held("values", sequences, K, LENGTH, D)
        self.register_buffer("count", torch.tensor(2))
        self.x = torch.randn(sequences, tokens, HIDDEN).to(dtype)

    def heads(self, x, w):
        return (x.view(-1, HIDDEN) @ w.t()).view(*x.shape[:2], -1, D)

    def rotated(self, y, cos, sin):
        if self.kind == "turned back":
            d = D // 2
            return y * cos + torch.cat((y[..., d:], -y[..., :d]), dim=-1) * sin
        if self.kind == "interleaved":
            other = torch.stack((-y[..., 1::2], y[..., ::2]), dim=-1).flatten(-2)
            return y * cos + other * sin
        if self.kind == "minus":
            return y * cos - turned(y) * sin
        if self.kind == "of another":
            return y * cos + turned(y * 2) * sin
        if self.kind.startswith("halves"):
            return self.halves(y, cos, sin)
        return y * cos + turned(y) * sin

    def halves(self, y, cos, sin):
        """Rotates as gpt-oss writes it."""
        kind = self.kind.removeprefix("halves").removeprefix(", ")
        low, high = y.chunk(2, dim=-1)
        if kind == "slices":
            low, high = y[..., : D // 2], y[..., D // 2 :]
        if kind == "other way":
            low, high = high, low
        if kind == "quarters":
            low, high = y[..., D // 4 : D // 4 + D // 2], y[..., D // 2 :]
        first, second = low * cos - high * sin, high * cos + low * sin
        if kind == "turned back":
            first, second = low * cos + high * sin, high * cos - low * sin
        if kind == "crossed":
            second = low * cos + high * sin
        if kind == "angles crossed":
            second = high * sin + low * cos
        if kind == "three":
            return torch.cat((first, second, first), dim=-1)[..., :D]
        if kind == "places":
            return torch.cat((second, first), dim=-1)
        return torch.cat((first, second), dim=-1)

    def forward(self, x):
        kind = self.kind
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        q, k = self.heads(x, self.wq), self.heads(x, self.wk)
        if kind == "whole norm":
            q, k = (norm(y.flatten(2), w).view(y.shape) for y, w in ((q, self.nwq), (k, self.nwk)))
        else:
            q = norm(q, self.nq)
        if self.k_norm and kind != "whole norm":
            k = norm(k, self.nk, 1e-3 if kind == "two epsilons" else 1e-6)
        v = self.heads(x, self.wv).transpose(1, 2)
        q = self.rotated(q.transpose(1, 2), cos, sin)
        k = k.transpose(1, 2)
        k = self.rotated(k, sin, cos) if kind == "two angles" else self.rotated(k, cos, sin)
        places = torch.arange(self.tokens) + self.count
        before = self.keys.float().sum() if kind == "read before" else 0
        if kind == "two starts":
            self.count.add_(1)
            self.values.index_copy_(2, torch.arange(self.tokens) + self.count, v)
        else:
            self.values.index_copy_(2, places[:1] if kind == "other places" else places, v)
        self.keys.index_copy_(2, places + 1 if kind == "moved" else places, k)
        if kind == "written twice":
            self.keys.index_copy_(2, places + 1, k)
        if kind != "two starts":
            self.count.add_(self.tokens)
        if kind == "k read":
            before = before + k.float().sum()
        return self.attended(q) + before

    def attended(self, q):
        y = torch.softmax((q.unflatten(1, (K, -1)) @ self.keys.unsqueeze(2).mT).float(), -1).to(q.dtype)
        return y @ self.values.unsqueeze(2)


def run(layer: Layer) -> OnePass:
    """The rewritten layer gives and holds what the layer does, up to rounding."""
    torch._dynamo.reset()
    held = {name: x.clone() for name, x in layer.state_dict().items()}
    with torch.no_grad():
        want = layer(layer.x)
        after = {name: x.clone() for name, x in layer.state_dict().items()}
        layer.load_state_dict(held)
        got = torch.compile(layer, backend=(done := OnePass(cache.write_caches)), fullgraph=True)(layer.x)
    assert got.shape == want.shape and relative_error(got, want.double()) < 1e-2
    for name, x in layer.state_dict().items():
        assert torch.allclose(x.double(), after[name].double(), rtol=1e-2, atol=1e-2), name
    return done


def updates(done: OnePass) -> list[torch.fx.Node]:
    return done.calls(fp4.update_cache.default)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("k_norm", [True, False])
def test_a_layer_is_one_call(k_norm, dtype):
    done = run(Layer(k_norm=k_norm, dtype=dtype, sequences=random.Random(SEED).randint(1, 4)))
    (call,) = updates(done)
    assert [w is not None for w in call.args[5:7]] == [True, k_norm]
    assert done.said == [
        "decoding step (1x): norms of heads, rotary position embedding and the write to the cache are one "
        "kernel (fp4::update_cache)"
    ]
    left = {n.target for n in done.graph.nodes}
    assert not left & {aten.index_copy.default, aten.cat.default, aten.rsqrt.default}


def test_a_norm_of_the_whole_projection_stays_before_it():
    done = run(Layer("whole norm"))
    (call,) = updates(done)
    assert call.args[5:7] == (None, None)
    assert len([n for n in done.graph.nodes if n.target is aten.rsqrt.default]) == 2


def test_several_tokens_of_a_sequence():
    assert len(updates(run(Layer(tokens=3)))) == 1


@pytest.mark.parametrize("kind", ["halves", "halves, slices"])
@pytest.mark.parametrize("norms", [True, False])
def test_halves_are_rotated_to_the_same_bits(kind, norms, monkeypatch):
    """As gpt-oss writes it. Without norms, the cache is the same to the bit."""
    layer = Layer(kind, k_norm=norms)
    if not norms:
        monkeypatch.setitem(globals(), "norm", lambda x, weight, eps=1e-6: x)
    held = {name: x.clone() for name, x in layer.state_dict().items()}
    done = run(layer)
    (call,) = updates(done)
    assert [tuple(x.meta["val"].shape) for x in call.args[3:5]] == [(1, 1, D), (1, 1, D)]
    if not norms:
        torch._dynamo.reset()
        got = {name: x.clone() for name, x in layer.state_dict().items()}
        layer.load_state_dict(held)
        layer(layer.x)
        assert all(torch.equal(x, got[name]) for name, x in layer.state_dict().items())


class Two(torch.nn.Module):
    """Two layers that share their angles."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer("halves"), Layer("halves")
        self.b.cos, self.b.sin, self.x = self.a.cos, self.a.sin, self.a.x

    def forward(self, x):
        return self.a(x) + self.b(x * 2)


def test_layers_share_the_angles_of_whole_heads():
    torch._dynamo.reset()
    model = Two()
    with torch.no_grad():
        torch.compile(model, backend=(done := OnePass(cache.write_caches)), fullgraph=True)(model.x)
    first, second = updates(done)
    assert first.args[3:5] == second.args[3:5]
    assert len(done.calls(aten.cat.default)) == 2


def test_a_second_run_is_undone_as_before():
    done = run(Layer())
    before, after = done.undone
    assert after is not None and after == before


@pytest.mark.parametrize(
    "kind",
    ["turned back", "interleaved", "minus", "of another", "two angles", "two epsilons", "two starts",
     "moved", "written twice", "read before", "k read", "halves, other way", "halves, quarters",
     "halves, turned back", "halves, crossed", "halves, angles crossed", "halves, three", "halves, places"],
)  # fmt: skip
def test_what_stays(kind):
    done = run(Layer(kind))
    assert not updates(done) and done.said == []


def test_parts_of_wider_heads_stay():
    """The product makes heads of 2 D. Half of each is rotated and kept."""
    torch._dynamo.reset()
    layer = Layer("halves")
    wq, wk = (torch.randn(n * 2 * D, HIDDEN).to(BF16) for n in (Q, K))

    def rotated(x, w):
        y = (x.view(-1, HIDDEN) @ w.t()).view(*x.shape[:2], -1, 2 * D).transpose(1, 2)
        low, high, cos, sin = (
            y[..., : D // 2],
            y[..., D // 2 : D],
            layer.cos.unsqueeze(1),
            layer.sin.unsqueeze(1),
        )
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def step(x):
        v, places = layer.heads(x, layer.wv).transpose(1, 2), torch.arange(1) + layer.count
        q = rotated(x, wq)
        layer.values.index_copy_(2, places, v), layer.keys.index_copy_(2, places, rotated(x, wk))
        return q.unflatten(1, (K, -1)) @ layer.keys.unsqueeze(2).mT

    with torch.no_grad():
        got = torch.compile(step, backend=(done := OnePass(cache.write_caches)), fullgraph=True)(layer.x)
        want = step(layer.x)
    assert not updates(done) and relative_error(got, want.double()) < 1e-2


def test_heads_of_two_sizes_share_angles():
    """The whole angles of heads of 64 are the half angles of heads of 128."""
    torch._dynamo.reset()
    cos, sin = torch.randn(2, 1, 1, 64).to(BF16)
    x = torch.randn(3, 1, HIDDEN).to(BF16)
    weights = {d: [torch.randn(n * d, HIDDEN).to(BF16) for n in (Q, K, K)] for d in (64, 128)}
    caches = {d: [torch.randn(3, K, LENGTH, d).to(BF16) for _ in range(2)] for d in (64, 128)}
    count = torch.tensor(2)

    def rotated(y, c, s):
        if y.shape[-1] == 64:
            return y * c + turned(y) * s
        low, high = y.chunk(2, -1)
        return torch.cat((low * c - high * s, high * c + low * s), -1)

    def step(x):
        c, s, places, found = cos.unsqueeze(1), sin.unsqueeze(1), torch.arange(1) + count, []
        for d, of_layer in weights.items():
            heads = [(x.view(-1, HIDDEN) @ w.t()).view(*x.shape[:2], -1, d).transpose(1, 2) for w in of_layer]
            q, k = (rotated(y, c, s) for y in heads[:2])
            keys, values = caches[d]
            values.index_copy_(2, places, heads[2]), keys.index_copy_(2, places, k)
            found.append(q.unflatten(1, (K, -1)) @ keys.unsqueeze(2).mT)
        return found

    with torch.no_grad():
        got = torch.compile(step, backend=(done := OnePass(cache.write_caches)), fullgraph=True)(x)
        want = step(x)
    assert [call.args[3].meta["val"].shape[-1] for call in updates(done)] == [64, 128]
    assert all(relative_error(a, b.double()) < 1e-2 for a, b in zip(got, want, strict=True))


def test_other_sizes_stay():
    assert not updates(run(Layer(dtype=torch.float32)))
    layer = Layer(sequences=cache.MAX_TOKENS // 2 + 1, tokens=2)
    assert not updates(run(layer))


def test_a_step_on_the_cpu(monkeypatch):
    """The dtype is bfloat16, as users have it. The kernel rounds where the model does, so without norms the
    bits are the same."""
    monkeypatch.undo()
    assert cache.runs(torch.device("cpu"))
    assert len(updates(run(Layer()))) == 1
    assert not updates(run(Layer(dtype=torch.float16)))


class ByOperator(Layer):
    """Its attention copies no cache: it is fp4::attention."""

    def attended(self, q):
        return fp4.attention(q.transpose(1, 2), self.keys, self.values, None, 0.1)


def through_inductor(layer: Layer, one: OnePass, **options: object) -> str:
    """Runs the rewritten layer for two steps, of which the second sees what the first has written, and
    returns Inductor's code."""
    torch._dynamo.reset()

    def backend(gm, inputs):
        one(gm, inputs)
        return compile_fx(torch.fx.GraphModule(gm, one.graph), inputs, config_patches=options)

    held = {name: x.clone() for name, x in layer.state_dict().items()}
    with torch.no_grad():
        want = [layer(layer.x), layer(layer.x * 2)]
        after = {name: x.clone() for name, x in layer.state_dict().items()}
        layer.load_state_dict(held)
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        first, (code,) = run_and_get_code(compiled, layer.x)
        got = [first, compiled(layer.x * 2)]
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b.double()) < 1e-2
    for name, x in layer.state_dict().items():
        assert torch.allclose(x.double(), after[name].double(), rtol=1e-2, atol=1e-2), name
    return code


@pytest.mark.slow
@pytest.mark.parametrize("cpp_wrapper", [False, more(True)])
def test_inductor_copies_no_cache(cpp_wrapper):
    """The operator writes to the model's own caches. Nothing that Inductor makes is as large as a cache."""
    layer = ByOperator(sequences=2)
    code = through_inductor(layer, one := OnePass(cache.write_caches), cpp_wrapper=cpp_wrapper)
    assert len(updates(one)) == 1
    assert "update_cache" in code
    check_that_no_cache_is_copied(code)


def check_that_no_cache_is_copied(code: str) -> None:
    """Checks Inductor's code of a layer of two sequences."""
    assert "index_copy" not in code and "clone" not in code and "auto_functionalized" not in code
    large = f"empty_strided_cpu((2, {K}, {LENGTH}, {D})"
    assert large not in code and large.replace(f"{K}, ", f"{K}L, ") not in code


def text_of(done: OnePass) -> str:
    """Returns the calls of a rewritten graph, with short names."""
    nodes = [f"{n} = {n.target}{n.args}" for n in done.graph.nodes if n.op == "call_function"]
    return "\n".join(nodes).replace("_default", "").replace(".default", "").replace("arg", "a")


class TestGolden(expecttest.TestCase):
    def test_a_layer(self) -> None:
        self.assertExpectedInline(
            text_of(run(ByOperator(sequences=1))),
            """\
view = aten.view(a3_1, [-1, 32])
t = aten.t(a2_1,)
mm = aten.mm(view, t)
view_1 = aten.view(mm, [1, 1, -1, 64])
view_2 = aten.view(a3_1, [-1, 32])
t_1 = aten.t(a4_1,)
mm_1 = aten.mm(view_2, t_1)
view_3 = aten.view(mm_1, [1, 1, -1, 64])
view_4 = aten.view(a3_1, [-1, 32])
t_2 = aten.t(a7_1,)
mm_2 = aten.mm(view_4, t_2)
view_5 = aten.view(mm_2, [1, 1, -1, 64])
update_cache = fp4.update_cache(view_1, view_3, view_5, a0_1, a1_1, a5_1, a6_1, 1e-06, a10_1, a9_1, a8_1)
transpose_int = aten.transpose.int(update_cache, 1, 2)
add_5 = aten.add.Tensor(a8_1, 1)
transpose_3 = aten.transpose.int(transpose_int, 1, 2)
attention = fp4.attention(transpose_3, a10_1, a9_1, None, 0.1)
add_6 = aten.add.Tensor(attention, 0)
copy_ = aten.copy_(a8_1, add_5)""",
        )


WEIGHTS = {"experts": {}, "all": {"attention": "nvfp4", "head": "nvfp4"}}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "family", ["qwen3_moe", *map(more, ("mixtral", "olmoe", "gpt_oss", "phimoe", "granitemoe"))]
)
def test_a_model(family, weights, monkeypatch):
    """The whole backend writes the operator on a CPU, with attention in bfloat16 or in 4 bits. OLMoE norms
    whole projections."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.undo()
    torch._dynamo.reset()
    model = tiny(family, hidden_size=256, head_dim=D).bfloat16()
    fp4_ops.prepare(model, "nvfp4", **WEIGHTS[weights])
    ids = tokens(1, 7)

    def steps(step):
        held = transformers.StaticCache(config=model.config, max_cache_len=16)
        made = [model(ids[:, :4], past_key_values=held).logits[:, -1:]]
        for i in range(4, 7):
            made.append(step(ids[:, i : i + 1], past_key_values=held).logits)
        return torch.cat(made, 1)

    recorder = Recorder()
    with torch.no_grad():
        want, got = steps(model), steps(torch.compile(model, backend=recorder))
    assert token_errors(got, want)[0] < 5e-2
    layers = model.config.num_hidden_layers
    names = [str(n.target) for n in recorder.graphs[0].graph.nodes]
    written = [name for name in names if name in ("fp4.update_cache.default", "fp4.cached_attention.default")]
    assert len(written) == layers and "aten.index_copy.default" not in names
    assert f"decoding step ({layers}x): norms of heads, rotary" in " ".join(recorder.frames[0].also)
