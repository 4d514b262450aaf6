"""Measures a training step of LoRA adapters on layers of a Qwen3-MoE, with experts in bf16, in our 4 bits,
and in nf4.

    python benchmarks/adapters.py [--layers 4] [--tokens 4096] [--tiny]

The model has the shapes of Qwen3-30B-A3B (hidden 2048, 128 experts of 768, 8 for each token) and random
weights. All weights are frozen, except rank-16 adapters on q, k, v and o of each layer. transformers
checkpoints activations, and AdamW trains the adapters. Steps of all variants take turns; milliseconds are
medians. Peak memory is measured for each variant alone. First the gradients are checked, in float32 and with
two layers: the relative difference of all adapters' gradients from those of a model with the same weights,
dequantised.

    bf16          transformers' grouped_mm
    nvfp4         fp4_ops.prepare(model, activation="bf16", trainable_inputs=True)
    nvfp4-auto    the same with activation="auto"
    nf4           experts4bit_qlora.Experts4bit, if that package and bitsandbytes are installed
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator

import record
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fp4_ops
from fp4_ops.experts.find import is_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANK = 16


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        like = {"dtype": torch.float32, "device": base.weight.device}
        self.a = nn.Parameter(torch.randn(RANK, base.in_features, **like) / base.in_features**0.5)
        self.b = nn.Parameter(torch.randn(base.out_features, RANK, **like) * 1e-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.a.T.to(x.dtype)) @ self.b.T.to(x.dtype)


def new_model(config: Qwen3MoeConfig) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        for module in filter(is_experts, model.modules()):
            for p in module.parameters():
                p.normal_(0, 0.03)
    return model.requires_grad_(False)


def with_adapters(model: nn.Module, checkpointing: bool = True) -> list[nn.Parameter]:
    torch.manual_seed(1)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return [p for p in model.parameters() if p.requires_grad]


def dequantised_twin(model: nn.Module, config: Qwen3MoeConfig) -> nn.Module:
    """Returns the model in float32, with the dequantised weights of `model`."""
    twin = new_model(config).float()
    for own, packed in zip(filter(is_experts, twin.modules()), filter(is_experts, model.modules())):
        own.gate_up_proj.data = packed.gate_up_proj.dequantize()
        own.down_proj.data = packed.down_proj.dequantize()
    return twin


def to_nf4(model: nn.Module) -> None:
    from experts4bit_qlora import Experts4bit

    for layer in model.model.layers:
        e = layer.mlp.experts
        layer.mlp.experts = Experts4bit.from_float(e.gate_up_proj.data, e.down_proj.data).requires_grad_(
            False
        )


def variants() -> dict:
    def ours(activation: str):
        return lambda m: fp4_ops.prepare(m, activation=activation, trainable_inputs=True)

    found = {"bf16": lambda m: None, "nvfp4": ours("bf16"), "nvfp4-auto": ours("auto")}
    try:
        import experts4bit_qlora  # noqa: F401

        found["nf4"] = to_nf4
    except ImportError as error:
        print(f"nf4 left out: {error}", file=sys.stderr)
    return found


class Trainer:
    def __init__(self, change, config: Qwen3MoeConfig) -> None:
        self.model = new_model(config)
        change(self.model)
        self.adapters = with_adapters(self.model)
        self.optimizer = torch.optim.AdamW(self.adapters, 1e-4)

    def step(self, ids: torch.Tensor) -> None:
        self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def gradients(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    adapters = with_adapters(model, checkpointing=False)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return torch.cat([p.grad.flatten().double().cpu() for p in adapters])


def gradient_error(config: Qwen3MoeConfig, ids: torch.Tensor) -> float:
    """Returns the relative error of the gradients. All is computed in float32, so that rounding does not
    change the routing of any token."""
    model = new_model(config).float()
    fp4_ops.prepare(model, activation="bf16", trainable_inputs=True)
    want = gradients(dequantised_twin(model, config), ids)
    got = gradients(model, ids)
    return ((got - want).norm() / want.norm()).item()


def seconds(run) -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    h, i, e, k, vocab = (64, 32, 8, 2, 256) if args.tiny else (2048, 768, 128, 8, 32000)
    config = Qwen3MoeConfig(
        hidden_size=h, num_hidden_layers=args.layers, num_attention_heads=max(1, h // 64),
        num_key_value_heads=1, head_dim=64, num_experts=e, num_experts_per_tok=k, moe_intermediate_size=i,
        norm_topk_prob=True, vocab_size=vocab, max_position_embeddings=40960,
    )  # fmt: skip
    ids = torch.randint(0, vocab, (2, args.tokens // 2), device=DEVICE)
    error = gradient_error(Qwen3MoeConfig(**{**config.to_dict(), "num_hidden_layers": 2}), ids[:, :256])
    yield {"table": "gradients of 2 layers in float32", "relative_error": error}
    chosen = variants()
    memory = {}
    for name, change in chosen.items():
        gc.collect()
        trainer = Trainer(change, config)
        trainer.step(ids)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            trainer.step(ids)
            memory[name] = (held >> 20, torch.cuda.max_memory_allocated() >> 20)
        del trainer
        gc.collect()
    trainers = {name: Trainer(change, config) for name, change in chosen.items()}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for t in trainers.values():
        t.step(ids)
    for _ in range(args.rounds):
        for name, t in trainers.items():
            times[name].append(seconds(lambda t=t: t.step(ids)))
    base = statistics.median(times["bf16"])
    for name, ts in times.items():
        held, peak = memory.get(name, (None, None))
        yield {
            "table": "training step", "variant": name, "step_ms": round(1e3 * statistics.median(ts), 2),
            "held_mib": held, "peak_mib": peak, "speedup": round(base / statistics.median(ts), 3),
        }  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
