"""Decode or prefill: the one that a model of its time says is faster.

Fitted to the times of both in benchmarks/results/h200_rows.txt, where the choice costs 0.7 per cent of the
faster one's time at most, in the mean of each column (tests/test_sm90_binary.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from . import decode, prefill
from .decode import Routing

DECODE_US, DECODE_RATE, BF16_RATE = 4.6, 6.4e6, 7.1e6
"""A launch that has nothing to read, and weights a microsecond: of layouts sm90 and sm90_bf16. Those of
mxfp4, which are fewer bytes, take as long."""
PREFILL_US = {"w4a8": (1.9, 0.93), "half": (4.2, 1.1), "bf16": (2.6, 1.06)}
"""A launch that has nothing to do, and the measured time over the model's."""
GROUP_US = 0.018
"""Walking over a group, whether it has rows or not."""
ORDER_RATE = 1e6
"""16-bit values a microsecond that rows.to_half puts in order for prefill."""
SORT_US = 12.0
"""Sorting the rows of a product by their expert, and back."""
BLOCK_SORT_US = 12.0
"""The same for a block, where other kernels do most of it."""
QUANTIZE_US = 6.0
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
def decode_us(product: Product, sms: int, bf16: bool = False) -> float:
    """Infinite where the kernel cannot run. `bf16`: the weights are in layout sm90_bf16."""
    config = decode.choose(product.all_rows, product.groups, product.n, product.kp, sms)
    if config is None:
        return math.inf
    if product.routing in (Routing.MASKED, Routing.DENSE) or product.groups == 1:
        each = float(-(-product.rows // decode.CHUNK))
    else:
        each = chunks_by_chance(product.rows / product.groups)
    weights = each * product.groups * product.n * product.kp
    return DECODE_US + weights / (BF16_RATE if bf16 else DECODE_RATE) * config.passes**0.18


@functools.cache
def prefill_us(product: Product, kernel: str, sms: int) -> float:
    """`kernel`: of PREFILL_US."""
    routing, name = product.routing, prefill.for_block(kernel, product.block)
    if routing not in prefill.MODES:
        routing = Routing.OFFS
    sizes = product.groups, product.rows, product.n, product.kp
    modelled = prefill.choose(routing, *sizes, sms, name).seconds * 1e6
    launch, factor = PREFILL_US[kernel]
    order = product.all_rows * product.kp / ORDER_RATE if kernel == "half" else 0
    return launch + GROUP_US * product.groups + factor * modelled + order


_only: str | None = None


@contextmanager
def only(kernel: str) -> Iterator[None]:
    """Whatever the models say, "decode" wherever it can run, or "prefill": for tests and measurements."""
    global _only
    before, _only = _only, kernel
    try:
        yield
    finally:
        _only = before


def _first(us: float, other_us: float) -> bool:
    """Whether decode, which takes `us`, is chosen before prefill."""
    return us < {None: other_us, "decode": math.inf, "prefill": 0.0}[_only]


def decodes(product: Product, kernel: str, sms: int) -> bool:
    """Whether decode multiplies rows, and not this kernel of prefill. Those by id are sorted for prefill."""
    sort = 0 if product.routing in prefill.MODES else SORT_US
    return _first(decode_us(product, sms, kernel == "bf16"), prefill_us(product, kernel, sms) + sort)


def block_decodes(products: tuple[Product, ...], a_format: str, sms: int, bf16: bool = False) -> bool:
    """Whether decode runs both products; in 'auto' prefill would have fp8 rows, and decode those given.

    `bf16`: the weights are in layout sm90_bf16.
    """
    kernel = "w4a8" if a_format in ("auto", "fp8") else "bf16" if bf16 else "half"
    decode_all = sum(decode_us(p, sms, bf16) for p in products)
    prefill_all = sum(prefill_us(p, kernel, sms) for p in products) + BLOCK_SORT_US
    if a_format == "auto":
        prefill_all = (prefill_all + QUANTIZE_US) * AUTO_GAIN
    return _first(decode_all, prefill_all)
