"""Divides the time of `h200_generate.py --variants prepared-backend` into parts on the host and kernels.

    python benchmarks/h200_profile.py [--batches 64,1] [--tensor-guards]

The host's times are medians between the calls in a step of `generate`, without the profiler. The times of
kernels in a step and in prefill come from torch.profiler, which makes a step longer than in h200_generate.py,
but not its kernels. `all` is the sum, and `other` the sum of kernels that are not listed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import record
import torch
from h200_generate import CONFIG, PREFILL, PROMPT, compile_config, new_model
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

import fp4_ops

STEPS, ROWS = 20, 24


class Host:
    """Records the times at which a step's calls begin and end."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, float]] = []
        for owner, name in (
            (GenerationMixin, "prepare_inputs_for_generation"),
            (GenerationMixin, "_update_model_kwargs_for_generation"),
            (torch.cuda.CUDAGraph, "replay"),
        ):
            setattr(owner, name, self.marked(getattr(owner, name), name))
        compiled = PreTrainedModel.get_compiled_call
        PreTrainedModel.get_compiled_call = lambda model, config: self.marked(
            compiled(model, config), "compiled model"
        )

    def marked(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.moments.append((f"{name} begins", time.perf_counter()))
            result = call(*args, **kwargs)
            self.moments.append((f"{name} ends", time.perf_counter()))
            return result

        return run

    def table(self, step: str, batch: int) -> Iterator[record.Row]:
        between: defaultdict[str, list[float]] = defaultdict(list)
        for (a, start), (b, end) in zip(self.moments, self.moments[1:]):
            between[f"{a} .. {b}"].append((end - start) * 1e6)
        for what, us in between.items():
            if len(us) >= STEPS:
                median = statistics.median(us[-STEPS:])
                yield {"table": "host", "step": step, "batch": batch, "between": what, "us": median}


def table(events: list, runs: int, step: str, batch: int) -> Iterator[record.Row]:
    us: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        us[event.name] += event.time_range.end - event.time_range.start
        calls[event.name] += 1
    listed = us.most_common(ROWS)
    other = sum(us.values()) - sum(t for _, t in listed)
    of = {"table": "kernels", "step": step, "batch": batch}
    yield {**of, "us": sum(us.values()) / runs, "calls": len(events) / runs, "kernel": "all"}
    for name, total in listed:
        yield {**of, "us": total / runs, "calls": calls[name] / runs, "kernel": name[:100]}
    yield {**of, "us": other / runs, "calls": None, "kernel": "other"}


@torch.no_grad()
def decode(model, batch: int, host: Host, tensor_guards: bool) -> Iterator[record.Row]:
    ids = torch.randint(1, CONFIG.vocab_size, (batch, PROMPT), device="cuda")

    def generate() -> None:
        model.generate(
            ids, max_new_tokens=2 * STEPS, min_new_tokens=2 * STEPS, do_sample=False,
            cache_implementation="static", compile_config=compile_config("fp4", "nvfp4", tensor_guards),
        )  # fmt: skip
        torch.cuda.synchronize()

    generate()
    host.moments.clear()
    generate()
    yield from host.table("decode", batch)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        generate()
    events = prof.events()
    launches = sorted(e.time_range.start for e in events if e.name == "cudaGraphLaunch")
    begin, end = launches[-STEPS - 1], launches[-1]
    inside = [e for e in events if e.device_type == DeviceType.CUDA and begin <= e.time_range.start < end]
    yield from table(inside, STEPS, "decode", batch)


@torch.no_grad()
def prefill(model) -> Iterator[record.Row]:
    ids = torch.randint(1, CONFIG.vocab_size, (1, PREFILL), device="cuda")
    compiled = torch.compile(model, backend="fp4")
    for _ in range(3):
        compiled(ids, use_cache=False)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        compiled(ids, use_cache=False)
        torch.cuda.synchronize()
    on_gpu = [e for e in prof.events() if e.device_type == DeviceType.CUDA]
    yield from table(on_gpu, 1, f"prefill of {PREFILL} tokens", 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", default="64,1")
    parser.add_argument("--tensor-guards", action="store_true", help="as for h200_generate.py")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    host, model = Host(), new_model()
    fp4_ops.prepare(model, format="nvfp4")
    torch.cuda.empty_cache()
    for batch in args.batches.split(","):
        yield from decode(model, int(batch), host, args.tensor_guards)
        torch._dynamo.reset()
    yield from prefill(model)


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
