"""Layers that look like experts behind a choice or a softmax, and are none: they keep their weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from recorder import Recorder, fake_quantised, relative_error
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
E, H, N = 4, 64, 96


def matrices(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 8)


class MaxPooled(nn.Module):
    """A neural tensor network: a bilinear layer of a query and a document, whose tokens a maximum pools."""

    def __init__(self) -> None:
        super().__init__()
        self.w = matrices(H, N, H)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.einsum("bi,ioj,bj->bo", x[:, 0], self.w, x.max(1).values).tanh()


class Codebook(MaxPooled):
    """The same with the nearest vector of a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.book = matrices(32, H)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        near = self.book[torch.cdist(x[:, 1], self.book).argmin(-1)]
        return torch.einsum("bi,ioj,bj->bo", x[:, 0], self.w, near)


class MixedRouters(nn.Module):
    """Routers, weighted by a softmax, whose sum chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.routers, self.gate = matrices(H, 32, E), nn.Linear(H, E)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        each = torch.einsum("bth,hre->btre", x, self.routers)
        return torch.einsum("btre,bte->btr", each, self.gate(x).softmax(-1)).softmax(-1).topk(2)


class OverTokens(nn.Module):
    """A softmax over tokens, one for each head, whose values are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(H, E), matrices(H, E, N)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        weights = self.q(x).softmax(1)[..., None]
        return (weights * torch.einsum("bth,hed->bted", x, self.v)).sum(2)


