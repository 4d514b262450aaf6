"""Compares a small Mixture-of-Experts language model in bfloat16 and in 4 bits.

    python examples/demo.py [--full]

The model (examples/demo_model, a Qwen3-MoE over bytes that was trained on Python's standard library) runs in
three ways: bf16 eager, bf16 under stock torch.compile, and with its experts in nvfp4 under
torch.compile(backend="fp4"). Speeds are medians over rounds in which the three take turns. --full adds mxfp4,
prefill of the large batch, and more rounds. It takes longer, because each speed of each way needs a
compilation. The script uses an NVIDIA GPU if there is one.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import logging
import math
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

START = time.monotonic()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def first_compilation() -> subprocess.Popen[bytes] | None:
    """Starts a process that compiles a small function, while this one has no graph to compile yet.

    Inductor then has done what it does only once on a CPU: it tries which instructions the C++ compiler
    knows, and precompiles its header.
    """
    if DEVICE != "cpu":
        return None
    code = "import torch; torch.set_num_threads(1); torch.compile(lambda x: x + 1)(torch.ones(64))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(process.kill)
    return process


FIRST = first_compilation() if __name__ == "__main__" and sys.argv[1:] in ([], ["--full"]) else None

# These imports come only now, because they take seconds.
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, StaticCache  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

import fp4_ops  # noqa: E402

HERE = Path(__file__).parent / "demo_model"
BATCHES = (1, 32)
PROMPT, STEPS = 128, 24
WINDOW, HELDOUT_BYTES = 512, 16_000
SAMPLE_PROMPT, SAMPLE_BYTES = b"class Queue:\n    def ", 160
CACHE = max(PROMPT + STEPS, len(SAMPLE_PROMPT) + SAMPLE_BYTES)
FORMATS, ROUNDS = ("nvfp4",), 3
SPEEDS = (("prefill", 1), ("decode", 1), ("decode", 32))
"""The demo measures these, each with its batch size."""
FULL_FORMATS, FULL_ROUNDS = ("nvfp4", "mxfp4"), 5
FULL_SPEEDS = (("prefill", 1), ("prefill", 32), ("decode", 1), ("decode", 32))
# On a CPU, Inductor compiles sdpa of one token poorly (3x slower at batch 32), so all variants use plain
# attention.
ATTENTION = "sdpa" if DEVICE == "cuda" else "eager"
COMPILE = {"dynamic": False, "mode": "reduce-overhead" if DEVICE == "cuda" else None}


@dataclass
class Variant:
    name: str
    model: torch.nn.Module
    step: Callable[[torch.nn.Module, Tensor, StaticCache], Tensor]
    caches: dict[int, StaticCache] = field(default_factory=dict)
    loss: float = 0.0
    speeds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """Tokens per second by an entry of SPEEDS, with one value for each round."""


def step(model: torch.nn.Module, tokens: Tensor, cache: StaticCache) -> Tensor:
    """Returns the most likely next token [B, 1], given tokens [B, T]."""
    logits = model(input_ids=tokens, past_key_values=cache, logits_to_keep=1).logits
    return logits[:, -1].argmax(-1, keepdim=True)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def progress(text: str) -> None:
    print(f"  {time.monotonic() - START:5.0f} s  {text}", flush=True)


def build(formats: tuple[str, ...] = FORMATS) -> list[Variant]:
    model = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    model = model.to(DEVICE).eval()
    variants = [
        Variant("bf16 eager", model, step),
        Variant("bf16 torch.compile", model, torch.compile(step, **COMPILE)),
    ]
    for format in formats:
        packed = copy.deepcopy(model)
        report = fp4_ops.prepare(packed, format)
        if format == "nvfp4":
            print(report, "\n")
        variants.append(Variant(f"{format} (ours)", packed, torch.compile(step, backend="fp4", **COMPILE)))
    return variants


def weight_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Returns (bytes of all weights, bytes of expert weights) in memory."""
    named = [*model.named_parameters(), *model.named_buffers()]
    sizes = {t.data_ptr(): (name, t.nbytes) for name, t in named}.values()
    return sum(n for _, n in sizes), sum(n for name, n in sizes if ".experts." in name)


def heldout_loss(variant: Variant) -> float:
    """Returns the mean negative log-likelihood per byte, for text that was not used in training."""
    text = (HERE / "heldout.txt").read_bytes()[:HELDOUT_BYTES]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(DEVICE)
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW).split(8)
    losses = [variant.model(input_ids=w, labels=w, use_cache=False).loss * len(w) for w in windows]
    return (sum(losses) / sum(len(w) for w in windows)).item()


def warm_up(variant: Variant, prompts: dict[int, Tensor], speeds=SPEEDS) -> None:
    for batch, prompt in prompts.items():
        cache = variant.caches[batch] = StaticCache(variant.model.config, max_cache_len=CACHE)
        step(variant.model, prompt[:, :1], cache)  # the cache allocates memory outside of compiled code
        # Use the strides of decode's own tokens. Otherwise the step would be compiled again when it is
        # measured.
        first = prompt[:, :1].clone(memory_format=torch.contiguous_format)
        for shape, tokens in (("prefill", prompt), ("decode", first)):
            if (shape, batch) not in speeds:
                continue
            if variant.step is not step:
                progress(f"{variant.name}: compiling {shape}, batch {batch}")
            for _ in range(3):
                cache.reset()
                variant.step(variant.model, tokens, cache)


