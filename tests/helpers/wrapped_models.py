"""Runs as one of several processes that wrap, save and load models with 4-bit experts: `wrapped_models.py
FOLDER`.

`rank0.json`, ... in FOLDER get the outcome of each situation, or of those whose names contain the second
argument. All processes make the same models, and compare results with those of one process.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from moe_models import build, config
from rank_situations import FOLDER, SITUATIONS, situation
from recorder import relative_error, token_errors
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fp4_ops
from fp4_ops.experts.packed import PackedWeight

PATTERN = sys.argv[2] if len(sys.argv) > 2 else ""
FAMILY = "gpt_oss"
"""A family whose experts have biases, which are different parameters on each process."""


def prepared(seed: int = 0, family: str = FAMILY, **kwargs: Any) -> Any:
    """Make a model that is the same on all processes. Each seed gives other weights."""
    torch.manual_seed(seed)
    model = build(family, torch.float32, "eager")
    fp4_ops.prepare(model, activation="bf16", **kwargs)
    return model.eval()


def spread(seed: int = 0, **kwargs: Any) -> Any:
    return prepared(seed, ep_group=dist.group.WORLD, **kwargs)


def own_ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 128, (2, 3 + dist.get_rank()), generator=generator)


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor | None = None) -> torch.Tensor:
    out = model(input_ids=own_ids() if ids is None else ids, use_cache=False).logits
    return out.full_tensor() if isinstance(out, DTensor) else out


def error(model: nn.Module, seed: int = 0, family: str = FAMILY) -> float:
    return relative_error(logits(model), logits(prepared(seed, family)))


class Outer(nn.Module):
    """A module around a model, as in training scripts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        return self.model(**kwargs)


def only_head_is_trained(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    return model


# --- experts that are spread: each process holds its own ---


@situation
def spread_in_ddp():
    return error(DistributedDataParallel(only_head_is_trained(spread())))


def alone(model: Any) -> Any:
    """Call the first experts module by itself. This is an error on rank 1, and rank 0 must not wait for rank
    1."""
    experts = next(m for m in model.modules() if hasattr(m, "_fp4_recipe"))
    if dist.get_rank() == 0:
        return [m.check_owner() for m in experts.modules() if isinstance(m, PackedWeight)] and "right"
    x, ids = torch.randn(3, 64), torch.tensor([[0, 1]] * 3)
    return str(type(experts(x, ids, torch.rand(3, 2))))


@situation
def spread_in_ddp_with_a_module_around():
    model = spread()
    DistributedDataParallel(Outer(only_head_is_trained(model)))
    return alone(model)


@situation
def buffers_that_are_broadcast_one_by_one():
    model = spread()
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    return alone(model)


@situation
def spread_in_fsdp():
    model = spread()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return error(model)


@situation
def own_state_dict():
    model, other = spread(), spread(seed=1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    return error(other)


@situation
def state_dict_of_rank_0():
    """Only rank 0 saves a file, and all ranks read it."""
    model = spread(seed=1)
    states = [spread().state_dict() if dist.get_rank() == 0 else spread() and None]
    dist.broadcast_object_list(states, 0)
    model.load_state_dict(states[0])
    return "loaded"


@situation
def state_dict_that_rank_0_broadcasts():
    model = spread(seed=1)
    state = spread().state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
    return "loaded"


@situation
def distributed_checkpoint_of_spread_experts():
    model, other = spread(), spread(seed=1)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=FOLDER / "spread")
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=FOLDER / "spread")
    set_model_state_dict(other, state["model"])
    return "loaded"


# --- several groups, meshes, pipelines ---


@situation
def spread_over_more_ranks_than_experts():
    """With three ranks, one has none; with two, each has one."""
    sizes = config("mixtral")
    sizes.num_local_experts = max(2, dist.get_world_size() - 1)
    models = []
    for group in (dist.group.WORLD, None):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(sizes, dtype=torch.float32).eval()
        for weight in model.parameters():
            if weight.dim() == 3:
                nn.init.normal_(weight, 0, 0.1)
        fp4_ops.prepare(model, activation="bf16", ep_group=group)
        models.append(logits(model))
    return relative_error(*models)


@situation
def models_over_several_groups():
    """Models over three groups, called in turn: all ranks, each rank alone, and all ranks again."""
    ranks, alone = dist.get_world_size(), None
    for rank in range(ranks):
        group = dist.new_group([rank])
        alone = group if rank == dist.get_rank() else alone
    groups = [dist.group.WORLD, alone, dist.new_group()]
    models = [prepared(seed, ep_group=group) for seed, group in enumerate(groups)]
    errors = [error(model, seed) for _ in range(2) for seed, model in enumerate(models)]
    return max(errors)


