"""Runs as one of several processes that spread or split a prepared model's experts: `python spread_models.py
FOLDER PATTERN FAMILY ...`.

FOLDER has `bf16` and `4bit` of each family. `rank0.json`, ... in FOLDER get the outcome of each situation
whose name contains PATTERN: [error of the typical token against one process, error of all logits, bytes of
the 4-bit experts on this rank, bytes of all].
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rank_situations import FOLDER, IDS, SITUATIONS, load, logits, situation, split
from recorder import fake_quantised, token_errors
from torch import nn

import fp4_ops
from fp4_ops.distributed import workspace
from fp4_ops.experts.find import is_experts
from fp4_ops.experts.packed import PackedWeight
from fp4_ops.integrations.transformers.quantizer import FP4Config

FAMILIES = sys.argv[3:]


def exact(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether an error can come from the order of float32 sums. One or two tokens may have larger
    errors."""
    typical, whole = token_errors(got, want)
    return typical < 1e-5 and whole < 1e-3


def held(model: nn.Module) -> int:
    return sum(m.num_bytes for m in model.modules() if isinstance(m, PackedWeight))


def compared(model: nn.Module, one: nn.Module, ids: torch.Tensor = IDS) -> list[float]:
    return [*token_errors(logits(model, ids), logits(one, ids)), held(model), held(one)]


def prepared(folder: str, **kwargs: Any) -> Any:
    model = load(folder)
    fp4_ops.prepare(model, **{"activation": "bf16", **kwargs})
    return model


def own_ids() -> torch.Tensor:
    """Return this rank's tokens. Other ranks have other tokens, and another number of them."""
    return torch.randint(
        0, 128, (1 + dist.get_rank(), 5), generator=torch.Generator().manual_seed(dist.get_rank())
    )


# --- whole models, whose experts prepare spreads ---


@situation
def a_group_of_ranks_with_own_tokens(family: str):
    model = load(f"{family}/bf16")
    report = fp4_ops.prepare(model, activation="bf16", ep_group=dist.group.WORLD)
    assert report.division == ""  # each rank has its own tokens
    assert all(m.part.kind == "spread" for m in recipes(model))
    return compared(model, prepared(f"{family}/bf16"), own_ids())


@situation
def a_group_that_generates(family: str):
    """The same number of steps on all ranks, with tokens of their own."""
    model, one = prepared(f"{family}/bf16", ep_group=dist.group.WORLD), prepared(f"{family}/bf16")
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    got, want = (m.generate(own_ids(), **options) for m in (model, one))
    wrong = float((got != want).sum())
    return [wrong, wrong, held(model), held(one)]


@situation
def a_group_and_activations_by_device(family: str):
    model = prepared(f"{family}/bf16", ep_group=dist.group.WORLD, activation="auto")
    return compared(model, prepared(f"{family}/bf16", activation="auto"), own_ids())


def recipes(model: nn.Module) -> list[Any]:
    return [m._fp4_recipe for m in model.modules() if hasattr(m, "_fp4_recipe")]


# --- models that transformers splits, in 16 bits until prepare ---


def after(family: str, activation: str = "bf16", **sizes: Any) -> list[float]:
    model = split(f"{family}/bf16", **sizes)
    report = fp4_ops.prepare(model, activation=activation)
    kind = next((r.part.kind for r in recipes(model) if r.part), None)  # gpt_oss's plan splits only attention
    assert kind is None or f"experts are {kind}; by an estimate" in str(report), report
    return compared(model, prepared(f"{family}/bf16", activation=activation))


@situation
def prepare_after_expert_parallelism(family: str):
    return after(family, tp_size=dist.get_world_size(), ep_size=dist.get_world_size())


@situation
def own_implementation_of_expert_parallelism(family: str):
    """Before prepare, transformers' own implementation runs; afterwards, the operator."""
    size = dist.get_world_size()
    model = split(f"{family}/bf16", tp_size=size, ep_size=size, ep_implementation="fp4")
    assert exact(logits(model), logits(load(f"{family}/bf16")))
    fp4_ops.prepare(model, activation="bf16")
    return compared(model, prepared(f"{family}/bf16"))


@situation
def compiled_implementation_of_expert_parallelism(family: str):
    """One graph, in which the operator is called for each layer."""
    size = dist.get_world_size()
    model = split(f"{family}/bf16", tp_size=size, ep_size=size, ep_implementation="fp4")
    fp4_ops.prepare(model, activation="bf16")
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        errors = compared(torch.compile(model, backend=backend, fullgraph=True), prepared(f"{family}/bf16"))
    calls = [str(n.target) for g in graphs for n in g.graph.nodes if "fp4" in str(n.target)]
    assert len(graphs) == 1 and len(calls) == len(recipes(model)), calls
    assert all("moe_ep" in call for call in calls), calls
    return errors


