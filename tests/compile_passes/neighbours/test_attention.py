"""Attention beside fp4 experts: query heads of a group share keys, and masks made of positions become
is_causal."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import SEED
from moe_models import Recorder, build, relative_error, tokens
from one_pass import copied
from torch._guards import TracingContext, detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import StaticCache

import fp4_ops
from fp4_ops.compile_passes import passes as module
from fp4_ops.compile_passes.graph.nodes import is_tensor
from fp4_ops.compile_passes.neighbours.attention import SDPA, TRUE, Masks, NotBefore, Place, write_attention

expecttest = pytest.importorskip("expecttest")
aten = torch.ops.aten


class Rewriter:
    """A backend that captures, rewrites attention alone, and runs the graph."""

    def __call__(self, gm, inputs):
        context = TracingContext.try_get()
        mode = context.fake_mode if context is not None else detect_fake_mode(inputs)
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        if any(isinstance(x, torch.SymInt) for x in inputs):
            fakes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        self.gm = copied(gm, fakes, mode)
        self.prepare(self.gm.graph)
        self.also = write_attention(self.gm.graph, mode)
        self.gm.graph.eliminate_dead_code()
        self.gm.graph.lint()
        self.gm.recompile()
        (self.call,) = self.gm.graph.find_nodes(op="call_function", target=SDPA)
        return self.gm.forward

    def prepare(self, graph: torch.fx.Graph) -> None:
        """Before attention is rewritten."""

    @property
    def grouped(self) -> bool:
        return bool(self.call.kwargs.get("enable_gqa"))

    @property
    def causal(self) -> bool:
        return len(self.call.args) > 5 and self.call.args[3] is None and self.call.args[5] is True

    @property
    def repeats(self) -> bool:
        return any(n.target in (aten.clone.default, aten.expand.default) for n in self.gm.graph.nodes)


def run(f, *args, dynamic: bool = False) -> Rewriter:
    """`f` rewritten computes what `f` does."""
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(f, backend=(rewriter := Rewriter()), dynamic=dynamic, fullgraph=True)(*args)
        want = f(*(x.double() if x.is_floating_point() else x for x in args))
    # bfloat16 probabilities times bfloat16 values, once more rounded.
    assert relative_error(got, want) < (5e-3 if got.dtype == torch.bfloat16 else 1e-5)
    return rewriter


def heads(device, b=2, s=7, length=None, h=8, groups=2, d=16, dv=None, dtype=torch.float32):
    """Queries [b, h, s, d], and keys and values [b, groups, length, d], as linear layers leave them."""
    length = s if length is None else length

    def draw(n, rows, d):
        return torch.randn(b, rows, n, d, device=device, dtype=dtype).transpose(1, 2)

    return draw(h, s, d), draw(groups, length, d), draw(groups, length, dv or d)


def repeated(x: torch.Tensor, n: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def interleaved(x, n):
    return x.repeat_interleave(n, dim=1)


def before_transposing(x, n):
    """[B, L, H, D], as torchtitan repeats it."""
    x = x.transpose(1, 2)
    b, s, h, d = x.shape
    return x[:, :, :, None].expand(b, s, h, n, d).reshape(b, s, h * n, d).transpose(1, 2)


def merged(out: torch.Tensor) -> torch.Tensor:
    """Reshape the result as models do: by a view, if its strides are those of the queries."""
    return out.transpose(1, 2).contiguous().view(out.shape[0], out.shape[2], -1)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("repeat", [repeated, interleaved, before_transposing])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_share_keys(device, repeat, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("no fused kernel of torch's takes groups of float32 heads with a mask on a GPU")
    d = 64 if device == "cuda" else 16
    for s, length in ((1, 9), (5, 9), (6, 6)):
        q, k, v = heads(device, s=s, length=length, d=d, dtype=dtype)
        seen = torch.rand(2, 1, s, length, device=device) < 0.7
        seen[..., 0] = True

        def attend(q, k, v, seen):
            return merged(F.scaled_dot_product_attention(q, repeat(k, 4), repeat(v, 4), attn_mask=seen))

        done = run(attend, q, k, v, seen, dynamic=s != 1)
        assert done.grouped and not done.causal and not done.repeats
        assert done.also == [
            "attention (1x): keys and values, which the model repeats, are read once for each group of heads "
            "(enable_gqa)"
        ]


def positions(s, length, device):
    """Queries and keys by their indices, [s, 1] and [1, length]."""
    return torch.arange(s, device=device)[:, None], torch.arange(length, device=device)[None, :]


def lower(s, length, device):
    q, k = positions(s, length, device)
    return k <= q


def by_distance(s, length, device):
    q, k = positions(s, length, device)
    return (q + 3 > k + 2) & torch.ones(s, length, dtype=torch.bool, device=device)


def one_sequence(s, length, device):
    """Causal within packed sequences, which start where positions do not go on: here is one."""
    at = (torch.arange(length, device=device) + 0)[None]
    first = torch.cat([at[:, :1] - 1, at], dim=-1)
    sequence = (first[:, 1:] - first[:, :-1] != 1).cumsum(-1)
    rows = torch.arange(s, device=device)
    row, key = rows[None, None, :, None], torch.arange(length, device=device)[None, None, None, :]
    batch = torch.arange(1, device=device)[:, None, None, None]
    same = sequence[batch, row] == sequence[batch, key]
    return same & (at[batch, key] <= at[batch, row])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", [lower, by_distance, one_sequence])
@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_that_are_causal(device, make, dynamic):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def attend(q, k, v):
        mask = make(q.shape[2], k.shape[2], q.device)
        return merged(F.scaled_dot_product_attention(q, repeated(k, 4), repeated(v, 4), attn_mask=mask))

    for s, length in ((7, 7), (5, 9)):
        done = run(attend, *heads(device, s=s, length=length, d=64, dtype=dtype), dynamic=dynamic)
        assert done.causal and done.grouped and len(done.also) == 2


def test_a_mask_that_hides_nothing(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def attend(q, k, v):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    done = run(attend, *heads(device, s=1, length=9, groups=8, d=64, dtype=dtype))
    assert done.call.args[3] is None and done.call.args[5] is False and not done.grouped


# --- what must stay ---


def window(s, length, device):
    q, k = positions(s, length, device)
    return (k <= q) & (k > q - 3)


def strictly_before(s, length, device):
    q, k = positions(s, length, device)
    return (k < q) | (k == 0)


def one_ahead(s, length, device):
    q, k = positions(s, length, device)
    return k <= q + 1


def from_the_end(s, length, device):
    """Aligned with the last key, as after a cache; with as many queries as keys it would be causal."""
    q, k = positions(s, length, device)
    return k <= q + 2


def backwards(s, length, device):
    q, k = positions(s, length, device)
    return k >= q


def two_sequences(s, length, device):
    at = torch.cat([torch.arange(3, device=device), torch.arange(length - 3, device=device)])[None]
    first = torch.cat([at[:, :1] - 1, at], dim=-1)
    sequence = (first[:, 1:] - first[:, :-1] != 1).cumsum(-1)[0]
    q, k = positions(s, length, device)
    return (sequence[:s, None] == sequence[None, :]) & (k <= q)


@pytest.mark.parametrize(
    "make",
    [window, strictly_before, one_ahead, from_the_end, backwards, two_sequences],
    ids=lambda f: f.__name__,
)
def test_masks_that_are_not_causal(make):
    def attend(q, k, v):
        mask = make(q.shape[2], k.shape[2], q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    done = run(attend, *heads("cpu", s=7, length=9, groups=8))
    assert done.also == [] and is_tensor(done.call.kwargs["attn_mask"])


def test_masks_that_the_data_decides():
    """Padding, or positions that are inputs."""

    def padded(q, k, v, keep):
        return F.scaled_dot_product_attention(q, k, v, lower(7, 7, "cpu") & keep[:, None, None])

    def placed(q, k, v, at):
        return F.scaled_dot_product_attention(q, k, v, (torch.arange(7)[None] <= at[:, None])[None, None])

    qkv = heads("cpu", groups=8)
    for f, other in (
        (padded, torch.tensor([[True] * 7, [True] * 5 + [False] * 2])),
        (placed, torch.arange(7)),
    ):
        assert run(f, *qkv, other).also == []


def tiled(x, n):
    """Whole sets of heads one after the other: head h is h % groups."""
    return x.repeat(1, n, 1, 1)


def some_twice(x, n):
    return torch.cat([x, *[x[:, :1]] * (2 * n - 2)], dim=1)


def along_the_sequence(x, n):
    """As many heads as before; keys repeated."""
    return x.repeat_interleave(n, dim=2)


@pytest.mark.parametrize("repeat", [tiled, some_twice, along_the_sequence], ids=lambda f: f.__name__)
def test_heads_that_are_repeated_otherwise(repeat):
    groups = 8 if repeat is along_the_sequence else 2

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, repeat(k, 4), repeat(v, 4))

    done = run(attend, *heads("cpu", groups=groups))
    assert done.also == [] and not done.grouped


def test_keys_and_values_in_other_groups():
    """Each is repeated, but not alike; or one of them only."""

    def unlike(q, k, v):
        return F.scaled_dot_product_attention(q, repeated(k, 4), repeated(v[:, :1], 8))

    def one(q, k, v):
        return F.scaled_dot_product_attention(q, repeated(k, 4), torch.cat([v, v, v, v], 1))

    for f in (unlike, one):
        assert run(f, *heads("cpu")).also == []


def test_no_kernel_for_the_whole(device):
    """Groups whose values are wider than keys: torch would repeat, multiply, take softmax and multiply."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(
            q, repeated(k, 4), repeated(v, 4), attn_mask=lower(7, 7, q.device)
        )

    done = run(attend, *heads(device, d=16, dv=24))
    assert not done.grouped and done.repeats


