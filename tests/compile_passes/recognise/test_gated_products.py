"""One product of x and the matrices of all experts, whose results a router's gates weight (MMoE, PLE); and
products that are no experts', or that are left with their reason."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from recorder import Recorder, check_lengths, fake_quantised
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

import fp4_ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, N, E, T = 64, 48, 4, 12
FORMAT = "nvfp4"


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 8)


class Kernels(nn.Module):
    """MMoE of keras and DeepCTR: kernels [H, N, E], and a softmax for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.bias = parameter(H, N, E), parameter(N, E)
        self.gates = nn.ModuleList(nn.Linear(H, E, bias=False) for _ in range(2))

    def product(self, x: Tensor) -> Tensor:
        return torch.einsum("bh,hne->bne", x, self.kernel)

    def gate(self, gate: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return gate(x).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.product(x) + self.bias)
        return torch.cat([(y * self.gate(g, x, y)[:, None]).sum(-1) for g in self.gates], -1)


class Tensordot(Kernels):
    def product(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.kernel, dims=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.product(x) + self.bias)
        return torch.cat([torch.einsum("bne,be->bn", y, g(x).softmax(-1)) for g in self.gates], -1)


class TopGates(Kernels):
    def gate(self, gate, x, y):
        weights, ids = gate(x).softmax(-1).topk(2, -1)
        return weights.new_zeros(x.shape[0], E).scatter(1, ids, weights)


class ExpertsFirst(Kernels):
    """The same with matrices [E, H, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = parameter(E, H, N)

    def product(self, x: Tensor) -> Tensor:
        return torch.einsum("bh,ehn->bne", x, self.kernel)


class SigmoidGates(Kernels):
    """A bilinear layer of x and another layer."""

    def gate(self, gate, x, y):
        return gate(x).sigmoid()


class ParameterGates(Kernels):
    """An ensemble with learned weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = parameter(E)

    def gate(self, gate, x, y):
        return self.weights.softmax(0)[None]


class OwnAttention(Kernels):
    """Attention over the branches' own outputs (SKNet)."""

    def gate(self, gate, x, y):
        return gate(F.pad(y.sum(-1), (0, H - N))).softmax(-1)


class Average(Kernels):
    def gate(self, gate, x, y):
        return torch.full((1, E), 1 / E)


