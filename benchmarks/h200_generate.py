"""Compares transformers' `generate` with and without fp4_ops, with a static cache and a Qwen3-MoE with
30B-A3B layer shapes.

    python benchmarks/h200_generate.py [--variants stock,stock-grouped,prepared] [--batches 1,8,64]

The model has random bfloat16 weights and 16 of the 48 layers. `generate` itself compiles every variant
(static cache, CompileConfig), in mode "reduce-overhead". A step's time is the median between CUDA events
before consecutive steps, in the second call. On a slow host, Python limits steps and prefill. So the same
steps are also timed in a greedy loop of five lines, without generate's own Python, and in generate with
`custom_generate=fp4_ops.decoding_loop`; prefill is also timed as CUDA graphs. First the results are checked:
logits are compared with a float32 model with the dequantised weights, and so are those of the stock bfloat16
model with the same weights. Expert bytes are those of parameters and buffers.

    stock             the default: decode through `batched_mm`
    stock-grouped     decode kept on `grouped_mm`
    backend           the model as it is, CompileConfig(backend="fp4")
    prepared          fp4_ops.prepare(model), which frees the bfloat16 experts; the default backend
    prepared-backend  both: packed weights in the model, and routers compiled by the backend
    whole-backend     as prepared-backend, with attention and the output head in 4 bits, too
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Iterator

import record
import torch
from transformers import (
    CompileConfig,
    LogitsProcessor,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
)

import fp4_ops
from fp4_ops.integrations.transformers import generation
from fp4_ops.models.outside_experts import kind_of

PROMPT, STEPS, SKIP = 32, 72, 16
WHOLE = ("attention", "head")
PREFILL = 4096
CONFIG = Qwen3MoeConfig(
    hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, vocab_size=151936,
    max_position_embeddings=40960, pad_token_id=0, eos_token_id=None, bos_token_id=None,
)  # fmt: skip


class Clock(LogitsProcessor):
    """Records a CUDA event at every token."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []

    def __call__(self, ids, scores):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)
        return scores

    def step_ms(self) -> float:
        torch.cuda.synchronize()
        pairs = list(zip(self.events, self.events[1:]))[SKIP:]
        return statistics.median(a.elapsed_time(b) for a, b in pairs)


def new_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3MoeForCausalLM(CONFIG).eval()
        torch.set_default_dtype(torch.float32)
    return model


def packed_weights(model, variant: str):
    """Returns the weights that the variant has in 4 bits."""
    for name, p in model.named_parameters():
        outside = is_whole(variant) and p.dim() == 2 and kind_of(name) in WHOLE
        if ".experts." in name or outside:
            yield p


def is_whole(variant: str) -> bool:
    return variant.startswith("whole")


def prepare(model, format: str, variant: str) -> None:
    fp4_ops.prepare(model, format, **(dict.fromkeys(WHOLE, format) if is_whole(variant) else {}))


def fake_quantise(model, format: str, variant: str) -> None:
    """Replaces weights by their values in 4 bits, as the reference for our model. This is exact in a float32
    model."""
    for p in packed_weights(model, variant):
        packed = torch.ops.fp4.quantize(p.detach().bfloat16(), format)
        p.data.copy_(torch.ops.fp4.dequantize(*packed, format, p.dtype))


def expert_bytes(model) -> int:
    """Returns the bytes of everything under the `experts` modules, packed or not."""
    experts = [m for name, m in model.named_modules() if name.endswith(".experts")]
    tensors = {t.data_ptr(): t for m in experts for t in (*m.parameters(), *m.buffers())}
    return sum(t.nbytes for t in tensors.values())


def compile_config(backend: str, format: str, tensor_guards: bool) -> CompileConfig:
    """Returns the configuration by which `generate` compiles a step, with CUDA graphs."""
    if backend == "inductor" and not tensor_guards:
        return CompileConfig()
    # torch takes either a mode or options. The option triton.cudagraphs is equivalent to
    # mode="reduce-overhead".
    options: dict = {"triton.cudagraphs": True}
    if backend == "fp4":
        options["format"] = format
    if tensor_guards:
        options["guard_filter_fn"] = torch.compiler.keep_tensor_guards_unsafe
    return CompileConfig(backend=backend, mode=None, options=options)


@contextlib.contextmanager
def clocked(model, ours: bool) -> Iterator[Clock]:
    """Makes a clock that ticks once for each step. In our loop it ticks when a token is chosen, in
    `generate`'s own loop before each call of the compiled step. It adds no logits processor, because that
    would change the code that runs."""
    clock = Clock()
    holder, name = (generation._Decoding, "_choose") if ours else (model, "get_compiled_call")
    original = getattr(holder, name)

    def timed(step):
        def timed_step(*args, **kwargs):
            clock(None, None)
            return step(*args, **kwargs)

        return timed_step

    setattr(holder, name, timed(original) if ours else lambda config: timed(original(config)))
    try:
        yield clock
    finally:
        if ours:
            setattr(holder, name, original)
        else:
            delattr(holder, name)


@torch.no_grad()
def generate_ms(model, batch: int, config: CompileConfig, **options) -> tuple[float, float, float]:
    """Returns milliseconds per step in the second call, seconds of the first call (with compilation), and
    seconds of the second."""
    ids = torch.randint(1, CONFIG.vocab_size, (batch, PROMPT), device="cuda")
    spent = []
    for _ in range(2):
        with clocked(model, ours="custom_generate" in options) as clock:
            start = time.perf_counter()
            model.generate(
                ids, max_new_tokens=STEPS, do_sample=False, cache_implementation="static",
                compile_config=config, **options,
            )  # fmt: skip
            torch.cuda.synchronize()
            spent.append(time.perf_counter() - start)
    return clock.step_ms(), *spent


