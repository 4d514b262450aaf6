"""activation="nvfp4" and "mxfp4", of a whole model: each row of an expert's input has a scale of its own."""

from __future__ import annotations

import importlib.util

import pytest
import reference
import torch
from conftest import more
from moe_models import Block, Recorder, build, fake_quantised, relative_error, tokens
from torch import nn

import fp4_ops
from fp4_ops.experts.packed import PackedWeight
from fp4_ops.meta import layouts
from fp4_ops.runtime import native

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FORMATS = ("nvfp4", "mxfp4")


def rounded(x: torch.Tensor, format: str) -> torch.Tensor:
    """float64 values of rows that are quantised as matrices of their own."""
    return reference.dequantize(*reference.quantize(x.float()[..., None, :], format), format)[..., 0, :]


def calls(recorder: Recorder) -> dict[str, str]:
    """Operators of the graphs, and how their activations come."""
    nodes = [n for g in recorder.graphs for n in g.graph.nodes if str(n.target).startswith("fp4.")]
    return {str(n.target).split(".")[1]: n.kwargs["a_format"] for n in nodes if "a_format" in n.kwargs}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(50, 48), nn.Linear(48, 34, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
def test_a_product_multiplies_the_rounded_rows(format):
    """And a row with a NaN or infinity is NaN, no other."""
    net, recorder = Two(), Recorder(linear=True, activation=format, format=format)
    run = torch.compile(net, backend=recorder)
    x = torch.randn(7, 50) * torch.exp(2 * torch.randn(7, 1))
    up, down = (fake_quantised(m.weight[None], format)[0].double() for m in (net.up, net.down))
    h = torch.relu(rounded(x, format) @ up.T + net.up.bias.double())
    # A hidden value at the edge between two codes may land on either; the first product is exact, below.
    assert relative_error(run(x), rounded(h, format) @ down.T) < 0.2
    assert calls(recorder) == {"mm": format}
    first = torch.compile(net.up, backend=Recorder(linear=True, activation=format, format=format))
    assert relative_error(first(x), rounded(x, format) @ up.T + net.up.bias.double()) < 1e-5
    x[2, 3], x[5, 0] = torch.nan, -torch.inf
    assert run(x).isnan().all(-1).tolist() == [i in (2, 5) for i in range(7)]
    assert recorder.compilations == 1


FORMS = [("grouped_mm", "nvfp4"), ("batched_mm", "mxfp4")]
FORMS += [more("batched_mm", "nvfp4"), more("grouped_mm", "mxfp4")]


@torch.no_grad()
@pytest.mark.parametrize("form, format", FORMS)
def test_blocks_and_single_products(form, format):
    for changed in ("", "alpha"):
        block, x = Block(form, changed), torch.randn(9, Block.H)
        recorder = Recorder(activation=format, format=format)
        got = torch.compile(block, backend=recorder)(x)
        assert set(calls(recorder).values()) == {format}
        assert set(calls(recorder)) == {"moe"} or changed
        assert all(s.a_format == f"{format} (asked for)" for s in recorder.sites)
        assert 1e-3 < relative_error(got, block.twin(format)(x)) < 0.4


@torch.no_grad()
@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", FORMATS)
def test_prepare_and_what_it_saves(format, tmp_path):
    """The backend quantises so, the prepared model, and what is loaded again. Numbers are close only: what
    moves a value past the edge between two codes, or two experts' scores, moves all that follows."""
    model = build("mixtral", torch.float32, "grouped_mm")
    ids = tokens(1, 9)
    compiled = torch.compile(model, backend=Recorder(activation=format, format=format))
    want = compiled(input_ids=ids, use_cache=False).logits
    report = fp4_ops.prepare(model, format, format)
    assert report.activations == format
    got = model(input_ids=ids, use_cache=False).logits
    assert relative_error(got, want) < 0.5
    model.save_pretrained(tmp_path)
    again = fp4_ops.load_checkpoint(None, tmp_path, activation=format)
    assert relative_error(again(input_ids=ids, use_cache=False).logits, got) < 0.5
    for each in (model, again):
        recipes = [m._fp4_recipe for m in each.modules() if hasattr(m, "_fp4_recipe")]
        assert recipes and {r.a_format for r in recipes} == {format}
    other = FORMATS[1 - FORMATS.index(format)]
    with pytest.raises(ValueError, match=f"activation is '{other}' and the weights' format is '{format}'"):
        fp4_ops.load_checkpoint(None, tmp_path, activation=other)


@pytest.mark.parametrize(
    "activation, format, instead",
    [("nvfp4", "mxfp4", "activation='mxfp4'"), ("mxfp4", "nvfp4", "activation='nvfp4'"),
     ("nvfp4", "int4", "activation='bf16' or 'auto'")],
)  # fmt: skip
def test_formats_that_differ_are_refused(activation, format, instead):
    said = (
        f"activation is '{activation}' and the weights' format is '{format}'.* Use {instead}, or weights in"
    )
    with pytest.raises(ValueError, match=said):
        fp4_ops.prepare(build("mixtral", torch.float32, "grouped_mm"), format, activation)
    with pytest.raises(ValueError, match=said):
        Recorder(activation=activation, format=format)
    with pytest.raises(ValueError, match=said):
        from fp4_ops.integrations.transformers.quantizer import FP4Config

        FP4Config(format, activation)


def test_where_tensor_cores_multiply_fp4_weights_stay_plain(monkeypatch):
    """Other activations have the layout of the native kernels there, and move to it."""
    monkeypatch.setitem(layouts._preferred, "cpu", lambda: ("tile16",))
    monkeypatch.setitem(layouts._plain, "cpu", lambda format, a_format: format == a_format)
    for format in FORMATS:
        model = build("mixtral", torch.float32, "grouped_mm")
        fp4_ops.prepare(model, format, format)
        assert {m.layout for m in model.modules() if isinstance(m, PackedWeight)} == {"plain"}
    assert layouts.preferred_layout("cpu", (64, 64), format="nvfp4", a_format="mxfp4") == "tile16"
    assert layouts.preferred_layout("cpu", (64, 64), format="nvfp4") == "tile16"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("capability, plain", [((12, 0), True), ((10, 0), True), ((9, 0), False)])
def test_which_gpus_leave_them_plain(capability, plain, monkeypatch):
    from fp4_ops.backends.triton import tiles

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native, "family", lambda index: native.HOPPER)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    tiles.pretend(tiles.Device("some", capability, 1 << 17, 100))
    try:
        for a_format in ("nvfp4", "mxfp4", "none"):
            found = layouts.preferred_layout("cuda", (64, 64), format="nvfp4", a_format=a_format)
            assert (found == "plain") == (plain and a_format == "nvfp4")
    finally:
        tiles.pretend(None)
