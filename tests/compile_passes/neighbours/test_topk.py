"""A router's topk becomes repeated maxima if it qualifies: the same values, and the lower index first for
equal ones."""

from __future__ import annotations

import pytest
import torch
from moe_models import Block, Recorder, build, tokens
from torch.fx.experimental.proxy_tensor import make_fx

import fp4_ops
from fp4_ops.compile_passes import passes
from fp4_ops.compile_passes.neighbours import topk as module
from fp4_ops.compile_passes.neighbours.topk import write_topk

expecttest = pytest.importorskip("expecttest")
CompileConfig = pytest.importorskip("transformers").CompileConfig
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def on_this_device(fresh_dynamo, monkeypatch):
    """Apply the rewrite for GPUs on this machine."""
    monkeypatch.setattr(module, "DEVICES", ("cpu",))


def rewritten(fn, *args, **kwargs) -> torch.fx.GraphModule:
    gm = make_fx(fn, decomposition_table={}, **kwargs)(*args)
    gm.meta["also"] = write_topk(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def count(gm: torch.fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=aten.topk.default))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_those_of_topk_and_indices_lead_to_them(dtype):
    for shape, k in (
        ((64, 128), 8),
        ((1, 128), 8),
        ((3, 5, 60), 4),
        ((7, 512), 16),
        ((9, 3), 3),
        ((5, 1), 1),
    ):
        for scores in (torch.randn(shape), torch.randn(shape).softmax(-1), torch.randint(-2, 3, shape)):
            x = scores.to(dtype)
            values, ids = rewritten(lambda x: torch.topk(x, k), x)(x)  # noqa: B023
            assert values.dtype == dtype and ids.dtype == torch.int64
            assert torch.equal(values, torch.topk(x, k).values)
            # Equal scores from the lowest index up: what a stable sort does.
            assert torch.equal(ids, torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k])


def test_scores_that_are_not_finite():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[0.0, nan, -inf, inf, -0.0, -1.0, -nan, -inf], [-inf] * 8])
    assert x[0, 6].isnan()
    for k in range(1, 9):
        values, ids = rewritten(lambda x: torch.topk(x, k), x)(x)  # noqa: B023
        torch.testing.assert_close(values, torch.topk(x, k).values, rtol=0, atol=0, equal_nan=True)
        assert ids[0].tolist() == [1, 6, 3, 0, 4, 5, 2, 7][:k]
        assert ids[1].tolist() == list(range(k))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.topk(x, 2, largest=False),
        lambda x: torch.topk(x, 2, dim=0),
        lambda x: torch.topk(x.double(), 2),
        lambda x: torch.topk(x.repeat(1, 100), 2),
        lambda x: torch.topk(x, 17),
        lambda x: torch.topk(x, 0),
        lambda x: torch.topk((100 * x).long(), 2),
        lambda x: torch.topk(x[0, 0], 1),
    ],
)
def test_what_is_left_alone(call):
    x = torch.randn(6, 20)
    gm = rewritten(call, x)
    assert count(gm) == 1 and gm.meta["also"] == []
    for got, want in zip(gm(x), call(x), strict=True):
        assert torch.equal(got, want)


def test_symbolic_sizes():
    """Rows may be symbolic, what is chosen from must not be."""
    x = torch.randn(6, 20)
    assert count(rewritten(lambda x: torch.topk(x, 2), x, tracing_mode="symbolic")) == 1

    w = torch.randn(20, 12)

    def router(x):
        return torch.topk(x @ w, 2)

    compiled = torch.compile(router, backend=(recorder := _Rewriter()))
    for rows in (6, 9):
        x = torch.randn(rows, 20)
        torch._dynamo.mark_dynamic(x, 0)
        for got, want in zip(compiled(x), router(x), strict=True):
            assert torch.equal(got, want)
    assert recorder.left == [0]


