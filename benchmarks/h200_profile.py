"""Where the time of `h200_generate.py --variants prepared-backend` goes: on the host, and in kernels.

    python benchmarks/h200_profile.py [--batches 64,1] [--tensor-guards]

The host's times are medians between the calls that a step of `generate` makes, without the profiler. Those
of a step's kernels and of prefill's are by torch.profiler, which makes a step longer than in
h200_generate.py, but not its kernels. `other` is what does not fit into the table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from h200_generate import CONFIG, PREFILL, PROMPT, compile_config, new_model
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

import fp4_ops

STEPS, ROWS = 20, 24


class Host:
    """Moments at which a step's calls begin and end."""

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

    def table(self) -> None:
        between: defaultdict[str, list[float]] = defaultdict(list)
        for (a, start), (b, end) in zip(self.moments, self.moments[1:]):
            between[f"{a} .. {b}"].append((end - start) * 1e6)
        for what, us in between.items():
            if len(us) >= STEPS:
                print(f"{statistics.median(us[-STEPS:]):9.1f} us  {what}")


def table(events: list, runs: int, what: str) -> None:
    us: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        us[event.name] += event.time_range.end - event.time_range.start
        calls[event.name] += 1
    print(f"\n{what}: {sum(us.values()) / runs / 1e3:.2f} ms of kernels, {len(events) / runs:.0f} of them")
    for name, total in us.most_common(ROWS):
        print(f"{total / runs:9.1f} us {calls[name] / runs:6.1f} x {total / calls[name]:8.2f}  {name[:100]}")
    print(f"{sum(us.values()) / runs - sum(t for _, t in us.most_common(ROWS)) / runs:9.1f} us other")


@torch.no_grad()
def decode(model, batch: int, host: Host, tensor_guards: bool) -> None:
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
    print(f"\ndecode, batch {batch}: a step of the host")
    host.table()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        generate()
    events = prof.events()
    launches = sorted(e.time_range.start for e in events if e.name == "cudaGraphLaunch")
    begin, end = launches[-STEPS - 1], launches[-1]
    inside = [e for e in events if e.device_type == DeviceType.CUDA and begin <= e.time_range.start < end]
    table(inside, STEPS, f"decode, batch {batch}: one step")


@torch.no_grad()
def prefill(model) -> None:
    ids = torch.randint(1, CONFIG.vocab_size, (1, PREFILL), device="cuda")
    compiled = torch.compile(model, backend="fp4")
    for _ in range(3):
        compiled(ids, use_cache=False)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        compiled(ids, use_cache=False)
        torch.cuda.synchronize()
    table([e for e in prof.events() if e.device_type == DeviceType.CUDA], 1, f"prefill of {PREFILL} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="64,1")
    parser.add_argument("--tensor-guards", action="store_true", help="as for h200_generate.py")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    host, model = Host(), new_model()
    fp4_ops.prepare(model, format="nvfp4")
    torch.cuda.empty_cache()
    for batch in args.batches.split(","):
        decode(model, int(batch), host, args.tensor_guards)
        torch._dynamo.reset()
    prefill(model)


if __name__ == "__main__":
    main()
