"""fp4::update_cache and attention of its result become fp4::cached_attention, but only if nothing else sees
when the cache is written.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from families import tiny
from moe_models import relative_error, tokens
from one_pass import OnePass
from recorder import Recorder
from test_cache import LENGTH, D, Layer, Q, check_that_no_cache_is_copied, text_of, through_inductor

import fp4_ops
from fp4_ops.backends.hopper import trust
from fp4_ops.compile_passes.step import attention, cache, cached

expecttest = pytest.importorskip("expecttest")
aten, fp4 = torch.ops.aten, torch.ops.fp4
BF16 = torch.bfloat16
ONE, UPDATE, ATTENTION = (
    fp4.cached_attention.default,
    fp4.update_cache.default,
    fp4.attention.default,
)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The CPU stands for a GPU with the kernels."""
    for one in (cache, attention, cached):
        monkeypatch.setattr(one, "runs", lambda device: True)
    for one in (cache, attention):
        monkeypatch.setitem(one.DTYPES, "cpu", one.DTYPES["cuda"])


class Step(Layer):
    """A layer of test_cache.py with torch's attention, or with fp4::attention."""

    def __init__(self, kind="", **options) -> None:
        super().__init__(kind, **options)
        for name in ("other_keys", "other_values"):
            self.register_buffer(name, torch.randn_like(self.keys))
        self.register_buffer("sinks", torch.randn(Q).to(self.keys.dtype))

    def attended(self, q):
        kind, keys, values, more = self.kind, self.keys, self.values, 0.0
        mask = (torch.arange(LENGTH) <= self.count - 1).view(1, 1, 1, LENGTH)
        if kind == "another cache of keys":
            keys = self.other_keys
        if kind == "another cache of values":
            values = self.other_values
        if kind == "crossed":
            keys, values = values, keys
        if kind == "a view":
            keys = keys.view(-1, LENGTH, D).view(keys.shape)
        if kind == "copies":
            keys, values = keys.clone(), values.clone()
        if kind == "queries read":
            more = q.float().sum()
        if kind == "other queries":
            q = q + 1
        if kind == "read between":
            mask = mask & (self.values.float().sum() < 1e9)
        if kind == "read after":
            return self.by_torch(q, keys, values, mask) + self.keys.float().sum().to(q.dtype)
        if kind == "operator":
            return fp4.attention(q.transpose(1, 2), keys, values, None, 0.1)
        if kind == "sinks":
            return fp4.attention(q.transpose(1, 2), keys, values, mask, 0.1, self.sinks)
        if kind == "two attentions":
            first, second = (
                fp4.attention(q.transpose(1, 2), keys, values, None, scale) for scale in (0.1, 0.2)
            )
            return first + second
        if self.tokens > 1:
            return fp4.attention(q.transpose(1, 2), keys, values, None, 0.1)
        return self.by_torch(q, keys, values, None if kind == "no mask" else mask) + more

    def by_torch(self, q, keys, values, mask):
        return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)


def passes(graph):
    cache.write_caches(graph)
    attention.write_attention(graph)
    return cached.write_cached_attention(graph)


def run(layer: Step, write=passes) -> OnePass:
    """The rewritten layer gives and holds what the layer does, up to rounding."""
    torch._dynamo.reset()
    held = {name: x.clone() for name, x in layer.state_dict().items()}
    with torch.no_grad():
        want = layer(layer.x)
        after = {name: x.clone() for name, x in layer.state_dict().items()}
        layer.load_state_dict(held)
        got = torch.compile(layer, backend=(done := OnePass(write)), fullgraph=True)(layer.x)
    assert got.shape == want.shape and relative_error(got, want.double()) < 1e-2
    for name, x in layer.state_dict().items():
        assert torch.allclose(x.double(), after[name].double(), rtol=1e-2, atol=1e-2), name
    return done


def two_are_one(done: OnePass) -> bool:
    return not done.calls(UPDATE) and not done.calls(ATTENTION)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("kind", ["", "no mask", "operator", "sinks", "read after", "halves"])
def test_a_layer_is_one_call(kind, dtype):
    done = run(Step(kind, dtype=dtype))
    (call,) = done.calls(ONE)
    assert two_are_one(done)
    (mask,) = call.args[11:12]
    assert (mask is None) == (kind in ("no mask", "operator"))
    assert (len(call.args) == 14) == (kind == "sinks")
    assert done.said == [
        "decoding step (1x): the update of the cache and attention are one operator (fp4::cached_attention)"
    ]
    assert done.undone[0] == done.undone[1]


@pytest.mark.parametrize(
    "kind",
    [
        "another cache of keys", "another cache of values", "crossed", "a view", "copies", "queries read",
        "other queries", "read between", "two attentions",
    ],
)  # fmt: skip
def test_what_stays(kind):
    done = run(Step(kind))
    assert done.said == [] and not done.calls(ONE) and done.calls(UPDATE)


