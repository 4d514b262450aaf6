"""Linear layers of few rows, the update of a cache, attention over it and the choice of experts on the CPU,
against float64, with every kernel family that this processor has.

A process chooses its kernels at its first call. So each family runs in another process, which runs this file
as a script.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import processes
import pytest
import torch
import torch.nn.functional as F
from samples import SAMPLES

import fp4_ops  # noqa: F401  loads the operators

CAPABILITIES = ("scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16")
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


def close(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> None:
    """`size` is the sum of the magnitudes that a sum has: a sum of terms that cancel may be far smaller.
    It is zero for weights of zeros."""
    assert got.shape == want.shape and got.is_contiguous()
    error = (got.double() - want).norm()
    assert error <= 3 * EPSILON[got.dtype] * size.norm(), (error.item(), got.dtype, tuple(got.shape))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).double()


def check_linears(dtype: torch.dtype) -> None:
    m, k = random.choice((1, 2, 3, 4, 5, 17)), random.choice((1, 31, 33, 64, 100, 700))
    columns = [random.choice((1, 7, 8, 40)) for _ in range(random.randint(1, 3))]
    weights = [torch.randn(n, k).to(dtype) for n in columns]
    check_call(dtype, m, weights, [w.double() for w in weights])


def check_call(
    dtype: torch.dtype,
    m: int,
    weights: list[torch.Tensor],
    exact: list[torch.Tensor],
    scales: list[torch.Tensor] | None = None,
) -> None:
    """Checks a call of fp4::linears with m rows and random options. exact: the weights' values in float64."""
    k, columns = weights[0].shape[1], [len(w) for w in weights]
    x, addend = (torch.randn(m, k).to(dtype) for _ in range(2))
    biases = [torch.randn(n).to(dtype) if random.random() < 0.5 else None for n in columns]
    norm = torch.randn(k).to(dtype) if random.random() < 0.5 else None
    add = addend if random.random() < 0.5 else None
    residual = torch.randn(m, columns[0]).to(dtype) if len(columns) == 1 else None
    in_float = norm is not None and random.random() < 0.5
    options = {"keep_norm": norm is not None, "norm_in_float": in_float}
    given = (x, weights, biases, norm, 1e-5, residual, add, scales)
    got = torch.ops.fp4.linears(*given, **options)
    one_by_one = [torch.ops.fp4.linears(*(
        t[i : i + 1] if isinstance(t, torch.Tensor) and t.dim() == 2 else t for t in given
    ), **options) for i in range(m)]  # fmt: skip
    for a, *rows in zip(got, *one_by_one):
        assert torch.equal(a, torch.cat(rows)), "the sums of a row depend on the number of rows"
    total = x.double() if add is None else rounded(x.double() + add.double(), dtype)
    rows = total
    if norm is not None:
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5)
        rows = rounded(norm.double() * (rows if in_float else rounded(rows, dtype)), dtype)
    want = [F.linear(rows, w, None if b is None else b.double()) for w, b in zip(exact, biases)]
    sizes = [rows.abs() @ w.abs().T + (0 if b is None else b.double().abs())
             for w, b in zip(exact, biases)]  # fmt: skip
    if residual is not None:
        want, sizes = [want[0] + residual.double()], [sizes[0] + residual.double().abs()]
    more = [rows] * (norm is not None) + [total] * (add is not None)
    assert len(got) == len(want) + len(more)
    for a, b, size in zip(got, want + more, sizes + more):
        close(a, b, size)


def check_attention(dtype: torch.dtype) -> None:
    """Keys that are not seen are NaN."""
    b, kv_heads, group, tokens = (random.choice((1, 2, 3, 8)) for _ in range(4))
    length, size, value_size = random.choice((1, 5, 64, 65, 300)), random.choice((8, 33, 64)), 48
    q = torch.randn(b, tokens, kv_heads * group, size).to(dtype)
    keys, values = (torch.randn(b, kv_heads, length, d).to(dtype) for d in (size, value_size))
    mask = torch.rand(random.choice((1, b)), 1, tokens, length) < random.random()
    if random.random() < 0.5:  # as of a static cache with room for more
        mask = mask & (torch.arange(length) < random.randint(0, length))
    if random.random() < 0.5:
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    unseen = ~mask.expand(b, -1, -1, -1).any(2).unsqueeze(-1)
    keys, values = keys.masked_fill(unseen, torch.nan), values.masked_fill(unseen, torch.nan)
    sinks = torch.randn(q.shape[2]).to(dtype) if random.random() < 0.5 else None
    scale = random.choice((size**-0.5, 1.0))
    wide = [x.double().nan_to_num().repeat_interleave(group, 1) for x in (keys, values)]
    for seen in (mask, None):
        if seen is None:
            keys, values = keys.nan_to_num(), values.nan_to_num()
        got = torch.ops.fp4.attention(q, keys, values, seen, scale, sinks)
        weights = (q.double().transpose(1, 2) @ wide[0].mT * scale).exp()
        weights = weights if seen is None else weights * seen
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp().view(1, -1, 1, 1)
        want, size_of_sum = (
            (weights / total @ v).nan_to_num().transpose(1, 2) for v in (wide[1], wide[1].abs())
        )  # no key is seen: 0
        if want.norm() > 0:
            close(got, want, size_of_sum)
        else:
            assert not got.any()


