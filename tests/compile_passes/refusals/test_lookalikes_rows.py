"""Look-alikes (lookalikes.py) that route rows to experts in other ways than by masks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from lookalikes import Loop, Switch, check, lookalike, names
from moe_styles import FusedStyle, ListStyle, RestoredSplits, Slices, grouped_mm
from package_styles import MaskedSlices
from repository_styles import IndexAddTogether, PutIntoZeros
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- rows put over another tensor: those of no expert keep what they had ---


@lookalike(
    "an expert takes only some of the rows that name it, by a slice (`token[:capacity]`)",
    "make a mask of the rows that an expert keeps",
)
class FirstRowsByASlice(ListStyle):
    capacity = 4

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            token, slot = token[: self.capacity], slot[: self.capacity]
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@lookalike("")
class RowsPutOverInputs(Switch):
    """Tokens beyond an expert's capacity keep what they had (Switch Transformers in transformers 4)."""

    def chosen(self, ids: Tensor) -> Tensor:
        one_hot = F.one_hot(ids, self.E)
        return (one_hot * (one_hot.cumsum(0) <= 2)).bool()

    def steps(self) -> list[tuple[int, nn.Module]]:
        return list(enumerate(self.list))

    def under(self, x: Tensor) -> Tensor:
        return x.clone()

    def forward(self, x):
        scores, out = torch.softmax(self.router(x), -1), self.under(x)
        chosen = self.chosen(scores.argmax(-1))
        for e, expert in self.steps():
            out = self.put(out, chosen[:, e], expert(x[chosen[:, e]]))
        return scores.amax(-1, keepdim=True) * out

    def put(self, out: Tensor, chosen: Tensor, rows: Tensor) -> Tensor:
        out[chosen] = rows
        return out


@lookalike("")
class RowsCopiedOverInputs(RowsPutOverInputs):
    def put(self, out, chosen, rows):
        return out.index_copy(0, chosen.nonzero()[:, 0], rows)


@lookalike("")
class RowsPutOverWhatIsShared(RowsPutOverInputs):
    def build(self):
        super().build()
        self.shared = nn.Linear(self.H, self.H)

    def under(self, x):
        return torch.tanh(self.shared(x)) * 2


@lookalike("")
class RowsOfSomeExpertsPutOverInputs(RowsPutOverInputs):
    """Tokens of the last expert keep what they had, too."""

    def steps(self):
        return super().steps()[:-1]


@lookalike("which is not zeros", "if each row has one expert")
class RowsPutOverOtherExperts(RowsPutOverInputs):
    """A token has two experts, and the result of the later one replaces the other."""

    def chosen(self, ids):
        return (F.one_hot(ids, self.E) + F.one_hot((ids + 1) % self.E, self.E)).bool()


@lookalike("which is not zeros", "if each row has one expert")
class RowsPutOverTheSameExpert(RowsPutOverInputs):
    def steps(self):
        return [*super().steps(), (0, self.list[1])]


@lookalike("which is not zeros", "if each row has one expert")
class RowsPutUpToACapacityEach(RowsPutOverInputs):
    def chosen(self, ids):
        one_hot = F.one_hot(ids, self.E)
        limits = [one_hot[:, e] * (one_hot[:, e].cumsum(0) <= 1 + e % 2) for e in range(self.E)]
        return torch.stack(limits, -1).bool()


@lookalike("", "")
class RowsOfOneExpertAreZeros(RowsOfSomeExpertsPutOverInputs):
    """The last expert's tokens do not keep what they had."""

    def forward(self, x):
        scores, out = torch.softmax(self.router(x), -1), self.under(x)
        ids = scores.argmax(-1)
        for e, expert in self.steps():
            out = self.put(out, ids == e, expert(x[ids == e]))
        return self.put(out, ids == self.E - 1, torch.zeros(1, self.H))


# --- slices of one masked buffer, each read and written over by its expert ---


