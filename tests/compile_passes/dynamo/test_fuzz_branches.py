"""Random loops with a branch on their rows compute the same as in Python, with or without the branch.

The time is several times FP4_FUZZ_SECONDS (0.25 if it is not set).
"""

from __future__ import annotations

import os
import random
import textwrap
import time
from collections.abc import Iterator

import pytest
import torch
from conftest import SEED, more
from torch import nn

import fp4_ops  # noqa: F401
from fp4_ops.compile_passes.dynamo.branches import KEPT, SEEN_THROUGH
from fp4_ops.compile_passes.dynamo.extend import CAPTURE, extend_dynamo

SECONDS = float(os.environ.get("FP4_FUZZ_SECONDS", "0.25"))

LOOP = """
def forward(self, x, ids, weights):
    out, acc, last, w = torch.zeros_like(x), torch.zeros(x.shape[1]), x.sum(), torch.zeros(len(self.list))
    n, seen, d, numbers = 0, [], {}, iter(range(100))
    for e, expert in enumerate(self.list):
        mask = (ids == e).any(-1)
        token, slot = torch.where(ids == e)
        other, _ = torch.where(ids == 0)
        rows = x[token]
%s
    return out + acc.sum() + last + w.sum() + n + sum(seen) + len(d) + next(numbers) + self.calls
"""

HITS = """
def forward(self, x, ids, weights):
    out, acc, last, w = torch.zeros_like(x), torch.zeros(x.shape[1]), x.sum(), torch.zeros(len(self.list))
    n, seen, d, numbers = 0, [], {}, iter(range(100))
    other, _ = torch.where(ids == 0)
    hot = torch.nn.functional.one_hot(ids, len(self.list)).permute(2, 0, 1)
    for e in (hot.sum((1, 2)) > 0).nonzero():
        e = e[0]
        expert = self.list[e]
        mask = hot[e].any(-1)
        token, slot = torch.where(hot[e])
        rows = x[token]
%s
    return out + acc.sum() + last + w.sum() + n + sum(seen) + len(d) + next(numbers) + self.calls
"""

HITS_BY_TENSOR = """
def forward(self, x, ids, weights):
    out, acc, last, w = torch.zeros_like(x), torch.zeros(x.shape[1]), x.sum(), torch.zeros(len(self.list))
    n, seen, d, numbers = 0, [], {}, iter(range(100))
    other, _ = torch.where(ids == 0)
    hot = torch.nn.functional.one_hot(ids, len(self.list))
    hot = (hot * (hot.cumsum(0) < 3)).permute(2, 0, 1)
    for t in (hot.sum((1, 2)) > 0).nonzero():
        row = hot[t].squeeze(0)
        e = t[0]
        expert = self.list[e]
        mask = row.any(-1)
        token, slot = torch.where(row)
        rows = x[token]
%s
    return out + acc.sum() + last + w.sum() + n + sum(seen) + len(d) + next(numbers) + self.calls
"""

ASKS_FOR_NONE = (
    "token.numel() == 0", "token.shape[0] < 1", "slot.size(0) == 0", "not len(token)", "rows.numel() == 0",
    "not mask.any()", "mask.sum() == 0", "not torch.any(mask)", "token.numel() < 2", "other.numel() == 0",
    "mask.sum() < 2", "(ids == 0).sum() == 0", "mask.all()",
)  # fmt: skip
DOES_NOTHING_WITHOUT_ROWS = (
    "out.index_add_(0, token, expert(rows) * weights[token, slot, None])",
    "out[token] += expert(x[token])", "out.index_put_((token,), rows, accumulate=True)",
    "out[mask] += expert(x[mask])", "out[mask] = 2 * out[mask]", "out[token, 0] = 1.0",
    "out.scatter_add_(0, token[:, None].expand(-1, x.shape[1]), rows)",
    "y = expert(rows)", "scratch = [e]\nscratch.append(1)", "half = x[token] / 2\nhalf.mul_(3)",
    "t = torch.zeros(3)\nt += 1", "index = mask.nonzero()[:, 0]\nout.index_add_(0, index, x[index])",
)  # fmt: skip
DOES_SOMETHING = (
    "n += 1", "seen.append(e)", "seen.append(token.numel())", "d[e] = 1", "last = x.mean()", "acc.add_(1)",
    "acc += rows.sum(0)", "acc.add_(rows.sum(0))", "w[e] = 2", "w[e] += token.numel()", "next(numbers)",
    "self.calls += 1", "out = out + 1", "out.mul_(0.9)", "out[0] += 1", "out[~mask] += 1",
    "weights = weights * 1.5", "x = x + 0.1", "mask.fill_(True)\nout[mask] += 1", "out[token[:1]] += 1",
    "ids = ids.roll(1, 0)", "x[:1].add_(out[:1])", "view = out[:1]\nview += 1",
    "torch.cumsum(out, 0, out=out)", "last = x[token].sum()", "x.index_copy_(0, other, out[other])",
    "expert.weight.data.mul_(0.9)",
)  # fmt: skip


