"""Buffers [E C, H] that are filled choice by choice, with or without a row for what overflows, and dense FFNs
of the experts' shape beside them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from recorder import Recorder, check_lengths, fake_quantised
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, INTER, E, K = 32, 48, 4, 2
FORMAT = "nvfp4"


def ffn() -> nn.Sequential:
    return nn.Sequential(nn.Linear(H, INTER), nn.SiLU(), nn.Linear(INTER, H))


class Slots(nn.Module):
    """Each choice has a slot of its expert's slice: `buffer[slot] += x` for one choice after the other."""

    spare = 0
    """The number of rows at the end of the buffer, for choices beyond the capacity."""
    fill = "index_add"
    c: int | None = None
    """The capacity, if it is not a number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.ffns = nn.ModuleList(ffn() for _ in range(E))

    def experts_of(self, rows: Tensor) -> Tensor:
        return torch.stack([expert(rows[e]) for e, expert in enumerate(self.ffns)])

    def put(self, buffer: Tensor, slot: Tensor, rows: Tensor) -> Tensor:
        if self.fill == "scatter_add":
            return buffer.scatter_add(0, slot[:, None].expand(-1, H), rows)
        if self.fill == "index_put":
            return buffer.index_put((slot,), rows)
        return getattr(buffer, self.fill)(0, slot, rows)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        c = self.c or count // 2
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        hot = F.one_hot(ids.t().reshape(-1), E)
        place = ((hot.cumsum(0) - 1) * hot).sum(-1).view(K, count)
        kept, slot = place < c, ids.t() * c + place
        slot = torch.where(kept, slot, E * c if self.spare else 0)
        buffer = x.new_zeros(E * c + self.spare, H)
        for k in range(K):
            buffer = self.put(buffer, slot[k], x if self.spare else x * kept[k, :, None])
        rows = self.experts_of(buffer[: E * c].view(E, c, H)).reshape(-1, H)
        rows = torch.cat([rows, rows.new_zeros(self.spare, H)])
        return sum(rows[slot[k]] * (weights[:, k] * kept[k])[:, None] for k in range(K))


class Slices(Slots):
    """Each expert writes its slice of a second buffer."""

    c = 7

    def experts_of(self, rows: Tensor) -> Tensor:
        c, flat = rows.shape[1], rows.reshape(-1, H)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.ffns):
            out[e * c : (e + 1) * c] = expert(flat[e * c : (e + 1) * c])
        return out.view_as(rows)


class Drop(Slots):
    spare = 1


class Put(Drop):
    fill = "index_put"


class Copy(Drop):
    fill = "index_copy"


class ScatterSlices(Slices):
    fill = "scatter_add"


class ThreeSpare(Slices):
    spare, fill = 3, "index_copy"


class Stacked(Slots):
    """Two products of all experts' rows at once."""

    def __init__(self) -> None:
        super().__init__()
        del self.ffns
        self.w1 = nn.Parameter(torch.randn(E, H, INTER) / H**0.5)
        self.w2 = nn.Parameter(torch.randn(E, INTER, H) / INTER**0.5)

    def experts_of(self, rows: Tensor) -> Tensor:
        return torch.bmm(F.relu(torch.bmm(rows, self.w1)), self.w2)


class Einsum(Slots):
    """GShard: one-hot matrices dispatch and combine. One expert a token."""

    c = 7

    def forward(self, x: Tensor) -> Tensor:
        p, ids = self.router(x).softmax(-1).max(-1)
        hot, c = F.one_hot(ids, E), self.c
        place = hot.cumsum(0) - 1
        dispatch = ((hot * (place < c))[..., None] * F.one_hot(place.clamp(0, c - 1), c)).to(x.dtype)
        rows = torch.einsum("tec,th->ech", dispatch, x)
        rows = torch.cat([f(part) for f, part in zip(self.ffns, rows.chunk(E))])
        return torch.einsum("tec,ech->th", dispatch * p[:, None, None], rows)


class Residual(nn.Module):
    """DeepSpeed's residual MoE: a dense FFN of the experts' shape, and two coefficients for each token."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe, self.mlp, self.coefficient = moe, ffn(), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        coef = self.coefficient(x).softmax(-1)
        return self.moe(x) * coef[..., 0:1] + self.mlp(x) * coef[..., 1:2]


class TwoBlocks(Residual):
    """Two blocks of one shape beside the dense FFN."""

    def __init__(self) -> None:
        super().__init__(Slots())
        self.other = Slices()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x) + self.other(x) + self.mlp(x)


def twin(module: nn.Module) -> nn.Module:
    """Return the module in float64, with the values of the packed weights in all experts."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            if "ffns" in name and p.dim() == 2:
                p.copy_(fake_quantised(p, FORMAT))
            elif p.dim() == 3:
                p.copy_(fake_quantised(p, FORMAT, transposed=True))
    return twin.double()


