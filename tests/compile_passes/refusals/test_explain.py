# ruff: noqa: E501  golden graphs
"""`fp4_ops.explain`, the log, and golden graphs of the main forms."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from conftest import more
from moe_models import Block, Recorder, build, tokens
from moe_styles import STYLES, ListStyle, StackedStyle
from torch import nn

import fp4_ops
from fp4_ops.compile_passes import advice

expecttest = pytest.importorskip("expecttest")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_model_that_is_rewritten():
    model = build("deepseek_v3", torch.bfloat16, "grouped_mm")
    report = fp4_ops.explain(model, tokens(1, 5), use_cache=False, options={"format": "mxfp4"})
    (site,) = report.sites
    assert site.rewritten and site.op == "fp4::moe"
    assert site.weights == tuple(f"model.layers[1].mlp.experts.{n}_proj" for n in ("gate_up", "down"))
    assert (site.format, site.layout, site.activation) == ("mxfp4", "tile16", "silu")
    assert site.a_format == "int8 (auto: the fast path on cpu)"
    assert "integrations/moe.py" in site.where
    elements = 8 * (2 * 32 * 64 + 64 * 32)
    assert report.bytes_before == site.bytes_before == 2 * elements
    assert report.bytes_after == elements // 2 + elements // 32
    # 5 tokens choose 2 of 8 experts each: 8 (1 - (6/8)^5) = 6.1 are read.
    read = 8 * (1 - 0.75**5)
    assert site.gain.tokens == 5 and abs(site.gain.experts_read - read) < 0.01
    assert site.gain.bytes_before == round(site.bytes_before * read / 8)
    assert site.gain.speedup == round(2 / (1 / 2 + 1 / 32), 2)
    assert report.to_dict()["frames"][-1]["sites"][0]["gain"]["speedup"] == site.gain.speedup
    text = str(report)
    for part in (
        "estimate from bytes: at 5 tokens a step reads",
        "so at most 3.8x faster where that is the limit (decode)",
        "fp4::moe",
        "8 experts, top 2, hidden 64, intermediate 32",
        "mxfp4",
        "1 rewritten, 0 left alone",
    ):
        assert part in text


def test_what_is_left_alone_is_said_with_its_place():
    report = fp4_ops.explain(Block("grouped_mm", "weights not sorted"), torch.randn(4, Block.H))
    assert [s.op for s in report.sites] == ["fp4::grouped_mm"] * 2
    assert "routing weights are not in the order of the sorted rows" in str(report)
    assert "moe_models.py" in report.sites[1].reason
    assert "\n      change: scale sorted rows by weights.flatten()[perm]" in str(report)

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(3, 8, 7))

        def forward(self, a, ids):
            return torch.bmm(self.w[ids], a.unsqueeze(-1))

    report = fp4_ops.explain(Odd(), torch.randn(2, 7), torch.tensor([0, 2]))
    (site,) = report.sites
    assert not site.rewritten and "K = 7 is odd" in site.reason and "test_explain.py" in site.where
    assert "left alone: K = 7 is odd" in str(report)
    assert "\n      change: pad K to an even number with zeros" in str(report)
    assert report.to_dict()["frames"][0]["sites"][0]["change"] == site.change


def test_a_graph_that_is_left_whole_is_told_with_what_would_help():
    recorder = Recorder()
    torch.compile(Block("batched_mm"), backend=recorder)(torch.randn(4, Block.H))
    (frame,) = recorder.frames
    assert "gradients" in frame.note and "torch.no_grad()" in frame.change
    assert "\n  change: run the model under torch.no_grad()" in str(frame)


def test_frames_without_experts_and_graph_breaks_are_told():
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block("batched_mm")

        def forward(self, x):
            x = x + 1
            torch._dynamo.graph_break()
            return self.block(x)

    report = fp4_ops.explain(Broken(), torch.randn(4, Block.H))
    assert len(report.frames) == 2 and len(report.graph_breaks) == 1
    assert "nothing that looks like experts" in str(report.frames[0])
    assert [s.op for s in report.frames[1].sites] == ["fp4::moe"]


def test_explaining_again_and_again_neither_packs_nor_wears_off():
    block, x = Block("batched_mm"), torch.randn(4, Block.H)
    want = block(x)
    for _ in range(10):
        assert len(fp4_ops.explain(block, x).sites) == 1
    assert torch.equal(block(x), want)
    compiled = torch.compile(block, backend=Recorder())
    assert len(fp4_ops.explain(compiled, x).sites) == 1


def test_the_log_says_what_was_done_and_warns_when_nothing_was(caplog):
    x = torch.randn(4, Block.H)
    with caplog.at_level(logging.INFO, "fp4_ops"), torch.no_grad():
        torch.compile(Block("batched_mm"), backend=Recorder())(x)
    assert [r.levelname for r in caplog.records if r.name == "fp4_ops"] == ["INFO"]
    assert "fp4::moe" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "fp4_ops"), torch.no_grad():
        torch.compile(Block("batched_mm").double(), backend=Recorder())(x.double())
    assert [r.levelname for r in caplog.records if r.name == "fp4_ops"] == ["WARNING"]
    assert "torch.float64" in caplog.text


# --- golden graphs ---


def graph_of(block: torch.nn.Module, **options) -> str:
    """From the router's topk on; inputs and values are numbered, since torch's names change with versions."""
    recorder = Recorder(**options)
    with torch.no_grad():
        torch.compile(block, backend=recorder, dynamic=True, fullgraph=True)(torch.randn(5, Block.H))
    (gm,) = recorder.graphs
    names, lines = {}, []
    for n in gm.graph.nodes:
        kind = "in" if n.op == "placeholder" else "v"
        names[n] = f"{kind}{sum(v.startswith(kind) for v in names.values())}"
        if n.op == "call_function":
            args, kwargs = torch.fx.node.map_aggregate((n.args, n.kwargs), lambda a: Name(names.get(a, a)))
            shown = ", ".join([*map(str, args), *(f"{k}={v}" for k, v in kwargs.items())])
            target = n.target if isinstance(n.target, torch._ops.OpOverload) else n.target.__name__
            lines.append(f"{names[n]} = {target}({shown})")
    start = next(i for i, line in enumerate(lines) if "topk" in line)
    return "\n".join(["", *lines[start:], ""])


class Name(str):
    __repr__ = str.__str__


class TestGolden(expecttest.TestCase):
    def test_block(self) -> None:
        self.assertExpectedInline(
            graph_of(Block("grouped_mm")),
            """\

