"""A call gives the same bits each time, whatever ran before it.

Earlier values in shared memory, registers or allocated memory must not have an effect.
"""

import random
from functools import partial

import pytest
import reference
import torch
from test_sm90_gpu import Weights, pytestmark, routed
from test_sm90_int4_gpu import Int4Weights

__all__ = ["pytestmark"]

GATES = ["silu", "silu_interleaved", "swigluoai", "gelu_tanh"]


def weights(format: str, *shape: int):
    kind = Weights if format in ("nvfp4", "mxfp4") else Int4Weights
    w = kind(*shape, format=format)
    return (w.packed if kind is Weights else w.made), w.options


def products(draw: random.Random, format: str):
    groups, n, k = draw.choice([(8, 192, 768), (3, 128, 2880), (60, 128, 256), (200, 64, 128)])
    w, options = weights(format, groups, n, k)
    for m in draw.sample([1, 3, 9, 33, 150, 601, 2047], 3):
        x = torch.randn(m, k, device="cuda").to(draw.choice([torch.bfloat16, torch.float16]))
        scale = None
        if format in reference.INT4_FORMATS or draw.random() < 0.5:
            x, scale = torch.ops.fp4.quantize_fp8(x, layout="sm90")
        ids, _, offs = routed(m, groups)
        rows = min(m, 65)
        masked_m = torch.randint(0, rows + 1, (groups,), device="cuda").int()
        batch = x[:rows].repeat(groups, 1, 1)
        scales = None if scale is None else scale[:rows].repeat(groups, 1)
        one = [t[-1] for t in w]
        op = torch.ops.fp4
        yield partial(op.grouped_mm, x, *w, offs, scale, **options)
        yield partial(op.indexed_mm, x, *w, ids, scale, **options)
        yield partial(op.mm, x, *one, scale, **options)
        yield partial(op.grouped_mm_masked, batch, *w, masked_m, scales, **options)


def blocks(draw: random.Random, format: str):
    experts, hidden, inter, top_k = draw.choice([(16, 512, 192, 4), (128, 256, 128, 8), (5, 768, 320, 2)])
    up, options = weights(format, experts, 2 * inter, hidden)
    down, _ = weights(format, experts, hidden, inter)
    b13, b2 = torch.randn(experts, 2 * inter, device="cuda"), torch.randn(experts, hidden, device="cuda")
    for tokens in draw.sample([1, 3, 9, 41, 150, 701], 3):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16() * 2.0 ** draw.randint(-6, 2)
        ids = torch.randint(-1, experts + 1, (tokens, top_k), device="cuda")
        scores = torch.rand(tokens, top_k, device="cuda")
        for gate in GATES:
            a_format = (
                "fp8" if format in reference.INT4_FORMATS else draw.choice(["none", "fp8", "nvfp4", "mxfp4"])
            )
            more = {"activation": gate, "a_format": a_format, **options}
            yield partial(torch.ops.fp4.moe, x, ids, scores, *up, *down, b13, b2, **more)


@pytest.mark.hardware
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", *reference.INT4_FORMATS])
@pytest.mark.parametrize("kind", [products, blocks], ids=lambda kind: kind.__name__)
def test_calls_in_any_order(kind, format):
    draw = random.Random(torch.randint(2**31, ()).item())
    calls = [call for _ in range(3) for call in kind(draw, format)]
    first = [call() for call in calls]
    for _ in range(8):
        for i in draw.sample(range(len(calls)), len(calls)):
            again = calls[i]()
            assert torch.equal(again, first[i]), i
