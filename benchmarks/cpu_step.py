"""Measures a whole decoding step of Qwen3-30B-A3B on a CPU, with the experts in 4 bits, and the other weights
in 16, 8 or 4.

    python benchmarks/cpu_step.py [--layers N] [--formats nvfp4] [--variants experts,fp8,whole]
                                  [--threads 16] [--prefill 512] [--rounds 5]
                                  [--bench build/bin/llama-bench --folder /dev/shm]

The model has random bfloat16 weights and a static cache that holds 100 tokens, and runs with batch 1 under
torch.compile(backend="fp4"). Its layers hold equal numbers in memory of their own. The time of a step is the
median of 40. First, each variant's logits are compared with those of the same model with dequantised weights;
that model has one layer. `--prefill` also times an uncompiled prompt of this number of tokens, as `generate`
runs it.

With `--bench`, llama.cpp's steps take turns with ours, because the speed of a virtual machine changes. It has
as many layers of this model, and as many threads. llama-bench is its program (see llama_cpp.py). It reads a
file of random blocks that `gguf_models` writes into the folder. The times of a row are medians over the
rounds, and `speedup` is the median of llama.cpp's time divided by ours of the same round.

    experts     fp4_ops.prepare(model, format): everything else is bf16
    fp8         prepare(model, format, attention="fp8", head="fp8")
    whole       prepare(model, format, attention=format, head=format)
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import cpu_machine
import gguf_models
import llama_cpp
import record
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, StaticCache

import fp4_ops
from fp4_ops.host_memory import use_huge_pages
from fp4_ops.models.fp8_linear import quantize_rows
from fp4_ops.models.outside_experts import KEEP, kind_of

ALL_LAYERS, STEPS, SKIP, CONTEXT = 48, 40, 8, 100
VOCABULARY = 151936
SIZES = dict(
    hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    pad_token_id=0, eos_token_id=None, bos_token_id=None,
)  # fmt: skip
VARIANTS = ("experts", "fp8", "whole")


def outside(variant: str, format: str) -> dict[str, str]:
    """Returns the options of prepare for the weights outside the experts."""
    return dict.fromkeys(("attention", "head"), {"fp8": "fp8", "whole": format}.get(variant, KEEP))


def new_model() -> Qwen3MoeForCausalLM:
    """Makes a model of one layer whose weights repeat some random rows, because so many random numbers would
    take long."""
    config = Qwen3MoeConfig(**SIZES, num_hidden_layers=1, vocab_size=VOCABULARY, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16().eval()
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.requires_grad_(False)
    rows = torch.randn(2048, 4096).mul_(0.02).bfloat16()
    for p in model.parameters():
        if p.dim() == 1:
            p.data.fill_(1)
            continue
        rows = rows.roll(1, 0)
        for matrix in p.data.view(-1, *p.shape[-2:]):
            for part in matrix.split(len(rows)):
                part.copy_(rows[: part.shape[0], : part.shape[1]])
    return model


@torch.no_grad()
def check(format: str, variant: str) -> record.Row:
    """Returns the relative error against the dequantised weights. Activations are int8, so the error is about
    1e-2."""
    model = new_model()
    twin, options = copy.deepcopy(model), outside(variant, format)
    for name, p in twin.named_parameters():
        kind = "head" if name == "lm_head.weight" else kind_of(name)
        own = format if ".experts." in name else options.get(str(kind), KEEP)
        if p.dim() < 2 or own == KEEP:
            continue
        if own == "fp8":
            codes, scale = quantize_rows(p)
            p.copy_(codes.float() * scale[:, None])
        else:
            p.copy_(torch.ops.fp4.dequantize(*torch.ops.fp4.quantize(p, own), own, p.dtype))
    fp4_ops.prepare(model, format, **options)
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


def add_layers(model: Qwen3MoeForCausalLM, layers: int) -> None:
    """Copies a packed layer. The copies have huge pages, as packed weights have."""
    stack = model.model.layers
    for i in range(1, layers):
        memo = {}
        for t in (*stack[0].parameters(), *stack[0].buffers()):
            copied = use_huge_pages(torch.empty_like(t)).copy_(t.detach())
            memo[id(t)] = torch.nn.Parameter(copied, False) if isinstance(t, torch.nn.Parameter) else copied
        stack.append(copy.deepcopy(stack[0], memo))
        stack[i].self_attn.layer_idx = i
    model.config.num_hidden_layers = layers


class Steps:
    """Steps of a model, compiled once."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        torch._dynamo.reset()
        self.model = model
        self.compiled = torch.compile(model, backend="fp4", dynamic=False)
        self.cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 3 * (STEPS + SKIP))

    @torch.no_grad()
    def ms(self) -> dict[str, float]:
        """Measures milliseconds of a step: compiled, compiled without guards, and not compiled. They take
        turns.

        Without guards means under torch.compiler.set_stance(skip_guard_eval_unsafe=True).
        """
        self.cache.reset()
        ids = torch.randint(1, VOCABULARY, (1, CONTEXT))
        logits = self.model(ids, past_key_values=self.cache, logits_to_keep=1).logits
        times: dict[str, list[float]] = {"ms": [], "unguarded_ms": [], "eager_ms": []}
        for _ in range(STEPS + SKIP):
            for name, of in times.items():
                with torch.compiler.set_stance(skip_guard_eval_unsafe=name == "unguarded_ms"):
                    start = time.perf_counter()
                    token = logits[:, -1].float().argmax(-1, keepdim=True)  # as `generate` does
                    step = self.model if name == "eager_ms" else self.compiled
                    logits = step(token, past_key_values=self.cache, logits_to_keep=1).logits
                    of.append(time.perf_counter() - start)
        return {name: 1e3 * statistics.median(of[SKIP:]) for name, of in times.items()}