class OneMaskedSlice(MaskedSlices):
    """MaskedSlices, each of whose steps may be another."""

    def filled(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.einsum("th,te->eth", x, mask)

    def steps(self) -> list[tuple[int, nn.Module]]:
        return list(enumerate(self.list))

    def read(self, rows: Tensor, e: int, chosen: Tensor) -> Tensor:
        return rows[e, chosen]

    def written(self, mask: Tensor, e: int) -> Tensor:
        return mask[:, e]

    def experts_of(self, x, ids, weights):
        probs = torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)
        rows = self.filled(x, probs.bool())
        for e, expert in self.steps():
            chosen = self.written(probs.bool(), e)
            rows[e, chosen] = probs[chosen, e, None] * expert(self.read(rows, e, chosen))
        return rows.sum(0)


@lookalike("")
class MaskedSlicesFromTheLast(OneMaskedSlice):
    def steps(self):
        return super().steps()[::-1]


@lookalike("which is not zeros", "if each row has one expert")
class SlicesThatKeepTheirInputs(OneMaskedSlice):
    """Rows without this expert keep the value x, and are added."""

    def filled(self, x, mask):
        return x.expand(self.E, -1, -1).clone()


@lookalike("read what others have computed", "none: ")
class SlicesOfWhatIsWritten(OneMaskedSlice):
    """An expert reads the rows that the previous expert has written."""

    def read(self, rows, e, chosen):
        return rows[max(e - 1, 0), chosen]


@lookalike("")
class OneMaskedSliceIsLeft(OneMaskedSlice):
    """The last expert's tokens are added as they are."""

    def steps(self):
        return super().steps()[:-1]


@lookalike("which is not zeros", "if each row has one expert")
class MaskedSlicesOfOtherRows(OneMaskedSlice):
    """The rows written are not those that the mask of the buffer left."""

    def written(self, mask, e):
        return mask.roll(1, -1)[:, e]


@lookalike("is not understood", "gather them as rows [E, C, H]")
class ExpertChoice(FusedStyle):
    """Experts choose tokens: their row sets overlap as they please."""

    def forward(self, x):
        scores = torch.softmax(self.router(x), -1)
        weights, tokens = torch.topk(scores.T, 3)
        out = torch.zeros_like(x)
        for e in range(self.E):
            out.index_add_(0, tokens[e], self.expert(e, x[tokens[e]]) * weights[e, :, None])
        return out