def test_several_tokens_and_large_heads_stay(monkeypatch):
    done = run(Step(tokens=2))
    assert len(done.calls(UPDATE)) == len(done.calls(ATTENTION)) == 1 and not done.calls(ONE)
    monkeypatch.setattr(cached, "HEAD_SIZES", (128,))
    done = run(Step())
    assert len(done.calls(UPDATE)) == len(done.calls(ATTENTION)) == 1 and not done.calls(ONE)


def test_a_cpu_has_one(monkeypatch):
    monkeypatch.undo()
    done = run(Step())
    assert len(done.calls(ONE)) == 1 and not done.calls(UPDATE) and not done.calls(ATTENTION)


@pytest.mark.parametrize("written", ["start", "keys", None])
def test_what_is_written_between_stays(written):
    """Passes before write to arguments, too: a write between the two, of the update's place or cache."""

    def write(graph):
        cache.write_caches(graph)
        attention.write_attention(graph)
        ((update,), (reader,)) = (graph.find_nodes(op="call_function", target=x) for x in (UPDATE, ATTENTION))
        place = update.args[{"keys": 8, "start": 10, None: 10}[written]]
        target, given = (aten.copy_.default, (place, place)) if written else (aten.neg.default, (place,))
        with graph.inserting_before(reader):
            graph.call_function(target, given)
        return cached.write_cached_attention(graph)

    done = run(Step(), write)
    assert len(done.calls(ONE)) == (written is None)


@pytest.mark.slow
def test_inductor_copies_no_cache():
    """The operator writes to the model's own caches."""
    code = through_inductor(Step(sequences=2), OnePass(passes))
    assert "cached_attention" in code
    check_that_no_cache_is_copied(code)


class TestGolden(expecttest.TestCase):
    def test_a_layer(self) -> None:
        self.assertExpectedInline(
            text_of(run(Step(sequences=1))),
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
add_5 = aten.add.Tensor(a8_1, 1)
arange_1 = aten.arange(6,)
sub = aten.sub.Tensor(add_5, 1)
le = aten.le.Tensor(arange_1, sub)
view_6 = aten.view(le, [1, 1, 1, 6])
cached_attention = fp4.cached_attention(view_1, view_3, view_5, a0_1, a1_1, a5_1, a6_1, 1e-06, a10_1, a9_1, a8_1, view_6, 0.125)
transpose_int_1 = aten.transpose.int(cached_attention, 1, 2)
add_6 = aten.add.Tensor(transpose_int_1, 0.0)
add_7 = aten.add.Tensor(add_6, 0)
copy_ = aten.copy_(a8_1, add_5)""",  # noqa: E501
        )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model(family, monkeypatch):
    """The whole backend writes the operator, and the steps are those without it, bit for bit."""
    transformers = pytest.importorskip("transformers")
    model = tiny(family, hidden_size=256, head_dim=D).bfloat16()
    fp4_ops.prepare(model, "nvfp4")
    ids = tokens(1, 7)
    found = []
    for alone in (True, False):
        torch._dynamo.reset()
        monkeypatch.setattr(cached, "runs", lambda device, alone=alone: not alone)
        step, held = (
            torch.compile(model, backend=(recorder := Recorder())),
            transformers.StaticCache(config=model.config, max_cache_len=16),
        )
        with torch.no_grad():
            model(ids[:, :4], past_key_values=held)
            made = [step(ids[:, i : i + 1], past_key_values=held).logits for i in range(4, 7)]
        names = [str(n.target) for n in recorder.graphs[0].graph.nodes]
        layers = model.config.num_hidden_layers
        assert names.count(f"fp4.{'update_cache' if alone else 'cached_attention'}.default") == layers
        assert alone or not {"fp4.update_cache.default", "fp4.attention.default"} & {*names}
        found.append(torch.cat(made, 1))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_check_of_the_kernel(monkeypatch, dtype):
    """By the two operators; then with a wrong place, without a mask or a norm, and with nothing written."""
    assert trust._cached_attention_error(dtype, "cpu", 1) < trust.BOUND
    right = fp4.cached_attention

    def unwritten(*given):
        caches = [cache.clone() for cache in given[8:10]]
        return right(*given[:8], *caches, *given[10:])

    wrong = [
        lambda *given: right(*given[:10], given[10] - 1, *given[11:]),
        lambda *given: right(*given[:11], None, *given[12:]),
        lambda *given: right(*given[:5], None, *given[6:]),
        unwritten,
    ]
    for one in wrong:
        monkeypatch.setattr(fp4, "cached_attention", one)
        assert not trust._cached_attention_error(dtype, "cpu", 1) < 10 * trust.BOUND
