"""Runs as one of several processes that have parts of random experts, or of a sequence: `python
random_shares.py FOLDER`.

`rank0.json`, ... in FOLDER get the outcome of each situation.
"""

from __future__ import annotations

import copy
import json
import os
import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from rank_situations import FOLDER, SITUATIONS, situation
from recorder import Recorder, relative_error, token_errors
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AttentionInterface, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import fp4_ops
from fp4_ops.meta.formats import FORMATS

SEED = int(os.environ.get("FP4_TEST_SEED", "0"))
DRAWS = 12


# --- experts that DTensors spread or split, as transformers does ---


def whole(rng: random.Random) -> Any:
    """Make experts of random sizes, the same on all ranks."""
    experts = rng.randint(1, 9)
    config = Qwen3MoeConfig(
        hidden_size=2 * rng.randint(16, 70), num_experts=experts,
        moe_intermediate_size=dist.get_world_size() * 2 * rng.choice((8, 16, 24, 32, 64, rng.randint(8, 70))),
    )  # fmt: skip
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    holder: Any = nn.Module()
    holder.experts = Qwen3MoeExperts(config)
    for p in holder.parameters():
        p.data = torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5
    return holder


def divided(holder: Any, kind: str) -> Any:
    """Make a copy of which each rank has a part. Its forward adds up the results of the ranks."""
    ranks, rank, mine = dist.get_world_size(), dist.get_rank(), copy.deepcopy(holder)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep" if kind == "spread" else "tp",))
    rows = Shard(0) if kind == "spread" else _StridedShard(1, split_factor=2)
    columns = Shard(0) if kind == "spread" else Shard(2)
    module = mine.experts
    for name, placement in (("gate_up_proj", rows), ("down_proj", columns)):
        part = distribute_tensor(getattr(module, name).detach(), mesh, [placement], src_data_rank=None)
        module._parameters[name] = nn.Parameter(part, requires_grad=False)
    each, own = -(-module.num_experts // ranks), module.forward

    def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if kind == "spread":
            elsewhere = ids // each != rank
            ids, weights = torch.where(elsewhere, each, ids % each), weights.masked_fill(elsewhere, 0)
        out = own(x, ids, weights)
        dist.all_reduce(out)
        return out

    module.forward = forward
    return mine


def expected(holder: Any, kind: str, format: str) -> str:
    """Return a part of the error that must be raised, or "" if nothing is wrong."""
    ranks, experts = dist.get_world_size(), holder.experts
    if kind == "spread":
        return f"{experts.num_experts} experts must be a multiple" if experts.num_experts % ranks else ""
    block = FORMATS[format].block
    return f"each part must be a multiple of {block}" if experts.intermediate_dim // ranks % block else ""


@situation
def experts_of_random_sizes():
    rng, told = random.Random(SEED), []
    for _ in range(DRAWS):
        one, kind, format = whole(rng), rng.choice(("spread", "split")), rng.choice((*FORMATS,))
        mine, why = divided(one, kind), expected(one, kind, format)
        top_k, tokens = rng.randint(1, one.experts.num_experts), rng.randint(1, 9)
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        x = torch.randn(tokens, one.experts.hidden_dim, generator=generator)
        ids = torch.rand(tokens, one.experts.num_experts, generator=generator).topk(top_k).indices
        given = x, ids, torch.rand(tokens, top_k, generator=generator)
        what = f"{kind} {format} {dict(one.named_parameters())['experts.down_proj'].shape}"
        try:
            fp4_ops.prepare(mine, format, activation="bf16")
        except ValueError as reason:
            told.append([what, why and why in str(reason)])
            continue
        fp4_ops.prepare(one, format, activation="bf16")
        with torch.no_grad():
            error = relative_error(mine.experts(*given), one.experts(*given))
        told.append([what, not why and error < 1e-5])
    return [what for what, right in told if not right] or "right"


# --- a sequence of which each rank has a part, where attention sees the whole sequence ---


def of_all(t: Tensor) -> Tensor:
    """Gather [B, heads, L, D] of all ranks. Dynamo of torch 2.11 can gather only along the first
    dimension."""
    whole = functional.all_gather_tensor(t.transpose(0, 2).contiguous(), 0, dist.group.WORLD)
    return whole.transpose(0, 2)


def seen_by_all(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float = 1.0, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention to the keys of all ranks. Each rank has the same number of keys."""
    ranks, rank, n = dist.get_world_size(), dist.get_rank(), query.shape[2]
    key, value = (of_all(t).repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    causal = torch.arange(ranks * n) <= (torch.arange(n) + rank * n)[:, None]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=causal, scale=scaling)
    return out.transpose(1, 2), None


def tiny() -> Any:
    torch.manual_seed(SEED % 2**31)
    config = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=2 * dist.get_world_size(), vocab_size=64,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        for p in model.parameters():
            if p.dim() == 3:
                p.normal_(0, 1 / 8)
    return model


def a_part_of_a_sequence(compiled: bool, **options: Any) -> Any:
    AttentionInterface.register("seen_by_all", seen_by_all)
    one, mine = tiny(), tiny()
    fp4_ops.prepare(one, activation="bf16")
    fp4_ops.prepare(mine, activation="bf16", **options)
    mine.set_attn_implementation("seen_by_all")
    each, rank = 5, dist.get_rank()
    whole_ids = torch.randint(0, 64, (2, each * dist.get_world_size()))
    part = slice(rank * each, (rank + 1) * each)
    positions = torch.arange(whole_ids.shape[1])[None, part]
    recorder = Recorder(activation="bf16")
    run: Any = torch.compile(mine, backend=recorder, fullgraph=True) if compiled else mine
    with torch.no_grad():
        want = one(whole_ids, use_cache=False).logits[:, part]
        got = run(input_ids=whole_ids[:, part], position_ids=positions, use_cache=False).logits
    typical, whole_error = token_errors(got, want)
    operator = "fp4::moe_ep" if options else "fp4::moe"
    right = typical < 1e-5 and whole_error < 1e-3 and (not compiled or recorder.ops == [operator] * 2)
    return "right" if right else [typical, whole_error, recorder.ops]


@situation
def a_sequence_and_whole_experts():
    return a_part_of_a_sequence(False)


@situation
def a_sequence_and_spread_experts():
    return a_part_of_a_sequence(False, ep_group=dist.group.WORLD)


@situation
def a_sequence_and_whole_experts_compiled():
    return a_part_of_a_sequence(True)


@situation
def a_sequence_and_spread_experts_compiled():
    return a_part_of_a_sequence(True, ep_group=dist.group.WORLD)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, function in SITUATIONS.items():
        torch.compiler.reset()
        try:
            results[name] = function()
        except Exception as reason:
            results[name] = f"{type(reason).__name__}: {reason}"
            if os.environ.get("TRACE"):
                import traceback

                traceback.print_exc()
        dist.barrier()
    (FOLDER / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # a normal exit may abort, because a thread of gloo may still run then