v3 = aten.topk.default(v2, 2)
v4 = getitem(v3, 0)
v5 = getitem(v3, 1)
v6 = fp4.moe.default(in2, v5, v4, in3, in4, in5, in6, in7, in8, None, None, format=nvfp4, layout=tile16, activation=silu, a_format=int8, out_dtype=torch.float32)
v7 = aten.contiguous.default(v6)
""",
        )

    def test_products_of_sorted_rows(self) -> None:
        self.assertExpectedInline(
            graph_of(Block("grouped_mm", "alpha"), activation="bf16"),
            """\

v3 = aten.topk.default(v2, 2)
v4 = getitem(v3, 0)
v5 = getitem(v3, 1)
v6 = aten.reshape.default(v5, [-1])
v7 = aten.sort.default(v6)
v8 = getitem(v7, 0)
v9 = getitem(v7, 1)
v10 = aten._to_copy.default(v8, dtype=torch.float32)
v11 = aten.histc.default(v10, 6, 0, 5)
v12 = aten.cumsum.default(v11, 0, dtype=torch.int32)
v13 = aten.floor_divide.default(v9, 2)
v14 = aten.index.Tensor(in2, [v13])
v15 = fp4.grouped_mm.default(v14, in3, in4, in5, v12, None, None, None, format=nvfp4, layout=tile16, a_format=, out_dtype=torch.float32)
v16 = aten.split.Tensor(v15, 48, -1)
v17 = getitem(v16, 0)
v18 = getitem(v16, 1)
v19 = aten.mul.Tensor(v17, 1.5)
v20 = aten.sigmoid.default(v19)
v21 = aten.mul.Tensor(v17, v20)
v22 = aten.mul.Tensor(v21, v18)
v23 = fp4.grouped_mm.default(v22, in6, in7, in8, v12, None, None, None, format=nvfp4, layout=tile16, a_format=, out_dtype=torch.float32)
v24 = aten.reshape.default(v4, [-1])
v25 = aten.index.Tensor(v24, [v9])
v26 = aten.unsqueeze.default(v25, -1)
v27 = aten.mul.Tensor(v23, v26)
v28 = aten.empty_like.default(v9, pin_memory=False)
v29 = mul(2, in1)
v30 = aten.arange.default(v29, device=cpu, pin_memory=False)
v31 = aten.index_put.default(v28, [v9], v30)
v32 = aten.index.Tensor(v27, [v31])
v33 = aten.reshape.default(v32, [in1, 2, -1])
v34 = aten.sum.dim_IntList(v33, [1])
v35 = aten.contiguous.default(v34)
""",
        )

    def test_products_of_gathered_weights(self) -> None:
        self.assertExpectedInline(
            graph_of(Block("batched_mm", "down routes otherwise"), format="mxfp4"),
            """\

