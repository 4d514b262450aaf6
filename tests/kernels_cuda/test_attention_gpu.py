"""Attention of one token over a cache (csrc/sm90/attention.cu), against float64."""

import random

import pytest
import torch
import torch.nn.functional as F
from reference import relative_error
from test_sm90_gpu import pytestmark

from fp4_ops.backends import anywhere

__all__ = ["pytestmark"]

SCALE = 0.2


def drawn(dtype, size, masked=True, tokens=1, sunk=False):
    """New arguments; keys that are not seen are NaN. Sinks weigh from nothing to all."""
    b, heads = random.randint(1, 6), random.randint(1, 3)
    length = random.choice((1, 5, 40, random.randint(1, 400)))

    def draw(*shape):
        return torch.randn(*shape, device="cuda").to(dtype)

    q = draw(b, tokens, heads * random.choice((1, 2, 4, 7, 8)), size)
    caches = [draw(b, heads, length, size) for _ in range(2)]
    mask = None
    if masked:
        n = random.choice((1, b))
        mask = torch.rand(n, 1, tokens, length, device="cuda") < random.random()
        if random.random() < 0.5:  # as a cache is filled
            count = torch.randint(0, length + 1, (n, 1, tokens, 1), device="cuda")
            mask = torch.arange(length, device="cuda") < count
        if tokens == 1:
            for x in caches:
                x.masked_fill_(~mask.expand(b, -1, -1, -1).transpose(2, 3), torch.nan)
    sinks = draw(q.shape[2]) * random.choice((1, 4, 20)) if sunk else None
    return q, *caches, mask, SCALE, sinks


def expected(q, keys, values, mask, scale, sinks=None):
    times = q.shape[2] // keys.shape[1]
    keys, values = (x.double().nan_to_num().repeat_interleave(times, 1) for x in (keys, values))
    if sinks is None:
        out = F.scaled_dot_product_attention(q.double().transpose(1, 2), keys, values, mask, scale=scale)
        return out.nan_to_num().transpose(1, 2)  # no key is seen: 0
    weights = (q.double().transpose(1, 2) @ keys.mT * scale).exp()
    if mask is not None:
        weights = weights * mask
    total = weights.sum(-1, keepdim=True) + sinks.double().exp().view(1, -1, 1, 1)
    return (weights / total @ values).transpose(1, 2)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attends_to_the_keys_that_are_seen(dtype, size):
    for masked in (True,) * 6 + (False,) * 2:
        given = drawn(dtype, size, masked)
        got, again, want = torch.ops.fp4.attention(*given), torch.ops.fp4.attention(*given), expected(*given)
        assert torch.equal(got, again) and got.is_contiguous()
        error = (got.double() - want).norm() / want.norm().clamp_min(1e-9)
        assert error < (3e-3 if dtype == torch.bfloat16 else 4e-4), (given[0].shape, float(error))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_with_sinks(dtype, size):
    for masked in (True,) * 6 + (False,) * 2:
        given = drawn(dtype, size, masked, sunk=True)
        got, again, want = torch.ops.fp4.attention(*given), torch.ops.fp4.attention(*given), expected(*given)
        assert torch.equal(got, again) and got.is_contiguous()
        error = (got.double() - want).norm() / want.norm().clamp_min(1e-3)
        assert error < (3e-3 if dtype == torch.bfloat16 else 1e-3), (given[0].shape, float(error))