def test_dropout_stays():
    """The random numbers of dropout depend on the kernel that torch chooses for the unchanged call."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, repeated(k, 4), repeated(v, 4), dropout_p=0.5)

    class Capture(Rewriter):
        def __call__(self, gm, inputs):
            with pytest.raises(ValueError, match="not enough values"):
                super().__call__(gm, inputs)
            return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(attend, backend=Capture(), fullgraph=True)(*heads("cpu"))


def test_a_scale_that_the_graph_computes():
    """With dynamic=True Dynamo first makes a symbol of a module's float."""

    class Scaled(Rewriter):
        def prepare(self, graph):
            (call,) = graph.find_nodes(op="call_function", target=SDPA)
            with graph.inserting_before(next(iter(graph.nodes))):
                call.kwargs = {**call.kwargs, "scale": graph.placeholder("scale")}

        def __call__(self, gm, inputs):
            super().__call__(gm, inputs)
            return gm.forward

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, repeated(k, 4), repeated(v, 4), scale=0.25)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(attend, backend=(done := Scaled()), fullgraph=True)(*heads("cpu"))
    assert done.grouped and isinstance(done.call.kwargs["scale"], torch.fx.Node)


def test_rows_that_see_nothing(device):
    """Padding on the left: the rows of padding are finite if they were finite before."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = heads(device, s=8, d=64, dtype=dtype)
    keep = torch.ones(2, 8, dtype=torch.bool, device=device)
    keep[0, :3] = False

    def attend(q, k, v, keep):
        seen = lower(8, 8, q.device) & keep[:, None, None]
        return F.scaled_dot_product_attention(q, repeated(k, 4), repeated(v, 4), attn_mask=seen)

    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(attend, backend=(done := Rewriter()), fullgraph=True)(q, k, v, keep)
        want = attend(q, k, v, keep)
    assert done.grouped and torch.equal(got.isfinite(), want.isfinite())
    rows = keep[:, None, :, None].expand_as(want)
    torch.testing.assert_close(got[rows], want[rows], rtol=2e-2, atol=2e-2)


# --- what is said of an element is so ---


COMPARISONS = (torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne)


def drawn_program(rng: random.Random):
    """Integer tensors computed from positions, by operators that masks are made of."""
    n, m = rng.choice((1, 3, 4)), rng.choice((1, 3, 5))

    def program(x):
        made = [
            torch.arange(n)[:, None],
            torch.arange(m)[None],
            torch.arange(rng.choice((0, 2)), m + 2)[None],
        ]
        made += [torch.ones(n, m, dtype=torch.bool), torch.zeros(1, m, dtype=torch.int64)]
        for _ in range(30):
            a, b = rng.choice(made), rng.choice(made)
            ops = (
                lambda: a + rng.randint(-2, 2),  # noqa: B023
                lambda: a - b,  # noqa: B023
                lambda: a + b,  # noqa: B023
                lambda: a[:, rng.randint(0, 1) :],  # noqa: B023
                lambda: a[:1],  # noqa: B023
                lambda: torch.cat([a[:, :1] - rng.randint(0, 2), a], dim=-1),  # noqa: B023
                lambda: torch.cat([a, b], dim=0),  # noqa: B023
                lambda: a[b[:1, :1].clamp(0, 0), b],  # noqa: B023
                lambda: a[torch.arange(1)[:, None], b],  # noqa: B023
                lambda: a.unsqueeze(rng.randint(0, 2))[0],  # noqa: B023
                lambda: a.expand(n, m),  # noqa: B023
                lambda: a.cumsum(-1),  # noqa: B023
                lambda: a.to(torch.bool),  # noqa: B023
                *(lambda op=op: op(a, b) for op in COMPARISONS),  # noqa: B023
                lambda: a & b,  # noqa: B023
            )
            try:
                new = rng.choice(ops)()
            except (RuntimeError, IndexError):
                continue
            if new.dim() == 2 and new.numel():
                made.append(new)
        return x, *made

    return program


def materialised(found, shape) -> torch.Tensor:
    def index(dim):
        sizes = [1] * len(shape)
        sizes[dim] = shape[dim]
        return torch.arange(shape[dim]).reshape(sizes)

    if isinstance(found, NotBefore):
        return (index(found.late) >= index(found.early) + found.by).expand(shape)
    place = torch.zeros(1, dtype=torch.int64) if found.dim is None else index(found.dim)
    return (place + found.plus).expand(shape)


def test_what_is_read_is_so():
    rng = random.Random(SEED)
    kinds: set[Any] = set()
    for drawn in itertools.count():  # one in six has a NotBefore: forty have none in one of a thousand draws
        if drawn >= 40 and kinds == {Place, NotBefore, "true"}:
            break
        assert drawn < 400, kinds
        gm = make_fx(drawn_program(rng))(torch.zeros(1))
        gm.graph.eliminate_dead_code()  # calls that raised
        masks = Masks()

        class Check(torch.fx.Interpreter):
            def run_node(self, n):
                out = super().run_node(n)
                found = masks.read(n) if isinstance(out, torch.Tensor) else None  # noqa: B023
                if found is not None:
                    kinds.add(type(found) if found != TRUE else "true")
                    want = materialised(found, tuple(out.shape))
                    assert torch.equal(out.to(torch.int64), want.to(torch.int64)), (n.format_node(), found)
                return out

        Check(gm).run(torch.zeros(1))


# --- in the backend ---


@pytest.mark.more
def test_models(monkeypatch):
    """Prefill of a model whose mask says what is_causal says, as compiled and as explained."""
    model, ids = build("qwen3_moe", torch.float32, "grouped_mm"), tokens(2, 9)
    recorder, plain = Recorder(activation="bf16"), Recorder(activation="bf16")
    with torch.no_grad():
        got = torch.compile(model, backend=recorder)(ids, use_cache=False).logits
        torch._dynamo.reset()
        monkeypatch.setattr(module, "write_attention", lambda *_: [])
        want = torch.compile(model, backend=plain)(ids, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    calls = recorder.graphs[0].graph.find_nodes(op="call_function", target=SDPA)
    assert [(c.args[3], c.args[5], c.kwargs["enable_gqa"]) for c in calls] == [(None, True, True)] * 2
    left = [str(n.target) for n in recorder.graphs[0].graph.nodes]
    assert not any("cumsum" in t for t in left[: left.index(str(SDPA))])
    monkeypatch.undo()
    torch._dynamo.reset()
    report = fp4_ops.explain(model, ids, use_cache=False)
    assert sum(words in str(report) for words in report.frames[0].also) == 2


def test_models_with_attention_in_4_bits():
    """Weights that are no plain tensors: attention is still one operator, with heads in groups.

    Query, key and value read the same rows, which are quantised once.
    """
    model = build("qwen3_moe", torch.float32, "grouped_mm", num_attention_heads=4, num_key_value_heads=2)
    fp4_ops.prepare(model, "nvfp4", attention="nvfp4", head="nvfp4")
    cache, recorder = StaticCache(config=model.config, max_cache_len=16), Recorder()
    with torch.no_grad():
        model(tokens(1, 5), past_key_values=cache)
        torch.compile(model, backend=recorder, dynamic=False)(tokens(1, 1), past_key_values=cache)
    (graph,) = (g.graph for g in recorder.graphs)
    calls = graph.find_nodes(op="call_function", target=SDPA)
    assert [c.kwargs["enable_gqa"] for c in calls] == [True] * 2
    assert recorder.ops.count("fp4::packed_linears") == 9
    rows = graph.find_nodes(op="call_function", target=torch.ops.fp4.packed_linears.default)
    assert len(rows) == 5  # in each layer those of q, k and v, those of o; the head's


def test_only_beside_fp4_experts():
    recorder = Recorder()
    layer = torch.nn.Linear(16, 16)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(layer(q), repeated(k, 4), repeated(v, 4))

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(attend, backend=recorder)(*heads("cpu"))
    assert not any(f.also for f in recorder.frames)


class TestGolden(expecttest.TestCase):
    def test_a_decoding_step(self) -> None:
        def attend(q, k, v, seen):
            return merged(F.scaled_dot_product_attention(q, repeated(k, 4), repeated(v, 4), attn_mask=seen))

        done = run(attend, *heads("cpu", s=1, length=9), torch.ones(2, 1, 1, 9, dtype=torch.bool))
        nodes = [f"{n} = {n.target}{n.args}" for n in done.gm.graph.nodes if n.op == "call_function"]
        nodes = [text.replace("scaled_dot_product_attention", "sdpa") for text in nodes]
        self.assertExpectedInline(
            "\n".join(nodes),
            """\
unsqueeze = aten.unsqueeze.default(arg0_1, 2)
unsqueeze_1 = aten.unsqueeze.default(arg1_1, 2)
squeeze_dim = aten.squeeze.dim(unsqueeze, 2)
squeeze_dim_1 = aten.squeeze.dim(unsqueeze_1, 2)
sdpa_default_1 = aten.sdpa.default(arg2_1, squeeze_dim, squeeze_dim_1, arg3_1, 0.0, False)
contiguous_default = aten.contiguous.default(sdpa_default_1,)
transpose = aten.transpose.int(contiguous_default, 1, 2)
view = aten.view.default(transpose, [2, 1, -1])""",
        )
