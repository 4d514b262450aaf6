"""The update of a cache and attention as one kernel (csrc/sm90/cached_attention.cu), against the two."""

import random

import pytest
import torch
from test_sm90_gpu import pytestmark

from fp4_ops.backends import anywhere
from fp4_ops.backends.hopper import trust

__all__ = ["pytestmark"]

fp4 = torch.ops.fp4
EPS, SCALE = 1e-6, 0.2
STARTS = ("first", "inside", "last", "before", "behind")
MASKS = ("none", "filled", "window", "holes", "hides start", "nothing")


def seen_keys(kind, b, length, start):
    """A mask [b or 1, 1, 1, length] of the keys that are seen, or None."""
    places, n = torch.arange(length, device="cuda"), random.choice((1, b))
    if kind == "none":
        return None
    if kind == "filled":
        return (places <= start).expand(n, 1, 1, length).contiguous()
    if kind == "window":
        return ((places <= start) & (places > start - 40)).expand(n, 1, 1, length).contiguous()
    mask = torch.rand(n, 1, 1, length, device="cuda") < random.choice((0.05, 0.5, 0.9))
    if 0 <= start < length:
        mask[..., start] = kind == "holes"
    return mask & (kind != "nothing")


def drawn(dtype, size, b, q_heads, kv_heads, length, start, kind):
    """New arguments. Rows of the caches that are not seen are NaN."""

    def draw(*shape):
        return torch.randn(*shape, device="cuda").to(dtype)

    q, k, v = (draw(b, 1, n, size) for n in (q_heads, kv_heads, kv_heads))
    angle = torch.rand(random.choice((1, b)), 1, size, device="cuda") * 6
    norms = [random.choice((None, draw(size))) for _ in range(2)]
    place = {
        "first": 0,
        "inside": random.randrange(length),
        "last": length - 1,
        "before": -random.choice((1, 1 << 40)),
        "behind": random.choice((length, 1 << 40)),
    }[start]
    mask = seen_keys(kind, b, length, place)
    caches = [draw(b, kv_heads, length, size) for _ in range(2)]
    unseen = torch.zeros(b, 1, length, 1, dtype=torch.bool, device="cuda")
    if mask is not None:
        unseen = ~mask.expand(b, -1, -1, -1).transpose(2, 3)
    if 0 <= place < length:  # nothing reads what was there
        unseen = unseen.index_fill(2, torch.tensor([place], device="cuda"), True)
    for cache in caches:
        cache.masked_fill_(unseen, torch.nan)
    sinks = draw(q_heads) * 4 if random.random() < 0.5 else None
    place = torch.tensor(place, device="cuda")
    return [
        q,
        k,
        v,
        angle.cos().to(dtype),
        angle.sin().to(dtype),
        *norms,
        EPS,
        *caches,
        place,
        mask,
        SCALE,
        sinks,
    ]


def two(q, k, v, cos, sin, q_norm, k_norm, eps, keys, values, start, mask, scale, sinks):
    q = fp4.update_cache(q, k, v, cos, sin, q_norm, k_norm, eps, keys, values, start)
    return fp4.attention(q, keys, values, mask, scale, sinks)


def run(function, given):
    """Returns the result, and both caches after the call as bits."""
    caches = [x.clone() for x in given[8:10]]
    out = function(*given[:8], *caches, *given[10:])
    return out, *(x.view(torch.int16) for x in caches)


def check(given):
    got, again, want = run(fp4.cached_attention, given), run(fp4.cached_attention, given), run(two, given)
    about = {n: x.shape if torch.is_tensor(x) and x.dim() else x for n, x in enumerate(given)}
    assert got[0].isfinite().all() and got[0].is_contiguous(), about
    for y, same, other in zip(got, again, want, strict=True):
        assert torch.equal(y, same) and torch.equal(y, other), about


HEADS = ((32, 4), (64, 8), (8, 8), (32, 2), (40, 2), (3, 1), (9, 1))


