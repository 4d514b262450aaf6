"""Programs that are similar to a mixture of experts but compute something else are never rewritten wrongly.

This file has loops over experts and norms of their outputs; test_lookalikes_rows.py has other ways to route
rows.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from lookalikes import Loop, Switch, check, lookalike, names
from moe_models import Recorder, fake_quantised, relative_error
from moe_styles import ListStyle, NormedLoop
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@lookalike("is added 2 times", "run each expert once")
class OneExpertTwice(Loop):
    def steps(self):
        return [*enumerate(self.list), (2, self.list[2])]


@lookalike("not consecutive", "loop over all experts from the first to the last")
class OneExpertMissing(Loop):
    def steps(self):
        return [s for s in enumerate(self.list) if s[0] != 2]


@lookalike("")
class TheLastExpertsMissing(Loop):
    """Ids of E or more contribute nothing, as on one rank of expert parallelism."""

    def steps(self):
        return list(enumerate(self.list))[:-2]


@lookalike("")
class TheFirstExpertsMissing(Loop):
    def steps(self):
        return list(enumerate(self.list))[2:]


@lookalike("")
class WeightsInAnotherOrder(Loop):
    def steps(self):
        return [(e, self.list[(e + 1) % self.E]) for e in range(self.E)]


@lookalike("is added 2 times", "for its own id")
class TwoExpertsForOneId(Loop):
    def masked(self, ids, e):
        return ids == (1 if e == 0 else e)


@lookalike("read different inputs", "rows of the same x")
class OneReadsAnotherInput(Loop):
    def rows(self, x, token, e):
        return x.roll(1, 0)[token] if e == 2 else x[token]


@lookalike("if e == 2 else x[token]`) of an expert's rows", "write this step with simpler operators")
class OneReadsTwiceItsInput(Loop):
    def rows(self, x, token, e):
        return x[token] * x[token].new_ones(token.shape[0], 1) if e == 2 else x[token]


@lookalike(
    "else weights[token, slot, None]`) of an expert's rows",
    "compute ids and weights, [T, k] each, before the experts",
)
class OneWeightFromTheWrongSlot(Loop):
    def scale(self, weights, token, slot, e):
        return weights[token, 1 - slot, None] if e == 2 else weights[token, slot, None]


@lookalike("weighted differently", "weights * scale[ids]")
class OneExpertIsDoubled(Loop):
    def scale(self, weights, token, slot, e):
        return weights[token, slot, None] * (2.0 if e == 2 else 1.0)


@lookalike("")
class EveryExpertIsDoubled(Loop):
    def scale(self, weights, token, slot, e):
        return 2.0 * weights[token, slot, None]


class ScaledByATable(Loop):
    """Ids of no expert, which no row reads."""

    def build(self):
        super().build()
        self.table = nn.Parameter(torch.rand(self.E))

    def experts_of(self, x, ids, weights):
        self.ids, self.scores = torch.where(ids == 1, self.E + 3, ids), self.router(x).sigmoid()
        return super().experts_of(x, self.ids, weights)


@lookalike("")
class ScaledByANumberOfEachExpert(ScaledByATable):
    def scale(self, weights, token, slot, e):
        return (weights[token, slot] * self.table[self.ids[token, slot]])[:, None]


@lookalike("")
class ScaledByScoresOfEachExpert(ScaledByATable):
    def scale(self, weights, token, slot, e):
        return (weights[token, slot] * self.scores[token, self.ids[token, slot]])[:, None]


@lookalike("")
class RowsOnAFurtherCondition(Loop):
    def masked(self, ids, e):
        return (ids == e) & (ids.cumsum(0) % 3 > 0)


@lookalike("on different conditions", "ids = torch.where(keep, ids, E)")
class OneHasAConditionOfItsOwn(Loop):
    def masked(self, ids, e):
        return (ids == e) & (ids.cumsum(0) % 3 > (e == 2))


@lookalike("on different conditions", "ids = torch.where(keep, ids, E)")
class OneHasNoCondition(Loop):
    def masked(self, ids, e):
        return ids == e if e == 2 else (ids == e) & (ids.cumsum(0) % 3 > 0)


class UpToACapacity(Loop):
    """Only the first rows of an expert count."""

    def capacity(self, e: int) -> int:
        return 2

    def whose(self, e: int) -> int:
        return e

    def masked(self, ids, e):
        seen = F.one_hot(ids, self.E).sum(1).cumsum(0)
        return (ids == e) & (seen[:, self.whose(e), None] <= self.capacity(e))


@lookalike("")
class OneCapacity(UpToACapacity):
    pass


@lookalike("on different conditions", "can be looked up by id: limit[ids]")
class CapacitiesDiffer(UpToACapacity):
    def capacity(self, e):
        return 1 + (e == 2)


@lookalike("on different conditions", "ids = torch.where(keep, ids, E)")
class CapacityOfAnotherExpert(UpToACapacity):
    def whose(self, e):
        return self.E - 1 - e


@lookalike("on different conditions", "ids = torch.where(keep, ids, E)")
class CapacityOfTheFirstExpert(UpToACapacity):
    def whose(self, e):
        return 0


@lookalike("is masked for another", "ids that should not count can be set to E")
class TwoExpertsAtOnce(Loop):
    def masked(self, ids, e):
        return (ids == e) & (ids.flip(1) == (e + 1) % self.E)


@lookalike("routed by different ids", "compare the same ids")
class OneByArgmin(Switch):
    def ids(self, scores, e):
        return scores.argmin(-1) if e == 2 else scores.argmax(-1)


@lookalike("")
class ScoresOfAnotherRow(Switch):
    def score(self, scores, ids):
        return scores.flip(0).gather(-1, ids[:, None])


@lookalike("]: an expert's id looks up a token's row", "scores.gather(-1, ids)")
class ScoresOfAnotherRowsId(Switch):
    def score(self, scores, ids):
        return scores[ids, 0][:, None]


class OneByOne(Loop):
    """Ids and weights of each choice are computed apart, then joined."""

    def joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, -1)

    def experts_of(self, x, ids, weights):
        a, b = weights.split(1, -1)
        first, second = (ids[:, j : j + 1].clone() for j in range(2))
        return super().experts_of(x, torch.cat([first, second], -1), self.joined([a.tanh(), b.sqrt()]))


@lookalike("")
class ChoicesOneByOne(OneByOne):
    pass


@lookalike("")
class ChoicesWithEachOthersWeights(OneByOne):
    def joined(self, parts):
        return torch.cat(parts[::-1], -1)


@lookalike("")
class ChoicesWithTheSameWeight(OneByOne):
    def joined(self, parts):
        return torch.stack([p.squeeze(-1) for p in [parts[1], parts[1]]], -1)


class ByChoice(Loop):
    """The experts of all first choices, then those of all second ones; the bias is of the up projection."""

    def build(self):
        super().build()
        self.biases = nn.Parameter(torch.randn(2, self.E, self.I))

    def bias_of(self, e, choice):
        return self.biases[0, e]

    def weight_of(self, e, choice):
        return self.list[e].w3.weight

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for choice in range(2):
            for e, expert in enumerate(self.list):
                (token,) = torch.where(ids[:, choice] == e)
                rows = x[token]
                up = F.linear(rows, self.weight_of(e, choice), self.bias_of(e, choice))
                y = expert.w2(self.act(F.linear(rows, expert.w1.weight, self.biases[1, e])) * up)
                out = out.index_add(0, token, y * weights[token, choice, None])
        return out


@lookalike("")
class TheSameForEachChoice(ByChoice):
    pass


@lookalike("choices differ in weights", "the same weights for each choice")
class EachChoiceHasItsBias(ByChoice):
    def bias_of(self, e, choice):
        return self.biases[choice, e]


@lookalike("choices differ in weights", "the same weights for each choice")
class EachChoiceHasItsWeights(ByChoice):
    def weight_of(self, e, choice):
        return self.list[(e + choice) % self.E].w3.weight


@lookalike("routed by different ids", "compare the same ids")
class OneIsRoutedOtherwise(Loop):
    def masked(self, ids, e):
        return ids.flip(1) == e if e == 2 else ids == e


@lookalike("not by expert ids", "by its own number")
class SelectedByInequality(Loop):
    def masked(self, ids, e):
        return ids >= e


@lookalike("different shapes", "pad the smaller experts with zeros")
class DifferentShapes(Loop):
    def build(self):
        super().build()
        self.list[2].w1 = nn.Linear(self.H, 32, bias=False)
        self.list[2].w3 = nn.Linear(self.H, 32, bias=False)
        self.list[2].w2 = nn.Linear(32, self.H, bias=False)


@lookalike("different activations", "none: ")
class OneOtherActivation(Loop):
    def build(self):
        super().build()
        self.list[2].act = F.gelu


@lookalike("differ in biases", "zeros where there is none")
class OneHasABias(Loop):
    def build(self):
        super().build()
        self.list[2].w2 = nn.Linear(self.I, self.H, bias=True)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@lookalike("is corrected by one of smaller rank (LoRA)", "w + scale * b @ a")
class LoRAOnOneExpert(Loop):
    def build(self):
        super().build()
        self.list[2].w1 = LoRA(self.list[2].w1)


@lookalike("the graph writes to the weight", "outside of the compiled function")
class AWeightIsWrittenTo(Loop):
    def experts_of(self, x, ids, weights):
        out = super().experts_of(x, ids, weights)
        self.list[1].w2.weight.data.mul_(1.0)
        return out


@lookalike("read different inputs", "rows of the same x")
class ASideEffectBetweenExperts(Loop):
    """x changes on the way: later experts read other rows."""

    def experts_of(self, x, ids, weights):
        out, x = torch.zeros_like(x), x.clone()
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            if e == 1:
                x.mul_(0.5)
        return out


@lookalike("4 experts read what others have computed", "none: ")
class ExpertsFollowEachOther(Loop):
    """Each expert refines what the ones before have left."""

    def experts_of(self, x, ids, weights):
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            x = x.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return x


@lookalike("")
class TheOutputIsUsedTwice(Loop):
    def experts_of(self, x, ids, weights):
        out = super().experts_of(x, ids, weights)
        return out * out.square().sum()  # which cannot cancel


@lookalike("")
class AddedToTheInput(Loop):
    def experts_of(self, x, ids, weights):
        out = x.clone()
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@lookalike("")
class BitsReadAsAnotherType(Loop):
    """Not a cast: the experts' x is another one than the router's."""

    def experts_of(self, x, ids, weights):
        return super().experts_of(x.bfloat16().view(torch.float16).float(), ids, weights)


def norm(y: Tensor, over: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """y over the root of what the squares of `over` are in the mean."""
    return y * torch.rsqrt(over.pow(2).mean(dim, keepdim=True) + eps)


@lookalike("")
class NormedDenseLoop(NormedLoop):
    def experts_of(self, x, ids, weights):
        full = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        return sum(self.normed(expert(x), e) * full[:, e, None] for e, expert in enumerate(self.list))


@lookalike("change their outputs differently", "over the values of one row")
class NormOverTheRowsOfAnExpert(NormedLoop):
    def normed(self, y, e):
        return norm(y, y, dim=0)


@lookalike("an expert's output is scaled by", "No change helps for others")
class NormOverAllTokens(NormedDenseLoop):
    def normed(self, y, e):
        return norm(y, y, dim=0)


@lookalike("an expert's output is scaled by", "over the whole row")
class NormOverHalfARow(NormedLoop):
    def normed(self, y, e):
        return norm(y, y[:, : self.H // 2])


@lookalike("an expert's output is scaled by", "F.rms_norm over the whole row")
class NormOfAnotherExpert(NormedDenseLoop):
    def experts_of(self, x, ids, weights):
        full = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        ys = [expert(x) for expert in self.list]
        return sum(norm(ys[e], ys[e - 1]) * full[:, e, None] for e in range(self.E))


@lookalike("change their outputs differently", "in the same way")
class NormOfOneExpert(NormedLoop):
    def normed(self, y, e):
        return super().normed(y, e) if e == 2 else y


@lookalike("change their outputs differently", "If each expert needs a norm of its own")
class NormWithAGainOfItsOwn(NormedLoop):
    def build(self):
        super().build()
        self.gains = nn.Parameter(torch.randn(self.E, self.H))

    def normed(self, y, e):
        return norm(y, y) * self.gains[e]


@lookalike("change their outputs differently", "one eps")
class NormsOfTwoEps(NormedLoop):
    def normed(self, y, e):
        return norm(y, y, eps=0.1 * (1 + e % 2))


@lookalike("something else is added to it", "times weights.sum(-1, keepdim=True)")
class NormAndABias(NormedLoop):
    def normed(self, y, e):
        return norm(y, y) + self.gain


@lookalike("an expert's output is scaled by", "F.rms_norm over the whole row")
class NormOfWeightedRows(NormedLoop):
    def experts_of(self, x, ids, weights):
        full = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        rows = [expert(x) * full[:, e, None] for e, expert in enumerate(self.list)]
        return sum(norm(y, y, eps=0.1) for y in rows)


@lookalike("an expert's output is scaled by", "can scale their sum")
class OutputsTimesInputs(NormedLoop):
    def experts_of(self, x, ids, weights):
        full = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        return sum(expert(x) * x * full[:, e, None] for e, expert in enumerate(self.list))


@lookalike("")
class NormOfTheSum(Loop):
    def forward(self, x):
        y = super().forward(x)
        return norm(y, y)


@lookalike("")
class NormWhoseRootMayBeZero(NormedLoop):
    """Rows of no expert are 0 / 0, and must not be added."""

    def experts_of(self, x, ids, weights):
        return super().experts_of(x, ids.where(ids != 1, self.E), weights)

    def normed(self, y, e):
        return norm(y, y, eps=0.0)


SIX = {"OneReadsTwiceItsInput", "OneWeightFromTheWrongSlot", "DifferentShapes", "LoRAOnOneExpert"}
"""With less than two experts on a side of the odd one, those before it are a block of their own."""
MORE = {
    "TwoExpertsForOneId", "OneReadsAnotherInput", "OneHasNoCondition", "CapacityOfAnotherExpert",
    "CapacityOfTheFirstExpert", "NormOfOneExpert", "NormWithAGainOfItsOwn",
    "NormOverHalfARow", "NormOfWeightedRows",
    "TheFirstExpertsMissing", "EveryExpertIsDoubled", "ScaledByScoresOfEachExpert", "OneCapacity",
    "ChoicesOneByOne", "ChoicesWithTheSameWeight", "NormedDenseLoop",
}  # fmt: skip
"""These variants are refused or recognised for the same reason as another variant."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [more(name) if name in MORE else name for name in names(__name__)])
def test_lookalikes(name):
    check(name, experts=6 if name in SIX else 4)


def test_ffns_side_by_side_are_no_experts():
    class Heads(ListStyle):
        def forward(self, x):
            scores = torch.softmax(self.router(x), -1)
            return torch.stack([head(x) for head in self.list]) * scores.amax(-1, keepdim=True)

    module, recorder, x = Heads(experts=4), Recorder(), torch.randn(6, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=recorder, fullgraph=True)(x), module(x))
    assert recorder.ops == []


def test_a_graph_with_gradients_is_left_alone():
    module, recorder = Loop(), Recorder()
    x = torch.randn(6, module.H)
    out = torch.compile(module, backend=recorder, fullgraph=True)(x)
    out.sum().backward()
    assert module.list[0].w1.weight.grad is not None
    assert "gradients" in recorder.frames[0].note


def test_quantised_twins_differ_from_the_originals():
    """The comparisons in this file can fail only if this holds."""
    module = Loop()
    w = module.list[0].w1.weight
    assert relative_error(fake_quantised(w[None], "nvfp4")[0], w) > 0.05
