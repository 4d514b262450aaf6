"""torch.library.opcheck on random calls of every operator: schema, fake, autograd, AOT dispatch."""

from __future__ import annotations

import pytest
import torch
from samples import SAMPLES, sample, why_no_gradient

import fp4_ops.meta.fakes


def test_every_operator_has_samples():
    defined = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fp4::")
    }
    assert set(SAMPLES) == set(fp4_ops.meta.fakes.OPERATORS)
    assert set(SAMPLES) <= defined


@pytest.fixture
def float8_allclose(monkeypatch):
    """opcheck compares inputs before and after with torch.allclose, which 8-bit floats do not have."""
    allclose = torch.allclose

    def bitwise(a, b, *args, **kwargs):
        if a.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        return allclose(a, b, *args, **kwargs)

    monkeypatch.setattr(torch, "allclose", bitwise)


@pytest.mark.parametrize("op", SAMPLES)
def test_opcheck(op, device, float8_allclose):
    for _ in range(3):
        args, kwargs = sample(op, device)
        torch.library.opcheck(getattr(torch.ops.fp4, op).default, args, kwargs)


@pytest.mark.parametrize("op", SAMPLES)
def test_backward_is_an_error(op, device):
    """An output may come from something that needs a gradient; asking for the gradient says why not."""
    args, kwargs = sample(op, device)
    needs = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dtype.is_floating_point]
    needs = [i for i in needs if args[i].dtype in (torch.float32, torch.bfloat16, torch.float16)]
    if not needs:
        pytest.skip("no floating argument that could need a gradient")
    args = [a.clone().requires_grad_() if i in needs else a for i, a in enumerate(args)]
    out = getattr(torch.ops.fp4, op)(*args, **kwargs)
    outs = out if isinstance(out, (tuple, list)) else (out,)
    outs = [
        o
        for o in outs
        if o.requires_grad and o.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ]
    if not outs:
        assert op == "prepack" or op == "unpack" or op == "quantize"
        return
    why, instead = why_no_gradient(op)
    with pytest.raises(RuntimeError, match=f"fp4::{op} has no gradient: {why}.*no_grad.*, or {instead}"):
        sum(o.sum() for o in outs).backward()
