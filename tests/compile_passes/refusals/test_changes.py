"""The changes that refusals suggest: every refusal has one, and a program with the change gets the promised
result."""

from __future__ import annotations

import copy
import re
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import test_lookalikes
import test_lookalikes_rows as rows
import torch
import torch.nn.functional as F
from conftest import more
from lookalikes import CHANGES, Loop
from moe_models import Recorder, relative_error
from moe_styles import NormedLoop
from test_lookalikes import norm
from test_lookalikes_rows import Splits
from torch import Tensor, nn

from fp4_ops.compile_passes import advice, naming, refusal
from fp4_ops.compile_passes.refusal import Kind, Refusal, Step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

KINDS = list(Kind)


# --- every refusal has one ---


def facts(kind: Kind) -> list[str]:
    """A word for each gap in the sentence of a kind."""
    gaps = [name for _, name, _, _ in string.Formatter().parse(kind.sentence) if name is not None]
    return ["w1"] * max([len(gaps), *(int(name) + 1 for name in gaps if name)])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_kind_has_a_change(kind):
    change = kind.change("w1") if callable(kind.change) else kind.change
    if change is None:  # one of the facts has it
        for cause in (Step.OTHER, Refusal(Kind.ODD_K, None, (7,))):
            assert Refusal(kind, None, (cause,)).change == cause.change
    else:
        told = str(change)
        assert 20 < len(told) < 500 and not told.endswith("."), told
        assert Refusal(kind, None, ("w1",)).change == told


def test_facts_become_words():
    plain = [kind for kind in KINDS if not re.search(r"\{\d?:", kind.sentence)]
    assert len(plain) > 120
    for kind in plain:
        told = Refusal(kind, None, tuple(facts(kind))).reason
        assert told.count("w1") == kind.sentence.count("{") and "{" not in told, told


def test_each_kind_is_used_and_each_change_is_named():
    package = Path(str(advice.__file__)).parent
    code = "".join(p.read_text() for p in package.rglob("*.py"))
    others = code.replace((package / "refusal.py").read_text(), "")
    assert [kind.name for kind in KINDS if not re.search(rf"Kind\.{kind.name}\b", others)] == []
    assert [step.name for step in Step if not re.search(rf"Step\.{step.name}\b", others)] == []
    sentences = [n for n in vars(advice) if n.isupper() and n != "ACTIVATIONS"] + ["elsewhere"]
    assert [n for n in sentences if f"advice.{n}" not in code] == []


def test_no_text_is_made_where_a_condition_holds(monkeypatch):
    """If a whole block is proved, no text of a refusal is computed."""
    monkeypatch.setattr(refusal._Sentence, "vformat", None)
    monkeypatch.setattr(naming, "source_line", None)
    recorder, module = Recorder(activation="bf16"), Loop(experts=4)
    with torch.no_grad():
        torch.compile(module, backend=recorder, fullgraph=True, dynamic=True)(torch.randn(10, module.H))
    assert recorder.ops == ["fp4::moe"]


# --- those of the look-alikes, applied ---


class Before(Loop):
    """Ids and weights are changed before the loop, which is allowed."""

    change: Callable[..., tuple[Tensor, Tensor]]

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return super().experts_of(x, *type(self).change(ids, weights, self.E))


def seen(ids: Tensor, experts: int) -> Tensor:
    return F.one_hot(ids, experts).sum(1).cumsum(0)


