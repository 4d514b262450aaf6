"""Decides whether a decoding step may use the kernels for what is beside the experts on this GPU.

The first use of each kernel on a GPU is checked (first_use.py).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...meta.torch_internals import without_modes
from ...runtime import first_use, native
from ...runtime.oracle import relative_error

BOUND = 4e-3
"""Bound of the error of bfloat16 results against float64."""
K, EPS = 2048, 1e-6
ROWS = (1, 8, 16, 32, 64)
"""Numbers of rows that are checked: one row, and the largest number for each form of the kernel in a step."""
SEQUENCES = 160
"""Sequences whose heads fill a GPU, so that no keys are divided."""
KEYS = {1: (100, 2500), SEQUENCES: (100, 300)}
"""Lengths of a cache, for each number of sequences: one of a tile or two for each warp, and one of more."""


def linears_error() -> float:
    """Returns the largest error of fp4::linears in the forms that a step uses."""
    return _largest("fp4::linears", _linears_error, ROWS)


def attention_error() -> float:
    """Returns the largest error of fp4::attention, with the keys divided among thread blocks and not."""
    return _largest("fp4::attention", _attention_error, tuple(KEYS))


def update_cache_error() -> float:
    """Returns the largest error of fp4::update_cache, for one sequence and several."""
    return _largest("fp4::update_cache", _update_cache_error, (1, 5))


def cached_attention_error() -> float:
    """Returns the largest error of fp4::cached_attention against the two operators that it is composed of."""
    return _largest("fp4::cached_attention", _cached_attention_error, tuple(KEYS))


def top_experts_error() -> float:
    """Returns the largest error of fp4::top_experts, for one token and more than a thread block has."""
    return _largest("fp4::top_experts", _top_experts_error, (1, 70))


def router_error() -> float:
    """Returns the largest error of fp4::router, for one row and as many as the kernel takes."""
    return _largest("fp4::router", _router_error, (1, 8))


def _largest(name: str, error: Callable[[torch.dtype, str, int], float], sizes: tuple[int, ...]) -> float:
    """Returns the largest error for both dtypes. It is infinite if the operator does not run."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]), torch.no_grad():
        torch.manual_seed(0)
        try:
            return max(error(dtype, "cuda", n) for dtype in (torch.bfloat16, torch.float16) for n in sizes)
        except torch.OutOfMemoryError:
            raise  # it says nothing about the kernel
        except RuntimeError as why:
            logging.getLogger("fp4_ops").warning("fp4: %s does not run: %s", name, why)
            return float("inf")


def _linears_error(dtype: torch.dtype, device: str, rows: int) -> float:
    """Returns the largest error of six calls: an addend and a norm before three products, the same with
    weights in fp8, a product with a residual, a norm that rounds after its weight, and three products alone,
    in 16 bits and in fp8. They run with `early`, as in a step, where the kernel before makes x.
    """

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    x, addend, scale, residual = draw(rows, K), draw(rows, K), draw(K), draw(rows, 512)
    weights = [draw(n, K) / 32 for n in (4096, 512, 128)]
    scales = [torch.rand(len(w), device=device) / 64 for w in weights]
    in_fp8 = [(w * 64).to(torch.float8_e4m3fn) for w in weights]
    got = []
    for given, own in ((weights, None), (in_fp8, scales)):
        made = x.clone(), addend.clone()
        got += torch.ops.fp4.linears(
            made[0], given, [None] * 3, scale, EPS, None, made[1], own, early=True, keep_norm=True
        )
    got += torch.ops.fp4.linears(x.clone(), weights[1:2], [None], None, 0.0, residual, early=True)
    got += torch.ops.fp4.linears(
        x.clone(), weights[2:], [None], scale, EPS, None, early=True, norm_in_float=True
    )
    for given, own in ((weights, None), (in_fp8, scales)):
        got += torch.ops.fp4.linears(x.clone(), given, [None] * 3, None, 0.0, None, None, own, early=True)
    total = x + addend

    def scaled(t: Tensor) -> Tensor:
        return t.float() * torch.rsqrt(t.float().pow(2).mean(-1, keepdim=True) + EPS)

    normed = scaled(total).to(dtype) * scale
    exact = [w.double() for w in weights]
    want = [normed.double() @ w.T for w in exact] + [normed.double(), total.double()]
    dequantised = [w.double() * s.double()[:, None] for w, s in zip(in_fp8, scales, strict=True)]
    want += [normed.double() @ w.T for w in dequantised] + [normed.double(), total.double()]
    want.append(x.double() @ weights[1].double().T + residual.double())
    want.append((scaled(x) * scale).to(dtype).double() @ weights[2].double().T)
    want += [x.double() @ w.T for w in (*exact, *dequantised)]
    return max(relative_error(a, b) for a, b in zip(got, want, strict=True))


