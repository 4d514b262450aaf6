"""Linear layers with weights in fp8 (e4m3) on the CPU, against float64, with every kernel family that this
processor has. As in test_few_rows.py, each family runs this file as a script.
"""

from __future__ import annotations

import random
import sys

import pytest
import torch
from test_few_rows import CAPABILITIES, EPSILON, check_call, close, run_family
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

linears = torch.ops.fp4.linears
FP8, NAN_CODES = torch.float8_e4m3fn, (0x7F, 0xFF)


def values_of(weight: torch.Tensor) -> torch.Tensor:
    """Decodes each code by the definition of e4m3, in float64."""
    codes = weight.view(torch.uint8).long()
    exponent, mantissa = codes >> 3 & 15, (codes & 7).double()
    magnitude = torch.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    magnitude = torch.where(codes & 127 == 127, torch.nan, magnitude)
    return torch.where(codes >= 128, -magnitude, magnitude)


def random_weight(n: int, k: int) -> torch.Tensor:
    """All codes but NaN are equally likely in half of the weights. Else values are normal, many of them
    subnormal."""
    if random.random() < 0.5:
        codes = torch.randint(0, 254, (n, k), dtype=torch.uint8)
        return torch.where(codes < 127, codes, codes + 1).view(FP8)
    return (torch.randn(n, k) * random.choice((0.01, 1.0))).to(FP8)


def random_scale(weight: torch.Tensor) -> torch.Tensor:
    """Makes weights of about 1, so that no result is beyond float16's range."""
    return (torch.rand(weight.shape[0]) + 0.1) / weight.float().abs().mean().clamp_min(2.0**-9)


def check_products(dtype: torch.dtype) -> None:
    m, k = random.choice((1, 2, 3, 4, 5, 6, 17, 40)), random.choice((1, 16, 31, 33, 64, 100, 701))
    weights = [random_weight(random.choice((1, 7, 8, 41)), k) for _ in range(random.randint(1, 3))]
    scales = [random_scale(weight) for weight in weights]
    exact = [values_of(weight) * scale.double()[:, None] for weight, scale in zip(weights, scales)]
    check_call(dtype, m, weights, exact, scales)


def check_every_code(dtype: torch.dtype) -> None:
    """A row that is 1 in one place reads one weight: its value times the scale, rounded once."""
    k = 254 + random.randint(0, 40)
    codes = [c for c in range(256) if c not in NAN_CODES]
    shuffled = [random.sample(codes, len(codes)) + [0] * (k - len(codes)) for _ in range(9)]
    weight = torch.tensor(shuffled, dtype=torch.uint8).view(FP8)
    scale = torch.rand(9) + 0.5
    want = (values_of(weight).float() * scale[:, None]).T.to(dtype)
    (got,) = linears(torch.eye(k).to(dtype), [weight], [None], None, 0.0, None, None, [scale])
    assert torch.equal(got, want)
    for rows in torch.eye(k).to(dtype).split(random.randint(1, 4)):
        (got,) = linears(rows, [weight], [None], None, 0.0, None, None, [scale])
        assert torch.equal(got, want[rows.argmax(-1)])


def check_nan(dtype: torch.dtype) -> None:
    """Each code of NaN at each place makes its column NaN, also where the row is 0."""
    for k in (1, 70):
        for place in range(k):
            weight = torch.full((9, k), 0x7E, dtype=torch.uint8)
            weight[3, place], weight[8, place] = NAN_CODES
            x = torch.zeros(random.choice((1, 3, 4, 5, 18)), k).to(dtype)
            (got,) = linears(x, [weight.view(FP8)], [None], None, 0.0, None, None, [torch.ones(9)])
            assert torch.equal(
                got.isnan(), torch.tensor([3, 8]).eq(torch.arange(9)[:, None]).any(1).expand(len(x), 9)
            )
            assert not got.nan_to_num().any()