@lookalike("offs", "count the ids that sort the rows")
class OffsetsOfOtherIds(FusedStyle):
    def experts_of(self, x, ids, weights):
        flat = ids.flatten()
        offs = F.one_hot((flat + 1) % self.E, self.E).sum(0).cumsum(0).to(torch.int32)
        perm = torch.argsort(flat, stable=True)
        gate, up = grouped_mm(x.index_select(0, perm // self.k), self.w13, offs).chunk(2, -1)
        y = grouped_mm(F.silu(gate) * up, self.w2, offs)
        y = torch.zeros_like(y).index_copy(0, perm, y)
        return (y.view(-1, self.k, self.H) * weights.unsqueeze(-1)).sum(dim=1)


class Splits(RestoredSplits):
    """Slices of sorted rows, each of whose steps may be another."""

    def counts(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids.view(-1), self.E).sum(0)

    def order(self, ids: Tensor) -> Tensor:
        return ids.view(-1).argsort()

    def joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    def experts_of(self, x, ids, weights):
        order = self.order(ids)
        parts = x[order // self.k].split(self.counts(ids).tolist())
        y = self.joined([expert(part) for expert, part in zip(self.list, parts, strict=False)])
        new = torch.zeros_like(x.repeat(self.k, 1))
        new = new.index_copy(0, order, y)
        return (new.view(-1, self.k, self.H) * weights.unsqueeze(-1)).sum(1)


@lookalike("")
class SplitsAsTheyAre(Splits):
    pass


@lookalike(".tolist())`) of an expert's rows", "split them by the number of rows of each expert")
class SplitsOfOtherIds(Splits):
    def counts(self, ids):
        return F.one_hot((ids.view(-1) + 1) % self.E, self.E).sum(0)


@lookalike(".tolist())`) of an expert's rows", "split them by the number of rows of each expert")
class SplitsOfCountsInAnotherOrder(Splits):
    def counts(self, ids):
        return super().counts(ids).roll(1, 0)


@lookalike(".tolist())`) of an expert's rows", "split them by the number of rows of each expert")
class SplitsOfUnsortedRows(Splits):
    def order(self, ids):
        return super().order(ids).flip(0)


@lookalike(".tolist())`) of an expert's rows", "split them by the number of rows of each expert")
class SplitsOfDescendingRows(Splits):
    def order(self, ids):
        return ids.view(-1).argsort(descending=True)


@lookalike(".tolist())`) of an expert's rows", "split them by the number of rows of each expert")
class SplitsOfRowsSortedByAnother(Splits):
    def order(self, ids):
        return ids.flip(1).reshape(-1).argsort()


@lookalike("torch.cat([*parts[1:], parts[0]])`) of an expert's rows", "Join the outputs in that order")
class SplitsJoinedInAnotherOrder(Splits):
    def joined(self, parts):
        return torch.cat([*parts[1:], parts[0]])


@lookalike("something else is added to it", "after the experts' weighted outputs are summed up")
class SplitsWithAnExpertOfZeros(Splits):
    """As many rows, of which one expert's are another's input."""

    def joined(self, parts):
        return torch.cat([*parts[:-1], parts[-1] * 0 + parts[-1].new_ones(1, self.H)])


@lookalike("")
class SplitsForOtherExperts(Splits):
    def build(self):
        super().build()
        self.list = self.list[1:] + self.list[:1]


class Buffers(Slices):
    """Slices of a buffer, each of whose steps may be another."""

    def taken(self, buffer: Tensor, e: int) -> Tensor:
        return buffer[e]

    def scaled(self, y: Tensor, e: int) -> Tensor:
        return y

    def joined(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts)

    def each(self, buffer):
        return self.joined([self.scaled(ex(self.taken(buffer, e)), e) for e, ex in enumerate(self.list)])


@lookalike("from slice 3 of a buffer", "join the outputs in that order")
class SlicesInReverse(Buffers):
    def taken(self, buffer, e):
        return buffer[self.E - 1 - e]


@lookalike("from slice 1 of a buffer", "give expert e slice e")
class ASliceForTwoExperts(Buffers):
    def taken(self, buffer, e):
        return buffer[max(e, 1)]


@lookalike("from slice 3 of a buffer", "join the outputs in that order")
class OutputsJoinedInReverse(Buffers):
    def joined(self, parts):
        return torch.stack(parts[::-1])


@lookalike("read different inputs", "")
class SlicesShiftedByARow(Buffers):
    def taken(self, buffer, e):
        rows = torch.cat([buffer.reshape(-1, self.H), buffer[0, :1]])
        return rows[e * self.capacity + 1 : (e + 1) * self.capacity + 1]


@lookalike("weighted differently", "")
class OneSliceIsDoubled(Buffers):
    def scaled(self, y, e):
        return y * (2.0 if e == 2 else 1.0)


@lookalike("from slice 0 of a buffer", "give expert e slice e")
class ASliceForAllExperts(Buffers):
    def taken(self, buffer, e):
        return buffer[0]


@lookalike("")
class SlicesScaledByANumberEach(Buffers):
    def build(self):
        super().build()
        self.factors = nn.Parameter(torch.rand(self.E))

    def scaled(self, y, e):
        return y * self.factors[e]


@lookalike("")
class AnExpertForTwoSlices(Buffers):
    def build(self):
        super().build()
        self.list[2] = self.list[1]


@lookalike("")
class AsManyRowsAsExperts(Buffers):
    """A slice may be taken along either dimension."""

    capacity = 4

    def taken(self, buffer, e):
        return buffer.transpose(0, 1)[:, e] if e % 2 else buffer[e]


@lookalike("read different inputs", "")
class SlicesOfTwoDimensions(Buffers):
    """As many rows as experts, along which some experts take theirs."""

    capacity = 4

    def taken(self, buffer, e):
        return buffer[:, e] if e % 2 else buffer[e]


@lookalike("")
class TransposedSum(FusedStyle):
    """The choices of tokens are used as tokens."""

    def experts_of(self, x, ids, weights):
        y = torch.bmm(x.repeat(self.k, 1).unsqueeze(1), self.w13[ids.flatten()])
        gate, up = y.chunk(2, -1)
        y = torch.bmm(F.silu(gate) * up, self.w2[ids.flatten()]).view(-1, self.k, self.H)
        return (y * weights.unsqueeze(-1)).sum(1)


# --- rows that scores choose by themselves ---


class ByScore(Loop):
    """Rows whose score for an expert is above a threshold."""

    def chosen(self, scores: Tensor, e: int) -> Tensor:
        return scores[:, e] > 0.4

    def forward(self, x):
        scores, out = torch.sigmoid(self.router(x)), torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            (token,) = torch.where(self.chosen(scores, e))
            out = out.index_add(0, token, expert(x[token]) * scores[token, e, None])
        return out


@lookalike("take rows on different conditions", "put the condition into the ids")
class OneThresholdIsAnother(ByScore):
    def chosen(self, scores, e):
        return scores[:, e] > (0.6 if e == 2 else 0.4)


@lookalike("not by expert ids", "select an expert's rows by its own number")
class TheNextExpertsScore(ByScore):
    def chosen(self, scores, e):
        return scores[:, (e + 1) % self.E] > 0.4


@lookalike("")
class AThresholdOfEachExpertsOwn(ByScore):
    def build(self):
        super().build()
        self.least = nn.Parameter(torch.rand(self.E) * 0.5)

    def chosen(self, scores, e):
        return scores[:, e] > self.least[e]


class Scattered(ListStyle):
    """Rows put back by masked_scatter."""

    def chosen(self, ids: Tensor, e: int) -> Tensor:
        return (ids == e).any(-1, keepdim=True)

    def places(self, ids: Tensor, e: int, x: Tensor) -> Tensor:
        return self.chosen(ids, e)

    def rows(self, x: Tensor, chosen: Tensor) -> Tensor:
        return x.masked_select(chosen).view(-1, self.H)

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            y = expert(self.rows(x, self.chosen(ids, e)))
            mine = torch.where(ids == e, weights, 0.0).sum(-1, keepdim=True)
            out = out + torch.zeros_like(x).masked_scatter(self.places(ids, e, x), y) * mine
        return out


@lookalike("fills in rows that its mask did not choose", "the tokens that they were taken from")
class FirstRowsToTheChosenPlaces(Scattered):
    """All rows go in, and the first of them are taken: not those of these tokens."""

    def rows(self, x, chosen):
        return x


@lookalike("fills in rows that its mask did not choose", "the tokens that they were taken from")
class PutWhereAnotherIsChosen(Scattered):
    def places(self, ids, e, x):
        return (ids >= e).any(-1, keepdim=True)

    def rows(self, x, chosen):
        return torch.cat([x.masked_select(chosen).view(-1, self.H), x])


@lookalike("a mask of elements, not of whole rows", "the tokens that they were taken from")
class PutInSomeColumns(Scattered):
    def places(self, ids, e, x):
        return self.chosen(ids, e) & (torch.arange(self.H) % 2 == 0)


@lookalike("fills in rows that its mask did not choose", "the tokens that they were taken from")
class SelectedElements(Scattered):
    """Every second element of all rows, and then all rows, so that there are enough."""

    def rows(self, x, chosen):
        some = x.masked_select((torch.arange(self.H) % 2 == 0).expand_as(x)).view(-1, self.H)
        return torch.cat([some, x])


@lookalike("cat", "Join the outputs in that order")
class PlacesInAnotherOrder(IndexAddTogether):
    """Rows of one expert go to tokens of another."""

    def joined(self, tokens):
        return torch.cat(tokens[::-1])


@lookalike("is not understood", "index_add")
class OneOfTwoEqualChoicesIsPut(PutIntoZeros):
    """A token may have an expert twice: one of its rows stays."""

    def experts_of(self, x, ids, weights):
        return super().experts_of(x, ids[:, :1].repeat(1, ids.shape[1]), weights)


MORE = {
    "SplitsOfCountsInAnotherOrder", "SplitsOfUnsortedRows", "SplitsOfDescendingRows",
    "SplitsOfRowsSortedByAnother", "ASliceForTwoExperts", "ASliceForAllExperts", "OutputsJoinedInReverse",
    "SplitsAsTheyAre", "AThresholdOfEachExpertsOwn",
}  # fmt: skip
"""These variants are refused or recognised for the same reason as another variant."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [more(name) if name in MORE else name for name in names(__name__)])
def test_lookalikes(name):
    check(name)