def _attention_error(dtype: torch.dtype, device: str, sequences: int) -> float:
    """Returns the error of eight and 32 query heads over two heads of keys, with hidden keys and without,
    with sinks and without. Of a longer cache, keys between others are hidden, too.
    """
    errors = []
    short, _ = lengths = KEYS[sequences]
    for size, length, heads in itertools.product((64, 128), lengths, (8, 32)):
        q, keys, values = (
            torch.randn(sequences, *shape, device=device).to(dtype)
            for shape in ((1, heads, size), (2, length, size), (2, length, size))
        )
        places = torch.arange(length, device=device)
        mask = places < torch.randint(1, length, (sequences, 1, 1, 1), device=device)
        if length > short:  # holes of a key to many tiles
            mask = mask & (places % 200 < torch.randint(1, 200, (sequences, 1, 1, 1), device=device))
        sinks = torch.randn(heads, device=device).to(dtype) * 4
        for seen, own in itertools.product((None, mask), (None, sinks)):
            got = torch.ops.fp4.attention(q, keys, values, seen, size**-0.5, own)
            errors.append(relative_error(got, _attended(q, keys, values, seen, own)))
    return max(errors)


def _attended(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Computes attention in float64. A sink is a key of its own, whose value is 0."""
    b, _, heads, size = q.shape
    shared = b, keys.shape[1], heads // keys.shape[1]
    logits = q.double().view(*shared, size) @ keys.double().mT * size**-0.5
    v = values.double()
    if seen is not None:
        logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sunk = sinks.double().view(1, *shared[1:], 1).expand(*shared, 1)
        logits, v = torch.cat([logits, sunk], -1), F.pad(v, (0, 0, 0, 1))
    return (logits.softmax(-1) @ v).view(q.shape)


def _update_cache_error(dtype: torch.dtype, device: str, sequences: int) -> float:
    """Returns the error of heads with a norm and one angle for all sequences, and of heads without a norm and
    with angles of their own, with the whole caches.
    """
    errors = []
    for size, normed in itertools.product((64, 128, 256), (True, False)):
        tokens, angles = (1, 1) if normed else (3, sequences)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        q, k, v = (draw(sequences, tokens, n, size) for n in (8, 2, 2))
        angle = torch.rand(angles, tokens, size, device=device) * 6
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        norms = (draw(size), draw(size)) if normed else (None, None)
        caches = [draw(sequences, 2, 9, size) for _ in range(2)]
        start = torch.tensor(4, device=device)
        want = [_rotated(x, norm, cos, sin) for x, norm in zip((q, k), norms, strict=True)]
        places = torch.arange(4, 4 + tokens, device=device)
        written = [
            cache.double().index_copy(2, places, x.double().transpose(1, 2))
            for cache, x in zip(caches, (want[1], v), strict=True)
        ]
        got = torch.ops.fp4.update_cache(q, k, v, cos, sin, *norms, EPS, *caches, start)
        errors += [relative_error(a, b) for a, b in zip((got, *caches), (want[0], *written), strict=True)]
    return max(errors)


def _rotated(x: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    """Computes in float64 what fp4::update_cache makes of queries or keys. Rounds where a model rounds."""

    def rounded(t: Tensor) -> Tensor:
        return t.to(x.dtype).double()

    y = x.double()
    if norm is not None:
        y = rounded(rounded(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)) * norm.double())
    low, high = y.chunk(2, -1)
    turned = torch.cat((-high, low), -1)
    return rounded(y * cos.double().unsqueeze(2)) + rounded(turned * sin.double().unsqueeze(2))


def _cached_attention_error(dtype: torch.dtype, device: str, sequences: int) -> float:
    """Returns the error of heads with norms and without, whose new key is the last that is seen, or hidden,
    with the whole caches. It is infinite if a key is read that is not seen, or was replaced.
    """
    errors = []
    for size, length, heads in itertools.product((64, 128), KEYS[sequences], (8, 32)):

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        q, k, v = (draw(sequences, 1, n, size) for n in (heads, 2, 2))
        angle = torch.rand(1, 1, size, device=device) * 6
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        place = length * 3 // 4
        start, places = torch.tensor(place, device=device), torch.arange(length, device=device)
        for normed, hidden, sinks in ((True, False, None), (False, True, draw(heads) * 4)):
            norms = (draw(size), draw(size)) if normed else (None, None)
            seen = ((places < place) if hidden else (places <= place)).expand(sequences, 1, 1, length)
            caches = [draw(sequences, 2, length, size) for _ in range(2)]
            for cache in caches:
                cache[:, :, place:] = math.nan
            given = (q, k, v, cos, sin, *norms, EPS)
            same = [cache.clone() for cache in caches]
            want = torch.ops.fp4.update_cache(*given, *same, start)
            want = torch.ops.fp4.attention(want, *same, seen, size**-0.5, sinks)
            got = torch.ops.fp4.cached_attention(*given, *caches, start, seen, size**-0.5, sinks)
            written = [cache.nan_to_num(7.0) for cache in (*caches, *same)]
            errors += [relative_error(a, b) for a, b in zip((got, *written), (want, *written[2:]))]
    return max(errors)


def _top_experts_error(dtype: torch.dtype, device: str, rows: int) -> float:
    """Returns the error of the weights, which is infinite if other experts are chosen."""
    errors = []
    for experts, k, softmax, normalize in (
        (128, 8, True, True),
        (128, 4, True, False),
        (512, 16, False, False),
    ):
        drawn = torch.randn(rows, experts, device=device, dtype=torch.float32)
        for logits in (drawn, drawn.to(dtype)):
            options = {"softmax": softmax, "normalize": normalize, "out_dtype": dtype}
            got, ids = torch.ops.fp4.top_experts(logits, k, **options)
            chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
            scores = logits.double().softmax(-1) if softmax else logits.double()
            want = scores.gather(-1, chosen)
            want = want / want.sum(-1, keepdim=True) if normalize else want
            errors.append(relative_error(got, want) if torch.equal(ids, chosen) else math.inf)
    return max(errors)


def _router_error(dtype: torch.dtype, device: str, rows: int) -> float:
    """Returns the largest error of three calls: an addend and a norm before as many experts as the kernel
    takes, a norm that rounds after its weight and a bias, and experts of which a tile is not full. It is
    infinite if other experts are chosen. The calls run with `early`, as in a step.
    """

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    errors = []
    for experts, k, chosen, added, in_float, normalize in (
        (128, K, 8, True, False, True),
        (128, 2880, 4, False, True, True),
        (60, K, 4, False, False, False),
    ):
        x, weight, scale = draw(rows, k), draw(experts, k) / k**0.5, draw(k)
        addend, bias = (draw(rows, k), None) if added else (None, draw(experts))
        got = torch.ops.fp4.router(
            x.clone(), weight, bias, scale, EPS, addend, chosen, softmax=True, normalize=normalize,
            early=True, keep_norm=True, norm_in_float=in_float, out_dtype=torch.float32,
        )  # fmt: skip
        total = x if addend is None else x + addend
        wide = total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + EPS)
        normed = (wide * scale).to(dtype) if in_float else wide.to(dtype) * scale
        logits = normed.double() @ weight.double().T + (0 if bias is None else bias.double())
        best = got[0].sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
        weights = got[0].double().softmax(-1).gather(-1, best)
        weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
        want = [logits, weights, best, normed] + ([] if addend is None else [total])
        errors += [relative_error(a, b.double()) for a, b in zip(got, want, strict=True)]
        errors.append(0.0 if torch.equal(got[2], best) else math.inf)
    return max(errors)


def linears_kernel(device_index: int) -> bool:
    """True if the kernel passed the check on this GPU. Works while a backend runs on fake tensors."""
    return _agrees("fp4::linears", device_index, linears_error)


def attention_kernel(device_index: int) -> bool:
    """True if the kernel passed the check on this GPU. Works while a backend runs on fake tensors."""
    return _agrees("fp4::attention", device_index, attention_error)


def update_cache_kernel(device_index: int) -> bool:
    """True if the kernel passed the check on this GPU. Works while a backend runs on fake tensors."""
    return _agrees("fp4::update_cache", device_index, update_cache_error)


def cached_attention_kernel(device_index: int) -> bool:
    """True if the kernel passed the check on this GPU. Works while a backend runs on fake tensors."""
    return _agrees("fp4::cached_attention", device_index, cached_attention_error)


def top_experts_kernel(device_index: int) -> bool:
    """True if the kernel passed the check on this GPU. Works while a backend runs on fake tensors."""
    return _agrees("fp4::top_experts", device_index, top_experts_error)


def router_kernel(device_index: int) -> bool:
    """True if the kernel passed the check on this GPU. Works while a backend runs on fake tensors."""
    return _agrees("fp4::router", device_index, router_error)


def _agrees(name: str, device_index: int, error: Callable[[], float]) -> bool:
    properties = torch.cuda.get_device_properties(device_index)
    device = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    with torch.cuda.device(device_index), without_modes():
        return first_use.agrees(
            f"the kernel of {name}", device, native.build(native.HOPPER), error, BOUND, "torch"
        )