def rotated(x: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Computes in float64 what a model computes, and rounds where a model rounds."""
    y = x.double()
    if norm is not None:
        y = rounded(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5), x.dtype)
        y = rounded(y * norm.double(), x.dtype)
    low, high = y.chunk(2, -1)
    turned = torch.cat((-high, low), -1)
    cos, sin = (t.double().unsqueeze(2) for t in (cos, sin))
    return rounded(rounded(y * cos, x.dtype) + rounded(turned * sin, x.dtype), x.dtype)


def apart(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in another order of memory: as it is, in one in three with heads before tokens, in
    one in three with a head's values apart."""
    dims = random.choice(((0, 1), (1, 2), (2, 3)))
    return x.transpose(*dims).clone(memory_format=torch.contiguous_format).transpose(*dims)


def check_update_cache(dtype: torch.dtype) -> None:
    """The caches have room on both sides of what is written. What is there stays to the bit."""
    b, tokens, heads = (random.choice((1, 2, 3)) for _ in range(3))
    size, value_size = random.choice((2, 6, 34, 64, 96, 128)), random.choice((1, 5, 64))
    length = tokens + random.randint(0, 5)
    start = random.randint(0, length - tokens)
    q, k = (apart(torch.randn(b, tokens, n, size).to(dtype)) for n in (random.choice((1, 7, 40)), heads))
    v = apart(torch.randn(b, tokens, heads, value_size).to(dtype))
    angle = torch.rand(random.choice((1, b)), tokens, size) * 6
    cos, sin = apart(angle.cos()[None].to(dtype))[0], angle.sin().to(dtype)
    norms = [torch.randn(size).to(dtype) if random.random() < 0.5 else None for _ in range(2)]
    caches = [apart(torch.full((b, heads, length, d), torch.nan).to(dtype)) for d in (size, value_size)]
    place = torch.tensor(start, dtype=random.choice((torch.int32, torch.int64)))
    got = torch.ops.fp4.update_cache(q, k, v, cos, sin, *norms, 1e-5, *caches, place)
    keys, values = (cache[:, :, start : start + tokens].transpose(1, 2) for cache in caches)
    assert torch.equal(values, v) and got.is_contiguous()
    for a, x, norm in ((got, q, norms[0]), (keys, k, norms[1])):
        want = rotated(x, norm, cos, sin)
        if norm is None and dtype != torch.float32:
            assert torch.equal(a.double(), want)
        close(a.contiguous(), want, want)
    for cache in caches:
        rest = [i for i in range(length) if not start <= i < start + tokens]
        assert cache[:, :, rest].isnan().all()


def check_top_experts(dtype: torch.dtype) -> None:
    """Among equal logits the lowest index comes first, and NaN before all."""
    experts = random.choice((1, 5, 33, 128, 512))
    k = random.randint(1, min(experts, 20))
    logits = apart(torch.randn(2, random.choice((1, 3, 200)), 1, experts)).to(dtype)
    logits = logits.mul(4).round() if random.random() < 0.5 else logits
    softmax, normalize = random.random() < 0.5, random.random() < 0.5
    if normalize and not softmax:
        logits = logits.abs() + 1  # else the sum cancels
    out_dtype = random.choice((None, *EPSILON))
    weights, ids = torch.ops.fp4.top_experts(
        logits, k, softmax=softmax, normalize=normalize, out_dtype=out_dtype
    )
    want = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    assert torch.equal(ids, want) and weights.dtype == (out_dtype or dtype)
    scores = (logits.double().softmax(-1) if softmax else logits.double()).gather(-1, want)
    scores = scores / scores.sum(-1, keepdim=True) if normalize else scores
    close(weights, scores, scores)
    logits[..., -1] = torch.nan
    assert (torch.ops.fp4.top_experts(logits, k)[1][..., 0] == experts - 1).all()


def run_all(capability: str, seed: int, draws: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    assert torch.ops.fp4.cpu_capability() == capability
    for dtype in EPSILON:
        for _ in range(draws):
            check_linears(dtype)
            check_attention(dtype)
            check_update_cache(dtype)
            check_top_experts(dtype)


def run_family(script: str, capability: str, draws: int) -> None:
    """Runs a script in a process that uses this family of kernels. Its arguments are the family, a seed and
    `draws`."""
    seed = torch.initial_seed() % 2**31
    env = processes.environment(FP4_CPU_CAPABILITY=capability, OMP_NUM_THREADS="3")
    command = [sys.executable, script, capability, str(seed), str(draws)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if capability != "scalar" and done.returncode != 0 and "FP4_CPU_CAPABILITY" in done.stderr:
        pytest.skip(f"this machine cannot run the {capability} kernels")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_family(capability):
    run_family(__file__, capability, 12)


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_multiply(rows):
    """No rows, and K = 0, whose products are the biases."""
    x, bias = torch.empty(rows, 0), torch.randn(5)
    (got,) = torch.ops.fp4.linears(x, [torch.empty(5, 0)], [bias], None, 0.0, None)
    torch.testing.assert_close(got, F.linear(x, torch.empty(5, 0), bias))
    (got,) = torch.ops.fp4.linears(torch.empty(0, 4), [torch.randn(5, 4)], [bias], None, 0.0, None)
    assert got.shape == (0, 5)


def test_a_number_that_is_none_reaches_the_result():
    """A NaN in a row or in a key that is seen, and a sum that overflows, as torch's operators have them."""
    x, w = torch.randn(2, 40), torch.randn(6, 40)
    x[1, 3] = torch.nan
    (got,) = torch.ops.fp4.linears(x, [w], [None], None, 0.0, None)
    assert got[1].isnan().all() and got[0].isfinite().all()
    q, keys, values = torch.randn(1, 1, 2, 8), torch.randn(1, 2, 150, 8), torch.randn(1, 2, 150, 8)
    for place, number in itertools.product((3, 66, 149), (torch.nan, torch.inf)):
        its = keys.clone()
        its[0, 1, place, 2] = number
        got = torch.ops.fp4.attention(q.abs(), its, values, None, 1.0)
        assert got[0, 0, 1].isnan().all() and got[0, 0, 0].isfinite().all(), (place, number)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_heads_share_threads_and_keep_their_bits(threads):
    """The heads of one sequence run on one thread, those of 16 on several."""
    q, k, v = (torch.randn(16, 1, n, 128).bfloat16() for n in (32, 4, 4))
    cos, sin = (torch.randn(16, 1, 128).bfloat16() for _ in range(2))
    norms = [torch.randn(128).bfloat16() for _ in range(2)]
    caches = [torch.zeros(16, 4, 3, 128).bfloat16() for _ in range(2)]
    alone = [cache.clone() for cache in caches]
    place, before = torch.tensor(1), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = torch.ops.fp4.update_cache(q, k, v, cos, sin, *norms, 1e-6, *caches, place)
        for i in range(16):
            one = slice(i, i + 1)
            given = [t[one] for t in (q, k, v, cos, sin)]
            parts = [cache[one] for cache in alone]
            y = torch.ops.fp4.update_cache(*given, *norms, 1e-6, *parts, place)
            assert torch.equal(y, got[one])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, caches, alone)) and caches[0][:, :, 1].any()


@pytest.mark.parametrize("start", [-1, 4, 1 << 40])
def test_places_outside_a_cache_are_refused_before_anything_is_written(start):
    heads, angles = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 8)
    caches = [torch.zeros(1, 1, 5, 8) for _ in range(2)]
    with pytest.raises(RuntimeError, match=f"start is {start}; keys has room for 5 tokens, and q has 2"):
        torch.ops.fp4.update_cache(*[heads] * 3, *[angles] * 2, None, None, 0.0, *caches, torch.tensor(start))
    assert not any(cache.any() for cache in caches)


def test_cached_attention_is_the_two_operators():
    for _ in range(20):
        given, _ = SAMPLES["cached_attention"](random.Random(random.random()), "cpu")
        same = [x.clone() for x in given[8:10]]
        q = torch.ops.fp4.update_cache(*given[:8], *same, given[10])
        want = torch.ops.fp4.attention(q, *same, *given[11:])
        got = torch.ops.fp4.cached_attention(*given)
        assert all(torch.equal(a, b) for a, b in zip((got, *given[8:10]), (want, *same), strict=True))


def test_cached_attention_refuses_before_it_writes():
    given, _ = SAMPLES["cached_attention"](random.Random(random.random()), "cpu")
    before = [x.clone() for x in given[8:10]]
    mask = torch.ones(1, 1, 1, before[0].shape[2] + 1, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="mask has shape"):
        torch.ops.fp4.cached_attention(*given[:11], mask, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(given[8:10], before, strict=True))
    two = [x.expand(-1, 2, *x.shape[2:]) for x in given[:5]]
    with pytest.raises(RuntimeError, match="q has 2 tokens"):
        torch.ops.fp4.cached_attention(*two, *given[5:])


if __name__ == "__main__":
    run_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
