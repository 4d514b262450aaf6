"""Measures a whole decoding step on one GPU, with all layers of a model, compared with Inductor's step of the
bf16 model.

    python benchmarks/step.py [--models qwen3-30b] [--layers N] [--batches 1,8,64] [--contexts 100,1000]
                              [--room 4096] [--variants fp4,fp8,all4,stock]

The weights are random. All layers hold the same numbers, but each layer has its own memory. The static cache
is filled with prompts until it holds `context` tokens. It has room for `room` tokens, by default for
`context`. A step takes one token of each sequence and computes the next one (argmax). It is one CUDA graph.
Its time is the median of 40 replays, which fill the cache. Each case has its own process. The cases compile
at the same time, and are timed one after another. gpt-oss-120b needs 66 GB for each case.

First, the logits of a compiled step are compared with those of the same model without compilation. Rounding
can change the choice of experts, so the difference in a model of many layers with random weights is larger
than rounding errors. `noise` is the size of this effect: the difference of the uncompiled model if each
number of its cache is rounded once more. At batch 64 Inductor does not round the sums of the residual to
bfloat16 as the uncompiled model does. With 24 layers the error is then 1.1e-2, that of torch.compile's bf16
model is 1.2e-2, and with `emulate_precision_casts` ours is 4.8e-3.

    fp4      fp4_ops.prepare(model, format), torch.compile(model, backend="fp4"); MODELS has the format
    fp8      the same with attention="fp8", head="fp8"
    all4     the same with attention and head in the experts' format
    stock    the bf16 model, torch.compile(model)

`--kernels` also yields each kernel's time in a step. A kernel may begin while it waits for the one before it,
so these times, `us`, add up to more than the step. `added_us` begins at the end of the kernel before it.
"""

from __future__ import annotations

import argparse
import collections
import copy
import itertools
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import record
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
)

import fp4_ops

DEVICE = "cuda"
STEPS, SKIP, PROFILED = 40, 8, 5


@dataclass(frozen=True)
class Model:
    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    sizes: dict[str, Any]
    layers: int
    period: int
    """The number of layers after which their kinds repeat."""
    format: str


NO_TOKENS: dict[str, Any] = dict(pad_token_id=0, eos_token_id=None, bos_token_id=None)
MODELS = {
    "qwen3-30b": Model(Qwen3MoeConfig, Qwen3MoeForCausalLM, dict(
        hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, vocab_size=151936, **NO_TOKENS,
    ), layers=48, period=1, format="nvfp4"),
    "gpt-oss-120b": Model(GptOssConfig, GptOssForCausalLM, dict(
        hidden_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=128,
        num_experts_per_tok=4, intermediate_size=2880, sliding_window=128, vocab_size=201088, **NO_TOKENS,
    ), layers=36, period=2, format="mxfp4"),
}  # fmt: skip
PROMPTS = 4
"""The number of different prompts in a batch."""


@dataclass(frozen=True)
class Case:
    model: str
    variant: str
    layers: int
    batch: int
    context: int
    room: int | None


def new_model(case: Case) -> PreTrainedModel:
    torch.manual_seed(0)
    what = MODELS[case.model]
    period = min(what.period, case.layers)
    config = what.config(**what.sizes, num_hidden_layers=period, dtype=torch.bfloat16)
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        model = what.model(config).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    for name, p in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(p, 1.0, 0.1)
        elif name.endswith("bias"):
            torch.nn.init.normal_(p, 0.0, 0.02)
    if case.variant != "stock":
        outside = {"fp8": "fp8", "all4": what.format}.get(case.variant, "keep")
        fp4_ops.prepare(model, what.format, attention=outside, head=outside)
    stack = model.model.layers
    for i in range(period, case.layers):
        layer = copy.deepcopy(stack[i % period])
        layer.self_attn.layer_idx = i
        stack.append(layer)
    model.config.num_hidden_layers = case.layers
    if kinds := getattr(model.config, "layer_types", None):
        model.config.layer_types[:] = [kinds[i % period] for i in range(case.layers)]
    return model


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