class Model(nn.Module):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.list = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.calls = 0
        names = {"torch": torch}
        exec(compile(source, "a random loop", "exec"), names)
        self.run = names["forward"].__get__(self)


def programs(random: random.Random) -> Iterator[str]:
    """One that is seen through, one that is not, and then any."""
    for work in (DOES_NOTHING_WITHOUT_ROWS[0], DOES_SOMETHING[0]):
        yield LOOP % textwrap.indent(f"if {ASKS_FOR_NONE[0]}:\n    continue\n{work}", " " * 8)
    while True:
        yield program(random)


def program(random: random.Random) -> str:
    work = random.choices(DOES_NOTHING_WITHOUT_ROWS, k=random.randint(1, 3))
    if random.random() < 0.5:
        work.insert(random.randint(0, len(work)), random.choice(DOES_SOMETHING))
    condition, body = random.choice(ASKS_FOR_NONE), "\n".join(work)
    form = random.choice((HITS, HITS_BY_TENSOR, "continue", "continue", "if", "if", "break", "else"))
    if form in (HITS, HITS_BY_TENSOR):
        return form % textwrap.indent(body, " " * 8)
    if form in ("continue", "break"):
        loop = f"if {condition}:\n    {form}\n{body}"
    else:
        loop = f"if not ({condition}):\n{textwrap.indent(body, '    ')}"
        if form == "else":
            loop += "\nelse:\n    " + random.choice((*DOES_SOMETHING, "pass")).replace("\n", "\n    ")
        if random.random() < 0.3:
            loop += "\nout.add_(0.5)"
    return LOOP % textwrap.indent(loop, " " * 8)


@pytest.mark.parametrize("times", [8, more(20)])
def test_random_loops(times):
    start = time.monotonic()

    def backend(gm, inputs):
        return gm.forward

    backend.sees_through_branches = True
    extend_dynamo()
    counters = torch._dynamo.utils.counters
    through, kept = 0, 0
    for number, source in enumerate(programs(random.Random(SEED + times))):
        if number >= 2 and time.monotonic() - start > times * SECONDS:
            break
        torch._dynamo.reset()
        counters.clear()
        KEPT.clear()
        model, twin = Model(source), Model(source)
        twin.load_state_dict(model.state_dict())
        compiled = torch.compile(model.run, backend=backend, dynamic=True)
        with torch.no_grad(), torch._dynamo.config.patch(CAPTURE):
            for tokens in (1, 2, 5):
                x, ids = torch.randn(tokens, 8), torch.randint(4, (tokens, 2))
                weights = torch.rand(tokens, 2)
                want = twin.run(x.clone(), ids, weights)
                got = compiled(x.clone(), ids, weights)
                assert torch.allclose(got, want, rtol=1e-4, atol=1e-4, equal_nan=True), source
                assert model.calls == twin.calls, source
        through += bool(counters[SEEN_THROUGH])
        kept += bool(KEPT)
    print(f"{number} programs: {through} seen through, {kept} not")
    assert through and kept
