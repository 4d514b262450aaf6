"""Measures the cost of noticing changed weights: a step with samples compared at each call, and without.

    python benchmarks/changed_weights.py                    demo, and 48 layers (compiles for minutes)
    python benchmarks/changed_weights.py demo
    python benchmarks/changed_weights.py 48x8 48x128         LAYERSxEXPERTS of a Qwen3-MoE, hidden size 64
    ... --hidden 256 --inter 128                             other widths

The script times one decoding step with a static cache under torch.compile(backend="fp4"), in bfloat16 with
batch 1. On a CPU it uses one thread and measures CPU time. On a GPU it uses mode "reduce-overhead" (or
`--mode default`) and measures wall time. Both variants are one compiled model in one process. They take
turns, with a run of steps each. The variant "without" only compares versions and addresses. Times are
medians; the ratio is the median ratio of neighbouring runs. On a GPU, `--wait` waits for the answer before
the step, as for graphs that may not run twice. `--ahead N` launches N steps before the host waits for them,
as serving does.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
from transformers.utils import logging as transformers_logging

from fp4_ops.compile_passes.weights import runtime

DEMO = Path(__file__).parent.parent / "examples" / "demo_model"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = "sdpa" if DEVICE == "cuda" else "eager"
PROMPT = 64
RUN, WARM = 20, 5
"""The number of steps of a run, and the number of steps before it that warm the processor's caches."""
clock = time.perf_counter if DEVICE == "cuda" else time.thread_time


def model_of(what: str, hidden: int, inter: int) -> torch.nn.Module:
    options = {"dtype": torch.bfloat16, "attn_implementation": ATTENTION}
    if what == "demo":
        return AutoModelForCausalLM.from_pretrained(DEMO, **options).to(DEVICE).eval()
    layers, experts = map(int, what.split("x"))
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=256, hidden_size=hidden, intermediate_size=inter, num_hidden_layers=layers,
        moe_intermediate_size=inter, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=experts,
        num_experts_per_tok=min(8, experts // 2), max_position_embeddings=512,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, **options).to(DEVICE).eval()


class Step:
    """Runs decoding steps, with or without comparing samples."""

    def __init__(self, model: torch.nn.Module, wait: bool, mode: str, ahead: int) -> None:
        self.cache = StaticCache(model.config, max_cache_len=512)
        prompt = torch.randint(0, 256, (1, PROMPT), device=DEVICE)
        model(input_ids=prompt, past_key_values=self.cache)
        self.token = prompt[:, :1]
        self.model = torch.compile(model, backend="fp4", dynamic=False, mode=mode)
        self.ahead = ahead
        for _ in range(4):
            self()
        self.lookups = [(lookup, lookup.on_gpu and not wait) for lookup in runtime._lookups if lookup._met]
        self.held = [(m, m.samples) for lookup, _ in self.lookups for m in lookup._met.values()]

    def compare(self, on: bool) -> None:
        for lookup, on_gpu in self.lookups:
            lookup.on_gpu = on and on_gpu
        for met, samples in self.held:
            met.samples = samples if on else []

    def samples(self) -> list[Any]:
        return [s for _, samples in self.held for s in samples]

    def __call__(self) -> float:
        if self.cache.get_seq_length() > 500 - self.ahead:
            self.cache.reset()
        start = clock()
        for _ in range(self.ahead):
            self.model(input_ids=self.token, past_key_values=self.cache)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return (clock() - start) * 1e3 / self.ahead


def alone(step: Step, calls: int = 300) -> float:
    """Measures only the comparisons of one step, in microseconds."""
    times = []
    for _ in range(calls):
        start = clock()
        assert not any([s.differs() for s in step.samples()])
        times.append((clock() - start) * 1e6)
    return statistics.median(times)


def measure(what: str, args: argparse.Namespace) -> record.Row:
    torch._dynamo.reset()
    model = model_of(what, args.hidden, args.inter)
    step = Step(model, args.wait, args.mode, args.ahead)
    runs = sum(s.at.numel() for s in step.samples())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(max(args.steps // RUN, 1)):
        for on in (False, True) if i % 2 == 0 else (True, False):
            step.compare(on)
            times[on].append(statistics.median([step() for _ in range(RUN + WARM)][WARM:]))
    without, with_ = (statistics.median(times[on]) for on in (False, True))
    ratio = statistics.median(b / a for a, b in zip(times[False], times[True]))
    return {
        "table": "step", "model": what, "mode": args.mode, "ahead": args.ahead,
        "expert_weights": experts, "runs": runs, "without_ms": without, "with_ms": with_, "ratio": ratio,
        "comparison_us": alone(step),
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="*", default=["demo", "48x8"])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--inter", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--mode", default="reduce-overhead" if DEVICE == "cuda" else "default")
    parser.add_argument("--ahead", type=int, default=1)


@torch.no_grad()
def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    for what in args.what:
        yield measure(what, args)


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
