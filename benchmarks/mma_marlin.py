"""Compares Marlin (vLLM's W4A16) with the mma.sync kernels in one process: both products and the whole block.

    python benchmarks/mma_marlin.py --vllm FOLDER --kernels LIBRARY [--shared-kb 99,163] [--tokens 1,8,...]
        [--models qwen3-30b,...] [--format nvfp4]

FOLDER has the two operator libraries of a vLLM wheel, `_moe_C_stable_libtorch*.so` and
`_C_stable_libtorch*.so`. Unpack the wheel of vllm 0.33.0 (pip download --no-deps vllm==0.33.0); vLLM itself
need not be installed. Marlin's code for these products is compiled for compute_80, and ours should be, too.
LIBRARY is built from csrc/device and csrc/sm80 like `_sm80.so` in setup.py, but with `nvcc -gencode
arch=compute_80,code=sm_90` if the GPU is an H100.

Rows are bfloat16, weights have 4 bits, routing is random and uniform, and times are microseconds. Launches of
`mma_99_us` use at most the shared memory of sm_86, 89 and 120, those of `mma_163_us` that of sm_80.
`decode_us` and `prefill_us` have the first limit and use one kernel, whatever the planner takes. They are
null where the choice is obvious. For products, rows are sorted before the time is taken, Marlin's and ours.
For blocks, the time includes the sort, Marlin's and ours. The method is that of h200_hopper.py: replays of
CUDA graphs, every launch has another routing, and each burst comes after a pause. The floor is that of
h200_hopper.py, too. `mma_error` and `marlin_error` are relative to float32 over the dequantised weights, for
blocks with few rows. The time of a wrong result is null.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import marlin
import record
import torch
import torch.nn.functional as F
from h200_hopper import MODELS, ROUTINGS, Model, ceilings, median_us
from torch import Tensor

from fp4_ops.meta.formats import FORMATS
from fp4_ops.runtime import native
from fp4_ops.runtime.oracle import relative_error

LAYOUT = "mma_bf16"
PAUSE_SECONDS = 0.1
BOUND = 1e-2
"""Bound of the error of a correct result. bfloat16 rounds to 2e-3."""
MIGHT_BE_EITHER = 0.25, 64
"""Either kernel may be faster between these numbers of rows per expert."""
PAIRS_CHECKED = 64
"""Number of (token, expert) pairs of a block that are checked, each computed by itself."""

Launch = Callable[[int], Tensor]
Check = Callable[[], float | None]
"""A function that returns the error of routing 0's result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--kernels", required=True)
    parser.add_argument("--shared-kb", default="99,163")
    parser.add_argument("--models", default=",".join(m.name for m in MODELS))
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192")
    parser.add_argument("--format", default="nvfp4", choices=marlin.BLOCK)


class Experts:
    """One weight [E, N, K], in the forms of both libraries."""

    def __init__(self, experts: int, n: int, k: int, format: str) -> None:
        values = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        packed, scale, factor = torch.ops.fp4.quantize(values, format)
        plain = packed, scale, factor if format == "nvfp4" else None
        self.experts, self.n, self.k, self.format = experts, n, k, format
        self.dense = torch.ops.fp4.dequantize(*plain, format, torch.bfloat16)
        self.theirs = marlin.Weight(*plain, format)
        self.ours = torch.ops.fp4.prepack(*plain, format, LAYOUT)

    @property
    def bytes(self) -> float:
        """Returns the bytes of one expert."""
        return self.n * self.k * FORMATS[self.format].bytes_per_weight()


def routing(model: Model, tokens: int) -> Tensor:
    """Returns ids [tokens, top_k]. The ids of a token are distinct."""
    return torch.rand(tokens, model.experts, device="cuda").topk(max(model.top_k, 1), 1).indices.int()


