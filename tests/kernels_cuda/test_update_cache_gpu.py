"""Rotation, and the write to a cache (csrc/sm90/update_cache.cu), against the model's own operators."""

import random

import pytest
import torch
from test_sm90_gpu import pytestmark

from fp4_ops.backends import anywhere

__all__ = ["pytestmark"]

EPS = 1e-6


def drawn(dtype, size, sequences=70):
    """New arguments, with a cache that is full of other numbers."""
    b, s, heads = random.randint(1, sequences), random.choice((1, 1, 3)), random.randint(1, 8)
    length = s + random.randint(0, 40)

    def draw(*shape):
        return torch.randn(*shape, device="cuda").to(dtype)

    q, k, v = (draw(b, s, n, size) for n in (random.randint(1, 40), heads, heads))
    angle = torch.rand(random.choice((1, b)), s, size, device="cuda") * 6
    norms = [random.choice((None, draw(size))) for _ in range(2)]
    caches = [draw(b, heads, length, size) for _ in range(2)]
    start = torch.tensor(random.randint(0, length - s), device="cuda")
    return [q, k, v, angle.cos().to(dtype), angle.sin().to(dtype), *norms, EPS, *caches, start]


def run(function, given):
    """Returns queries, keys and values."""
    keys, values = (x.clone() for x in given[8:10])
    return function(*given[:8], keys, values, given[10]), keys, values


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_as_a_model_does(dtype, size):
    for _ in range(8):
        given = drawn(dtype, size)
        got, again, plain = (
            run(f, given)
            for f in (torch.ops.fp4.update_cache, torch.ops.fp4.update_cache, anywhere.update_cache)
        )
        assert torch.equal(got[2], plain[2])
        for y, same, want in zip(got, again, plain):
            assert torch.equal(y, same) and y.is_contiguous()
            # The sum of a head's squares has another order: a norm's result may be rounded to the next value.
            error = (y.double() - want.double()).norm() / want.double().norm()
            assert error < (1e-3 if dtype == torch.bfloat16 else 1.3e-4), (given[0].shape, float(error))
            assert given[5:7] != [None, None] or torch.equal(y, want)


def test_heads_that_lie_apart_and_sizes_of_no_kernel():
    for size, dtype in ((96, torch.bfloat16), (128, torch.float32), (128, torch.bfloat16)):
        given = drawn(dtype, size, 3)
        given[:3] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given[:3]]
        for a, b in zip(run(torch.ops.fp4.update_cache, given), run(anywhere.update_cache, given)):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_places_outside_the_cache_are_not_written():
    for place in (-1, 1 << 40):
        given = drawn(torch.bfloat16, 128)
        given[10] = torch.tensor(place, device="cuda")
        _, keys, values = run(torch.ops.fp4.update_cache, given)
        room = given[8].shape[2]
        inside = [place + s for s in range(given[0].shape[1]) if 0 <= place + s < room]
        same = [p for p in range(room) if p not in inside]
        assert torch.equal(keys[:, :, same], given[8][:, :, same])
        assert torch.equal(values[:, :, same], given[9][:, :, same])
