"""Measures experts in host memory with slots on the GPU, compared with the same experts on the GPU.

    python benchmarks/slots.py [--models qwen3-30b,gpt-oss-120b] [--layers 12] [--tokens 2048,8192]

The layers have the shapes of real models and random weights. Each has its own host memory and slots. Times
are those of the block `moe_slots` in a CUDA graph of all layers, per layer. The rest of a model is not
included.

link      GB/s of cudaMemcpyAsync from pinned memory, and of the kernel that fetches experts.
decode    Steps with another routing each. "recent": picks repeat as those of text do (`routing`); "uniform":
          the worst case for LRU; "same": every step the same; "new": each step picks from another quarter of
          the experts, and there are slots for one step only, so nothing is there. missed_gb_per_s: bytes
          fetched over the time of the whole step. bound_ratio: the time that the resident block and the
          missed bytes at the link's rate take one after the other, over the time of the step.
          Before a time is taken, results are compared with the resident block's: eager and in a replayed
          graph, with other routings and inputs. "difference" is the largest relative one; 0: bit for bit.
peer      What plain PyTorch does: the experts that a step wants are read back, copied by `.to`, and run by
          `fp4::moe`; for a prompt the whole layer is copied.
prefill   ratio_to_link: all experts' bytes at the link's rate, over the time. "empty": the slots hold nothing
          before each call; "kept": they hold what the call before left.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import record
import torch
from torch import Tensor

import fp4_ops  # noqa: F401  loads the operators
from fp4_ops.models.expert_slots import ExpertSlots, host_block, map_block


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    format: str
    activation: str
    bias: bool


MODELS = {
    m.name: m
    for m in (
        Model("qwen3-30b", 2048, 768, 128, 8, "nvfp4", "silu_interleaved", False),
        Model("gpt-oss-120b", 2880, 2880, 128, 4, "mxfp4", "swigluoai", True),
    )
}
LAYOUT = "sm90"
SHARE = 0.4
"""Share of the experts that have slots."""
WARM, STEPS = 30, 60
RUNS = 3
MOST_DIFFERENCE = 5e-3
"""Largest difference between the block with slots and the resident block. Both run the same kernels, but
prefill divides its tiles by the slots."""
PEER_DIFFERENCE = 5e-2
"""The same for `moe` with only the chosen experts. It may run other kernels, with fp8 activations or
unquantised ones."""


def ms(
    call: Callable[[], object],
    before: Callable[[], object] | None = None,
    calls: int = 1,
    runs: int = RUNS,
) -> float:
    """Measures milliseconds of a call on the GPU: the median of runs of so many calls."""
    times = []
    for run in range(runs + 1):
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        if run:
            times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def weights_of(model: Model) -> list[Tensor | None]:
    """Returns weights and biases of a layer, as `moe_slots` takes them."""
    made: list[Tensor | None] = []
    for n, k in ((2 * model.inner, model.hidden), (model.hidden, model.inner)):
        values = torch.randn(model.experts, n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        plain = torch.ops.fp4.quantize(values, model.format)
        made += [t if t.numel() else None for t in torch.ops.fp4.prepack(*plain, model.format, LAYOUT)]
    for n in (2 * model.inner, model.hidden):
        made.append(torch.randn(model.experts, n, device="cuda").bfloat16() if model.bias else None)
    return made


def in_host_memory(t: Tensor | None) -> Tensor | None:
    if t is None:
        return None
    return map_block(host_block(t.nbytes), t.device).view(t.dtype).view(t.shape).copy_(t)


def routing(steps: int, sequences: int, model: Model, kind: str) -> Tensor:
    """Returns ids [steps, sequences, top_k].

    "recent": a sequence prefers some experts, and the more recently an expert was picked, the more likely it
    is picked again. The median distance to the next use of an expert is then 1 or 2 steps, and LRU with slots
    for 40 % of the experts finds 9 of 10 of them, as published measurements for text say.
    """
    shape = sequences, model.experts
    recent, quarter = kind == "recent", model.experts // 4
    popular = torch.rand(shape).square() + 0.05 if recent else torch.ones(shape)
    used, picks = torch.zeros(shape), []
    for step in range(steps):
        chance = (popular + recent * 80 / model.top_k * used).log()
        if kind == "new":
            chance[:, torch.arange(model.experts) // quarter != step % 4] = -torch.inf
        ids = (chance - torch.empty(shape).exponential_().log()).topk(model.top_k).indices
        used = (0.7 * used).scatter_add_(1, ids, torch.ones(ids.shape))
        picks.append(ids)
    return torch.stack(picks)


class Layers:
    """Layers of a model. All have the same weights, but each in its own host memory."""

    def __init__(self, model: Model, count: int) -> None:
        self.model, self.count = model, count
        self.weights = weights_of(model)
        self.hosts = [[in_host_memory(t) for t in self.weights] for _ in range(count)]
        self.layer_bytes = sum(t.nbytes for t in self.weights if t is not None)
        self.expert_bytes = self.layer_bytes // model.experts
        self.options = {
            "format": model.format, "layout": LAYOUT, "activation": model.activation, "a_format": "auto",
            "out_dtype": torch.bfloat16,
        }  # fmt: skip

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x, ids of every layer and their shares."""
        m = self.model
        x = torch.randn(tokens, m.hidden, device="cuda").bfloat16()
        ids = torch.rand(self.count, tokens, m.experts, device="cuda").topk(m.top_k).indices
        return x, ids, torch.rand(tokens, m.top_k, device="cuda")

    def resident(self, x: Tensor, ids: Tensor, share: Tensor) -> Callable[[], list[Tensor]]:
        """Returns a call of all layers with their experts on the GPU, each its own copy of them."""
        held = [[None if t is None else t.clone() for t in self.weights] for _ in range(self.count)]

        def call() -> list[Tensor]:
            return [
                torch.ops.fp4.moe(x, ids[i], share, *weights, **self.options)
                for i, weights in enumerate(held)
            ]

        return call

    def copied(self, x: Tensor, ids: Tensor, share: Tensor, whole: bool) -> Callable[[], list[Tensor]]:
        """Returns a call of two layers whose experts `.to` copies from pinned memory. whole: all of them."""
        pinned = [[None if t is None else t.cpu().pin_memory() for t in self.weights] for _ in range(2)]

        def layer(weights: list[Tensor | None], chosen: Tensor) -> Tensor:
            if not whole:
                experts, chosen = chosen.unique(return_inverse=True)
                picks = experts.tolist()
                weights = [None if t is None else [t[e].to(x.device, non_blocking=True) for e in picks]
                           for t in weights]  # fmt: skip
                there = [None if t is None else torch.stack(t) for t in weights]
            else:
                there = [None if t is None else t.to(x.device, non_blocking=True) for t in weights]
            return torch.ops.fp4.moe(x, chosen, share, *there, **self.options)

        return lambda: [layer(weights, ids[i]) for i, weights in enumerate(pinned)]

    def scratch(self, x: Tensor, ids: Tensor, share: Tensor, slots: int) -> int:
        """Returns the peak memory of a layer in bytes, with its result and without its slots."""
        call, _ = self.slotted(x, ids, share, slots, count=1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def difference(self, x: Tensor, share: Tensor, slots: int, kinds: tuple[str, ...]) -> float:
        """Returns the largest relative difference from the resident block. Raises AssertionError if it is
        larger than other tiles explain."""
        x, tokens = torch.empty_like(x), len(x)
        made = [routing(2, tokens, self.model, kind) for kind in kinds for _ in range(2)]
        ids = made[0][:2].to(x.device).clone()
        call, _ = self.slotted(x.normal_(), ids, share, slots, count=2)
        replay, outs = graph_of(call)
        largest = 0.0
        for picks in made:
            ids.copy_(picks)
            x.normal_()
            want = [torch.ops.fp4.moe(x, each, share, *self.weights, **self.options) for each in ids]
            eager = [out.clone() for out in call()]
            replay()
            for got in (eager, outs):
                for a, b in zip(got, want):
                    if not torch.equal(a, b):
                        error = (a.float() - b.float()).norm() / b.float().norm()
                        largest = max(largest, float(error.nan_to_num(torch.inf)))
        assert largest < MOST_DIFFERENCE, f"results differ by {largest:.2e} from those of the resident block"
        return largest

    def slotted(
        self, x: Tensor, ids: Tensor, share: Tensor, slots: int, count: int | None = None
    ) -> tuple[Callable[[], list[Tensor]], list[ExpertSlots]]:
        """Returns a call of `count` layers (None: all) with so many slots each, and the slots."""
        caches = [ExpertSlots(self.weights, slots, x.device) for _ in range(count or self.count)]

        def call() -> list[Tensor]:
            return [
                torch.ops.fp4.moe_slots(x, ids[i], share, *host, cache.slots, cache.state, **self.options)
                for i, (host, cache) in enumerate(zip(self.hosts, caches))
            ]

        return call, caches


def graph_of(call: Callable[[], list[Tensor]]) -> tuple[Callable[[], object], list[Tensor]]:
    """Returns the replay of a call as a CUDA graph, and its outputs."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = call()
    return graph.replay, outs


def counters(caches: list[ExpertSlots]) -> tuple[int, int]:
    """Returns how many experts all calls used, and how many they fetched."""
    wanted, fetched = zip(*(cache.read_counters() for cache in caches))
    return sum(wanted), sum(fetched)


def link_rate() -> float:
    """Measures bytes a second of a copy from pinned memory by the copy engine."""
    pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device="cuda")
    return pinned.nbytes / ms(functools.partial(there.copy_, pinned, non_blocking=True)) * 1e3


def link(layers: Layers, rate: float) -> Iterator[record.Row]:
    parts, host = torch.ops.fp4_parts, [t for t in layers.hosts[0] if t is not None]
    for count in (1, 4, 32):
        cache = ExpertSlots(layers.weights, count, layers.weights[0].device)
        ids = torch.arange(count, device="cuda").view(1, -1)
        plan = parts.slots_plan(ids, cache.state, count)
        took = ms(lambda: parts.slots_fetch(ids, *plan, host, cache.slots, 0), calls=4)  # noqa: B023
        fetched = count * layers.expert_bytes / took * 1e3
        yield {
            "table": "link", "model": layers.model.name, "experts": count,
            "expert_mb": layers.expert_bytes / 1e6, "link_gb_per_s": rate / 1e9,
            "fetch_gb_per_s": fetched / 1e9, "fetch_us": took * 1e3, "ratio_to_link": fetched / rate,
        }  # fmt: skip


def decode(layers: Layers, tokens: int, rate: float) -> Iterator[record.Row]:
    model = layers.model
    x, ids, share = layers.inputs(tokens)
    resident, _ = graph_of(layers.resident(x, ids, share))
    resident_us = ms(resident, calls=20) * 1e3 / layers.count
    del resident
    torch.cuda.empty_cache()
    least = min(model.experts // 4, tokens * model.top_k)
    for slots, kinds in ((int(SHARE * model.experts), ("same", "recent", "uniform")), (least, ("new",))):
        difference = layers.difference(x, share, slots, kinds)
        call, caches = layers.slotted(x, ids, share, slots)
        replay, _ = graph_of(call)
        for kind in kinds:
            steps = 1 if kind == "same" else WARM + STEPS
            made = [routing(steps, tokens, model, kind) for _ in range(layers.count)]
            picks = torch.stack(made, 1).to(ids.device)
            before = 0, 0
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for step in range(WARM + STEPS):
                if step == WARM:
                    before = counters(caches)
                    start.record()
                ids.copy_(picks[step % steps])
                replay()
            end.record()
            end.synchronize()
            wanted, fetched = (a - b for a, b in zip(counters(caches), before))
            us = start.elapsed_time(end) * 1e3 / STEPS / layers.count
            missed = fetched * layers.expert_bytes / STEPS / layers.count
            yield {
                "table": "decode", "model": model.name, "tokens": tokens, "slots": slots, "routing": kind,
                "hit_ratio": 1 - fetched / max(wanted, 1), "resident_us": resident_us, "us": us,
                "speed_ratio": resident_us / us, "missed_gb_per_s": missed / us / 1e3,
                "ratio_to_link": missed / us * 1e6 / rate,
                "bound_ratio": (resident_us + missed / rate * 1e6) / us, "difference": difference,
            }  # fmt: skip
        del call, replay, caches
        torch.cuda.empty_cache()


def prefill(layers: Layers, tokens: int, rate: float) -> Iterator[record.Row]:
    model = layers.model
    x, ids, share = layers.inputs(tokens)
    at_link_ms = layers.layer_bytes / rate * 1e3
    held = layers.weights
    one = functools.partial(torch.ops.fp4.moe, x, ids[0], share, *held, **layers.options)
    resident_ms = ms(one)
    for share_of in (SHARE, 0.2):
        slots = int(share_of * model.experts)
        difference = layers.difference(x, share, slots, ("uniform",))
        scratch_gb = layers.scratch(x, ids, share, slots) / 1e9
        call, caches = layers.slotted(x, ids, share, slots)

        def reset(caches: list[ExpertSlots] = caches) -> None:
            for cache in caches:
                cache.reset()

        for begin, prepare in (("empty", reset), ("kept", None)):
            took = ms(call, prepare) / layers.count
            yield {
                "table": "prefill", "model": model.name, "tokens": tokens, "slots": slots, "begin": begin,
                "resident_ms": resident_ms, "ms": took, "at_link_ms": at_link_ms,
                "ratio_to_link": at_link_ms / took,
                "difference": difference, "scratch_gb": scratch_gb,
            }  # fmt: skip
        del call, caches
        torch.cuda.empty_cache()


def peer(layers: Layers) -> Iterator[record.Row]:
    model = layers.model
    for tokens in (1, 8, 2048):
        x, ids, share = layers.inputs(tokens)
        call = layers.copied(x, ids, share, whole=tokens > 8)
        want = [torch.ops.fp4.moe(x, each, share, *layers.weights, **layers.options) for each in ids[:2]]
        for got, right in zip(call(), want):
            error = float(((got.float() - right.float()).norm() / right.float().norm()).nan_to_num(torch.inf))
            assert error < PEER_DIFFERENCE, error
        took = ms(call, runs=10 if tokens <= 8 else RUNS) / 2
        yield {"table": "peer", "model": model.name, "tokens": tokens, "us": took * 1e3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", default="2048,8192")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    with torch.no_grad():
        for name in args.models.split(","):
            layers = Layers(MODELS[name], args.layers)
            rate = link_rate()
            yield from link(layers, rate)
            for batch in map(int, args.batches.split(",")):
                yield from decode(layers, batch, rate)
            for tokens in map(int, args.tokens.split(",")):
                yield from prefill(layers, tokens, rate)
            yield from peer(layers)
            del layers
            torch.cuda.empty_cache()


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
