"""Where the time of `h200_generate.py --variants prepared-backend` goes: kernels of a step and of prefill.

    python benchmarks/h200_profile.py [--batches 64,1]

Device times by torch.profiler, which makes a step longer than in h200_generate.py, but not its kernels.
`other` is what does not fit into the table.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from h200_generate import CONFIG, PREFILL, PROMPT, compile_config, new_model
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fp4_ops

STEPS, ROWS = 20, 24


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
def decode(model, batch: int) -> None:
    ids = torch.randint(1, CONFIG.vocab_size, (batch, PROMPT), device="cuda")

    def generate() -> None:
        model.generate(
            ids, max_new_tokens=2 * STEPS, min_new_tokens=2 * STEPS, do_sample=False,
            cache_implementation="static", compile_config=compile_config("fp4", "nvfp4"),
        )  # fmt: skip
        torch.cuda.synchronize()

    generate()
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
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    model = new_model()
    fp4_ops.prepare(model, format="nvfp4")
    torch.cuda.empty_cache()
    for batch in args.batches.split(","):
        decode(model, int(batch))
        torch._dynamo.reset()
    prefill(model)


if __name__ == "__main__":
    main()