@pytest.mark.parametrize("length", [1, 7, 16, 100, 1008, 2500])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_is_the_two_operators(heads, size, length):
    dtype = random.choice((torch.bfloat16, torch.float16))
    starts, kinds = [*STARTS], [*MASKS]
    random.shuffle(starts)
    random.shuffle(kinds)
    # Each start and each mask at least once; a long cache of many heads takes the emulator seconds.
    for start, kind in zip([*starts, random.choice(STARTS)], kinds, strict=True):
        b = random.choice((1, 2) if length > 1000 else (1, 2, 8))
        if start in ("before", "behind") and kind == "hides start":
            kind = "holes"
        check(drawn(dtype, size, b, *heads, length, start, kind))


@pytest.mark.parametrize("length", [3, 100, 520])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("group", [2, 9])
def test_keys_that_one_block_has(group, size, length):
    """Enough sequences for the GPU, so that no keys are divided."""
    b = torch.cuda.get_device_properties(0).multi_processor_count // 2 + 1
    dtype = random.choice((torch.bfloat16, torch.float16))
    for kind in ("none", random.choice(MASKS)):
        check(drawn(dtype, size, b, 2 * group, 2, length, random.choice(STARTS[:3]), kind))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_float64(dtype, size):
    for kind in MASKS[:4]:
        given = drawn(dtype, size, 3, 16, 2, random.randint(1, 300), "inside", kind)
        q, k, v, cos, sin, q_norm, k_norm, _, keys, values, start, mask, _, sinks = given
        given[12] = size**-0.5
        got, *_ = run(fp4.cached_attention, given)
        wrote = trust._rotated(k, k_norm, cos, sin), v.double()
        for cache, new in zip((keys, values), wrote, strict=True):
            cache[:, :, start] = new.to(dtype)[:, 0]
        want = trust._attended(
            trust._rotated(q, q_norm, cos, sin).to(dtype), keys.nan_to_num(), values.nan_to_num(), mask, sinks
        )
        error = (got.double() - want).norm() / want.norm()
        assert error < (4e-3 if dtype == torch.bfloat16 else 1e-3), (kind, float(error))


def test_a_hidden_new_key_counts_nothing_even_if_it_is_not_finite():
    given = drawn(torch.bfloat16, 128, 2, 8, 2, 50, "inside", "hides start")
    given[1][0, 0, 0, 0], given[2][1, 0, 1, 3] = torch.nan, torch.inf
    check(given)
    given[11][..., given[10]] = True
    out = run(fp4.cached_attention, given)[0]
    assert out[0, 0, :4].isnan().all() and not out[1, 0, 4:, 3].isfinite().any()
    assert out[0, 0, 4:].isfinite().all() and out[1, 0, :4].isfinite().all()


@pytest.mark.parametrize("view", ["heads apart", "start int32", "caches apart", "head 256", "float32", "96"])
def test_operands_that_are_views_and_sizes_of_no_kernel(view):
    size = {"head 256": 256, "96": 96}.get(view, 64)
    dtype = torch.float32 if view == "float32" else torch.float16
    given = drawn(torch.float16, size, 2, 8, 2, 60, "inside", "filled")
    given = [x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in given]
    for i in (8, 9):  # torch's attention multiplies what is hidden by 0
        given[i] = given[i].nan_to_num(nan=0.7)
    if view == "heads apart":
        for i in range(3):
            given[i] = torch.cat([given[i], given[i]], -1)[..., :size]
    if view == "start int32":
        given[10] = given[10].int()
    if view == "caches apart":
        given[8:10] = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in given[8:10])
    caches = [x.clone() for x in given[8:10]], [x.clone() for x in given[8:10]]
    got = fp4.cached_attention(*given[:8], *caches[0], *given[10:])
    want = anywhere.cached_attention(*given[:8], *caches[1], *given[10:])
    for a, b in zip((got, *caches[0]), (want, *caches[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