@torch.no_grad()
def loop_ms(model, batch: int, config: CompileConfig) -> float:
    """Returns milliseconds per step of a loop that calls the compiled model and takes the most likely
    token."""
    ids = torch.randint(1, CONFIG.vocab_size, (batch, PROMPT), device="cuda")
    cache = StaticCache(config=CONFIG, max_cache_len=PROMPT + STEPS)
    compiled = torch.compile(model, **config.to_dict())
    clock = Clock()
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    for _ in range(STEPS):
        token = logits[:, -1].argmax(-1, keepdim=True)
        clock(token, logits)
        torch.compiler.cudagraph_mark_step_begin()
        logits = compiled(token, past_key_values=cache, logits_to_keep=1).logits
    return clock.step_ms()


@torch.no_grad()
def prefill_ms(model, backend: str, format: str, graphs: bool) -> float:
    ids = torch.randint(1, CONFIG.vocab_size, (1, PREFILL), device="cuda")
    options = {"triton.cudagraphs": graphs, **({"format": format} if backend == "fp4" else {})}
    compiled = torch.compile(model, backend=backend, options=options)
    for _ in range(3):
        compiled(ids, use_cache=False)
    times = []
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        compiled(ids, use_cache=False)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@torch.no_grad()
def check(format: str, variant: str) -> record.Row:
    """Compares ours and stock bfloat16, with the same 4-bit values, with stock in float32. Both must have
    about the same error."""
    # Each expert has so few rows that activation="auto" does not quantise activations. There are several
    # draws, because rounding changes the choice of some experts, which would dominate a single draw.
    draws = [torch.randint(1, CONFIG.vocab_size, (2, 16), device="cuda") for _ in range(8)]

    def compiled(model):
        return torch.compile(model, backend="fp4", options={"format": format})

    def distance(model) -> float:
        errors = [
            (model(ids, use_cache=False).logits.double() - w).norm() / w.norm() for ids, w in zip(draws, want)
        ]
        return torch.stack(errors).square().mean().sqrt().item()

    exact = new_model().float()
    fake_quantise(exact, format, variant)
    want = [exact(ids, use_cache=False).logits.double() for ids in draws]
    del exact
    torch.cuda.empty_cache()
    model = new_model()
    four_bits = distance(model)
    if variant.startswith(("prepared", "whole")):
        prepare(model, format, variant)
        ours = distance(compiled(model) if variant.endswith("backend") else model)
        del model
        torch.cuda.empty_cache()
        model = new_model()
    else:
        ours = distance(compiled(model))
    fake_quantise(model, format, variant)
    stock = distance(model)
    assert ours < 1.25 * stock, f"{variant} is off by {ours:.2e}, stock bfloat16 by {stock:.2e}"
    return {
        "table": "logits against float32 over the 4-bit values", "variant": variant, "format": format,
        "error": ours, "stock_bf16_error": stock, "error_before_quantisation": four_bits,
    }  # fmt: skip


def keep_grouped(model):
    """Keeps decode on grouped_mm, without the switch to batched_mm."""
    if hasattr(model, "_optimize_model_for_decode"):
        model._optimize_model_for_decode = contextlib.nullcontext


def run(variant: str, batches: list[int], given: argparse.Namespace) -> Iterator[record.Row]:
    format = given.format
    torch._dynamo.reset()
    if not variant.startswith("stock"):
        yield check(format, variant)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    model = new_model()
    before = expert_bytes(model)
    if variant.startswith(("prepared", "whole")):
        prepare(model, format, variant)
        gc.collect()
        torch.cuda.empty_cache()
    if variant == "stock-grouped":
        keep_grouped(model)
    after = expert_bytes(model)
    yield {
        "table": "expert bytes", "variant": variant, "gb": after / 1e9, "ratio_to_bf16": after / before,
    }  # fmt: skip
    backend = "fp4" if variant.endswith("backend") else "inductor"
    config = compile_config(backend, format, given.tensor_guards)
    for batch in batches:
        of = {"table": "decode", "variant": variant, "batch": batch}
        for loop in given.loops.split(","):
            if loop == "plain":
                ms, seconds = loop_ms(model, batch, config), (None, None)
            else:
                ours = {"custom_generate": fp4_ops.decoding_loop} if loop == "decoding_loop" else {}
                ms, *seconds = generate_ms(model, batch, config, **ours)
            yield {**of, "loop": loop, "ms": ms, **dict(zip(("first_call_s", "second_call_s"), seconds))}
            torch._dynamo.reset()
    if not given.no_prefill and variant != "stock-grouped":
        for graphs in (False, True):
            ms = prefill_ms(model, backend, format, graphs)
            yield {"table": "prefill", "variant": variant, "tokens": PREFILL, "cuda_graphs": graphs, "ms": ms}
            torch._dynamo.reset()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", default="stock,stock-grouped,backend,prepared")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--loops", default="generate,decoding_loop,plain")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument(
        "--tensor-guards",
        action="store_true",
        help="of Dynamo's guards keep those on tensors (docs/compiler.md)",
    )


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    batches = [int(b) for b in args.batches.split(",")]
    for variant in args.variants.split(","):
        only_big = variant == "stock-grouped"
        yield from run(variant, batches[-1:] if only_big else batches, args)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