class _Rewriter:
    """A backend that only rewrites topk."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def __call__(self, gm, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def compile(gm, inputs):
            write_topk(gm.graph)
            gm.recompile()
            self.left.append(count(gm))
            return gm.forward

        return aot_autograd(fw_compiler=compile)(gm, inputs)


def test_other_users_of_the_results():
    """Results that go elsewhere too, or of which one is not used."""

    def both(x):
        values, ids = torch.topk(x, 3)
        return values.exp(), values, ids, x.gather(1, ids), torch.topk(x, 2).indices.view(-1)

    x = torch.randn(5, 16)
    gm = rewritten(both, x)
    assert count(gm) == 0
    for got, want in zip(gm(x), both(x), strict=True):
        assert torch.equal(got, want)


# --- in the backend ---


def test_only_graphs_with_fp4_experts():
    x = torch.randn(7, 32)
    for model, rewrites in ((Block("grouped_mm"), 1), (torch.nn.Linear(32, 12), 0)):
        recorder = Recorder(activation="bf16")

        def run(x, model=model):
            return torch.topk(model(x), 3).values

        with torch.no_grad():
            compiled = torch.compile(run, backend=recorder)
            compiled(x)
        assert [len(f.also) > 0 for f in recorder.frames] == [rewrites > 0]


def test_the_backend_and_explain(monkeypatch):
    model, x = Block("grouped_mm"), torch.randn(5, 32)
    recorder, plain = Recorder(activation="bf16"), Recorder(activation="bf16")
    with torch.no_grad():
        got = torch.compile(model, backend=recorder)(x)
        monkeypatch.setattr(module, "DEVICES", ("cuda",))
        torch._dynamo.reset()
        assert torch.equal(got, torch.compile(model, backend=plain)(x))
    assert [count(r.graphs[0]) for r in (recorder, plain)] == [0, 1]
    assert "topk" not in str(fp4_ops.explain(model, x))
    monkeypatch.setattr(module, "DEVICES", ("cpu",))
    report = fp4_ops.explain(model, x)
    (text,) = report.frames[0].also
    assert text.startswith("1 topk of 2 in 6 became rounds of a maximum") and text in str(report)
    assert report.to_dict()["frames"][0]["also"] == [text]


@pytest.mark.more
def test_a_prepared_model(monkeypatch):
    """Nothing of its experts and routers is rewritten but topk."""
    monkeypatch.setattr(passes, "write_attention", lambda *_: [])  # another kernel rounds in another way
    model = build("qwen3_moe", torch.float32, "grouped_mm")
    fp4_ops.prepare(model, activation="bf16")
    ids = tokens(2, 5)
    recorder = Recorder()
    with torch.no_grad():
        compiled = torch.compile(model, backend=recorder)
        assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    (frame,) = recorder.frames
    assert not frame.note and len(frame.also) == 1
    assert recorder.ops == ["fp4::moe"] * model.config.num_hidden_layers
    assert not any(site.weights for site in frame.sites)


@pytest.mark.more
def test_a_prepared_model_generates_with_a_static_cache():
    """As many compilations as without `prepare`: decode, and at most one more."""
    model = build("mixtral", torch.float32, "grouped_mm")
    fp4_ops.prepare(model, activation="bf16")
    ids = tokens(2, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options)
    recorder = Recorder()
    config = CompileConfig(backend=lambda gm, inputs, mode=None: recorder(gm, inputs))
    config._compile_all_devices = True  # transformers compiles on CUDA only unless told so
    got = model.generate(ids, **options, cache_implementation="static", compile_config=config)
    assert torch.equal(got, want)
    assert 1 <= recorder.compilations <= 2 and all(frame.also for frame in recorder.frames)
    assert set(recorder.ops) == {"fp4::moe"}


class TestGolden(expecttest.TestCase):
    def test_rounds(self) -> None:
        gm = rewritten(lambda x: torch.topk(x, 2), torch.randn(3, 6, dtype=torch.bfloat16))
        nodes = [f"{n} = {n.target}{n.args}" for n in gm.graph.nodes if n.op == "call_function"]
        self.assertExpectedInline(
            "\n".join(nodes),
            """\
_to_copy_default = aten._to_copy.default(x_1,)
eq_scalar = aten.eq.Scalar(_to_copy_default, 0.0)
where_scalar_self = aten.where.ScalarSelf(eq_scalar, 0.0, _to_copy_default)
view_dtype = aten.view.dtype(where_scalar_self, torch.int32)
bitwise_xor_scalar = aten.bitwise_xor.Scalar(view_dtype, 2147483647)
lt_scalar = aten.lt.Scalar(view_dtype, 0)
where_self = aten.where.self(lt_scalar, bitwise_xor_scalar, view_dtype)
isnan_default = aten.isnan.default(_to_copy_default,)
where_scalar_self_1 = aten.where.ScalarSelf(isnan_default, 2147483647, where_self)
_to_copy_default_1 = aten._to_copy.default(where_scalar_self_1,)
bitwise_left_shift_tensor_scalar = aten.bitwise_left_shift.Tensor_Scalar(_to_copy_default_1, 32)
arange_start_step = aten.arange.start_step(5, -1, -1)
bitwise_or_tensor = aten.bitwise_or.Tensor(bitwise_left_shift_tensor_scalar, arange_start_step)
amax_default = aten.amax.default(bitwise_or_tensor, [-1], True)
lt_tensor = aten.lt.Tensor(bitwise_or_tensor, amax_default)
where_scalar_other = aten.where.ScalarOther(lt_tensor, bitwise_or_tensor, -9223372036854775808)
amax_default_1 = aten.amax.default(where_scalar_other, [-1], True)
cat_default = aten.cat.default([amax_default, amax_default_1], -1)
bitwise_right_shift_tensor_scalar = aten.bitwise_right_shift.Tensor_Scalar(cat_default, 32)
_to_copy_default_2 = aten._to_copy.default(bitwise_right_shift_tensor_scalar,)
bitwise_xor_scalar_1 = aten.bitwise_xor.Scalar(_to_copy_default_2, 2147483647)
lt_scalar_1 = aten.lt.Scalar(_to_copy_default_2, 0)
where_self_1 = aten.where.self(lt_scalar_1, bitwise_xor_scalar_1, _to_copy_default_2)
view_dtype_1 = aten.view.dtype(where_self_1, torch.float32)
bitwise_and_scalar = aten.bitwise_and.Scalar(cat_default, 4294967295)
_to_copy_default_3 = aten._to_copy.default(view_dtype_1,)
rsub_scalar = aten.rsub.Scalar(bitwise_and_scalar, 5)""",
        )


@pytest.mark.more
@pytest.mark.slow
def test_through_inductor():
    """The operators compile, and give a prepared model's own tokens."""
    model = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=1)
    fp4_ops.prepare(model, activation="bf16")
    ids = tokens(2, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options)
    config = CompileConfig(backend="fp4", mode=None)
    config._compile_all_devices = True
    got = model.generate(ids, **options, cache_implementation="static", compile_config=config)
    assert torch.equal(got, want)
