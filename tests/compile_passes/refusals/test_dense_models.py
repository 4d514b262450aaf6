"""A dense model stays as it is: Inductor gets the graph that Dynamo captured, and nobody is warned."""

from __future__ import annotations

import logging

import pytest
import torch
from conftest import more
from dense_models import FAMILIES, OWN, build
from torch._inductor import compile_fx as inductor

import fp4_ops
from fp4_ops.compile_passes import pipeline

QUICK = {"recurrent_gemma", "bert", *OWN}
"""One with weights in three dimensions and one without; the other families show the same in other forms."""
UNROUTED = {
    "projections of heads (xLSTM)": 3, "block-diagonal FFN, no router": 2, "parts of a token, an FFN each": 1,
    "latent attention, absorbed projections": 2, "heads of the tokens that a topk kept": 1,
    "gated heads": 1, "ensemble (TabM)": 2, "mixture of heads, weights that are parameters": 2,
    "branches (DARTS), weights that are parameters": 1, "grouped codebook": 1, "bilinear layer": 1,
    "low-rank factors": 1,
    "routers of a group each (hierarchical)": 1, "attention over branches by their sum (SKNet)": 1,
    "attention over adapters (AdapterFusion)": 1, "heads weighted by their own norms": 2,
    "the best of several heads (multiple choice learning)": 2, "a kernel for each example (CondConv)": 1,
    "attention, then an FFN for each task": 1, "attention, then an FFN with a norm for each task": 1,
    "attention, then a layer for each task": 1,
    "a kernel for each example, after a ReLU": 1, "a kernel for each sequence, by its mean": 1,
    "a kernel for each example, x sigmoid(x)": 1, "a kernel for each example, mish written out": 1,
    "a kernel for each example, ReLU": 1, "a kernel for each example, gated linear unit": 1,
    "a kernel for each example, gated residual": 1, "squeeze and excite, then a kernel for each example": 1,
}  # fmt: skip
"""How many products are told of, with what would make them experts'."""


def tensors(output: object) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [t for part in output for t in tensors(part)] if isinstance(output, (list, tuple)) else []


def quick(name: str) -> object:
    return name if name in QUICK else more(name)


@pytest.fixture
def analysed(monkeypatch):
    """(rewritten, frame) of each graph."""
    found, analyse = [], pipeline.analyse

    def watch(*args):
        found.append(analyse(*args))
        return found[-1]

    monkeypatch.setattr(pipeline, "analyse", watch)
    return found


def run(name: str, analysed: list, caplog) -> None:
    if name in FAMILIES:
        pytest.importorskip("transformers")
    model, (args, kwargs) = build(name)
    compiled = torch.compile(model, backend="fp4", options={"strict": True})
    with torch.no_grad(), caplog.at_level(logging.WARNING, "fp4_ops"):
        got = tensors(compiled(*args, **kwargs))
    assert analysed and all(rewritten is None and not frame.sites for rewritten, frame in analysed)
    assert not [r for r in caplog.records if r.name == "fp4_ops"], caplog.text
    torch._dynamo.reset()
    with torch.no_grad():
        want = tensors(torch.compile(model, backend="eager")(*args, **kwargs))
    assert got and len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [quick(name) for name in (*FAMILIES, *OWN)])
def test_a_dense_model_stays(name, analysed, caplog, monkeypatch):
    monkeypatch.setattr(inductor, "compile_fx", lambda gm, inputs, config_patches=None, **kwargs: gm.forward)
    run(name, analysed, caplog)
    told = [site for _, frame in analysed for site in frame.unrouted]
    assert len(told) == UNROUTED.get(name, 0), [s.reason for s in told]
    assert all(site.change for site in told)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ensemble (TabM)", more("projections of heads (xLSTM)")])
def test_inductor_computes_the_same_bits(name):
    model, (args, _) = build(name)
    with torch.no_grad():
        got = torch.compile(model, backend="fp4", options={"strict": True})(*args)
        torch._dynamo.reset()
        assert torch.equal(got, torch.compile(model, backend="inductor")(*args))


@pytest.mark.parametrize(
    "name", ["ensemble (TabM)", "routers of a group each (hierarchical)", "recurrent_gemma"]
)
def test_prepare_finds_no_experts(name):
    if name in FAMILIES:
        pytest.importorskip("transformers")
    model, _ = build(name)
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="the model has no experts modules"):
        fp4_ops.prepare(model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
