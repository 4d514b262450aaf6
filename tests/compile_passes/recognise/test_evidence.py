"""Products count as experts only if rows are routed to them. test_dense_models.py tests dense models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from recorder import Recorder
from torch import Tensor, nn

import fp4_ops

H, INTER, E, C, T = 64, 96, 4, 6, 12
TWO = ["fp4::grouped_mm_masked"] * 2
ROUTED: dict[str, tuple[type[nn.Module], list[str]]] = {}


def routed(*ops: str):
    def add(cls):
        ROUTED[cls.__name__] = cls, list(ops)
        return cls

    return add


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


class Buffers(nn.Module):
    """Experts over rows [E, C, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(H, E, bias=False), nn.LayerNorm(INTER)
        self.w1, self.w2 = parameter(E, H, INTER), parameter(E, INTER, H)

    def ffn(self, rows: Tensor) -> Tensor:
        return torch.bmm(self.norm(F.gelu(torch.bmm(rows, self.w1))), self.w2)


def places(ids: Tensor) -> Tensor:
    """[T, E, C]: 1 where a token has a place in its expert's buffer."""
    hot = F.one_hot(ids, E)
    at = hot.cumsum(0) - 1
    return (hot * (at < C))[..., None] * F.one_hot(at.clamp(0, C - 1), C)


@routed(*TWO)
class CapacityDispatch(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        p, ids = self.gate(x).softmax(-1).max(-1)
        dispatch = places(ids).to(x.dtype)
        y = self.ffn(torch.einsum("tec,th->ech", dispatch, x))
        return torch.einsum("tec,ech->th", dispatch * p[:, None, None], y)


@routed(*TWO)
class ExpertChoice(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).t().topk(C, -1)
        y = self.ffn(x[ids]) * weights[..., None]
        return torch.zeros_like(x).index_add(0, ids.flatten(), y.reshape(-1, H))


@routed(*TWO)
class SoftSlots(Buffers):
    """Soft MoE: a softmax mixes tokens into slots, and slots into tokens. No expert is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = parameter(H, E * 3)

    def forward(self, x: Tensor) -> Tensor:
        logits = (x @ self.phi).view(1, -1, E, 3)
        rows = torch.einsum("btes,bth->besh", logits.softmax(1), x[None])
        h = F.gelu(torch.einsum("besh,ehi->besi", rows, self.w1))
        y = torch.einsum("besi,eih->besh", self.norm(h), self.w2)
        return torch.einsum("btes,besh->bth", logits.flatten(2).softmax(-1).view_as(logits), y)[0]


@routed(*TWO)
class HashTable(Buffers):
    """The expert of a token is looked up by its number: nothing is scored."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randint(0, E, (50,)))
        self.register_buffer("numbers", torch.arange(50))

    def forward(self, x: Tensor) -> Tensor:
        ids = self.table[(x[:, 0].abs() * 7).long() % 50]
        dispatch = places(ids).to(x.dtype)
        return torch.einsum("tec,ech->th", dispatch, self.ffn(torch.einsum("tec,th->ech", dispatch, x)))


@routed(*TWO)
class PutIntoABuffer(Buffers):
    """Rows are put into a flat buffer at places that were computed, and read from there."""

    def forward(self, x: Tensor) -> Tensor:
        ids = self.gate(x).argmax(-1)
        hot = F.one_hot(ids, E)
        slot = ids * T + ((hot.cumsum(0) - 1) * hot).sum(-1)
        buffer = x.new_zeros(E * T, H).index_put((slot,), x)
        return self.ffn(buffer.view(E, T, H)).reshape(-1, H)[slot]


@routed("fp4::indexed_mm")
class HashLoop(Buffers):
    """Each token's word decides, by a table that is a buffer. Nothing else in the graph makes a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randint(0, E, (50,)))
        self.ffns = nn.ModuleList(
            nn.Sequential(nn.Linear(H, INTER), nn.ReLU(), nn.Linear(INTER, H)) for _ in range(E)
        )

    def forward(self, x: Tensor) -> Tensor:
        ids, out = self.table[(x[:, 0].abs() * 7).long() % 50], torch.zeros_like(x)
        for e, ffn in enumerate(self.ffns):
            mask = ids == e
            out[mask] = ffn(x[mask])
        return out


class OneMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(H, E), parameter(E, H, H)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@routed("fp4::indexed_mm")
class GatheredByIds(OneMatrix):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.w[self.gate(x).argmax(-1)], x[:, :, None]).squeeze(-1)


@routed()
class GatheredByPosition(OneMatrix):
    """The same matrix at each call."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.w[torch.arange(T, device=x.device) % E], x[:, :, None]).squeeze(-1)


@routed()
class GatheredRouter(OneMatrix):
    """A router of each group: a softmax chooses by what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.bmm(self.w[self.gate(x).argmax(-1)], x[:, :, None]).squeeze(-1)
        return (scores / 0.7).softmax(-1).topk(2, -1).values


class Trunk(nn.Module):
    """Experts of one Linear after a layer that they share."""

    def __init__(self, rank: int = INTER) -> None:
        super().__init__()
        self.gate, self.up, self.w = nn.Linear(H, E), nn.Linear(H, rank), parameter(E, rank, H)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        y = torch.einsum("ti,tkih->tkh", F.relu(self.up(x)), self.w[ids])
        return (y * weights[..., None]).sum(1)


@routed("fp4::indexed_mm")
class TrunkThenGathered(Trunk):
    pass


@routed("fp4::indexed_mm")
class TrunkThenList(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(INTER, H) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        scores, h = self.gate(x).softmax(-1), F.relu(self.up(x))
        return sum(scores[:, e, None] * layer(h) for e, layer in enumerate(self.layers))


@routed("fp4::indexed_mm")
class TrunkThenGate(Trunk):
    """An MMoE head: the gate reads the trunk's output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(INTER, E)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        return torch.einsum("ti,eih,te->th", h, self.w, self.gate(h).softmax(-1))


@routed("fp4::indexed_mm")
class SharedFactor(Trunk):
    """HydraLoRA: the first factor of a product of small rank is shared."""

    def __init__(self) -> None:
        super().__init__(rank=32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("tr,erh,te->th", self.up(x), self.w, self.gate(x).softmax(-1))


def dense(scores: Tensor) -> Tensor:
    """[T, E]: scores of the two experts that were chosen, and 0."""
    weights, ids = scores.softmax(-1).topk(2, -1)
    return torch.zeros_like(scores).scatter(-1, ids, weights)


class Steps(nn.Module):
    """Routers of a later step read the outputs of experts in the same parameters."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(H, E) for _ in range(2))
        self.w1, self.w2, self.norm = (
            parameter(*layers, E, H, INTER),
            parameter(*layers, E, INTER, H),
            nn.LayerNorm(H),
        )

    def mixed(self, x: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = F.gelu(torch.einsum("th,ehi->tei", x, w1))
        return torch.einsum("teh,te->th", torch.einsum("tei,eih->teh", h, w2), scores)


@routed("fp4::indexed_mm", "fp4::indexed_mm")
class Refinement(Steps):
    """Experts read the input, routers the state."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for gate in self.gates:
            state = state + self.mixed(x, dense(gate(self.norm(x + state))), self.w1, self.w2)
        return state


@routed("fp4::indexed_mm", "fp4::indexed_mm")
class AllLayersInOneParameter(Steps):
    """Experts of the second layer read what those of the first read (ScMoE)."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        for layer, gate in enumerate(self.gates):
            x = x + self.mixed(rows, dense(gate(self.norm(x))), self.w1[layer], self.w2[layer])
        return x


class Half(nn.Module):
    """A graph behind a graph break gets rows of experts that another graph dispatched."""

    def __init__(self, name: str) -> None:
        super().__init__()
        holder = nn.Module()
        holder.w1, holder.w2 = parameter(E, H, INTER), parameter(E, INTER, H)
        self.name = name
        self.add_module(name, holder)

    def forward(self, rows: Tensor) -> Tensor:
        held = self.get_submodule(self.name)
        return torch.bmm(F.gelu(torch.bmm(rows, held.w1)), held.w2)


def compiled(module: nn.Module, *inputs: Tensor) -> Recorder:
    """What became of a module, whose result is that of its twin over the packed weights, or its own."""
    recorder = Recorder(activation="bf16", format="mxfp4")
    with torch.no_grad():
        got = torch.compile(module, backend=recorder, fullgraph=True)(*inputs)
        exact = module(*inputs)
    error = ((got - exact).norm() / exact.norm()).item()
    assert error < 0.5 if recorder.ops else torch.equal(got, exact)
    return recorder


@pytest.mark.parametrize("name", [more(n) if n in ("HashTable", "ExpertChoice") else n for n in ROUTED])
def test_routed_products(name):
    cls, ops = ROUTED[name]
    recorder = compiled(cls(), torch.randn(T, H))
    assert recorder.ops == ops
    (frame,) = recorder.frames
    assert ops or [s.change for s in frame.unrouted]
    assert all(s.rewritten for s in frame.sites)


def test_a_name_counts_where_the_router_is_in_another_graph():
    rows = torch.randn(E, C, H)
    assert compiled(Half("experts"), rows).ops == TWO
    recorder = compiled(Half("blocks"), rows)
    (frame,) = recorder.frames
    assert not frame.sites and sorted(s.reason for s in frame.unrouted) == [
        f"nothing routes rows to the matrices of blocks.{w}: no experts"
        for w in ("w1 (4 x 64 x 96)", "w2 (4 x 96 x 64)")
    ]
    assert "'expert' in it" in str(frame)


class Adapters(nn.Module):
    """A frozen Linear, and adapters of a small rank that a router chooses (LoRA)."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base, self.gate = nn.Linear(H, H, bias=False), nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(H, rank, bias=False), nn.Linear(rank, H, bias=False)) for _ in range(E)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        out = self.base(x)
        for e, adapter in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, adapter(x[token]) * weights[token, slot, None])
        return out


@pytest.mark.parametrize("rank", [8, 32])
def test_adapters_of_a_small_rank_stay(rank):
    recorder = compiled(Adapters(rank), torch.randn(T, H))
    if rank == 32:
        assert recorder.ops == ["fp4::indexed_mm"]
        assert fp4_ops.prepare(Adapters(rank)).bytes_before
        return
    (site,) = recorder.sites
    assert not site.rewritten and "8 x 64" in site.reason and "a side below 32" in site.reason
    with pytest.raises(ValueError, match=r"8 x 64; 4 bits save little .* a side below 32"):
        fp4_ops.prepare(Adapters(rank))