ROUTING: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "OneExpertTwice": lambda ids, w, E: (ids, w * torch.where(ids == 2, 2.0, 1.0)),
    "OneExpertMissing": lambda ids, w, E: (torch.where(ids == 2, E, ids), w),
    "OneWeightFromTheWrongSlot": lambda ids, w, E: (ids, torch.where(ids == 2, w.flip(1), w)),
    "OneIsRoutedOtherwise": lambda ids, w, E: (ids, torch.where(ids == 2, w.flip(1), w)),
    "OneExpertIsDoubled": lambda ids, w, E: (ids, w * (1.0 + (torch.arange(E) == 2))[ids]),
    "OneHasAConditionOfItsOwn": lambda ids, w, E: (torch.where(ids.cumsum(0) % 3 > (ids == 2), ids, E), w),
    "OneHasNoCondition": lambda ids, w, E: (torch.where((ids == 2) | (ids.cumsum(0) % 3 > 0), ids, E), w),
    "CapacitiesDiffer": lambda ids, w, E: (
        torch.where(seen(ids, E).gather(1, ids) <= (1 + (torch.arange(E) == 2))[ids], ids, E), w
    ),
    "CapacityOfAnotherExpert": lambda ids, w, E: (
        torch.where(seen(ids, E).gather(1, E - 1 - ids) <= 2, ids, E), w
    ),
    "CapacityOfTheFirstExpert": lambda ids, w, E: (torch.where(seen(ids, E)[:, :1] <= 2, ids, E), w),
    "TwoExpertsAtOnce": lambda ids, w, E: (torch.where(ids.flip(1) == (ids + 1) % E, ids, E), w),
}  # fmt: skip

APPLIED: dict[str, Callable[[nn.Module], nn.Module]] = {}
"""Maps each refused program to the program after the change, which computes the same."""


def applied(name: str):
    """Decorates the class that a module has afterwards, or what changes the module itself."""

    def add(change):
        APPLIED[name] = change
        return change

    return add


for _name, _change in ROUTING.items():
    APPLIED[_name] = type(f"{_name}Changed", (Before,), {"change": staticmethod(_change)})
APPLIED |= {"OneReadsTwiceItsInput": Loop, "AWeightIsWrittenTo": Loop}


@applied("DifferentShapes")
def padded(module: nn.Module) -> nn.Module:
    small, inter = module.list[2], module.I
    for name, shape in (("w1", (inter, module.H)), ("w3", (inter, module.H)), ("w2", (module.H, inter))):
        old = getattr(small, name).weight
        new = torch.zeros(shape)
        new[: old.shape[0], : old.shape[1]] = old
        setattr(small, name, linear(new))
    return module


@applied("OneHasABias")
def zeros_for_the_others(module: nn.Module) -> nn.Module:
    for expert in module.list:
        if expert.w2.bias is None:
            expert.w2.bias = nn.Parameter(torch.zeros(module.H))
    return module


@applied("LoRAOnOneExpert")
def merged(module: nn.Module) -> nn.Module:
    lora = module.list[2].w1
    module.list[2].w1 = linear(lora.base.weight + lora.b.weight @ lora.a.weight)
    return module


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight = nn.Parameter(weight.detach())
    return layer


@applied("ExpertChoice")
class RowsOfEachExpert(rows.ExpertChoice):
    def forward(self, x):
        scores = torch.softmax(self.router(x), -1)
        weights, tokens = torch.topk(scores.T, 3)
        gate, up = torch.bmm(x[tokens], self.w13).chunk(2, -1)
        y = torch.bmm(F.silu(gate) * up, self.w2) * weights.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, tokens.flatten(), y.flatten(0, 1))


@applied("FirstRowsByASlice")
class FirstRowsByAMask(rows.FirstRowsByASlice):
    def experts_of(self, x, ids, weights):
        out, hot = torch.zeros_like(x), F.one_hot(ids.flatten(), self.E)
        kept = (hot * (hot.cumsum(0) <= self.capacity)).view(*ids.shape, self.E)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(kept[..., e])
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@applied("SplitsWithAnExpertOfZeros")
class OnesAreAddedLater(Loop):
    def steps(self):
        return list(enumerate(self.list))[:-1]

    def experts_of(self, x, ids, weights):
        ones = (weights * (ids == self.E - 1)).sum(-1, keepdim=True)
        return super().experts_of(x, ids, weights) + ones


@applied("NormAndABias")
class TheGainIsAddedLater(NormedLoop):
    def normed(self, y, e):
        return norm(y, y)

    def experts_of(self, x, ids, weights):
        return super().experts_of(x, ids, weights) + self.gain * weights.sum(-1, keepdim=True)