def seen_keys(kind, b, length):
    """A mask [b, 1, 1, length] of the keys that are seen."""
    places = torch.arange(length, device="cuda").expand(b, 1, 1, length)
    first, last = torch.randint(0, length + 1, (2, b, 1, 1, 1), device="cuda")
    if kind == "filled":
        return places < last
    if kind == "window":
        return (places >= first) & (places < first + 128)
    if kind == "holes":  # of one key to many tiles
        return torch.rand(b, 1, 1, length, device="cuda") < torch.where(places // 70 % 3 == 0, 0.8, 0.01)
    if kind == "far apart":
        return places % 333 == first % 333
    return places < 0 if kind == "nothing" else torch.full_like(places, True, dtype=torch.bool)


KINDS = ("filled", "window", "holes", "far apart", "nothing", "all")


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [(1,), (8,), (2, 3, 7), (9, 12, 16, 17)])
def test_long_caches(dtype, size, group):
    """Every kind of mask, some with sinks; the keys that are not seen are NaN, and so is what lies behind."""
    for kind in KINDS:
        b, heads, times = random.randint(1, 3), random.randint(1, 2), random.choice(group)
        length = random.choice((512, 1024, random.randint(500, 1500), random.randint(1500, 3000)))
        mask = seen_keys(kind, b, length)
        q = torch.randn(b, 1, heads * times, size, device="cuda").to(dtype)
        caches = torch.full((2, b * heads * length + 99, size), torch.nan, device="cuda", dtype=dtype)
        keys, values = (x[: b * heads * length].view(b, heads, length, size) for x in caches)
        for x in keys, values:
            x.copy_(torch.randn(x.shape, device="cuda")).masked_fill_(~mask.transpose(2, 3), torch.nan)
        sinks = torch.randn(heads * times, device="cuda").to(dtype) if random.random() < 0.5 else None
        given = q, keys, values, None if kind == "all" else mask, SCALE, sinks
        got, want = torch.ops.fp4.attention(*given), expected(*given)
        assert torch.equal(got, torch.ops.fp4.attention(*given))
        error = (got.double() - want).norm() / want.norm().clamp_min(1e-3)
        assert error < (3e-3 if dtype == torch.bfloat16 else 1e-3), (kind, b, heads, length, float(error))


@pytest.mark.parametrize("first", [0, 3, 16])
def test_long_masks_that_begin_anywhere(first):
    b, length = 2, 700 + 2 * first
    whole = seen_keys("holes", b, length + 40)
    q, keys, values = (
        torch.randn(b, *s, 64, device="cuda").half() for s in ((1, 4), (2, length), (2, length))
    )
    for mask in (
        whole[..., first : first + length],
        whole[:1, ..., first : first + length].expand(b, -1, -1, -1),
    ):
        got, want = (
            torch.ops.fp4.attention(q, keys, values, mask, SCALE),
            expected(q, keys, values, mask, SCALE),
        )
        assert (got.double() - want).norm() / want.norm() < 4e-4


def test_sinks_of_extreme_size():
    """A sink that weighs nothing changes no bit; one that weighs all leaves 0, as does one beside no key."""
    q, keys, values, mask, scale, sinks = drawn(torch.bfloat16, 64, sunk=True)
    plain = torch.ops.fp4.attention(q, keys, values, mask, scale)
    assert torch.equal(torch.ops.fp4.attention(q, keys, values, mask, scale, sinks - torch.inf), plain)
    hidden = torch.zeros_like(mask)
    for seen, own in ((mask, sinks * 0 + 3e4), (hidden, sinks), (hidden, sinks * 0 - 3e4)):
        assert (torch.ops.fp4.attention(q, keys, values, seen, scale, own) == 0).all()
    assert torch.ops.fp4.attention(q, keys, values, mask, scale, sinks * torch.nan).isnan().all()


@pytest.mark.parametrize("length", [3, 100, 520])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("group", [2, 9])
def test_keys_that_one_block_has(length, size, group):
    """Enough sequences for the GPU, so that no keys are divided: several rounds in one thread block."""
    b = torch.cuda.get_device_properties(0).multi_processor_count // 2 + 1
    dtype = random.choice((torch.float16, torch.bfloat16))
    q, keys, values = (
        torch.randn(b, *s, size, device="cuda").to(dtype) for s in ((1, 2 * group), (2, length), (2, length))
    )
    sinks = torch.randn(2 * group, device="cuda").to(dtype)
    for kind in ("all", random.choice(KINDS)):
        mask = seen_keys(kind, b, length)
        for x in keys, values:
            x.masked_fill_(~mask.transpose(2, 3), torch.nan)
        given = q, keys, values, None if kind == "all" else mask, SCALE, sinks if kind == "all" else None
        got, want = torch.ops.fp4.attention(*given), expected(*given)
        assert torch.equal(got, torch.ops.fp4.attention(*given))
        error = (got.double() - want).norm() / want.norm().clamp_min(1e-3)
        assert error < (4e-4 if dtype == torch.float16 else 3e-3), (kind, b, dtype, float(error))