class Fields(nn.Module):
    """A record's fields: an FFN for each, on rows of one embedding. Missing values have id 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(100, H), matrices(E, H, N), matrices(E, N, H)

    def rows(self, ids: Tensor) -> Tensor:
        return self.table(ids.masked_fill(ids == -1, 0))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = torch.einsum("bfh,fhn->bfn", self.rows(ids), self.up).relu()
        return torch.einsum("bfn,fnh->bfh", h, self.down)


class ExcitedFields(Fields):
    """Squeeze and excite over the fields (FiBiNET)."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(E, 4), nn.Linear(4, E)

    def rows(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        return rows * self.excite(self.squeeze(rows.mean(-1)).relu()).relu()[..., None]


class CutAttention(nn.Module):
    """Attention over latents that keeps the largest probabilities. Each head has a matrix (MLA)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(H, E * H), matrices(E, H, N)

    def probabilities(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (E, H)).transpose(1, 2)
        p = torch.einsum("beth,bsh->bets", q, x).softmax(-1)
        values, ids = p.topk(3, -1)
        p = torch.zeros_like(p).scatter(-1, ids, values)
        return p / p.sum(-1, keepdim=True)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows = torch.einsum("bets,bsh->beth", self.probabilities(x), x)
        return torch.einsum("beth,ehn->bten", rows, self.v)


class MaskedAttention(CutAttention):
    """The same by a mask."""

    def probabilities(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (E, H)).transpose(1, 2)
        p = torch.einsum("beth,bsh->bets", q, x).softmax(-1)
        return p * (p >= p.topk(3, -1).values[..., -1:])


NONE = (
    MaxPooled, MixedRouters, Fields, CutAttention,
    *map(more, (Codebook, OverTokens, ExcitedFields, MaskedAttention)),
)  # fmt: skip


@pytest.mark.parametrize("kind", NONE)
@torch.no_grad()
def test_what_is_no_expert_keeps_its_weights(kind):
    module, recorder = kind(), Recorder(activation="bf16")
    run = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    for n in (5, 3):
        inputs = torch.randn(n, 7, H), torch.randint(-1 if kind is Fields else 0, 100, (n, E))
        got, want = run(*inputs), module(*inputs)
        assert torch.equal(got[1], want[1]) if isinstance(got, tuple) else relative_error(got, want) < 1e-5
    assert not recorder.sites


class PartShared(nn.Module):
    """Experts that share one matrix, which is no expert's."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.router = form, nn.Linear(H, E)
        self.up, self.out, self.bias = nn.Linear(H, N), nn.Linear(N, H), matrices(E, N)
        self.ups = nn.ModuleList(nn.Linear(H, N) for _ in range(E))
        self.downs = nn.ModuleList(nn.Linear(N, H) for _ in range(E))

    def expert(self, e: int, x: Tensor) -> Tensor:
        if self.form == "down":
            return self.out(self.ups[e](x).relu())
        if self.form == "gate":
            return self.downs[e](F.silu(self.up(x)) * self.ups[e](x))
        if self.form == "all but a bias":
            return self.out(F.linear(x, self.up.weight, self.bias[e]).relu())
        return self.downs[e](self.ups[e](x).relu())

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        return sum(scores[:, e, None] * self.expert(e, x) for e in range(E))


@pytest.mark.parametrize("form", ["down", more("gate"), more("all but a bias")])
@torch.no_grad()
def test_a_matrix_that_all_experts_share_is_no_experts(form):
    module, recorder = PartShared(form), Recorder(activation="bf16")
    x = torch.randn(9, H)
    got = torch.compile(module, backend=recorder, fullgraph=True)(x)
    assert relative_error(got, module(x)) < 1e-5 and not recorder.ops
    reasons = [s.reason for f in recorder.frames for s in (*f.sites, *f.unrouted)]
    assert any("all of these experts share the matrix of" in reason for reason in reasons), reasons


@torch.no_grad()
def test_experts_with_matrices_of_their_own_are_packed():
    module, recorder = PartShared(""), Recorder(activation="bf16")
    x = torch.randn(9, H)
    got = torch.compile(module, backend=recorder, fullgraph=True)(x)
    for layer in (*module.ups, *module.downs):
        layer.weight.data = fake_quantised(layer.weight, "nvfp4")
    assert relative_error(got.double(), module.double()(x.double())) < 1e-5
    assert recorder.ops


class Narrow(nn.Module):
    """MMoE whose experts are too narrow for 4 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.gate = matrices(H, 16, E), nn.Linear(H, E)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.einsum("bh,hne->bne", x, self.kernel).relu()
        return (each * self.gate(x).softmax(-1)[:, None]).sum(-1)


@torch.no_grad()
def test_gated_products_that_cannot_be_packed_have_a_reason():
    module, recorder = Narrow(), Recorder(activation="bf16")
    x = torch.randn(9, H)
    assert relative_error(torch.compile(module, backend=recorder, fullgraph=True)(x), module(x)) < 1e-5
    assert not recorder.ops
    assert [s.reason for f in recorder.frames for s in (*f.sites, *f.unrouted)]


class ChosenHeads(CutAttention):
    """Experts that are heads: a topk of scores over them chooses the heads whose rows count."""

    def __init__(self, by_tokens: bool) -> None:
        super().__init__()
        self.by_tokens, self.router = by_tokens, nn.Linear(H, E)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(1 if self.by_tokens else -1)
        values, ids = scores.topk(2, 1 if self.by_tokens else -1)
        if self.by_tokens:  # each expert chooses tokens
            put = F.one_hot(ids, x.shape[1]).to(x.dtype)
            rows = torch.einsum("bcet,bth->bech", put, x)
            y = torch.einsum("bech,ehn->becn", rows, self.v) * values.transpose(1, 2)[..., None]
            return torch.einsum("bcet,becn->btn", put, y)
        scores = torch.zeros_like(scores).scatter(-1, ids, values)
        weights = self.probabilities(x) * scores.transpose(1, 2)[..., None]
        return torch.einsum("beth,ehn->bten", torch.einsum("bets,bsh->beth", weights, x), self.v)


@pytest.mark.parametrize("by_tokens", [False, True])
@torch.no_grad()
def test_a_topk_over_experts_or_by_them_is_a_routers(by_tokens):
    module, recorder = ChosenHeads(by_tokens), Recorder(activation="bf16")
    x = torch.randn(2, 7, H)
    got = torch.compile(module, backend=recorder, fullgraph=True)(x)
    assert recorder.ops
    module.v.data = fake_quantised(module.v, "nvfp4", transposed=True)
    assert relative_error(got.double(), module.double()(x.double())) < 1e-5