@applied("OutputsTimesInputs")
class TheSumTimesInputs(NormedLoop):
    def experts_of(self, x, ids, weights):
        full = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        return x * sum(expert(x) * full[:, e, None] for e, expert in enumerate(self.list))


@applied("TransposedSum")
class RowsOfATokenInARow(rows.TransposedSum):
    """The program sums the rows of another token. With the change it computes something else."""

    def experts_of(self, x, ids, weights):
        y = torch.bmm(x.repeat_interleave(self.k, 0).unsqueeze(1), self.w13[ids.flatten()])
        gate, up = y.chunk(2, -1)
        y = torch.bmm(F.silu(gate) * up, self.w2[ids.flatten()]).view(-1, self.k, self.H)
        return (y * weights.unsqueeze(-1)).sum(1)


class SplitsAsTold(Splits):
    def experts_of(self, x, ids, weights):
        counts = torch.bincount(ids.flatten(), minlength=self.E)
        perm = ids.flatten().argsort()
        parts = x[perm // self.k].split(counts.tolist())
        y = torch.cat([expert(part) for expert, part in zip(self.list, parts, strict=True)])
        y = y * weights.flatten()[perm].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, perm // self.k, y)


class OffsetsAsTold(rows.OffsetsOfOtherIds):
    def experts_of(self, x, ids, weights):
        sorted_ids, perm = ids.flatten().sort()
        counts = torch.histc(sorted_ids.float(), bins=self.E, min=0, max=self.E - 1)
        offs = counts.cumsum(0, dtype=torch.int32)
        gate, up = rows.grouped_mm(x[perm // self.k], self.w13, offs).chunk(2, -1)
        y = rows.grouped_mm(F.silu(gate) * up, self.w2, offs)
        y = y[perm.argsort()].view(-1, self.k, self.H)
        return (y * weights.unsqueeze(-1)).sum(1)


MEANT: dict[str, type[nn.Module]] = {
    **dict.fromkeys(("TwoExpertsForOneId", "OneReadsAnotherInput", "SelectedByInequality"), Loop),
    "ASideEffectBetweenExperts": Loop,
    **dict.fromkeys([n for n in CHANGES if n.startswith("Splits")], SplitsAsTold),
    "OffsetsOfOtherIds": OffsetsAsTold,
    **dict.fromkeys([n for n in CHANGES if n.startswith("RowsPut")], rows.RowsPutOverInputs),
    **dict.fromkeys(("SlicesThatKeepTheirInputs", "MaskedSlicesOfOtherRows"), rows.OneMaskedSlice),
    **dict.fromkeys([n for n, (cls, *_) in CHANGES.items() if issubclass(cls, rows.Buffers)], rows.Buffers),
    **dict.fromkeys([n for n, (cls, *_) in CHANGES.items() if issubclass(cls, rows.Scattered)], Loop),
    **dict.fromkeys(("PlacesInAnotherOrder", "OneOfTwoEqualChoicesIsPut"), Loop),
    **dict.fromkeys(("OneByArgmin", "ScoresOfAnotherRowsId"), test_lookalikes.Switch),
    **dict.fromkeys(("OneThresholdIsAnother", "TheNextExpertsScore"), rows.ByScore),
    **dict.fromkeys([n for n in CHANGES if n.startswith("Norm")], NormedLoop),
    **dict.fromkeys([n for n in CHANGES if n.startswith("EachChoice")], test_lookalikes.TheSameForEachChoice),
}
"""Programs that are one step off. With the change they compute something else, which was probably meant."""
SAME = APPLIED.keys() - {"TransposedSum"}
NO_CHANGE = {"OneOtherActivation", "ExpertsFollowEachOther", "SlicesOfWhatIsWritten"}


def changed(name: str) -> tuple[nn.Module, nn.Module]:
    refused = CHANGES[name][0](experts=4)
    change, module = APPLIED.get(name) or MEANT[name], copy.deepcopy(refused)
    if isinstance(change, type):
        module.__class__ = change
        return refused, module
    return refused, change(module)


def recognised(module: nn.Module, x: Tensor) -> list[str]:
    recorder = Recorder(activation="bf16")
    with torch.no_grad():
        want = module.twin()(x)
        got = torch.compile(module, backend=recorder, fullgraph=True, dynamic=True)(x)
    assert relative_error(got, want) < 1e-5
    assert not any(s.reason for s in recorder.sites), recorder.reasons
    return recorder.ops


# Ids and weights that are others before a plain loop, and plain loops: three show what all do.
PLAIN = {*ROUTING, "OneReadsTwiceItsInput", "AWeightIsWrittenTo"}
PLAIN -= {"OneExpertTwice", "CapacitiesDiffer", "TwoExpertsAtOnce"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [more(name) if name in PLAIN else name for name in sorted(APPLIED)])
def test_a_change_that_is_applied_is_recognised(name):
    refused, module = changed(name)
    x = torch.randn(10, module.H)
    if name in SAME:  # sums in another order
        with torch.no_grad():
            assert relative_error(module(x), refused(x)) < 1e-4
    ops = recognised(module, x)
    assert ops == (["fp4::grouped_mm_masked"] * 2 if name == "ExpertChoice" else ["fp4::moe"])


# As test_styles.py has them.
AS_STYLES = Loop, NormedLoop
CLASSES = sorted({*MEANT.values()}, key=lambda c: c.__name__)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cls", [more(cls) if cls in AS_STYLES else cls for cls in CLASSES])
def test_what_was_meant_is_recognised(cls):
    module = cls(experts=4)
    assert recognised(module, torch.randn(10, module.H)) == ["fp4::moe"]


# --- what else is refused, and with the change is not ---


class Steps(Loop):
    """An expert may do something besides, on its rows."""

    def inside(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows)

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in self.steps():
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, self.inside(expert, x[token]) * weights[token, slot, None])
        return out


class Dropout(Steps):
    def inside(self, expert, rows):
        return F.dropout(expert(rows), 0.1, self.training)


class DropoutInside(Steps):
    def inside(self, expert, rows):
        h = F.silu(expert.w1(rows)) * expert.w3(rows)
        return expert.w2(F.dropout(h, 0.1, self.training))


class DropoutBefore(Steps):
    def inside(self, expert, rows):
        return expert(F.dropout(rows, 0.1, self.training))


class NormInside(Steps):
    def inside(self, expert, rows):
        h = F.silu(expert.w1(rows)) * expert.w3(rows)
        return expert.w2(F.layer_norm(h, (self.I,)))


class OutputsNormed(Steps):
    def inside(self, expert, rows):
        return F.layer_norm(expert(rows), (self.H,))


class SumNormed(Steps):
    def experts_of(self, x, ids, weights):
        return F.layer_norm(super().experts_of(x, ids, weights), (self.H,))


class InputsNormed(Steps):
    def inside(self, expert, rows):
        return expert(F.layer_norm(rows, (self.H,)))


class InputsNormedBefore(Steps):
    def experts_of(self, x, ids, weights):
        return super().experts_of(F.layer_norm(x, (self.H,)), ids, weights)


class ThirdProduct(Steps):
    def inside(self, expert, rows):
        return expert.w2(F.silu(expert.w1(rows)) * expert.w3(rows) + expert.w1(2 * rows))


class LinearExperts(Loop):
    def build(self):
        super().build()
        self.square = nn.Parameter(torch.randn(self.E, self.H, self.H) / self.H**0.5)

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in range(self.E):
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, (x[token] @ self.square[e].T) * weights[token, slot, None])
        return out


class LinearExpertsGathered(LinearExperts):
    def experts_of(self, x, ids, weights):
        rows = x.repeat_interleave(self.k, 0).unsqueeze(-1)
        y = torch.bmm(self.square[ids.flatten()], rows).view(-1, self.k, self.H)
        return (y * weights.unsqueeze(-1)).sum(1)


FURTHER = {
    "dropout": (
        Dropout,
        Dropout.eval,
        "F.dropout(expert(rows), 0.1, self.training)`) of one expert's output",
        "model.eval()",
    ),
    "dropout inside": (
        DropoutInside,
        Dropout.eval,
        "draws random numbers between an expert's products",
        "model.eval()",
    ),
    "dropout before": (DropoutBefore, Dropout.eval, "of an expert's rows is not", "model.eval()"),
    "norm inside": (
        NormInside,
        Steps,
        "native_layer_norm (`return expert.w2(F.layer_norm(h, (self.I,)))`) between the two products",
        "activation without parameters",
    ),
    "outputs": (
        OutputsNormed,
        SumNormed,
        "F.layer_norm(expert(rows), (self.H,))`) of one expert's output",
        "are added up",
    ),
    "inputs": (InputsNormed, InputsNormedBefore, "of an expert's rows is not", "before or after the experts"),
    "products": (
        ThirdProduct,
        Steps,
        "between the two products of an expert is no activation",
        "from one product of x (up), or from two",
    ),
    "linear": (LinearExperts, LinearExpertsGathered, "an expert is more or less", "an operator of its own"),
    "float64": (Steps, nn.Module.float, "experts that compute in torch.float64", "model.to(torch.bfloat16)"),
}
BY_PRODUCT = ("dropout", "norm inside", "outputs", "inputs", "linear")
"""Each product of these is in 4 bits, but the block is not one operator."""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FURTHER)
def test_what_else_is_refused_is_told_and_helped(name):
    cls, change, reason, told = FURTHER[name]
    recorder, refused = Recorder(activation="bf16"), cls(experts=4)
    x = torch.randn(10, refused.H)
    if name == "float64":
        refused, x = refused.double(), x.double()
    with torch.no_grad():
        torch.compile(refused, backend=recorder, fullgraph=True, dynamic=True)(x)
        own = refused(x)
    (site,) = recorder.sites
    assert site.op == ("fp4::mm" if name in BY_PRODUCT else None)
    assert reason in site.reason and told in site.change, site
    torch._dynamo.reset()
    module, recorder, x = copy.deepcopy(refused), Recorder(activation="bf16"), x.float()
    if isinstance(change, type):
        module.__class__ = change
    else:
        module = change(module)
    with torch.no_grad():
        torch.compile(module, backend=recorder, fullgraph=True, dynamic=True)(x)
        assert recorder.ops == ["fp4::indexed_mm" if name == "linear" else "fp4::moe"]
        if name in ("inputs", "linear", "float64"):  # the others compute something else then
            assert relative_error(module(x), own) < 1e-4