v3 = aten.topk.default(v2, 2)
v4 = getitem(v3, 0)
v5 = getitem(v3, 1)
v6 = aten.reshape.default(v5, [-1])
v7 = aten.unsqueeze.default(in2, 1)
v8 = aten.expand.default(v7, [in1, 2, 32])
v9 = aten.clone.default(v8, memory_format=torch.contiguous_format)
v10 = mul(in1, 2)
v11 = aten.reshape.default(v9, [v10, 32])
v12 = aten.unsqueeze.default(v11, -1)
v13 = aten.reshape.default(v12, [-1, 32])
v14 = fp4.quantize_int8.default(v13)
v15 = getitem(v14, 0)
v16 = getitem(v14, 1)
v17 = fp4.indexed_mm.default(v15, in3, in4, None, v6, v16, None, None, format=mxfp4, layout=tile16, a_format=, out_dtype=torch.float32)
v18 = aten.unsqueeze.default(v17, 2)
v19 = aten.squeeze.dim(v18, -1)
v20 = aten.add.Tensor(v6, 1)
v21 = aten.remainder.Scalar(v20, 6)
v22 = aten.split.Tensor(v19, 48, -1)
v23 = getitem(v22, 0)
v24 = getitem(v22, 1)
v25 = aten.silu.default(v23)
v26 = aten.mul.Tensor(v25, v24)
v27 = aten.unsqueeze.default(v26, -1)
v28 = aten.reshape.default(v27, [-1, 48])
v29 = fp4.quantize_int8.default(v28)
v30 = getitem(v29, 0)
v31 = getitem(v29, 1)
v32 = aten.add.Tensor(v21, 6)
v33 = aten.lt.Scalar(v21, 0)
v34 = aten.where.self(v33, v32, v21)
v35 = fp4.indexed_mm.default(v30, in5, in6, None, v34, v31, None, None, format=mxfp4, layout=tile16, a_format=, out_dtype=torch.float32)
v36 = aten.unsqueeze.default(v35, 2)
v37 = aten.squeeze.dim(v36, -1)
v38 = aten.reshape.default(v4, [-1])
v39 = aten.unsqueeze.default(v38, -1)
v40 = aten.mul.Tensor(v37, v39)
v41 = aten.reshape.default(v40, [in1, 2, -1])
v42 = aten.sum.dim_IntList(v41, [1])
v43 = aten.contiguous.default(v42)
""",
        )

    def test_a_loop_over_experts(self) -> None:
        self.assertExpectedInline(
            graph_of(STYLES["where loop"](), activation="bf16"),
            """\

v3 = aten.topk.default(v2, 2)
v4 = getitem(v3, 0)
v5 = getitem(v3, 1)
v6 = aten.sum.dim_IntList(v4, [-1], True)
v7 = aten.div.Tensor(v4, v6)
v8 = fp4.moe.default(in2, v5, v7, in3, in4, in5, in6, in7, in8, None, None, format=nvfp4, layout=tile16, activation=silu, a_format=none, out_dtype=torch.float32)
v9 = aten.contiguous.default(v8)
""",
        )

    def test_experts_with_an_activation_of_their_own(self) -> None:
        module = STYLES["where loop"](act=torch.relu, gated=False)
        self.assertExpectedInline(
            graph_of(module, activation="bf16"),
            """\

