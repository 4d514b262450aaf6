"""Decode or prefill: the one that a model of its time says is faster.

Fitted to times of both as benchmarks/h200_rows.py prints them. In its table of the kernels since then
(benchmarks/results/rows_h200.json) the choice costs 0.5 per cent of the faster one's time at most, in the
mean of each column, but 1.1 of dense fp8 rows (tests/test_sm90_binary.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from . import decode, gemv, prefill
from .decode import Routing

DECODE_US = 4.45
"""A launch that has nothing to read."""
DECODE_RATE = {"half": 6.4e6, "bf16": 6.4e6, "w4a8": 6.97e6}
"""Weights a microsecond. Those of mxfp4, which are fewer bytes, take as long."""
PASS_POWER = 0.09
"""Of the passes over K, by which the weights take longer."""
ROW_US = 0.11
"""Bringing 2048 values of each further row of an expert."""
PREFILL_US = {
    "w4a8": (2.87, 0.888, 1.85, 1.13),
    "half": (6.3, 1.1, 0.0, 1.09),
    "bf16": (2.45, 1.117, 0.0, 1.09),
}
"""A launch that has nothing to do, the measured time over the model's, what a launch that shares tiles takes
more, and how many times as long the rest of it."""
GROUP_US = 0.012
"""Walking over a group, whether it has rows or not."""
ORDER_RATE = 1e6
"""16-bit values a microsecond that rows.to_half puts in order for prefill."""
SORT_US = 12.0
"""Sorting the rows of a product by their expert, and back."""
BLOCK_SORT_US = 9.0
"""The same for a block, where other kernels do most of it."""
GEMV_UNITS, GEMV_UNITS_ALONE = 64, 40
"""Of a thread block, in a block's products or where decode goes over K several times, and in other products:
from there on decode, which has more of them on their way, is faster."""
QUANTIZE_US = 5.4
"""Quantising the rows of both products of a block."""
AUTO_GAIN = 1.03
"""What fp8 rows must gain over those given before 'auto' rounds them."""


class Product(NamedTuple):
    """`rows` activation rows, of each group where the routing is masked, times [groups, n, kp]."""

    routing: Routing
    groups: int
    rows: int
    n: int
    kp: int
    block: int = 16
    """K that share a scale."""

    @property
    def all_rows(self) -> int:
        return self.rows * self.groups if self.routing == Routing.MASKED else self.rows


def chunks_by_chance(mean: float) -> float:
    """Expected chunks of a group whose rows are Poisson distributed."""
    if mean > 8 * decode.CHUNK:  # the last chunk is as often short by one row as by any other number
        return mean / decode.CHUNK + (decode.CHUNK - 1) / (2 * decode.CHUNK)
    p, expected = math.exp(-mean), 0.0
    for rows in range(1, 20 * decode.CHUNK):
        p *= mean / rows
        expected += p * math.ceil(rows / decode.CHUNK)
    return expected


@functools.cache
def decode_us(product: Product, kernel: str, sms: int) -> float:
    """Infinite where the kernel cannot run. `kernel`: of DECODE_RATE."""
    config = decode.choose(product.all_rows, product.groups, product.n, product.kp, sms)
    if config is None:
        return math.inf
    if product.routing in (Routing.MASKED, Routing.DENSE) or product.groups == 1:
        each, rows = float(-(-product.rows // decode.CHUNK)), float(product.rows)
    else:
        each = chunks_by_chance(product.rows / product.groups)
        rows = decode.rows_per_expert(product.rows, product.groups)
    weights = each * product.groups * product.n * product.kp
    values = (min(rows, decode.CHUNK) - 1) * product.kp
    time = weights / DECODE_RATE[kernel] * config.passes**PASS_POWER
    return DECODE_US + time + ROW_US * max(values, 0) / 2048


@functools.cache
def prefill_us(product: Product, kernel: str, sms: int) -> float:
    """`kernel`: of PREFILL_US."""
    routing, name = product.routing, prefill.for_block(kernel, product.block)
    if routing not in prefill.MODES:
        routing = Routing.OFFS
    sizes = product.groups, product.rows, product.n, product.kp
    choice = prefill.choose(routing, *sizes, sms, name)
    launch, factor, share, shared = PREFILL_US[kernel]
    time = factor * choice.seconds * 1e6
    if choice.share_below > 0:
        time = share + shared * time
    order = product.all_rows * product.kp / ORDER_RATE if kernel == "half" else 0
    return launch + GROUP_US * product.groups + time + order


_only: str | None = None


@contextmanager
def only(kernel: str) -> Iterator[None]:
    """Whatever the models say, "decode", or "gemv" and decode, wherever they can run, or "prefill": for tests
    and measurements."""
    global _only
    before, _only = _only, kernel
    try:
        yield
    finally:
        _only = before


def _first(us: float, other_us: float) -> bool:
    """Whether decode, which takes `us`, is chosen before prefill."""
    return us < {None: other_us, "decode": math.inf, "gemv": math.inf, "prefill": 0.0}[_only]


def gemvs(product: Product, sms: int) -> bool:
    """Whether gemv multiplies the rows, each one of x, where decode would."""
    rows, n, kp = product.rows, product.n, product.kp
    config = gemv.configure(product.routing, rows, rows, n, kp, False, sms)
    if config is None or _only == "decode":
        return False
    if _only == "gemv" or config.units <= GEMV_UNITS_ALONE:
        return True
    if config.units > GEMV_UNITS:
        return False
    other = decode.choose(product.all_rows, product.groups, n, kp, sms)
    return other is None or other.passes > 1


def block_gemvs(products: tuple[Product, ...], top_k: int, sms: int) -> bool:
    """Whether gemv runs both products of a block, the second of which combines its rows.

    One of them beside decode would be slower: the multiprocessors change over between them.
    """
    up, down = products
    size = down.routing, down.rows, down.rows, down.n, down.kp
    gate_up = gemv.configure(up.routing, up.rows, -(-up.rows // top_k), up.n, up.kp, False, sms)
    combined, even = (gemv.configure(*size, combines, sms) for combines in (True, False))
    if gate_up is None or combined is None or even is None or _only == "decode":
        return False
    few = max(gate_up.units, combined.units) <= GEMV_UNITS
    return _only == "gemv" or (few and combined.units <= 1.1 * even.units)


def decodes(product: Product, kernel: str, sms: int) -> bool:
    """Whether decode multiplies rows, and not this kernel of prefill. Those by id are sorted for prefill."""
    sort = 0 if product.routing in prefill.MODES else SORT_US
    return _first(decode_us(product, kernel, sms), prefill_us(product, kernel, sms) + sort)


def block_decodes(products: tuple[Product, ...], a_format: str, sms: int, bf16: bool = False) -> bool:
    """Whether decode runs both products; in 'auto' prefill would have fp8 rows, and decode those given.

    `bf16`: the weights are in layout sm90_bf16.
    """
    exact = "bf16" if bf16 else "half"
    kernel = "w4a8" if a_format in ("auto", "fp8") else exact
    decode_all = sum(decode_us(p, kernel if a_format == "fp8" else exact, sms) for p in products)
    prefill_all = sum(prefill_us(p, kernel, sms) for p in products) + BLOCK_SORT_US
    if a_format == "auto":
        prefill_all = (prefill_all + QUANTIZE_US) * AUTO_GAIN
    return _first(decode_all, prefill_all)
