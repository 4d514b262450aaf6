"""Measures how long it takes to put a trainer's new weights into a 4-bit layer of Qwen3-30B-A3B.

    python benchmarks/new_weights.py [--format nvfp4] [--rounds 3] [--device cuda]

The weights are 128 experts of 768 x 2048 in bf16, already on the device. They are stacked, or one tensor for
each matrix, or one tensor for each matrix in random order ("mixed"), so that gate and up of an expert come at
different times. `load_state_dict` gets all of them at once, `fp4_ops.update` one by one. `waiting_mib`: the
largest memory of halves that wait for the other half.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from functools import partial

import record
import torch
from torch import Tensor, nn

import fp4_ops
from fp4_ops.meta.formats import FORMATS

SIZES = {"num_experts": 128, "hidden_size": 2048, "moe_intermediate_size": 768}


def layer(device: torch.device) -> nn.Module:
    """Makes the experts of one decoder layer, in bf16."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(**SIZES, experts_implementation="grouped_mm")
    with torch.device(device):
        experts = Qwen3MoeExperts(config).to(torch.bfloat16)
    for p in experts.parameters():
        torch.nn.init.normal_(p, 0, 0.02)
    return nn.ModuleDict({"experts": experts})


def per_expert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the same weights, with one tensor for each matrix."""
    made = {}
    for e, (both, down) in enumerate(zip(state["experts.gate_up_proj"], state["experts.down_proj"])):
        gate, up = both.chunk(2)
        for part, w in (("gate", gate), ("up", up), ("down", down)):
            made[f"experts.{e}.{part}_proj.weight"] = w
    return made


def waiting(model: nn.Module) -> int:
    """Returns the bytes of halves that wait for the other half."""
    held = [m.__dict__.get("_halves", {}) for m in model.modules()]
    return sum(half.rows.nbytes for halves in held for one in halves.values() for half in one.values())


def at_once(model: nn.Module, items: list[tuple[str, Tensor]]) -> None:
    model.load_state_dict(dict(items))


def one_by_one(model: nn.Module, items: list[tuple[str, Tensor]]) -> None:
    for name, values in items:
        fp4_ops.update(model, name, values)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Measures seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", nargs="+", default=["nvfp4", "mxfp4", "int4"], choices=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    device = torch.device(args.device)
    for format in args.format:
        model = layer(device)
        state = {name: torch.randn_like(p) * 0.02 for name, p in model.named_parameters()}
        fp4_ops.prepare(model, format)
        singles = per_expert(state)
        mixed = list(singles.items())
        random.Random(0).shuffle(mixed)
        gib = sum(t.nbytes for t in state.values()) / 2**30
        orders = {"stacked": [*state.items()], "one by one": [*singles.items()], "mixed": mixed}
        for sent, items in orders.items():
            for name, values in items:  # warm
                fp4_ops.update(model, name, values)
            most = 0
            for name, values in items if sent == "mixed" else ():
                fp4_ops.update(model, name, values)
                most = max(most, waiting(model))
            for way, send in (("load_state_dict", at_once), ("update", one_by_one)):
                seconds = min(timed(partial(send, model, items), device) for _ in range(args.rounds))
                yield {
                    "table": "update", "format": format, "sent": sent, "way": way, "tensors": len(items),
                    "seconds": seconds, "gib_per_s": gib / seconds, "waiting_mib": most / 2**20,
                }  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