@pytest.mark.parametrize("b", [1, 20])
@pytest.mark.parametrize("size", [64, 128])
def test_scores_far_below_those_of_keys_that_are_not_seen(b, size):
    """The scores of seen keys are about -200. Another key's, or that of zeros in its place, is far larger."""
    length, scale = 75, size**-0.5
    q = torch.rand(b, 1, 4, size, device="cuda").add(1).half()
    keys = -torch.rand(b, 2, length, size, device="cuda").add(12).half()
    values = torch.randn(b, 2, length, size, device="cuda").half()
    mask = torch.rand(b, 1, 1, length, device="cuda") < 0.5
    mask[..., 0] = True
    for unseen in (0.0, 12.0, torch.nan):
        keys.masked_fill_(~mask.transpose(2, 3), unseen)
        got, want = (f(q, keys, values, mask, scale) for f in (torch.ops.fp4.attention, expected))
        assert (got.double() - want).norm() / want.norm() < 1e-3


def at_odd_address(t):
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


@pytest.mark.parametrize(
    "view",
    [
        "sinks apart",
        "mask of all",
        "mask apart",
        "part of a mask",
        "queries apart",
        "caches apart",
        "odd address",
        "odd addresses",
        "mask of other bytes",
    ],
)
def test_operands_that_are_views(view):
    b, length = 3, 640
    q, keys, values = (
        torch.randn(b, *s, 64, device="cuda").half() for s in ((1, 4), (2, length), (2, length))
    )
    mask = torch.rand(b, 1, 1, length, device="cuda") < 0.5
    sinks = torch.randn(8, device="cuda").half()[::2] if view == "sinks apart" else None
    if view == "mask of all":
        mask = mask[:1].expand(b, -1, -1, -1)
    if view == "mask of other bytes":  # any byte but 0 is true
        mask = (mask * torch.randint(1, 256, mask.shape, device="cuda")).to(torch.uint8).view(torch.bool)
    if view == "mask apart":
        mask = mask.repeat_interleave(2, -1)[..., ::2]
        assert mask.stride(3) == 2
    if view == "part of a mask":
        mask = (torch.rand(b, 1, 1, length + 9, device="cuda") < 0.5)[..., 5 : 5 + length]
    if view == "queries apart":
        q = torch.randn(b, 4, 1, 64, device="cuda").half().transpose(1, 2)
        q = torch.cat([q, q], -1)[..., :64]
    if view == "caches apart":
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    if view == "odd address":
        keys = at_odd_address(keys)
    if view == "odd addresses":
        q, keys, values = (at_odd_address(x) for x in (q, keys, values))
    want = expected(q, keys, values, mask, SCALE, sinks)
    got = torch.ops.fp4.attention(q, keys, values, mask, SCALE, sinks)
    assert (got.double() - want).norm() / want.norm() < 4e-4


@pytest.mark.parametrize("length", [5, 700])
def test_numbers_that_are_not_finite_are_not_hidden(length):
    q, keys, values = (
        torch.randn(2, *s, 128, device="cuda").bfloat16() for s in ((1, 8), (2, length), (2, length))
    )
    values[0, 0, -1] = torch.inf
    keys[-1, -1, 0] = torch.nan
    got = torch.ops.fp4.attention(q, keys, values, None, SCALE)
    assert not got[0, 0, 0].isfinite().any() and got[-1, 0, -1].isnan().all()


def test_sizes_and_tokens_of_no_kernel():
    for size, dtype, tokens in ((96, torch.bfloat16, 1), (128, torch.float32, 1), (128, torch.bfloat16, 3)):
        given = drawn(dtype, size, masked=False, tokens=tokens, sunk=random.random() < 0.5)
        got, want = torch.ops.fp4.attention(*given), anywhere.attention(*given)
        assert relative_error(got, want.double()) < 1e-2  # emulated, the CPU's kernel rounds elsewhere
