"""Measures how the passes change the time of a compilation.

    python benchmarks/compile_time.py loop 8 64 128       an unrolled loop over experts, and Inductor alone
    python benchmarks/compile_time.py layers 8x4 8x16     EXPERTSxLAYERS of a Mixtral (grouped_mm), the same
    python benchmarks/compile_time.py passes 8x4 128x48   only Dynamo and the passes, which take seconds
    python benchmarks/compile_time.py traced 8 128 512    the same for the loop
    ... --family qwen3_moe                                another of transformers' families

Times are CPU seconds of the first call, including C++ compilers and the packing of the weights. The script
uses one thread, bfloat16 and no caches, and marks tokens as dynamic. Hidden sizes are so small that the run
itself takes almost no time.
"""

from __future__ import annotations

import argparse
import gc
import logging
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import record
import torch
import torch.nn.functional as F
from torch import nn

from fp4_ops.compile_passes import pipeline
from fp4_ops.compile_passes.options import parse
from fp4_ops.compile_passes.weights.given import given

HIDDEN, INTER, TOP, TOKENS = 256, 512, 2, 16


class Loop(nn.Module):
    """A ModuleList of experts. Each expert runs on the tokens that chose it."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        shapes = ((HIDDEN, INTER), (HIDDEN, INTER), (INTER, HIDDEN))
        make = (nn.ModuleList(nn.Linear(*s, bias=False) for s in shapes) for _ in range(experts))
        self.experts = nn.ModuleList(make)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(torch.softmax(self.router(x), -1), TOP)
        out = torch.zeros_like(x)
        for e, (gate, up, down) in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            y = down(F.silu(gate(x[token])) * up(x[token]))
            out.index_add_(0, token, y * weights[token, choice, None])
        return out


def transformer(family: str, experts: int, layers: int) -> nn.Module:
    """Makes a transformers model with hidden size 64 and the default implementation of experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family, vocab_size=128, hidden_size=64, intermediate_size=64, moe_intermediate_size=64,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_local_experts=experts, num_experts=experts, num_experts_per_tok=TOP,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_experts_implementation("grouped_mm")
    return model


# --- clocks ---


def cpu_seconds() -> float:
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in uses)


