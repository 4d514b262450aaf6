"""Runs as one of two processes that split, wrap and synchronise models: `python split_models.py FOLDER`.

FOLDER has `bf16` and `4bit`, folders of one tiny model. `rank0.json` in FOLDER gets the outcome of each
situation. Rank, number of processes and the port come from the environment, as torchrun sets them.
"""

from __future__ import annotations

import copy
import json
import os
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from rank_situations import FOLDER, SITUATIONS, load, logits, situation, split
from recorder import relative_error
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fp4_ops
from fp4_ops.experts.find import is_experts
from fp4_ops.integrations.transformers.quantizer import FP4Config

without_inductor = mock.patch("torch._inductor.compile_fx.compile_fx", lambda gm, *_, **__: gm.forward)
"""Runs the graphs instead of compiling them. One situation here shows that Inductor compiles them."""


def prepared(seed: int = 0) -> Any:
    """Return a model with weights that depend on the seed."""
    model, generator = load("bf16"), torch.Generator().manual_seed(seed)
    for module in filter(is_experts, model.modules()):
        module.down_proj.data = torch.randn(module.down_proj.shape, generator=generator)
    fp4_ops.prepare(model, activation="bf16")
    return model


# --- models that transformers splits ---


@situation
def a_folder_with_pipeline_parallelism():
    return relative_error(logits(split("4bit", pp_size=2)), logits(load("4bit")))


@situation
def a_folder_with_fsdp():
    return relative_error(logits(split("4bit", fsdp_size=2)), logits(load("4bit")))


@situation
def quantising_with_fsdp():
    return relative_error(logits(split("bf16", FP4Config("nvfp4"), fsdp_size=2)), logits(load("bf16")))


@situation
def prepare_of_a_list_of_experts_that_are_split():
    mesh = init_device_mesh("cpu", (2,))
    block = nn.Module()
    block.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)) for _ in range(4))
    for expert in block.experts:
        weight = distribute_tensor(expert[0].weight.detach(), mesh, [Shard(0)])
        expert[0].weight = nn.Parameter(weight, requires_grad=False)
    return str(fp4_ops.prepare(block))


# --- FSDP2, DDP, state dicts ---


@situation
def prepare_after_fully_shard():
    model = load("bf16")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return str(fp4_ops.prepare(model))


@situation
def fully_shard_after_prepare():
    model = prepared()
    want = logits(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return relative_error(logits(model), want)


@situation
def ddp_broadcasts_buffers():
    model, want = prepared(seed=dist.get_rank()), logits(prepared(seed=0))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    wrapped = DistributedDataParallel(model)
    return relative_error(logits(wrapped), want)


@situation
def a_state_dict_from_rank_0():
    model, want = prepared(seed=dist.get_rank()), logits(prepared(seed=0))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = model.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=options)
    return relative_error(logits(model), want)


@situation
def a_full_state_dict_after_fully_shard():
    model, other = prepared(), prepared(seed=1)
    want = logits(model)
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = copy.deepcopy(get_model_state_dict(model, options=options))
    if dist.get_rank() == 0:  # only this rank gets the state
        other.load_state_dict(state)
        return relative_error(logits(other), want)
    return 0.0


@situation
def buffers_are_broadcast_one_by_one():
    model, want = prepared(seed=dist.get_rank()), logits(prepared(seed=0))
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    return relative_error(logits(model), want)


# --- DTensors as operands ---


def _mm(placement: Any, of: str) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.randn(4, 64), torch.ops.fp4.quantize(torch.randn(32, 64), "int4")[:2]
    split = [distribute_tensor(t, mesh, [placement]) for t in (x, *w)]
    chosen = [d if name in of else t for name, d, t in zip("xps", split, (x, *w))]
    return str(type(torch.ops.fp4.mm(*chosen, None, format="int4")))


@situation
def operators_with_sharded_rows():
    return _mm(Shard(0), "x")


@situation
def operators_with_sharded_operands():
    return _mm(Shard(0), "xps")


@situation
def operators_with_replicated_operands():
    return _mm(Replicate(), "xps")


@situation
def an_fp4_tensor_that_is_split():
    mesh = init_device_mesh("cpu", (2,))
    w = fp4_ops.quantize(torch.randn(32, 64), "nvfp4")
    return str(distribute_tensor(w, mesh, [Shard(0)]))