class SummedHeads(nn.Module):
    """Attention whose heads are added up, with values by one product [H, N, heads]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(H, H), nn.Linear(H, H)
        self.kernel = parameter(H, N, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).view(-1, E, H // E).transpose(0, 1) for p in (self.q, self.k))
        scores = (q @ k.transpose(1, 2)).softmax(-1)
        return torch.einsum("ets,sne->tn", scores, torch.einsum("sh,hne->sne", x, self.kernel))


class SummedSplitHeads(SummedHeads):
    """The same, where each head reads its own part of x."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = parameter(2, H // 2, N)

    def forward(self, x: Tensor) -> Tensor:
        q, k, rows = (y.view(-1, 2, H // 2).transpose(0, 1) for y in (self.q(x), self.k(x), x))
        scores = (q @ k.transpose(1, 2)).softmax(-1)
        return torch.einsum("ets,esn->tn", scores, torch.bmm(rows, self.kernel))


class Fields(nn.Module):
    """A recommender: each field of a record has an embedding, and matrices of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.w1, self.w2 = nn.Embedding(100, H), parameter(E, H, N), parameter(E, N, H)

    def rows(self, x: Tensor) -> Tensor:
        return self.table((x[:, :E].abs() * 9).long())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bfh,fhn->bfn", self.rows(x), self.w1).relu()
        return torch.einsum("bfn,fnh->bfh", h, self.w2)


class StackedFields(Fields):
    def rows(self, x: Tensor) -> Tensor:
        return torch.stack([self.table(i) for i in (x[:, :E].abs() * 9).long().unbind(1)], 1)


class SwitchHead(nn.Module):
    """The value projection of SwitchHead: each head of a token adds up two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.select, self.v = nn.Linear(H, 2 * E, bias=False), parameter(2 * E, H, N)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.select(x).sigmoid().view(-1, 2, E).topk(2, -1)
        ids = ids + torch.arange(2)[:, None] * E
        return torch.einsum("ti,thkin,thk->thn", x, self.v[ids], weights)


class SwitchHeadOfAll(SwitchHead):
    """The same, with the products of all experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.select(x).sigmoid().view(-1, 2, E).topk(2, -1)
        y = torch.einsum("ti,ein->ten", x, self.v).view(-1, 2, E, N)
        return (y.gather(2, ids[..., None].expand(-1, -1, -1, N)) * weights[..., None]).sum(2)


def twin(module: nn.Module) -> nn.Module:
    """Return the module in float64, with the values of the packed weights."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for name, w in twin.named_parameters():
            if name == "kernel" and w.shape[-1] == E:
                matrices = fake_quantised(w.permute(2, 1, 0).contiguous(), FORMAT)
                w.copy_(matrices.permute(2, 1, 0))
            elif w.dim() == 3:
                w.copy_(fake_quantised(w, FORMAT, transposed=True))
    return twin.double()


def compiled(module: nn.Module) -> Recorder:
    """Compare two lengths by Inductor with float64."""
    recorder = Recorder(run=compile_fx, activation="bf16", format=FORMAT)
    check_lengths(recorder, module, twin(module), (torch.randn(n, H) for n in (T, 17)))
    return recorder


@pytest.mark.parametrize(
    "cls", [Kernels, SwitchHeadOfAll, more(Tensordot), more(TopGates), more(ExpertsFirst)]
)
def test_gates_show_that_matrices_are_experts(cls):
    assert compiled(cls()).ops == ["fp4::grouped_mm_masked"]


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (SigmoidGates, f"matrices of kernel ({H} x {N} x {E})"),
        (OwnAttention, "no softmax over the matrices"), (Fields, "nothing routes rows"),
        (SummedHeads, "no softmax"), (SummedSplitHeads, "nothing routes rows"),
        more(StackedFields, "nothing routes rows"),
        more(ParameterGates, "no softmax"), more(Average, "no softmax"),
    ],
)  # fmt: skip
def test_layers_that_only_look_like_it_stay(cls, reason):
    frame = compiled(cls()).frames[-1]
    assert not frame.sites
    assert frame.unrouted and all(reason in s.reason and s.change for s in frame.unrouted)


def test_a_row_that_meets_several_gathered_matrices_is_told():
    (site,) = compiled(SwitchHead()).sites
    assert not site.rewritten and "a row meets several of them" in site.reason and " v" in site.reason
    assert "torch.bmm(weight[ids]" in site.change


class Hits(nn.Module):
    """A loop over experts that have more rows than `least`."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.router, self.least = nn.Linear(H, E, bias=False), least
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(H, N), nn.SiLU(), nn.Linear(N, H)) for _ in range(E)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        mask, out = F.one_hot(ids, E).permute(2, 1, 0), torch.zeros_like(x)
        hit = (mask.sum((-1, -2)) > self.least).nonzero() if self.least else mask.amax((-1, -2)).nonzero()
        for e in hit:
            slot, token = torch.where(mask[e].squeeze(0))
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


def test_a_loop_over_some_experts_says_what_stopped_it():
    report = fp4_ops.explain(Hits(1), torch.randn(T, H))
    (hint,) = report.hints
    assert "test_gated_products.py" in hint and "not proved to run over all experts that have rows" in hint
    assert "mask.sum((-1, -2)) > 0" in hint


def test_a_loop_over_the_largest_mark_of_each_expert_is_read():
    assert [s.op for s in fp4_ops.explain(Hits(0), torch.randn(T, H)).sites] == ["fp4::indexed_mm"]
