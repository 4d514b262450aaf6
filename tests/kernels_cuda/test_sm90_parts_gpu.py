"""`moe_parts`: the rows of experts that `moe` adds up, for ranks that add them up elsewhere."""

from __future__ import annotations

import pytest
import torch
from test_sm90_gpu import Weights, pytestmark

from fp4_ops import native

__all__ = ["pytestmark"]

GROUPS, HIDDEN, INNER, TOP_K = 5, 256, 128, 3


def moe_parts(*args, ranks=2, **options):
    there = torch.ops.fp4_parts if torch.version.cuda else torch.ops.fp4_emulated_parts
    return there.moe_parts(*args, ranks=ranks, **options)


@pytest.mark.parametrize("only, tokens", [("prefill", 40), ("decode", 4)])
@pytest.mark.parametrize("sends", ["as they are", "fp8 as they are", "fp8"])
def test_parts_add_up_to_moe(only, tokens, sends):
    """Poison where no expert is; ids of other ranks; rows that came in fp8 are what `moe` makes of them."""
    up, down = (
        Weights(GROUPS, 2 * INNER, HIDDEN, format="nvfp4"),
        Weights(GROUPS, HIDDEN, INNER, format="nvfp4"),
    )
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    ids = torch.randint(-2, GROUPS + 2, (tokens, TOP_K), device="cuda").int()
    weights = torch.rand(tokens, TOP_K, device="cuda")
    a_format = "none" if sends == "as they are" else "fp8"
    options = {
        "format": "nvfp4", "layout": "sm90", "activation": "silu", "a_format": a_format,
        "out_dtype": torch.bfloat16,
    }  # fmt: skip
    with native.only(only):
        want = torch.ops.fp4.moe(x, ids, weights, *up.packed, *down.packed, **options)
        values = factor = None
        if sends == "fp8":
            values, factor = torch.ops.fp4.quantize_fp8(x, layout="sm90")
            if only == "decode":
                with pytest.raises(RuntimeError, match="so few that they must be as they are"):
                    moe_parts(x, values, factor, ids, weights, *up.packed, *down.packed, None, **options)
                return
        given = torch.full_like(x, float("nan")) if sends == "fp8" else x
        y, order = moe_parts(given, values, factor, ids, weights, *up.packed, *down.packed, None, **options)
    if only == "decode":
        assert not order.numel() and torch.equal(y, want)
        return
    places = order[GROUPS + ids.numel() : GROUPS + 2 * ids.numel()].view(ids.shape).long()
    here = (ids >= 0) & (ids < GROUPS)
    assert sorted(places[here].tolist()) == list(range(int(here.sum())))
    rows = torch.where(here[..., None], y[places.clamp(max=len(y) - 1)].float(), 0.0)
    torch.testing.assert_close((rows * weights[..., None]).sum(1), want.float(), rtol=2**-7, atol=1e-3)
