"""Generates text with a model whose experts are in host memory, and with the same model on the GPU.

    python benchmarks/slots_model.py [--layers 6] [--steps 256] [--batches 1,8] [--tokens 2048,8192]
                                     [--experts GPU,slots] [--share 0.4] [--outside keep]

The model is a Qwen3-MoE with 30B-A3B's layer shapes and random experts in nvfp4. First the whole model is on
the GPU. Then it has a memory budget with slots for a share of the experts; the experts of one token are 1/16
of all. `--outside` is the format of attention and head. `generate` runs with a static cache and
`decoding_loop`, which captures a step as a CUDA graph.

budget    `generate` with a long prompt and one token after it, in parts where the plan says so: what is
          allocated before, and the allocator's peak beside the budget.
prefill   ms of a forward pass.
generate  ms of a step; the share of the tokens that are those of the model on the GPU; the share that the
          same model gives in another call; graphs that Dynamo compiled in the first call and later; the
          growth of the allocator's memory from the first call of all steps to the last of --repeats.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import record
import torch
from slots import ms
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fp4_ops
from fp4_ops.models.expert_slots import ExpertSlots, place_experts
from fp4_ops.models.memory_plan import RESERVE_LEAST, RESERVE_SHARE, plan_memory

CONFIG: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "vocab_size": 151936, "max_position_embeddings": 40960, "pad_token_id": 0, "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
DEVICE, PROMPT = "cuda", 100


def new_model(layers: int, outside: str) -> Any:
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=layers, **CONFIG)).eval()
        torch.set_default_dtype(torch.float32)
    torch.nn.init.normal_(model.get_input_embeddings().weight)  # otherwise all tokens have the same routing
    fp4_ops.prepare(model, "nvfp4", attention=outside, head=outside)
    return model


def budget_for(model: Any, share: float) -> int:
    """Returns a budget that has slots for a share of the experts."""
    plan = plan_memory(model, 2**50)
    held = plan.dense_bytes + (share + 0.002) * plan.expert_bytes
    return int(max(held * RESERVE_SHARE / (RESERVE_SHARE - 1), held + RESERVE_LEAST))


def generated(model: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False,
        cache_implementation="static", custom_generate=fp4_ops.decoding_loop,
    )[:, ids.shape[1] :]  # fmt: skip


def generate(model: Any, ids: torch.Tensor, steps: int, repeats: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns the tokens of a call, and its measurements."""
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    tokens = generated(model, ids, steps)  # later calls have a cache of the same length
    compiled = stats["unique_graphs"] - before
    held = torch.cuda.memory_allocated()
    short = ms(lambda: generated(model, ids, 8))
    took = ms(lambda: generated(model, ids, steps), runs=repeats)
    again = generated(model, ids, steps)
    return tokens, {
        "repeat_ratio": (again == tokens).float().mean().item(),
        "ms": (took - short) / (steps - 8), "compiled": compiled,
        "compiled_later": stats["unique_graphs"] - before - compiled,
        "grown_mb": (torch.cuda.memory_allocated() - held) / 1e6,
    }  # fmt: skip


def counted(model: Any, call: Callable[[], Any]) -> tuple[Any, float | None]:
    """Returns the result of a call, and the share of the used experts that were in slots."""
    caches = [m for m in model.modules() if isinstance(m, ExpertSlots)]
    before = [c.read_counters() for c in caches]
    out = call()
    pairs = [(a - c, b - d) for cache, (c, d) in zip(caches, before) for a, b in [cache.read_counters()]]
    wanted, fetched = (sum(each) for each in zip(*pairs)) if pairs else (0, 0)
    return out, 1 - fetched / wanted if wanted else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--tables", default="budget,prefill,generate")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", default="2048,8192")
    parser.add_argument("--experts", default="GPU,slots")
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--outside", default="keep")


def clean() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def budget_rows(args: argparse.Namespace, lengths: list[int]) -> Iterator[record.Row]:
    model = new_model(args.layers, args.outside)
    budget = budget_for(model, args.share)
    plan = place_experts(model, budget)
    print(plan)
    clean()
    for tokens in lengths:
        text = torch.randint(1, CONFIG["vocab_size"], (1, tokens), device="cuda")
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run = functools.partial(model.generate, text, max_new_tokens=1, do_sample=False)
        took = ms(run, runs=1)
        yield {
            "table": "budget", "tokens": tokens, "at_once": plan.prompt_tokens, "ms": took,
            "held_gb": held / 1e9, "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            "budget_gb": budget / 1e9,
        }  # fmt: skip


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    tables, lengths = args.tables.split(","), [int(n) for n in args.tokens.split(",")]
    with torch.no_grad():
        if "budget" in tables:
            yield from budget_rows(args, lengths)
            clean()
        if tables == ["budget"]:
            return
        model = new_model(args.layers, args.outside)
        vocabulary = CONFIG["vocab_size"]
        batches = [int(b) for b in args.batches.split(",") if b]
        prompts = {b: torch.randint(1, vocabulary, (b, PROMPT), device="cuda") for b in batches}
        texts = [torch.randint(1, vocabulary, (1, int(n)), device="cuda") for n in lengths]
        want = {}
        for where in args.experts.split(","):
            budget = None
            if where == "slots":
                budget = budget_for(model, args.share)
                print(place_experts(model, budget))
                clean()
            torch.cuda.reset_peak_memory_stats()
            for text in texts if "prefill" in tables else ():
                run = lambda: model(text, use_cache=False, logits_to_keep=1)  # noqa: E731, B023
                took, hit = counted(model, lambda: ms(run))  # noqa: B023
                yield {
                    "table": "prefill", "experts": where, "tokens": text.shape[1], "ms": took,
                    "hit_ratio": hit, "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
                    "budget_gb": budget and budget / 1e9,
                }  # fmt: skip
            for batch, ids in prompts.items() if "generate" in tables else ():
                clean()
                (tokens, row), hit = counted(model, lambda: generate(model, ids, args.steps, args.repeats))  # noqa: B023
                same = (tokens == want.setdefault(batch, tokens)).float().mean().item()
                yield {
                    "table": "generate", "experts": where, "batch": batch, "steps": args.steps, **row,
                    "hit_ratio": hit, "equal_ratio": same,
                    "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
                    "budget_gb": budget and budget / 1e9,
                }  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