@torch.no_grad()
def prefill_ms(model: Qwen3MoeForCausalLM, tokens: int) -> float:
    """Measures milliseconds of an uncompiled forward pass over a prompt, the median of 3."""
    ids = torch.randint(1, VOCABULARY, (1, tokens))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        model(ids, use_cache=False, logits_to_keep=1)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


class Peer:
    """llama.cpp with the same layers on the CPU, in Q4_K_M."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=args.folder)
        file = Path(self.folder.name, "qwen3-30b.gguf")
        self.words = [str(args.bench), "-m", str(file), "-ngl", "0", "-t", str(args.threads)]
        self.gb = gguf_models.write(file, gguf_models.MODELS["qwen3-30b"], args.layers) / 1e9

    def ms(self, *test: str) -> float:
        ((found, _),) = llama_cpp.bench([*self.words, *test], False, [])
        record.ELSEWHERE["llama.cpp"] = found["build_commit"]
        return found["avg_ns"] / 1e6

    def step_ms(self) -> float:
        steps = llama_cpp.STEPS
        return self.ms("-p", "0", "-n", str(steps), "-d", str(CONTEXT)) / steps

    def prefill_ms(self, tokens: int) -> float:
        return self.ms("-p", str(tokens), "-n", "0")


def in_turn(steps: Steps, peer: Peer, rounds: int) -> dict[str, float]:
    """Measures steps of both, in rounds."""
    measured = [{**steps.ms(), "llama_cpp_ms": peer.step_ms()} for _ in range(rounds)]
    times = {name: statistics.median(r[name] for r in measured) for name in measured[0]}
    times["speedup"] = statistics.median(r["llama_cpp_ms"] / r["ms"] for r in measured)
    return {**times, "llama_cpp_gb": peer.gb}


def gigabytes(model: torch.nn.Module) -> float:
    held = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(held.values()) / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=ALL_LAYERS)
    parser.add_argument("--formats", default="nvfp4")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--bench", type=Path, help="llama-bench of a build of llama.cpp")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="for llama.cpp's file")
    parser.add_argument("--rounds", type=int, default=5, help="in which llama.cpp and fp4_ops take turns")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    torch.set_num_threads(args.threads)
    yield cpu_machine.bandwidth(args.threads)
    peer = Peer(args) if args.bench else None
    variants = args.variants.split(",")
    for format in args.formats.split(","):
        for variant in variants:
            yield check(format, variant)
        for variant in variants:
            model = new_model()
            fp4_ops.prepare(model, format, **outside(variant, format))
            add_layers(model, args.layers)
            names = {"variant": variant, "format": format, "threads": args.threads, "layers": args.layers}
            gb = gigabytes(model)
            if args.prefill:
                ms = prefill_ms(model, args.prefill)
                theirs = {"llama_cpp_ms": peer.prefill_ms(args.prefill)} if peer else {}
                yield {
                    "table": "prefill", **names, "tokens": args.prefill, "ms": ms,
                    "tokens_per_s": 1e3 * args.prefill / ms, **theirs,
                }  # fmt: skip
            steps = Steps(model)
            times = in_turn(steps, peer, args.rounds) if peer else steps.ms()
            yield {"table": "step", **names, **times, "tokens_per_s": 1e3 / times["ms"], "gb": gb}
            del model, steps
            gc.collect()


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