def compiled(module: nn.Module) -> Recorder:
    """Compare two lengths of one compilation by Inductor with float64."""
    recorder = Recorder(run=compile_fx, activation="bf16", format=FORMAT)
    check_lengths(recorder, module, twin(module), (torch.randn(n, H) for n in (12, 18)))
    assert recorder.compilations == 1
    return recorder


@pytest.mark.parametrize(
    ("module", "ops"),
    [
        (Copy, 1), (Slices, 1), (lambda: Residual(Einsum()), 1), (TwoBlocks, 2),
        more(Slots, 1), more(Drop, 1), more(Put, 1), more(ScatterSlices, 1), more(ThreeSpare, 1),
        more(Stacked, 2), more(Einsum, 1), more(lambda: Residual(Slots()), 1),
        more(lambda: Residual(Copy()), 1), more(lambda: Residual(Stacked()), 2),
    ],
)  # fmt: skip
def test_experts_of_a_buffer(module, ops):
    recorder = compiled(module())
    assert len(recorder.ops) == ops == len(recorder.sites), recorder.reasons


class NextSlice(Slices):
    """Expert e reads the slice after the one that it writes."""

    def experts_of(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, H)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.ffns):
            out[e * 7 : (e + 1) * 7] = expert(rows[(e + 1) % E])
        return out.view_as(rows)


class OneReadsAnother(Slots):
    """The last expert reads the slice of the first."""

    def experts_of(self, rows: Tensor) -> Tensor:
        return torch.stack([expert(rows[e % (E - 1)]) for e, expert in enumerate(self.ffns)])


class OneNormed(Copy):
    """One expert reads its rows after a norm."""

    def experts_of(self, rows: Tensor) -> Tensor:
        last = len(self.ffns) - 1
        return torch.stack(
            [f(F.rms_norm(rows[e], (H,)) if e == last else rows[e]) for e, f in enumerate(self.ffns)]
        )


class SpareFirst(Drop):
    """The spare row is the first one. Expert e reads from row e C on, its slot is from row e C + 1 on."""

    def put(self, buffer: Tensor, slot: Tensor, rows: Tensor) -> Tensor:
        return super().put(buffer, (slot + 1) % buffer.shape[0], rows)


class SpareJoined(Copy):
    """The outputs and the spare row are joined at once."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).max(-1)
        hot = F.one_hot(ids, E)
        place, c = ((hot.cumsum(0) - 1) * hot).sum(-1), 7
        slot = torch.where(place < c, ids * c + place, E * c)
        buffer = x.new_zeros(E * c + 1, H).index_copy(0, slot, x)
        rows = [f(buffer[e * c : (e + 1) * c]) for e, f in enumerate(self.ffns)]
        return torch.cat([*rows, x.new_zeros(1, H)])[slot] * weights[:, None]


class CopiedOver(Slots):
    """index_copy of all rows for each expert: those of the others go to a spare row."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).max(-1)
        out, n = x.new_zeros(x.shape[0] + 1, H), x.shape[0]
        for e, expert in enumerate(self.ffns):
            at = torch.where(ids == e, torch.arange(n), n)
            out = out.index_copy(0, at, expert(x) * weights[:, None])
        return out[:-1]


@pytest.mark.parametrize(
    ("module", "reason", "change"),
    [
        (lambda: Residual(OneNormed()), "", ""), (NextSlice, "", ""),
        (SpareJoined, "cat (`return torch.cat([*rows", "Append a row that is no expert's after that"),
        (CopiedOver, "index_copy (`out = out.index_copy(0, at", "index_add_"),
        more(OneReadsAnother, "", ""), more(lambda: Residual(NextSlice()), "", ""), more(OneNormed, "", ""),
    ],
)  # fmt: skip
def test_what_only_looks_like_it_stays(module, reason, change):
    recorder = compiled(module())
    assert not recorder.ops and recorder.sites
    assert any(reason in s.reason and change in s.change for s in recorder.sites), recorder.sites


def test_slices_that_begin_one_row_later_are_right():
    compiled(SpareFirst())