def run_all(capability: str, seed: int, draws: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    assert torch.ops.fp4.cpu_capability() == capability
    for dtype in EPSILON:
        for _ in range(draws):
            check_products(dtype)
        check_every_code(dtype)
        check_nan(dtype)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_family(capability):
    run_family(__file__, capability, 20)


@pytest.mark.parametrize("shape", [(0, 20, 4), (3, 0, 5), (40, 0, 5), (3, 20, 0)], ids=str)
def test_nothing_to_multiply(shape):
    """No rows, K = 0, whose products are the biases, and N = 0."""
    m, k, n = shape
    x, bias = torch.randn(m, k), torch.randn(n)
    (got,) = linears(x, [random_weight(n, k)], [bias], None, 0.0, None, None, [torch.rand(n)])
    assert got.shape == (m, n) and (k > 0 or torch.equal(got, bias.expand(m, n)))


def test_operands_need_not_be_contiguous():
    x, weight, scale = torch.randn(20, 3).T, random_weight(20, 9).T, torch.rand(9, 2)[:, 1]
    (got,) = linears(x, [weight], [None], None, 0.0, None, None, [scale])
    (want,) = linears(x.contiguous(), [weight.contiguous()], [None], None, 0.0, None, None, [scale.clone()])
    assert torch.equal(got, want)
    close(got, x.double() @ (values_of(weight) * scale.double()[:, None]).T, got.double())


@pytest.mark.parametrize("dtype", EPSILON)
def test_no_scales_are_none(dtype):
    x, w = torch.randn(3, 40).to(dtype), torch.randn(6, 40).to(dtype)
    made = [linears(x, [w], [None], None, 0.0, None, None, *scales)[0] for scales in ((), (None,), ([],))]
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


def test_threads_do_not_change_bits():
    """Several units of work for each thread; rows that are converted as they are multiplied, and before."""
    n, k = random.choice((300, 1001)), random.choice((512, 777))
    weights, scales = [random_weight(n, k) for _ in range(2)], [torch.rand(n) for _ in range(2)]
    before = torch.get_num_threads()
    for rows in (1, 6):
        x = torch.randn(rows, k).bfloat16()
        made = []
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                made.append(linears(x, weights, [None] * 2, None, 0.0, None, None, scales))
        finally:
            torch.set_num_threads(before)
        assert all(map(torch.equal, *made))


BAD = {
    "few scales": ({"weight_scales": [torch.ones(5)]}, "weight_scales has 1 entries; weights has 2"),
    "dtype of a scale": (
        {"weight_scales": [torch.ones(5), torch.ones(5).double()]},
        "weight_scales has dtype float64; it must be float32",
    ),
    "shape of a scale": (
        {"weight_scales": [torch.ones(5), torch.ones(5, 1)]},
        r"weight_scales has shape \[5, 1\]; it must be \[5\]",
    ),
    "weights without scales": (
        {"weight_scales": None},
        "weights has dtype float8_e4m3fn; x has float32, and they must be equal",
    ),
    "scales of other weights": (
        {"weights": [torch.ones(5, 8), torch.ones(5, 8)]},
        "weights has dtype float32; it must be float8_e4m3fn",
    ),
    "another fp8": (
        {"weights": [torch.ones(5, 8).to(FP8), torch.ones(5, 8).to(torch.float8_e5m2)]},
        "weights has dtype float8_e5m2; it must be float8_e4m3fn",
    ),
    "columns": (
        {"weights": [torch.ones(5, 8).to(FP8), torch.ones(5, 7).to(FP8)]},
        "weights has 7 columns; x has 8, and they must be equal",
    ),
    "device": (
        {"weight_scales": [torch.ones(5), torch.ones(5, device="meta")]},
        "weight_scales is on (meta|device:-1) and x on cpu; they must be on one device",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_and_scales(case):
    """The kernel and the fake say the same."""
    changes, message = BAD[case]
    given = {
        "x": torch.ones(2, 8),
        "weights": [torch.ones(5, 8).to(FP8) for _ in range(2)],
        "biases": [None, None],
        "norm_weight": None,
        "eps": 0.0,
        "residual": None,
        "weight_scales": [torch.ones(5), torch.ones(5)],
    }
    linears(**given)
    with pytest.raises(RuntimeError, match=message) as real:
        linears(**{**given, **changes})
    with FakeTensorMode() as mode:
        faked = pytree.tree_map_only(torch.Tensor, mode.from_tensor, {**given, **changes})
        with pytest.raises(RuntimeError, match=message) as fake:
            linears(**faked)
    # A kernel has no name for the meta device.
    assert str(fake.value).splitlines()[0] == str(real.value).splitlines()[0].replace("device:-1", "meta")


if __name__ == "__main__":
    run_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
