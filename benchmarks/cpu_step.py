"""A whole decoding step on a CPU: Qwen3-30B-A3B's layers and head, experts alone or everything in 4 bits.

    python benchmarks/cpu_step.py [--layers 2,6] [--formats nvfp4,int4] [--threads 16]

Random bfloat16 weights, batch 1, a static cache, torch.compile(backend="fp4"). A step is the median of
40. Two numbers of layers give the time of one layer and of the rest (embedding, norm, head, argmax), and
from these the time of the 48 layers of the model. First each variant's logits are compared with those of
the same model whose weights were replaced by the values of their codes.

    experts     fp4_ops.prepare(model, format): everything else is bf16
    whole       prepare(model, format, attention=format, head=format)
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Iterator

import cpu_machine
import record
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, StaticCache

import fp4_ops
from fp4_ops.outside_experts import kind_of

ALL_LAYERS, STEPS, SKIP, CONTEXT = 48, 40, 8, 96
VOCABULARY = 151936
SIZES = dict(
    hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    pad_token_id=0, eos_token_id=None, bos_token_id=None,
)  # fmt: skip
KINDS = {"experts": (), "whole": ("attention", "head")}


def new_model(layers: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = Qwen3MoeConfig(**SIZES, num_hidden_layers=layers, vocab_size=VOCABULARY)
    model = Qwen3MoeForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


@torch.no_grad()
def check(format: str, variant: str) -> record.Row:
    """The relative error against the dequantised weights. Activations are int8, so it is about 1e-2."""
    model = new_model(1)
    twin = copy.deepcopy(model)
    for name, p in twin.named_parameters():
        kind = "head" if name == "lm_head.weight" else kind_of(name)
        if p.dim() > 1 and (".experts." in name or kind in KINDS[variant]):
            packed = torch.ops.fp4.quantize(p, format)
            p.copy_(torch.ops.fp4.dequantize(*packed, format, p.dtype))
    fp4_ops.prepare(model, format, **dict.fromkeys(KINDS[variant], format))
    ids = torch.randint(1, VOCABULARY, (1, 8))
    want = twin(ids, use_cache=False).logits.double()
    error = ((model(ids, use_cache=False).logits.double() - want).norm() / want.norm()).item()
    assert error < 5e-2, f"{variant} in {format} is off by {error:.2e}"
    return {
        "table": "logits against the dequantised weights",
        "variant": variant,
        "format": format,
        "error": error,
    }


@torch.no_grad()
def step_ms(layers: int, format: str, variant: str) -> tuple[float, float]:
    """Milliseconds a step, and GB of all weights."""
    torch._dynamo.reset()
    model = new_model(layers)
    fp4_ops.prepare(model, format, **dict.fromkeys(KINDS[variant], format))
    held = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    compiled = torch.compile(model, backend="fp4", dynamic=False)
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT)
    logits = model(torch.randint(1, VOCABULARY, (1, 32)), past_key_values=cache, logits_to_keep=1).logits
    times = []
    for _ in range(STEPS + SKIP):
        start = time.perf_counter()
        token = logits[:, -1].argmax(-1, keepdim=True)
        logits = compiled(token, past_key_values=cache, logits_to_keep=1).logits
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[SKIP:]), sum(held.values()) / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", default="2,6")
    parser.add_argument("--formats", default="nvfp4,int4")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    torch.set_num_threads(args.threads)
    yield cpu_machine.bandwidth(args.threads)
    few, many = map(int, args.layers.split(","))
    for format in args.formats.split(","):
        for variant in KINDS:
            yield check(format, variant)
        for variant in KINDS:
            (low, _), (high, gb) = (step_ms(n, format, variant) for n in (few, many))
            layer = (high - low) / (many - few)
            rest = low - few * layer
            yield {
                "table": "step", "variant": variant, "format": format, "threads": args.threads,
                "layer_ms": layer, "rest_ms": rest, "model_ms": ALL_LAYERS * layer + rest, "layers": many,
                "gb": gb,
            }  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
