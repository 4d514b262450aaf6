"""The router in one kernel (csrc/sm90/router.cu) against float64, and against the two operators."""

import random
from typing import Any, NamedTuple

import pytest
import torch
from conftest import poisoned
from test_sm90_gpu import BOUND, error, pytestmark

from fp4_ops.backends import anywhere

__all__ = ["pytestmark"]

fp4 = torch.ops.fp4
DTYPES = [torch.bfloat16, torch.float16]
EPS = 1e-6


class Case(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm: torch.Tensor | None
    addend: torch.Tensor | None
    k: int
    options: dict[str, Any]

    def run(self, **options: Any) -> list[torch.Tensor]:
        given = self.x, self.weight, self.bias, self.norm, EPS, self.addend, self.k
        return list(fp4.router(*given, **self.options, **options))

    def by_kernel(self, **options: Any) -> list[torch.Tensor]:
        """Runs the operator. It is an error if it calls the two operators."""

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("no kernel ran")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(fp4, "top_experts", refuse)
            return self.run(**options)

    def linears(self, operator: Any) -> list[torch.Tensor]:
        given = self.x, [self.weight], [self.bias], self.norm, EPS, None, self.addend
        names = "keep_norm", "norm_in_float"
        return list(operator(*given, **{name: self.options[name] for name in names}))

    def chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        names = "softmax", "normalize", "out_dtype"
        return fp4.top_experts(logits, self.k, **{name: self.options[name] for name in names})


def random_case(rows: int, experts: int, k: int, dtype: torch.dtype) -> Case:
    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    def maybe(*shape: int) -> torch.Tensor | None:
        return draw(*shape) if random.random() < 0.5 else None

    bias, norm, addend = maybe(experts), maybe(k), maybe(rows, k)
    flags = {name: random.random() < 0.5 for name in ("softmax", "normalize")}
    flags |= {name: norm is not None and random.random() < 0.5 for name in ("keep_norm", "norm_in_float")}
    out = random.choice((None, torch.float32, torch.bfloat16, torch.float16))
    most = min(experts, 16)
    return Case(
        draw(rows, k), draw(experts, k, scale=2 * k**-0.5), bias, norm, addend,
        random.choice((1, min(8, most), most)), {**flags, "out_dtype": out},
    )  # fmt: skip


def check(case: Case, early: bool) -> None:
    with poisoned():
        got = case.by_kernel(early=early)
    logits, weights, ids, *kept = got
    rows = case.x if case.addend is None else case.x + case.addend
    normed = rows
    if case.norm is not None:
        normed = anywhere.linears(
            rows, [case.weight], [None], case.norm, EPS, None, keep_norm=True,
            norm_in_float=case.options["norm_in_float"],
        )[1]  # fmt: skip
    want = normed.double() @ case.weight.double().T
    want = want if case.bias is None else want + case.bias.double()
    assert error(logits, want) < BOUND[case.x.dtype]
    right = logits.sort(dim=-1, descending=True, stable=True).indices[:, : case.k]
    assert torch.equal(ids, right)
    # The kernels of both choose by the same code.
    for a, b in zip((weights, ids), case.chosen(logits), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert len(kept) == case.options["keep_norm"] + (case.addend is not None)
    if case.options["keep_norm"]:
        assert error(kept[0], normed.double()) < BOUND[case.x.dtype] / 4
    assert case.addend is None or torch.equal(kept[-1], rows)
    assert [y.shape for y in got] == [y.shape for y in anywhere_router(case)]


def anywhere_router(case: Case) -> list[torch.Tensor]:
    logits, *kept = case.linears(anywhere.linears)
    return [logits, *case.chosen(logits), *kept]


@pytest.mark.parametrize("k", [64, 2048, 2880, 4096])
@pytest.mark.parametrize("experts", [8, 60, 64, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(dtype, experts, k):
    for rows in (1, random.choice((2, 3, 5)), 8):
        check(random_case(rows, experts, k, dtype), early=random.random() < 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_sizes(dtype):
    """An odd number of experts, parts of a tile, and K of which some blocks of the cluster have nothing."""
    for _ in range(6):
        rows, experts, steps = random.randint(1, 8), random.randint(1, 128), random.randint(1, 20)
        check(random_case(rows, experts, 64 * steps, dtype), early=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_and_nan(dtype):
    for softmax in (False, True):
        options = {"softmax": softmax, "normalize": softmax, "out_dtype": torch.float32}
        case = random_case(4, 128, 256, dtype)._replace(k=8, bias=None)
        case = case._replace(options={**case.options, **options})
        of = torch.randint(0, 3, (128,), device="cuda")
        same = case._replace(weight=case.weight[of].clone())
        check(same, early=False)
        logits = same.by_kernel()[0]
        assert all(len(set(row.tolist())) <= 3 for row in logits)
        case.x[1, 5] = float("nan")
        assert case.by_kernel()[2][1].tolist() == [*range(8)], "NaN first, the lowest index before others"
        check(case._replace(x=case.x[[0, 2, 3]], addend=None, norm=None, options={
            **case.options, "keep_norm": False, "norm_in_float": False}), early=False)  # fmt: skip
        infinite = torch.zeros(128, device="cuda", dtype=dtype)
        infinite[[7, 9]] = float("-inf")
        infinite[70] = float("nan")
        logits, weights, ids, *_ = case._replace(bias=infinite, x=case.x[:1], addend=None).by_kernel()
        assert ids[0, 0] == 70 and logits[0, 70].isnan() and weights[0, 0].isnan()
        assert not {7, 9} & set(ids[0].tolist())


def test_more_dimensions_and_rows_that_lie_apart():
    case = random_case(6, 40, 320, torch.bfloat16)
    case = case._replace(k=5, addend=torch.randn_like(case.x))
    wide = torch.cat([case.x, case.x], -1).view(2, 3, 640)[..., :320]
    got = case._replace(x=wide, addend=case.addend.view(2, 3, 320)).by_kernel()
    for a, b in zip(got, case.run(), strict=True):
        assert a.shape == (2, 3, b.shape[1]) and torch.equal(a.flatten(0, 1), b)


@pytest.mark.parametrize(
    "rows, experts, k, dtype",
    [
        (9, 64, 128, torch.bfloat16),
        (2, 130, 128, torch.bfloat16),
        (2, 64, 96, torch.bfloat16),
        (2, 64, 128, torch.float32),
        (1, 128, 4160, torch.bfloat16),
    ],
)
def test_others_run_the_two_operators(rows, experts, k, dtype):
    case = random_case(rows, experts, k, dtype)
    got, want = case.run(), anywhere_router(case)
    assert error(got[0], want[0].double()) < 1e-2
    for a, b in zip(got[1:3], case.chosen(got[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    with pytest.raises(RuntimeError, match="no kernel ran"):
        case.by_kernel()
