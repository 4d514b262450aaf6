"""Compares transformers' `generate` and `generate_batch` with and without fp4_ops, which is one additional
line of code.

    python benchmarks/h200_eager.py [--batches 1,8,64]

The model is that of h200_generate (a Qwen3-MoE with 30B-A3B layer shapes, 16 layers, random bfloat16
weights). `eager generate` uses a dynamic cache and compiles nothing; ms is the median between CUDA events on
consecutive tokens, in the second call. `generate_batch` continues 32 requests of 32 tokens by 64 tokens each,
with transformers' continuous batching; seconds are those of the second call. The variants are:

    stock             the model as it is
    prepared          fp4_ops.prepare(model)
    prepared-backend  the same, generate_batch with CompileConfig(backend="fp4") and CUDA graphs
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator

import record
import torch
from h200_generate import CONFIG, PROMPT, STEPS, Clock, new_model
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList

import fp4_ops

REQUESTS, NEW = 32, 64


@torch.no_grad()
def step_ms(model, batch: int) -> float:
    ids = torch.randint(1, CONFIG.vocab_size, (batch, PROMPT), device="cuda")
    for _ in range(2):
        clock = Clock()
        model.generate(
            ids, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False,
            logits_processor=LogitsProcessorList([clock]),
        )  # fmt: skip
    return clock.step_ms()


def batch_s(model, backend: bool) -> float:
    prompts = torch.randint(1, CONFIG.vocab_size, (REQUESTS, PROMPT)).tolist()
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options = {}
    if backend:
        compiled = CompileConfig(backend="fp4", mode=None, fullgraph=False, dynamic=True)
        options = {
            "varlen_compile_config": compiled, "decode_compile_config": compiled, "use_cuda_graph": True,
        }  # fmt: skip
    spent = []
    for _ in range(2):
        batching = ContinuousBatchingConfig(**options)
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching
        )
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
        told = [r.error for r in found.values() if r.error]
        assert not told and len(found) == REQUESTS, told[:1]
        assert all(len(r.generated_tokens) == NEW for r in found.values())
    return spent[-1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", default="1,8,64")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    model = new_model()
    for variant in ("stock", "prepared", "prepared-backend"):
        if variant == "prepared":
            fp4_ops.prepare(model)
            gc.collect()
            torch.cuda.empty_cache()
        if variant != "prepared-backend":
            for batch in (int(b) for b in args.batches.split(",")):
                of = {"table": "eager generate", "variant": variant, "batch": batch}
                yield {**of, "ms": step_ms(model, batch)}
        seconds = batch_s(model, variant.endswith("backend"))
        of = {"table": "generate_batch", "variant": variant, "requests": REQUESTS, "new_tokens": NEW}
        yield {**of, "s": seconds}
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