class Step:
    """A compiled step of a model, as a CUDA graph."""

    def __init__(self, case: Case, backend: str, options: dict[str, Any] | None = None) -> None:
        self.model = new_model(case)
        length = -(-(case.context + 1) // 8) * 8
        self.begin = length - STEPS - SKIP - PROFILED - 2
        room = max(case.room or 0, length)
        self.cache = StaticCache(config=self.model.config, max_cache_len=room)
        self.token = self.tokens(case.batch, 1)
        self.fill(min(case.batch, PROMPTS), length, room)
        want = self.logits(self.model).float()
        kept = [(t, t.clone()) for layer in self.cache.layers for t in (layer.keys, layer.values)]
        for t, _ in kept:
            t.mul_(1 + torch.randn_like(t) / 512)
        self.noise = relative(self.logits(self.model), want)
        for t, old in kept:
            t.copy_(old)
        del kept
        start = time.perf_counter()
        compiled = torch.compile(self.model, backend=backend, options=options)
        self.error = relative(self.logits(compiled), want)
        self.compile_s = time.perf_counter() - start
        assert self.error < 4 * self.noise + 1e-2, f"{case}: {self.error:.2e}, noise {self.noise:.2e}"
        for _ in range(2):
            self.logits(compiled)
        self.rewind()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            logits = compiled(self.token, past_key_values=self.cache, logits_to_keep=1).logits
            self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def tokens(self, *shape: int) -> torch.Tensor:
        return torch.randint(1, self.model.config.vocab_size, shape, device=DEVICE)

    def fill(self, prompts: int, length: int, room: int) -> None:
        """Fills the cache with a few prompts of `length` tokens, which sequences share."""
        few = StaticCache(config=self.model.config, max_cache_len=room)
        self.model(self.tokens(prompts, length), past_key_values=few, logits_to_keep=1)
        self.model(self.token, past_key_values=self.cache, logits_to_keep=1)
        which = torch.arange(len(self.token), device=DEVICE) % prompts
        for layer, filled in zip(self.cache.layers, few.layers, strict=True):
            layer.keys.copy_(filled.keys[which])
            layer.values.copy_(filled.values[which])

    def rewind(self) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.begin)
            if layer.is_sliding:
                layer.cumulative_length_int = self.begin

    def logits(self, model) -> torch.Tensor:
        self.rewind()
        return model(self.token, past_key_values=self.cache, logits_to_keep=1).logits

    def ms(self) -> float:
        self.rewind()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + SKIP + 1)]
        for event in events[:-1]:
            event.record()
            self.graph.replay()
        events[-1].record()
        torch.cuda.synchronize()
        return statistics.median([a.elapsed_time(b) for a, b in itertools.pairwise(events)][SKIP:])

    def kernels(self) -> list[tuple[str, float, float, float]]:
        """Returns the name, calls per step, microseconds per step, and microseconds added to the step of each
        kernel."""
        self.rewind()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PROFILED):
                self.graph.replay()
            torch.cuda.synchronize()
        us: collections.Counter[str] = collections.Counter()
        added: collections.Counter[str] = collections.Counter()
        calls: collections.Counter[str] = collections.Counter()
        ran = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        done = 0.0
        for event in sorted(ran, key=lambda e: e.time_range.end):
            start, end = event.time_range.start, event.time_range.end
            us[event.name] += end - start
            added[event.name] += end - done if done else end - start
            calls[event.name] += 1
            done = end
        return [
            (name, calls[name] / PROFILED, us[name] / PROFILED, total / PROFILED)
            for name, total in added.most_common()
        ]


@torch.no_grad()
def work(case: Case, parent: Connection, kernels: bool) -> None:
    """Compiles a case, reports that it is ready, and times it when the parent asks for it."""
    try:
        step = Step(case, "inductor" if case.variant == "stock" else "fp4")
        parent.send(None)
        parent.recv()
        ms = step.ms()
        names = asdict(case)
        found: list[record.Row] = [
            {"table": "step", **names, "ms": ms, "tokens_per_s": 1e3 * case.batch / ms, "error": step.error,
             "noise": step.noise, "compile_s": step.compile_s, "gb": torch.cuda.memory_allocated() / 1e9}
        ]  # fmt: skip
        for name, calls, us, added in step.kernels() if kernels else ():
            row = {"kernel": name[:120], "calls": calls, "us": us, "added_us": added}
            found.append({"table": "kernels", **names, **row})
        parent.send(found)
    except Exception:
        parent.send(traceback.format_exc())


def run(
    cases: list[Case], work: Callable[..., None], *args: Any, before: Callable[[], None] = lambda: None
) -> Iterator[record.Row]:
    """Starts a process for each case, and yields their rows. Calls `before` once all have compiled."""
    context = multiprocessing.get_context("spawn")
    ready: dict[Connection, Case] = {}
    for case in cases:
        mine, its = context.Pipe()
        context.Process(target=work, args=(case, its, *args)).start()
        its.close()
        ready[mine] = case
    waiting = list(ready)
    while waiting:
        for pipe in wait(waiting):
            waiting.remove(pipe)
            why = pipe.recv()
            if why is not None:
                print(f"{ready.pop(pipe)} failed: {why}", flush=True)
    before()
    for pipe, case in ready.items():
        pipe.send(None)
        found = pipe.recv()
        if isinstance(found, str):
            print(f"{case} failed: {found}", flush=True)
        else:
            yield from found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="qwen3-30b")
    parser.add_argument("--layers", type=int, help="instead of all")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--contexts", default="100,1000")
    parser.add_argument("--room", type=int, help="of the cache, in tokens")
    parser.add_argument("--variants", default="fp4")
    parser.add_argument("--kernels", action="store_true")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    cases = [
        Case(model, variant, args.layers or MODELS[model].layers, int(batch), int(context), args.room)
        for model in args.models.split(",")
        for variant in args.variants.split(",")
        for batch in args.batches.split(",")
        for context in args.contexts.split(",")
    ]
    yield from run(cases, work, args.kernels)


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