class Passes:
    """Measures CPU seconds in the passes: `total`, and the part `capture` of it.

    `collector`: the time of Python's garbage collector, which may run inside the passes. It visits all live
    objects (Dynamo's trace, transformers) whenever their number has grown by a quarter.
    """

    def __init__(self) -> None:
        self.total = self.capture = self.collector = 0.0
        self._depth, self._began = 0, 0.0
        gc.callbacks.append(self._collects)
        self._analyse, self._capture = pipeline.analyse, pipeline.capture
        pipeline.analyse = self._timed(self._analyse, "total")
        pipeline.capture = self._timed(self._capture, "capture")

    def _timed(self, f: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.process_time()
            self._depth += 1
            try:
                return f(*args)
            finally:
                self._depth -= 1
                setattr(self, name, getattr(self, name) + time.process_time() - start)

        return timed

    def _collects(self, phase: str, info: Any) -> None:
        if phase == "start":
            self._began = time.process_time()
        elif self._depth:
            self.collector += time.process_time() - self._began

    def stop(self) -> None:
        gc.callbacks.remove(self._collects)
        pipeline.analyse, pipeline.capture = self._analyse, self._capture


def first_call(
    model: nn.Module, x: torch.Tensor, backend: Any, fullgraph: bool = True
) -> tuple[float, Callable[[], Any]]:
    """Returns (CPU seconds of the first call, a function for later calls)."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    torch._dynamo.mark_dynamic(x, x.shape.index(TOKENS))
    more = {} if isinstance(model, Loop) else {"use_cache": False}
    start = cpu_seconds()
    compiled(x, **more)
    return cpu_seconds() - start, lambda: compiled(x, **more)


def step_ms(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


# --- tables ---


def loop(cells: list[str], family: str) -> Iterator[record.Row]:
    for experts in map(int, cells):
        model = Loop(experts).bfloat16()
        x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
        passes = Passes()
        ours, call = first_call(model, x, "fp4")
        passes.stop()
        our_step = step_ms(call)
        stock, call = first_call(model, x, "inductor")
        stock_step = step_ms(call)
        yield {
            "table": "loop", "experts": experts, "inductor_s": stock, "fp4_s": ours, "speedup": stock / ours,
            "passes_s": passes.total, "inductor_step_ms": stock_step, "fp4_step_ms": our_step,
            "step_speedup": stock_step / our_step,
        }  # fmt: skip


def layers(cells: list[str], family: str) -> Iterator[record.Row]:
    x = torch.randint(0, 128, (1, TOKENS))
    for backend in ("fp4", "inductor"):  # a warm-up for work that is done once
        first_call(transformer(family, 4, 1), x, backend)
    for experts, count in map(_cell, cells):
        model = transformer(family, experts, count)
        passes = Passes()
        ours, _ = first_call(model, x, "fp4")
        passes.stop()
        stock, _ = first_call(model, x, "inductor")
        yield {
            "table": "layers", "family": family, "experts": experts, "layers": count, "inductor_s": stock,
            "fp4_s": ours, "passes_s": passes.total,
        }  # fmt: skip


def passes_alone(cells: list[str], family: str) -> Iterator[record.Row]:
    """Measures only Dynamo and the passes; their graphs are not compiled. The growth per layer leaves out the
    garbage collector."""
    x = torch.randint(0, 128, (1, TOKENS))
    options = parse(None, None)
    first_call(transformer(family, 4, 1), x, lambda gm, inputs: _analysed(gm, inputs, options))
    before = (0, 0, 0.0)
    for experts, count in map(_cell, cells):
        passes = Passes()
        model = transformer(family, experts, count)
        whole, _ = first_call(model, x, lambda gm, inputs: _analysed(gm, inputs, options))
        passes.stop()
        more = before[0] == experts and count > before[1]
        own = passes.total - passes.collector
        growth = (own - before[2]) / (count - before[1]) if more else None
        yield {
            "table": "passes", "family": family, "experts": experts, "layers": count,
            "dynamo_s": whole - passes.total, "passes_s": passes.total, "capture_s": passes.capture,
            "collector_s": passes.collector, "growth_s_per_layer": growth,
        }  # fmt: skip
        before = (experts, count, own)


def traced(cells: list[str], family: str) -> Iterator[record.Row]:
    """Measures only Dynamo and the passes, for a loop over experts; their graphs are not compiled."""
    options = parse(None, None)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    first_call(Loop(4).bfloat16(), x, lambda gm, inputs: _analysed(gm, inputs, options))
    for experts in map(int, cells):
        model, passes = Loop(experts).bfloat16(), Passes()
        whole, _ = first_call(model, x, lambda gm, inputs: _analysed(gm, inputs, options))
        passes.stop()
        yield {
            "table": "traced", "experts": experts, "dynamo_s": whole - passes.total,
            "passes_s": passes.total, "capture_s": passes.capture,
        }  # fmt: skip


def _analysed(gm: torch.fx.GraphModule, inputs: Any, options: Any) -> Any:
    rewritten, _ = pipeline.analyse(given(gm, inputs), options)
    assert rewritten is not None
    return gm.forward


def _cell(text: str) -> tuple[int, int]:
    experts, count = text.split("x")
    return int(experts), int(count)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", choices=["loop", "layers", "passes", "traced"])
    parser.add_argument("cells", nargs="+", help="EXPERTS for loop and traced, otherwise EXPERTSxLAYERS")
    parser.add_argument("--family", default="mixtral")


@torch.no_grad()
def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(lambda a: (a @ a).relu() + 1)(torch.randn(8, 8))  # a warm-up
        tables = {"loop": loop, "layers": layers, "passes": passes_alone, "traced": traced}
        yield from tables[args.table](args.cells, args.family)


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