class Case:
    """Rows of one size with several routings, for one product or the block."""

    def __init__(self, model: Model, tokens: int) -> None:
        self.model, self.tokens, self.top_k = model, tokens, max(model.top_k, 1)
        self.ids = [routing(model, tokens) for _ in range(ROUTINGS)]
        self.pairs = tokens * self.top_k
        self.order = [ids.flatten().argsort(stable=True) for ids in self.ids]
        counts = [torch.bincount(ids.flatten(), minlength=model.experts) for ids in self.ids]
        self.offs = [c.cumsum(0).int() for c in counts]
        self.hit = sum(int((c > 0).sum()) for c in counts) / ROUTINGS
        self.rows = [marlin.Rows(ids, model.experts) for ids in self.ids]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.workspace = torch.zeros(4 * sms, dtype=torch.int32, device="cuda")


class Product:
    """One product, ours and Marlin's. Rows of the first product are tokens, rows of the second are (token,
    expert) pairs."""

    def __init__(self, case: Case, w: Experts, first: bool) -> None:
        self.case, self.w = case, w
        count, self.top_k = (case.tokens, case.top_k) if first else (case.pairs, 1)
        x = torch.randn(count, w.k, device="cuda", dtype=torch.bfloat16)
        self.padded = F.pad(x, (0, w.theirs.k - w.k))
        self.by_expert = [x[order // self.top_k] for order in case.order]
        self.out = torch.empty(case.pairs, w.theirs.padded_n, device="cuda", dtype=torch.bfloat16)

    def ours(self, i: int) -> Tensor:
        return torch.ops.fp4.grouped_mm(
            self.by_expert[i], *self.w.ours, self.case.offs[i],
            format=self.w.format, layout=LAYOUT, out_dtype=torch.bfloat16,
        )  # fmt: skip

    def theirs(self, i: int) -> Tensor:
        case = self.case
        return marlin.product(self.padded, self.w.theirs, case.rows[i], self.top_k, case.workspace, self.out)

    def wanted(self) -> Tensor:
        """Returns the exact result for routing 0, sorted by expert."""
        ends = [0, *self.case.offs[0].tolist()]
        x = self.by_expert[0]
        return torch.cat(
            [x[a:b].float() @ self.w.dense[e].float().t() for e, (a, b) in enumerate(pairwise(ends))]
        )

    def checks(self) -> tuple[Check, Check]:
        want = self.wanted()
        return (
            lambda: relative_error(self.ours(0), want),
            lambda: relative_error(self.theirs(0)[self.case.order[0], : self.w.n], want),
        )


class Block:
    """The same for a block of silu-gated experts. Marlin's first weight has all gates before all ups; in ours
    they alternate."""

    def __init__(self, case: Case, up: Experts, down: Experts) -> None:
        self.case, self.up, self.down = case, up, down
        self.x = torch.randn(case.tokens, up.k, device="cuda", dtype=torch.bfloat16)
        self.scores = [torch.rand(case.tokens, case.top_k, device="cuda").softmax(1) for _ in range(ROUTINGS)]
        self.padded = F.pad(self.x, (0, up.theirs.k - up.k))
        new: Any = lambda n: torch.empty(case.pairs, n, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.h, self.gated, self.y = new(up.theirs.padded_n), new(up.n // 2), new(down.theirs.padded_n)
        self.inner = new(down.theirs.k).zero_()
        self.direct = self.inner.shape == self.gated.shape
        self.out = torch.empty(case.tokens, down.n, device="cuda", dtype=torch.bfloat16)

    def ours(self, i: int) -> Tensor:
        return torch.ops.fp4.moe(
            self.x, self.case.ids[i], self.scores[i], *self.up.ours, *self.down.ours, format=self.up.format,
            layout=LAYOUT, activation="silu_interleaved", a_format="none", out_dtype=torch.bfloat16,
        )  # fmt: skip

    def theirs(self, i: int, exact: bool = False) -> Tensor:
        """Runs Marlin's block. If K of the second product is padded, vLLM would have padded N of the first
        product when it loads the weights. Here a copy does this; it is only made for `exact` results and is
        not timed."""
        case, down = self.case, self.down
        case.rows[i].align()
        marlin.product(self.padded, self.up.theirs, case.rows[i], case.top_k, case.workspace, self.h)
        torch.ops._C.silu_and_mul(self.inner if self.direct else self.gated, self.h[:, : self.up.n])
        if exact and not self.direct:
            self.inner[:, : self.gated.shape[1]] = self.gated
        marlin.product(self.inner, down.theirs, case.rows[i], 1, case.workspace, self.y, self.scores[i])
        if self.y.shape[1] == down.n:
            torch.ops._moe_C.moe_sum(self.y.view(case.tokens, case.top_k, -1), self.out)
            return self.out
        return torch.sum(self.y[:, : down.n].view(case.tokens, case.top_k, -1), dim=1, out=self.out)

    def wanted(self, interleaved: bool) -> Tensor:
        rows = []
        for x, ids, scores in zip(self.x, self.case.ids[0].tolist(), self.scores[0]):
            of_experts = []
            for e in ids:
                h = self.up.dense[e].float() @ x.float()
                gate, up = (h[::2], h[1::2]) if interleaved else h.chunk(2)
                of_experts.append(self.down.dense[e].float() @ (F.silu(gate) * up))
            rows.append(scores @ torch.stack(of_experts))
        return torch.stack(rows)

    def checks(self) -> tuple[Check, Check]:
        if self.case.pairs > PAIRS_CHECKED:
            return (lambda: None), (lambda: None)
        of_ours, of_theirs = self.wanted(True), self.wanted(False)
        return (
            lambda: relative_error(self.ours(0), of_ours),
            lambda: relative_error(self.theirs(0, exact=True), of_theirs),
        )


def us_of(launch: Launch, error: float | None) -> float | None:
    return median_us(launch, PAUSE_SECONDS) if error is None or error < BOUND else None


def us_alone(launch: Launch, check: Check, each: float) -> dict[str, float | None]:
    """Times each kernel alone, if the planner might take either of them. `each`: the number of rows per
    expert."""
    us: dict[str, float | None] = {"decode_us": None, "prefill_us": None}
    if MIGHT_BE_EITHER[0] <= each <= MIGHT_BE_EITHER[1]:
        for kernel in ("decode", "prefill"):
            with native.only(kernel):
                us[f"{kernel}_us"] = us_of(launch, check())
    return us


def rows(given: argparse.Namespace) -> Iterator[record.Row]:
    marlin.load(given.vllm)
    limits = [int(kb) for kb in given.shared_kb.split(",")]
    native.use_kernels(given.kernels, limits[0] * 1024)
    copy, rate, _ = ceilings()
    yield {"table": "ceilings", "copy_tb_per_s": copy / 1e6, "bf16_tflop_per_s": rate / 1e6}
    for model in MODELS:
        if model.name not in given.models.split(","):
            continue
        up = Experts(model.experts, 2 * model.inter, model.hidden, given.format)
        down = Experts(model.experts, model.hidden, model.inter, given.format)
        for tokens in map(int, given.tokens.split(",")):
            case, floors = Case(model, tokens), [0.0]
            for what in ("gate/up", "down", "block"):
                if what == "block":
                    pair: Product | Block = Block(case, up, down)
                    floors.append(sum(floors))
                else:
                    w = up if what == "gate/up" else down
                    pair = Product(case, w, first=what == "gate/up")
                    moved = case.hit * w.bytes + 2 * case.pairs * (w.n + w.k)
                    floors.append(max(moved / copy, 2 * case.pairs * w.n * w.k / rate))
                check, check_theirs = pair.checks()
                us, errors = {}, []
                for kb in reversed(limits):
                    native.use_kernels(given.kernels, kb * 1024)
                    errors.append(check())
                    us[f"mma_{kb}_us"] = us_of(pair.ours, errors[-1])
                alone = us_alone(pair.ours, check, case.pairs / model.experts)
                their_error = check_theirs()
                yield {
                    "table": what, "model": model.name, "format": given.format, "tokens": tokens, **us,
                    **alone, "marlin_us": us_of(pair.theirs, their_error), "floor_us": floors[-1],
                    "mma_error": max((e for e in errors if e is not None), default=None),
                    "marlin_error": their_error,
                }  # fmt: skip
        del up, down, case, pair
        torch.cuda.empty_cache()


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