v3 = aten.topk.default(v2, 2)
v4 = getitem(v3, 0)
v5 = getitem(v3, 1)
v6 = aten.sum.dim_IntList(v4, [-1], True)
v7 = aten.div.Tensor(v4, v6)
v8 = aten.unsqueeze.default(in2, 1)
v9 = aten.expand.default(v8, [-1, 2, -1])
v10 = aten.reshape.default(v9, [-1, 32])
v11 = aten.reshape.default(v5, [-1])
v12 = fp4.indexed_mm.default(v10, in3, in4, in5, v11, None, None, None, format=nvfp4, layout=tile16, a_format=, out_dtype=torch.float32)
v13 = aten.relu.default(v12)
v14 = aten._to_copy.default(v13, dtype=torch.float32)
v15 = fp4.indexed_mm.default(v14, in6, in7, in8, v11, None, None, None, format=nvfp4, layout=tile16, a_format=, out_dtype=torch.float32)
v16 = aten.reshape.default(v15, [-1, 2, 32])
v17 = aten.unsqueeze.default(v7, 2)
v18 = aten._to_copy.default(v17, dtype=torch.float32)
v19 = aten.mul.Tensor(v16, v18)
v20 = aten.sum.dim_IntList(v19, [1])
v21 = aten._to_copy.default(v20, dtype=torch.float32)
v22 = aten.contiguous.default(v21)
""",
        )

    def test_scaled_inputs(self) -> None:
        module = STYLES["dense bmm, scaled inputs (Llama 4)"]()
        self.assertExpectedInline(
            graph_of(module, activation="bf16"),
            """\

v2 = aten.topk.default(v1, 2, 1)
v3 = getitem(v2, 0)
v4 = getitem(v2, 1)
v5 = aten.full_like.default(v1, -inf, pin_memory=False)
v6 = aten.scatter.src(v5, 1, v4, v3)
v7 = aten.sigmoid.default(v6)
v8 = aten.ones_like.default(v4, dtype=torch.float32)
v9 = aten.unsqueeze.default(in2, 1)
v10 = aten.clamp.default(v4, 0, 5)
v11 = aten._to_copy.default(v10, dtype=torch.int64)
v12 = aten.gather.default(v7, 1, v11)
v13 = aten.reshape.default(v12, [-1, 2, 1])
v14 = aten.mul.Tensor(v9, v13)
v15 = aten._to_copy.default(v14, dtype=torch.float32)
v16 = aten.reshape.default(v15, [-1, 32])
v17 = aten.reshape.default(v4, [-1, 1])
v18 = aten.reshape.default(v8, [-1, 1])
v19 = fp4.moe.default(v16, v17, v18, in3, in4, in5, in6, in7, in8, None, None, format=nvfp4, layout=tile16, activation=silu, a_format=none, out_dtype=torch.float32)
v20 = aten.reshape.default(v19, [-1, 2, 32])
v21 = aten.sum.dim_IntList(v20, [1])
v22 = aten.contiguous.default(v21)
""",
        )

    def test_buffers_of_fixed_capacity(self) -> None:
        module = STYLES["capacity dispatch/combine (GShard)"](k=1)
        graph = graph_of(module, activation="bf16")
        products = [line for line in graph.splitlines() if "fp4." in line]
        products = [re.sub(r"\bv\d+", "v", line) for line in products]  # torches have other nodes before them
        self.assertExpectedInline(
            "\n".join(products),
            """\