class Region(nn.Module):
    """Experts compiled without their router: ids and weights are inputs, of as many rows as x."""

    def __init__(self, checks: bool) -> None:
        super().__init__()
        self.checks, self.loop = checks, Loop(experts=4)

    def forward(self, x, ids, weights):
        if self.checks:
            torch._check(ids.shape[0] == x.shape[0])
            torch._check(weights.shape[0] == x.shape[0])
        return self.loop.experts_of(x, ids, weights)


@pytest.mark.parametrize("checks", [False, True])
def test_experts_without_their_router(checks):
    """With any number of tokens Dynamo may have a size of its own for each input (torch 2.13 does)."""
    module, recorder = Region(checks), Recorder(activation="bf16")
    compiled, twin = torch.compile(module, backend=recorder, fullgraph=True), module.loop.twin()
    with torch.no_grad():
        for n in (5, 9, 11):
            x = torch.randn(n, 32)
            routing = module.loop.route(x)
            got = compiled(x, *routing)
            exact = recorder.sites[-1].op is None
            assert relative_error(got, (module.loop if exact else twin).experts_of(x, *routing)) < 1e-5
    told = [s.change for s in recorder.sites if s.reason]
    assert recorder.ops == ["fp4::moe"] * (2 - len(told)) and recorder.compilations == 2
    assert not (told and checks) and all("torch._check(ids.shape[0] == x.shape[0])" in t for t in told)


def test_every_refused_lookalike_has_a_change_here():
    refused = {name for name, (_, reason, _) in CHANGES.items() if reason} | {"TransposedSum"}
    assert refused <= APPLIED.keys() | MEANT.keys() | NO_CHANGE
    for name in NO_CHANGE:
        assert CHANGES[name][2] == "none: "