@situation
def mesh_of_replicas_and_experts():
    """Half of the ranks hold the experts of each replica. With two ranks, each rank is a replica."""
    size = max(dist.get_world_size() // 2, 1)
    shape = (dist.get_world_size() // size, size)
    if dist.get_world_size() % size:
        shape = (1, dist.get_world_size())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    model = prepared(ep_group=mesh["ep"].get_group())
    wrapped = DistributedDataParallel(only_head_is_trained(model), process_group=mesh["dp"].get_group())
    return max(error(model), error(wrapped))


class Stage(nn.Module):
    """One layer's experts block with its residual, as a stage of a pipeline."""

    def __init__(self, model: Any, layer: int) -> None:
        super().__init__()
        self.block = model.model.layers[layer].mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.block(x)
        return x + (out[0] if isinstance(out, tuple) else out)


@situation
def stages_of_a_pipeline():
    """With torch's own schedule, rank 0 has the first layer's experts, and rank 1 the second layer's."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    pair = dist.new_group([0, 1])
    model, rank = prepared(family="qwen3_moe"), dist.get_rank()
    torch.manual_seed(5)
    x = torch.randn(4, 6, 64)
    stages = [Stage(model, i) for i in range(2)]
    with torch.no_grad():
        want = stages[1](stages[0](x))
        if rank > 1:
            return 0.0
        stage = PipelineStage(stages[rank], rank, 2, torch.device("cpu"), group=pair)
        schedule = ScheduleGPipe(stage, 2)
        out = schedule.step(x) if rank == 0 else schedule.step()
    return relative_error(out, want) if rank == 1 else 0.0


# --- FSDP2 around a whole prepared model: its packed tensors as parameters ---


def sharded(seed: int = 0, trainable: bool = False, **options: Any) -> Any:
    model = prepared(seed, "qwen3_moe", trainable_inputs=trainable)
    fp4_ops.packed_as_parameters(model)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def held_share(model: nn.Module) -> float:
    """Return the share of the packed bytes that this process holds between calls."""
    whole = here = 0
    for weight in (m for m in model.modules() if isinstance(m, PackedWeight)):
        for p in weight.parameters():
            assert isinstance(p, DTensor)
            whole, here = whole + p.nbytes, here + p.to_local().nbytes
    return here / whole


@situation
def fsdp_around_packed_parameters():
    """Returns [error, share of the bytes before and after, error if activations are cast]."""
    model = sharded()
    before = held_share(model)
    wrong = error(model, family="qwen3_moe")
    cast = logits(sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    typical, _ = token_errors(cast.float(), logits(prepared(0, "qwen3_moe")))
    return [wrong, before, held_share(model), typical]


@situation
def fsdp_with_gradients_to_what_goes_in():
    """Check gradients of the embeddings, averaged over the processes as FSDP does."""

    def gradient(model: Any) -> torch.Tensor:
        model.train()
        model(input_ids=own_ids(), use_cache=False).logits.float().pow(2).mean().backward()
        grad = model.get_input_embeddings().weight.grad
        return grad.full_tensor() if isinstance(grad, DTensor) else grad

    got, want = gradient(sharded(trainable=True)), gradient(prepared(0, "qwen3_moe", trainable_inputs=True))
    dist.all_reduce(want)
    return relative_error(got, want / dist.get_world_size())


@situation
def fsdp_state_dicts():
    """Returns the results for [full state dicts into a whole model, full ones into shards, distributed
    checkpoints]."""
    model, options = sharded(), StateDictOptions(full_state_dict=True)
    full = copy.deepcopy(get_model_state_dict(model, options=options))
    whole, other, third = prepared(1, "qwen3_moe"), sharded(1), sharded(2)
    whole.load_state_dict(full)
    set_model_state_dict(other, copy.deepcopy(full), options=options)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=FOLDER / "sharded")
    state = {"model": get_model_state_dict(third)}
    dcp.load(state, checkpoint_id=FOLDER / "sharded")
    set_model_state_dict(third, state["model"])
    return [error(m, family="qwen3_moe") for m in (whole, other, third)]


@situation
def fsdp_of_converted_models():
    """`.to(dtype)` does not change codes."""
    model = sharded()
    want = logits(model)
    model.to(torch.float64)
    return relative_error(logits(model.to(torch.float32)), want)


@situation
def refused_parameters_of_parts():
    return str(fp4_ops.packed_as_parameters(spread()))


@situation
def refused_parameters_of_none():
    return str(fp4_ops.packed_as_parameters(nn.Linear(2, 2)))


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, function in SITUATIONS.items():
        if not re.search(PATTERN, name):
            continue
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