@situation
def own_implementation_from_a_folder(family: str):
    size = dist.get_world_size()
    return loaded(family, tp_size=size, ep_size=size, ep_implementation="fp4")


@situation
def own_implementation_with_own_batches(family: str):
    """Each process has a batch of its own: FSDP holds what is not experts."""
    return own_batches(family, "fp4")


@situation
def transformers_all_to_all_with_own_batches(family: str):
    return own_batches(family, "auto")


def own_batches(family: str, implementation: str) -> list[float]:
    from transformers.distributed import DistributedConfig

    path, size = FOLDER / family / "4bit", dist.get_world_size()
    config = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation=implementation)
    options = {"activation": "bf16", "dtype": torch.float32}
    model = fp4_ops.load_checkpoint(None, path, distributed_config=config, **options)
    one = fp4_ops.load_checkpoint(None, path, **options)
    ids = torch.randint(0, 128, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    return compared(model, one, ids)


@situation
def prepare_after_tensor_parallelism(family: str):
    return after(family, tp_size=dist.get_world_size())


# --- 4-bit folders, and quantising while loading ---


def loaded(family: str, **sizes: Any) -> list[float]:
    model, one = split(f"{family}/4bit", **sizes), load(f"{family}/4bit")
    for m in (model, one):
        for recipe in recipes(m):
            object.__setattr__(recipe, "a_format", "none")
    assert recipes(model)
    return compared(model, one)


@situation
def a_folder_with_expert_parallelism(family: str):
    return loaded(family, tp_size=dist.get_world_size(), ep_size=dist.get_world_size())


@situation
def a_folder_with_tensor_parallelism(family: str):
    return loaded(family, tp_size=dist.get_world_size())


@situation
def a_folder_with_tp_plan_auto(family: str):
    """Activations are chosen by device: int8 here. If columns are split, the blocks are different."""
    model, one = load(f"{family}/4bit", tp_plan="auto"), load(f"{family}/4bit")
    return compared(model, one)


@situation
def bytes_read_by_a_rank(family: str):
    """Return bytes of the folder's 4-bit weights: [0, 0, here, all of them]."""
    from fp4_ops.checkpoints import files

    size, read = dist.get_world_size(), files.Reader.read
    bytes_read = 0

    def counted(self: Any, info: Any, device: Any = "cpu") -> torch.Tensor:
        nonlocal bytes_read
        bytes_read += info.nbytes
        return read(self, info, device)

    files.Reader.read = counted
    try:
        split(f"{family}/4bit", tp_size=size, ep_size=size)
        here, bytes_read = bytes_read, 0
        load(f"{family}/4bit")
    finally:
        files.Reader.read = read
    return [0.0, 0.0, here, bytes_read]


@situation
def a_folder_over_a_group(family: str):
    path = FOLDER / family / "4bit"
    options = {"activation": "bf16", "dtype": torch.float32}
    model = fp4_ops.load_checkpoint(None, path, ep_group=dist.group.WORLD, **options)
    return compared(model, fp4_ops.load_checkpoint(None, path, **options), own_ids())


@situation
def load_checkpoint_with_expert_parallelism(family: str):
    from transformers.distributed import DistributedConfig

    path, size = FOLDER / family / "4bit", dist.get_world_size()
    options = {"activation": "bf16", "dtype": torch.float32}
    config = DistributedConfig(tp_size=size, ep_size=size)
    model = fp4_ops.load_checkpoint(None, path, distributed_config=config, **options)
    return compared(model, fp4_ops.load_checkpoint(None, path, **options))


@situation
def quantising_with_expert_parallelism(family: str):
    size = dist.get_world_size()
    model = split(f"{family}/bf16", FP4Config("nvfp4", "bf16"), tp_size=size, ep_size=size)
    return compared(model, prepared(f"{family}/bf16"))


@situation
def quantising_with_tensor_parallelism(family: str):
    model = split(f"{family}/bf16", FP4Config("nvfp4", "bf16"), tp_size=dist.get_world_size())
    return compared(model, prepared(f"{family}/bf16"))


# --- the compiler's backend, of models in 16 bits ---


def in_parts(folder: str) -> Any:
    """Make a model whose experts have the 4-bit values of each process's columns, with separate scales."""
    model, size = load(folder), dist.get_world_size()
    for experts in filter(is_experts, model.modules()):
        gate, up = (half.chunk(size, 1) for half in experts.gate_up_proj.data.chunk(2, 1))
        rows = [fake_quantised(torch.cat(pair, 1), "nvfp4").chunk(2, 1) for pair in zip(gate, up)]
        experts.gate_up_proj.data = torch.cat([part for half in zip(*rows) for part in half], 1)
        columns = [fake_quantised(part, "nvfp4") for part in experts.down_proj.data.chunk(size, 2)]
        experts.down_proj.data = torch.cat(columns, 2)
    return model


def compiled(family: str, one: nn.Module, **sizes: Any) -> list[Any]:
    """Returns [errors against one process, fp4 operators in the graph, explain's text]."""
    model = split(f"{family}/bf16", tp_plan=WHOLE, **sizes)
    report = fp4_ops.explain(model, input_ids=IDS, use_cache=False)
    with torch.no_grad():
        fast = torch.compile(model, backend="fp4", options={"activation": "bf16"})
        errors = token_errors(logits(fast), logits(one))
        return [errors, sum(s.rewritten for s in report.sites), str(report)]


@situation
def backend_with_expert_parallelism(family: str):
    size = dist.get_world_size()
    return compiled(family, prepared(f"{family}/bf16"), tp_size=size, ep_size=size)


@situation
def backend_with_tensor_parallelism(family: str):
    return compiled(family, in_parts(f"{family}/bf16"), tp_size=dist.get_world_size())


class Workspace:
    """Stands for memory that GPUs share. Operators on the CPU do not use it."""

    def __init__(self, most: int = 2**40) -> None:
        self.most = most

    def sums(self, num_bytes: int) -> bool:
        return num_bytes <= self.most


def summed(model: nn.Module) -> list[Any]:
    """Returns [whether sums by fp4::all_reduce change a bit, explain's text about them]. Before, the model is
    compiled without them."""
    spaces, name = workspace._SPACES, dist.group.WORLD.group_name
    told = []
    for space in ({}, {name: Workspace()}):
        torch.compiler.reset()
        spaces.update(space)
        try:
            report = fp4_ops.explain(model, input_ids=IDS, use_cache=False)
            fast = torch.compile(model, backend="fp4", options={"activation": "bf16"})
            told.append((logits(fast), [line for line in str(report).splitlines() if "sums over" in line]))
        finally:
            spaces.pop(name, None)
    (one, before), (two, after) = told
    assert before == []
    return [torch.equal(one, two), after]


WHOLE = {"model.embed_tokens": "replicate", "lm_head": "replicate"}
"""Parameters that transformers otherwise reads as DTensors."""


@situation
def sums_with_expert_parallelism(family: str):
    size = dist.get_world_size()
    return summed(split(f"{family}/bf16", tp_plan=WHOLE, tp_size=size, ep_size=size))


@situation
def sums_with_tensor_parallelism(family: str):
    return summed(split(f"{family}/bf16", tp_plan=WHOLE, tp_size=dist.get_world_size()))


@situation
def sums_of_a_prepared_model(family: str):
    size = dist.get_world_size()
    model = split(f"{family}/bf16", tp_plan=WHOLE, tp_size=size, ep_size=size)
    fp4_ops.prepare(model, activation="bf16")
    return summed(model)


# --- what is refused ---


@situation
def refused_blocks_that_do_not_fit(family: str):
    model = split(f"{family}/bf16", tp_size=dist.get_world_size())
    want = logits(model)
    try:
        fp4_ops.prepare(model, "int4")
    except ValueError as reason:
        assert torch.equal(logits(model), want), "the model changed"
        return str(reason)


@situation
def refused_gradients(family: str):
    return str(fp4_ops.prepare(load(f"{family}/bf16"), trainable_inputs=True, ep_group=dist.group.WORLD))


@situation
def refused_twice(family: str):
    size = dist.get_world_size()
    return str(
        fp4_ops.prepare(split(f"{family}/bf16", tp_size=size, ep_size=size), ep_group=dist.group.WORLD)
    )


@situation
def refused_to_save(family: str):
    prepared(f"{family}/bf16", ep_group=dist.group.WORLD).save_pretrained(FOLDER / "never")


@situation
def refused_linears(family: str):
    return str(type(split(f"{family}/linears", tp_size=dist.get_world_size())))


@situation
def refused_a_group_and_a_plan(family: str):
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=dist.get_world_size())
    path = FOLDER / family / "4bit"
    return str(fp4_ops.load_checkpoint(None, path, distributed_config=config, ep_group=dist.group.WORLD))


@situation
def refused_mixtures_of_plans(family: str):
    plan = {"model.layers.*.mlp.experts.down_proj": "colwise"}
    return str(split(f"{family}/4bit", tp_size=dist.get_world_size(), tp_plan=plan))


# --- main ---


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    warnings.simplefilter("ignore")
    fp4_ops.register_with_transformers()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, function in SITUATIONS.items():
        for family in FAMILIES if re.search(sys.argv[2], name) else ():
            torch.manual_seed(0)
            torch.compiler.reset()
            try:
                results[f"{name} {family}"] = function(family)
            except Exception as reason:
                results[f"{name} {family}"] = f"{type(reason).__name__}: {reason}"
                if os.environ.get("TRACE"):
                    import traceback

                    traceback.print_exc()
            dist.barrier()
    (FOLDER / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # a normal exit may abort, because a thread of gloo may still run then
