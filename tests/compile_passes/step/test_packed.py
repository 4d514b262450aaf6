"""Products of the same int8 rows are one call on a CPU. What reads the rows otherwise keeps them."""

from __future__ import annotations

import pytest
import torch
from moe_models import that_answers, tokens
from one_pass import OnePass
from recorder import Recorder
from reference import FORMATS, random_weight

import fp4_ops
from fp4_ops.compile_passes import passes
from fp4_ops.compile_passes.step.packed import write_packed_linears

fp4 = torch.ops.fp4
K = 64


class Layer(torch.nn.Module):
    """Products of the rows of an attention layer. `kind` names what is different."""

    def __init__(self, format: str, kind: str = "", layout: str = "tile16") -> None:
        super().__init__()
        self.how, self.kind = {"format": format, "layout": layout}, kind
        self.operands, self.biases = torch.nn.ParameterList(), torch.nn.ParameterList()
        scale = None
        for n in (48, 16, 33):
            w = random_weight(format, 1, n, K, layout=layout).operands()
            while scale not in (None, w[1].dtype):  # int4 has several dtypes
                w = random_weight(format, 1, n, K, layout=layout).operands()
            scale = w[1].dtype
            self.operands.append(
                torch.nn.ParameterList(self._fixed(t) for t in w if t is not None and t.numel())
            )
            self.biases.append(self._fixed(torch.randn(n)))

    @staticmethod
    def _fixed(t: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(t, requires_grad=False)

    def forward(self, x):
        codes, scale = fp4.quantize_int8(x)
        made = []
        for i, (weight, bias) in enumerate(zip(self.operands, self.biases)):
            b, b_scale, *factor = (t[0] for t in weight)
            if self.kind == "written" and i == 1:
                bias.mul_(2)
            how = dict(self.how)
            if self.kind == "two dtypes" and i == 1:
                how["out_dtype"] = torch.float32
            read = codes + 0 if self.kind == "changed rows" and i == 2 else codes
            made.append(fp4.mm(read, b, b_scale, *(factor or [None]), scale, bias, **how))
        if self.kind == "also read":
            made.append(codes)
        return made


def ran(layer: Layer, rows: int = 2, dynamic: bool = False) -> OnePass:
    torch._dynamo.reset()
    one = OnePass(lambda graph: list(map(str, write_packed_linears(graph, _written(graph)))))
    x = torch.randn(rows, K).bfloat16()
    with torch.no_grad():
        before = {name: t.clone() for name, t in layer.state_dict().items()}
        want = layer(x)
        layer.load_state_dict(before)
        got = torch.compile(layer, backend=one, fullgraph=True, dynamic=dynamic)(x)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    return one


def _written(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    return {n.args[0] for n in graph.nodes if str(n.target).endswith("_.Tensor")}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_three_products_are_one_call(format, dynamic):
    one = ran(Layer(format), dynamic=dynamic)
    (call,) = one.calls(fp4.packed_linears.default)
    assert not one.calls(fp4.mm.default) and not one.calls(fp4.quantize_int8.default)
    assert len(call.args[1]) == len(one.said) == 3 and call.kwargs["a_format"] == "int8"


@pytest.mark.parametrize("kind", ["also read", "changed rows", "two dtypes", "written"])
def test_what_is_not_for_products_alone_stays(kind):
    one = ran(Layer("nvfp4", kind))
    assert len(one.calls(fp4.mm.default)) == 3 and one.said == []


def test_a_prepared_model_has_one_call_for_q_k_v(fresh_dynamo, monkeypatch):
    """Under the whole backend; the bits are those without the pass."""
    model = that_answers("qwen3_moe")
    fp4_ops.prepare(model, "nvfp4", attention="nvfp4", head="nvfp4")
    recorder = Recorder()
    x = tokens(1, 5)
    with torch.no_grad():
        got = torch.compile(model, backend=recorder)(x, use_cache=False).logits
        torch._dynamo.reset()
        monkeypatch.setattr(passes, "write_packed_linears", lambda graph, written: set())
        want = torch.compile(model, backend=Recorder())(x, use_cache=False).logits
    calls = [n for g in recorder.graphs for n in g.graph.nodes if n.target is fp4.packed_linears.default]
    layers = model.config.num_hidden_layers
    assert sorted(len(n.args[1]) for n in calls) == sorted([3, 1] * layers + [1])  # q, k, v; o; the head
    assert not any(n.target is fp4.mm.default for g in recorder.graphs for n in g.graph.nodes)
    assert sorted(recorder.ops) == ["fp4::moe"] * layers + ["fp4::packed_linears"] * (4 * layers + 1)
    assert torch.equal(got, want)