def measure(variant: Variant, batch: int, prompt: Tensor, speeds=SPEEDS) -> None:
    cache = variant.caches[batch]
    # Prefill is not compiled if only decode is measured.
    prefill = variant.step if ("prefill", batch) in speeds else step
    cache.reset()
    synchronize()
    start = time.perf_counter()
    token = prefill(variant.model, prompt, cache)
    synchronize()
    prefilled = time.perf_counter()
    for _ in range(STEPS):
        token = variant.step(variant.model, token.clone(), cache)
    synchronize()
    decoded = time.perf_counter()
    found = {"prefill": PROMPT / (prefilled - start), "decode": STEPS / (decoded - prefilled)}
    for what, tokens in found.items():
        if (what, batch) in speeds:
            variant.speeds.setdefault((what, batch), []).append(batch * tokens)


def sample(variant: Variant) -> str:
    """Returns a greedy continuation, computed with the same compiled one-token step that was timed."""
    cache = variant.caches[1]
    cache.reset()
    out = list(SAMPLE_PROMPT)
    for i in range(len(SAMPLE_PROMPT) + SAMPLE_BYTES - 1):
        token = variant.step(variant.model, torch.tensor([[out[i]]], device=DEVICE), cache)
        if i + 1 == len(out):
            out.append(token.item())
    return bytes(out).decode(errors="replace")


def print_table(variants: list[Variant]) -> None:
    stock = variants[1]

    def speed(values: list[float], base: list[float]) -> str:
        ratio = statistics.median(a / b for a, b in zip(values, base))
        return f"{statistics.median(values):>9,.0f} {ratio:>5.2f}x"

    print(f"\n{'':20}{'weights':>9}{'experts':>9}{'bits per':>10}{'perplexity':>12}", end="")
    print("".join(f"{f'{what}, batch {b}':>19}" for what, b in stock.speeds))
    note = "tokens/s, and times stock torch.compile"
    print(f"{'':20}{'MB':>9}{'MB':>9}{'byte':>10}{'of a byte':>12}{note:>{19 * len(stock.speeds)}}")
    for v in variants:
        total, experts = weight_bytes(v.model)
        print(f"{v.name:20}{total / 1e6:9.2f}{experts / 1e6:9.2f}", end="")
        print(f"{v.loss / math.log(2):10.4f}{math.exp(v.loss):12.4f}", end="")
        print("".join(f"{speed(values, stock.speeds[s]):>19}" for s, values in v.speeds.items()))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--full", action="store_true")
    full = parser.parse_args().full
    formats, speeds, rounds = (FULL_FORMATS, FULL_SPEEDS, FULL_ROUNDS) if full else (FORMATS, SPEEDS, ROUNDS)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    # All variants share the code of `step`. With prefill and decode at two batches, there are more graphs
    # than Dynamo's limit of 8. Beyond the limit, Dynamo would run the rest uncompiled.
    torch._dynamo.config.recompile_limit = 64
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else f"{platform.machine()} CPU"
    print(f"torch {torch.__version__} on {where}, {torch.get_num_threads()} threads\n")

    variants = build(formats)
    losses: dict[torch.nn.Module, float] = {}  # the stock eager and compiled variants share a model
    for v in variants:
        if v.model not in losses:
            progress(f"{v.name}: perplexity on {HELDOUT_BYTES // 1000} kB of held-out text")
            losses[v.model] = heldout_loss(v)
        v.loss = losses[v.model]
    text = (
        torch.frombuffer(bytearray((HERE / "heldout.txt").read_bytes()), dtype=torch.uint8).long().to(DEVICE)
    )
    prompts = {b: text[: b * PROMPT].view(b, PROMPT) for b in BATCHES}
    if FIRST is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            FIRST.wait(60)
    for v in variants:
        warm_up(v, prompts, speeds)
    for i in range(rounds):
        progress(f"measuring, round {i + 1} of {rounds}")
        for batch, prompt in prompts.items():
            for v in variants:
                measure(v, batch, prompt, speeds)
    print_table(variants)

    print("\nGreedy samples:")
    for v in variants[1:]:  # eager has the same sample as stock torch.compile
        print(f"\n--- {v.name}", flush=True)
        print(sample(v))
    print(
        "\nSpeeds and ratios are medians over the rounds, so a ratio is not the quotient of two speeds.\n"
        "Ours is fp4_ops.prepare(model, format), which frees the bf16 experts, under "
        'torch.compile(..., backend="fp4").\nWithout prepare, torch.compile(model, backend="fp4") makes the '
        "same 4-bit weights itself and keeps the bf16 ones."
    )


if __name__ == "__main__":
    main()