@situation
@without_inductor
def the_backend_with_sharded_experts():
    """The backend leaves experts alone if one of their tensors is split. Their results stay right."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    w13, w2 = torch.randn(4, 2 * 32, 64) / 8, torch.randn(4, 64, 32) / 6

    class Experts(nn.Module):
        def __init__(self, split: bool):
            super().__init__()
            self.w13 = nn.Parameter(distribute_tensor(w13, mesh, [Shard(0)]) if split else w13, False)
            self.w2 = nn.Parameter(distribute_tensor(w2, mesh, [Shard(0)]) if split else w2, False)
            self.router = nn.Linear(64, 4, bias=False)

        def forward(self, x):
            whole = [w.full_tensor() if isinstance(w, DTensor) else w for w in (self.w13, self.w2)]
            scores = self.router(x).softmax(-1)
            gate, up = torch.einsum("th,enh->etn", x, whole[0]).chunk(2, -1)
            out = torch.einsum("etn,ehn->eth", F.silu(gate) * up, whole[1])
            return torch.einsum("eth,te->th", out, scores)

    one, two = Experts(True), Experts(False)
    two.router = one.router
    x = torch.randn(6, 64)
    with torch.no_grad():
        got = torch.compile(one, backend="fp4", options={"activation": "bf16"})(x)
        return [relative_error(got, two(x)), str(fp4_ops.explain(one, x))]


class LocalExperts(nn.Module):
    """Experts like torchtitan's: the experts of this process by `to_local()`, zero weights for other tokens,
    and an all-reduce."""

    def __init__(self, mesh: Any, also: bool = False):
        super().__init__()
        weights = {"w13": torch.randn(4, 2 * 32, 64) / 8, "w2": torch.randn(4, 64, 32) / 6}
        for name, w in weights.items():
            setattr(self, name, nn.Parameter(distribute_tensor(w, mesh, [Shard(0)]), False))
        self.router, self.also, self.first = nn.Linear(64, 4, bias=False), also, 2 * dist.get_rank()

    def forward(self, x):
        w13, w2 = self.w13.to_local(), self.w2.to_local()
        scores, ids = self.router(x).softmax(-1).topk(2)
        here = torch.zeros(x.shape[0], 4).scatter(1, ids, scores)[:, self.first : self.first + 2]
        gate, up = torch.einsum("th,enh->etn", x, w13).chunk(2, -1)
        out = torch.einsum("etn,ehn->eth", F.silu(gate) * up, w2)
        out = torch.einsum("eth,te->th", out, here)
        out = funcol.all_reduce(out, "sum", dist.group.WORLD)
        return out + self.w2.full_tensor().sum() * 0 if self.also else out


@situation
def the_backend_sees_through_to_local():
    """Returns [error against 4-bit experts, error after a weight changed, number of rewritten sites in
    explain's report, its text]."""
    model = LocalExperts(init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    twin, x = copy.deepcopy(model), torch.randn(6, 64)
    compiled = torch.compile(model, backend="fp4", options={"activation": "bf16"})

    def want() -> torch.Tensor:
        for name in ("w13", "w2"):
            local = getattr(model, name).to_local()
            getattr(twin, name).to_local().copy_(fp4_ops.quantize(local, "nvfp4").dequantize())
        return twin(x)

    with torch.no_grad():
        first = relative_error(compiled(x), want())
        model.w2.to_local().mul_(-2)
        second = relative_error(compiled(x), want())
        report = fp4_ops.explain(model, x)
    return [first, second, sum(site.rewritten for site in report.sites), str(report)]


@situation
@without_inductor
def the_backend_where_a_part_is_read_otherwise_too():
    model = LocalExperts(init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), also=True)
    x = torch.randn(6, 64)
    with torch.no_grad():
        compiled = torch.compile(model, backend="fp4", options={"activation": "bf16"})
        report = fp4_ops.explain(model, x)
        rewritten = sum(site.rewritten for site in report.sites)
        return [relative_error(compiled(x), model(x)), rewritten, str(report)]


class Trainable(LocalExperts):
    """The weights require gradients, which the model turns on or off itself. No other process is asked."""

    def __init__(self, mesh: Any, grad: bool):
        super().__init__(mesh)
        self.requires_grad_()
        self.grad = grad

    def forward(self, x):
        with torch.set_grad_enabled(self.grad):
            w13, w2 = self.w13.to_local(), self.w2.to_local()
            scores, ids = self.router(x).softmax(-1).topk(2)
            here = torch.zeros(x.shape[0], 4).scatter(1, ids, scores)[:, self.first : self.first + 2]
            gate, up = torch.einsum("th,enh->etn", x, w13).chunk(2, -1)
            return torch.einsum("eth,te->th", torch.einsum("etn,ehn->eth", F.silu(gate) * up, w2), here)


@situation
@without_inductor
def the_backend_where_a_model_turns_gradients_on_or_off():
    """Returns, for each, [relative error, whether the result has gradients and in eager, rewritten sites]."""
    found, mesh = [], init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    for grad in (True, False):
        model, x = Trainable(mesh, grad), torch.randn(6, 64)
        with torch.set_grad_enabled(not grad):
            torch.compiler.reset()
            want = model(x)
            got = torch.compile(model, backend="fp4", options={"activation": "bf16"})(x)
            sites = fp4_ops.explain(model, x).sites
        rewritten = sum(site.rewritten for site in sites)
        found.append([relative_error(got, want), got.requires_grad, want.requires_grad, rewritten])
    return found


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    fp4_ops.register_with_transformers()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, function in SITUATIONS.items():
        torch.manual_seed(0)
        torch.compiler.reset()
        try:
            results[name] = function()
        except Exception as reason:
            results[name] = f"{type(reason).__name__}: {reason}"
        dist.barrier()
    (FOLDER / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # a normal exit may abort, because a thread of gloo may still run then
