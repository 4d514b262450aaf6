"""`moe_parts` gives the rows of experts before `moe` adds them up, for ranks that add them up elsewhere.

Such ranks have many slots without an expert of this rank. These slots take no time, and nothing reads them.
"""

from __future__ import annotations

import pytest
import torch
from test_sm90_gpu import Weights, decode, prefill, pytestmark

from fp4_ops.backends.hopper import HOPPER
from fp4_ops.backends.launchers import rows
from fp4_ops.meta.layouts import LAYOUTS
from fp4_ops.runtime import native

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
                with pytest.raises(RuntimeError, match="with so few rows they must not be quantised"):
                    moe_parts(x, values, factor, ids, weights, *up.packed, *down.packed, None, **options)
                return
        given = torch.full_like(x, float("nan")) if sends == "fp8" else x
        y, order = moe_parts(given, values, factor, ids, weights, *up.packed, *down.packed, None, **options)
    here = (ids >= 0) & (ids < GROUPS)
    if only == "decode":
        assert not order.numel() and y.dtype == torch.float32
        places = torch.arange(ids.numel(), device="cuda").view(ids.shape)
    else:
        places = order[GROUPS + ids.numel() : GROUPS + 2 * ids.numel()].view(ids.shape).long()
        assert sorted(places[here].tolist()) == list(range(int(here.sum())))
    rows = torch.where(here[..., None], y[places.clamp(max=len(y) - 1)].float(), 0.0)
    torch.testing.assert_close((rows * weights[..., None]).sum(1), want.float(), rtol=2**-7, atol=1e-3)


@pytest.fixture
def poisoned_memory():
    """Fill the results of torch.empty with NaN."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize("gate", ["silu_interleaved", "gelu", "relu2"])
@pytest.mark.parametrize(
    "layout, a_format",
    [(o, a) for o in ("sm90", "mma_bf16") for a in LAYOUTS[o].a_formats if HOPPER.takes(a, o)],
)
@pytest.mark.parametrize("only", ["prefill", "decode"])
def test_nobody_reads_rows_of_no_expert(only, layout, a_format, gate, poisoned_memory):
    """Most slots have none; one call has no other."""
    width = INNER if gate == "relu2" else 2 * INNER
    up, down = (
        Weights(GROUPS, *shape, format="nvfp4", layout=layout) for shape in ((width, HIDDEN), (HIDDEN, INNER))
    )
    options = {"activation": gate, "a_format": a_format, **up.options}
    for tokens, low in ((1, 0), (7, -9), (70, -20), (3, -1)):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        ids = torch.randint(low, GROUPS if low < -1 else low + 1, (tokens, TOP_K), device="cuda")
        ids[0, 0] = low
        weights = torch.rand(tokens, TOP_K, device="cuda")
        with native.only(only):
            out = torch.ops.fp4.moe(x, ids, weights, *up.packed, *down.packed, **options)
        assert torch.isfinite(out.float()).all()
        here = (ids >= 0).any(1)
        assert not out[~here].any() and out[here].any(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prefill_leaves_rows_of_no_group_alone(dtype):
    w = Weights(GROUPS, HIDDEN, INNER, format="nvfp4")
    counts = torch.tensor([3, 0, 20, 1, 9], dtype=torch.int32, device="cuda")
    m, end = 50, int(counts.sum())
    x, factor = rows.to_half(torch.randn(m, INNER, device="cuda").bfloat16())

    def run(leaves_rest):
        out = torch.full((m, HIDDEN), float("nan"), device="cuda", dtype=dtype)
        offs = counts.cumsum(0).int()
        prefill.run(x, factor, w.of_kernels(), offs, decode.Routing.OFFS, m, out, leaves_rest=leaves_rest)
        return out

    zeroed, left = run(False), run(True)
    assert not zeroed[end:].any() and left[end:].isnan().all()
    assert torch.equal(zeroed[:end], left[:end])