v = fp4.grouped_mm_masked.default(v, in3, in4, in5, v, None, None, None, format=nvfp4, layout=tile16, a_format=, out_dtype=torch.float32)
v = fp4.grouped_mm_masked.default(v, in6, in7, in8, v, None, None, None, format=nvfp4, layout=tile16, a_format=, out_dtype=torch.float32)
v = fp4.grouped_mm_masked.default(v, in9, in10, in11, v, None, None, None, format=nvfp4, layout=tile16, a_format=, out_dtype=torch.float32)""",
        )


def test_weights_that_are_arguments_are_told():
    """torch.func.functional_call with a dictionary of tensors."""
    block, x = STYLES["where loop"](experts=3), torch.randn(7, 32)
    given = {name: p.detach().clone() for name, p in block.named_parameters()}

    def run(given, x):
        return torch.func.functional_call(block, given, (x,))

    (frame,) = fp4_ops.explain(run, given, x).frames
    assert "experts' weights are arguments, given['list[0].w1.weight']" in frame.note
    assert frame.change == advice.PARAMETER


class NoProducts(StackedStyle):
    def experts_of(self, x, ids, weights):
        def product(w, x):
            return (w[ids] * x.unsqueeze(-2)).sum(-1)

        rows = x[:, None].expand(-1, self.k, -1)
        h = self.act(product(self.w1, rows)) * product(self.w3, rows)
        return (product(self.w2, h) * weights[..., None]).sum(1)


def test_experts_without_products_are_told():
    report = fp4_ops.explain(NoProducts(experts=3), torch.randn(7, 32))
    assert not report.sites
    (hint,) = report.hints
    assert "parameters of NoProducts look like experts, but no product of theirs with rows is read" in hint


class Dispatched(ListStyle):
    """The classic SparseDispatcher: rows sorted by `nonzero(gates).sort(0)`, parts of a size for each expert."""

    def experts_of(self, x, ids, weights):
        gates = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        by_expert, places = torch.nonzero(gates).sort(0)
        token = torch.nonzero(gates)[places[:, 1], 0]
        sizes = (gates > 0).sum(0).tolist()
        parts = torch.split(x[token], sizes, dim=0)
        y = torch.cat([expert(part) for expert, part in zip(self.list, parts)])
        scale = gates[token].gather(1, by_expert[:, 1:])
        return torch.zeros_like(x).index_add(0, token, y * scale)


def test_a_sparse_dispatcher_is_told_its_line_and_what_to_write():
    module, x = Dispatched(experts=3), torch.randn(7, 32)
    report = fp4_ops.explain(module, x)
    assert not any(site.rewritten for site in report.sites)
    assert any("sizes = (gates > 0).sum(0).tolist()" in reason for reason in report.graph_breaks)
    (hint,) = report.hints
    assert "takes numbers out of tensors" in hint and "torch.where(ids == e)" in hint


class Groups(nn.Module):
    """The mean of each group of rows. How many groups there are depends on the data."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def ffn(self, e, x):
        return self.down(self.up(x).relu())

    def forward(self, x, ids):
        return torch.stack([self.ffn(int(e), x[ids == e]).mean(0) for e in ids.unique()])


class GroupsInLayers(nn.Module):
    """Equal layers of a module beside the loop are no experts of the loop."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.groups = Groups()

    def forward(self, x, ids):
        return self.groups(self.encoder(x), ids)


class GroupsOfList(Groups):
    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(32, 48) for _ in range(3))

    def ffn(self, e, x):
        return self.down(self.ups[e](x).relu())


class GroupsOfAttributes(Groups):
    """Experts with five matrices each, as attributes."""

    def __init__(self):
        super().__init__()
        for e in range(3):
            layers = [nn.Linear(32, 48), *(nn.Linear(48, 48) for _ in range(3)), nn.Linear(48, 32)]
            setattr(self, f"ffn{e}", nn.Sequential(*layers))

    def ffn(self, e, x):
        return getattr(self, f"ffn{e}")(x)


class GroupsOfParameters(Groups):
    def __init__(self):
        super().__init__()
        self.ups = nn.ParameterList(torch.randn(48, 32) for _ in range(3))

    def ffn(self, e, x):
        return self.down((x @ self.ups[e].T).relu())


class Dispatcher(nn.Module):
    """The loop is in a module that gets the experts from the one around it."""

    def forward(self, x, ids, layers):
        return torch.stack([layers[int(e)](x[ids == e]).mean(0) for e in ids.unique()])


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.dispatcher = Dispatcher()
        self.layers = nn.ModuleList(nn.Linear(32, 48) for _ in range(3))

    def forward(self, x, ids):
        return self.dispatcher(x, ids, self.layers)


def of_function(module, x, ids):
    return torch.stack([module(x[ids == e]).mean(0) for e in ids.unique()])


class ByFunction(nn.Module):
    """The loop is in a function that belongs to no module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 48)

    def forward(self, x, ids):
        return of_function(self.layer, x, ids)


@pytest.mark.parametrize(
    "kind",
    [
        Groups, GroupsInLayers, GroupsOfList, GroupsOfAttributes,
        *map(more, (GroupsOfParameters, Around, ByFunction)),
    ],
)  # fmt: skip
def test_only_modules_that_may_hold_experts_get_hints_about_them(kind):
    report = fp4_ops.explain(kind(), torch.randn(12, 32), torch.arange(12) % 3)
    assert not report.sites and report.graph_breaks
    told = any("expert" in hint for hint in report.hints)
    assert told == (kind not in (Groups, GroupsInLayers)), report.hints
