"""Rows sorted by expert: how they are put back in order, and rows that belong to no expert."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from moe_models import Recorder, fake_quantised, relative_error
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Sorted(nn.Module):
    """Experts with biases over given ids, of which E or more are no expert's; with one thing `changed`."""

    E, K, H, I, T = 6, 2, 32, 48, 11  # noqa: E741

    def __init__(self, changed: str) -> None:
        super().__init__()
        self.changed = changed
        self.w13 = nn.Parameter(torch.randn(self.E, 2 * self.I, self.H) / self.H**0.5)
        self.w2 = nn.Parameter(torch.randn(self.E, self.H, self.I) / self.I**0.5)
        self.b13 = nn.Parameter(torch.randn(self.E, 2 * self.I))
        self.b2 = nn.Parameter(torch.randn(self.E, self.H))

    def is_(self, *names: str) -> bool:
        return self.changed in names

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        order, perm = flat.sort()
        mask = (order >= (self.E - 1 if self.is_("a mask of an expert") else self.E))[:, None]
        clamp = order.clamp(max=self.E - (2 if self.is_("biases clamped to fewer experts") else 1))
        if self.is_("bincount"):
            counts = torch.bincount(flat.clamp(max=self.E), minlength=self.E + 1)[: self.E]
        else:
            counted = flat if self.is_("counts before sorting") else order
            counts = torch.histc(counted.float(), bins=self.E, min=0, max=self.E - 1)
        offs = counts.cumsum(0, dtype=torch.int32)
        rows = (
            self.masked(x[perm // self.K], mask) if self.is_("", "a mask of an expert") else x[perm // self.K]
        )
        h = self.product(rows, self.w13, offs) + self.b13[clamp]
        h = h if self.is_("masked once") else self.masked(h, mask)
        gate, up = h.chunk(2, -1)
        y = self.product(F.silu(gate) * up, self.w2, offs)
        if self.is_("masked before the bias"):
            y = self.masked(y, mask) + self.b2[clamp]
        else:
            y = self.masked(y + self.b2[clamp], mask)
        again = flat.argsort() if self.is_("sorted again") else perm
        y = self.restored(y * weights.reshape(-1)[again, None], again)
        return y.view(-1, self.K, self.H).sum(1)

    def masked(self, rows: Tensor, mask: Tensor) -> Tensor:
        if self.is_("where"):
            return torch.where(mask.logical_not(), rows, torch.zeros_like(rows))
        return rows.masked_fill(mask, 1.0 if self.is_("masked by ones") else 0.0)

    def restored(self, y: Tensor, perm: Tensor) -> Tensor:
        count = torch.arange(perm.shape[0])
        if self.is_("argsort"):
            inverse = perm.argsort()
        elif self.is_("scatter"):
            inverse = torch.empty_like(perm).scatter_(0, perm, count)
        elif self.is_("counted from 1"):
            inverse = torch.zeros_like(perm).index_put((perm,), (count + 1) % perm.shape[0])
        elif self.is_("added up"):
            inverse = torch.ones_like(perm).index_put((perm,), count - 1, accumulate=True).abs()
        elif self.is_("the inverse of another sort"):
            inverse = (perm * 7 % perm.shape[0]).argsort()
        elif self.is_("descending argsort"):
            inverse = perm.argsort(descending=True)
        else:
            inverse = torch.zeros_like(perm)
            inverse[perm] = count
        if self.is_("index_select"):
            return y.index_select(0, inverse)
        if self.is_("gather"):
            return y.gather(0, inverse[:, None].expand(-1, y.shape[1]))
        if self.is_("restored into choices"):
            return y[inverse.view(-1, self.K)].flatten(0, 1)
        return y[inverse]

    def product(self, a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(a, w.transpose(1, 2), offs=offs)

    def twin(self) -> Sorted:
        twin = copy.deepcopy(self)
        with torch.no_grad():
            for name in ("w13", "w2"):
                getattr(twin, name).copy_(fake_quantised(getattr(self, name), "nvfp4"))
        return twin


PRODUCTS = ["fp4::grouped_mm"] * 2


def check(changed: str, ops: list[str], sentinels: bool, flat: bool = False) -> list[str]:
    """Why it is not one operator, once it computes what its twin does."""
    module, recorder = Sorted(changed), Recorder(activation="bf16")
    x, weights = torch.randn(module.T, module.H), torch.rand(module.T, module.K)
    ids = torch.randint(0, module.E + 3 * sentinels, (module.T, module.K))
    ids = ids.flatten() if flat else ids
    with torch.no_grad():
        want = module.twin()(x, ids, weights)
        got = torch.compile(module, backend=recorder)(x, ids, weights)
    assert recorder.ops == ops, recorder.reasons
    assert relative_error(got, want) < 1e-5
    return [s.reason for s in recorder.sites]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "changed",
    [
        *("", "argsort", "scatter", "index_select", "gather", "counts before sorting", "sorted again"),
        more("masked once"),
    ],
)
def test_one_operator(changed):
    check(changed, ["fp4::moe"], sentinels=True)


@pytest.mark.parametrize("changed", ["", "counts before sorting", "sorted again"])
def test_ids_in_one_dimension(changed):
    """Whose axis is cut into tokens and choices by `perm // k`, after rows have been read."""
    check(changed, ["fp4::moe"], sentinels=True, flat=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("a mask of an expert", "a mask zeroes rows of experts"),
        ("biases clamped to fewer experts", "bias is not in the order of the sorted rows"),
        ("masked before the bias", "other than each row's expert bias"),
        ("masked by ones", ""),
        ("counted from 1", "not put back by the inverse permutation"),
        ("added up", "not put back by the inverse permutation"),
        ("the inverse of another sort", "not put back by the inverse permutation"),
        ("descending argsort", "not put back by the inverse permutation"),
    ],
)
def test_two_products(changed, reason):
    reasons = check(changed, PRODUCTS, sentinels=True)
    assert any(reason in r for r in reasons), reasons


@pytest.mark.parametrize("changed", ["where", "restored into choices", "bincount"])
def test_right_whatever_it_becomes(changed):
    with torch.no_grad():
        module, recorder = Sorted(changed), Recorder(activation="bf16")
        x, weights = torch.randn(module.T, module.H), torch.rand(module.T, module.K)
        ids = torch.randint(0, module.E, (module.T, module.K))
        got = torch.compile(module, backend=recorder)(x, ids, weights)
        assert recorder.ops in (["fp4::moe"], PRODUCTS)
        assert relative_error(got, module.twin()(x, ids, weights)) < 1e-5


def test_routing_weights_may_be_integers():
    module, recorder = Sorted(""), Recorder(activation="bf16")
    x, weights = torch.randn(module.T, module.H), torch.randint(1, 4, (module.T, module.K))
    ids = torch.randint(0, module.E, (module.T, module.K))
    with torch.no_grad():
        got = torch.compile(module, backend=recorder)(x, ids, weights)
        assert recorder.ops == ["fp4::moe"], recorder.reasons
        assert relative_error(got, module.twin()(x, ids, weights)) < 1e-5


def test_up_and_down_of_different_experts():
    """If only one of the weights has an id, it is not an expert of a block."""
    module, recorder = Sorted("masked once"), Recorder(activation="bf16")
    module.w13 = nn.Parameter(module.w13.detach()[:-1].clone())
    x, weights = torch.randn(module.T, module.H), torch.rand(module.T, module.K)
    ids = torch.randint(0, module.E - 1, (module.T, module.K))

    def product(a, w, offs):
        return torch.ops.transformers.grouped_mm_fallback(a, w.transpose(1, 2), offs=offs[: w.shape[0]])

    module.product = product
    with torch.no_grad():
        got = torch.compile(module, backend=recorder)(x, ids, weights)
        assert recorder.ops == PRODUCTS, recorder.reasons
        twin = module.twin()
        twin.product = product
        assert relative_error(got, twin(x, ids, weights)) < 1e-5
