"""DTensors as arguments: everything raises one clear error, which names the argument. One process.

Models that are split over two processes: test_distributed.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checkpoint_samples import tiny
from samples import SAMPLES, sample
from torch import nn

import fp4_ops
from fp4_ops.experts.find import is_experts

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)


@pytest.fixture(scope="module")
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def whole(t: torch.Tensor, mesh) -> DTensor:
    """On each process; gloo, over which `distribute_tensor` would send it, knows no float8."""
    return DTensor.from_local(t, mesh, [Replicate()], run_check=False)


def says(name: str, placed: str = "") -> str:
    """Return a regular expression that matches the errors."""
    return (
        rf": {name} is a DTensor, placed {placed}.* on 1 process; it must be a plain tensor\. "
        rf"Pass {name}\.to_local\(\).*{name}\.full_tensor\(\).*docs/deployment\.md"
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("op", SAMPLES)
def test_operators_name_the_argument(op, mode, mesh):
    """Each tensor alone, and all at once, of which the first is named."""
    args, kwargs = sample(op)
    overload = getattr(torch.ops.fp4, op)
    names = [argument.name for argument in overload.default._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    split = {name: whole(given[name], mesh) for name in tensors}
    with mode():
        overload(**given)
        for name in tensors:
            with pytest.raises(RuntimeError, match=f"^fp4::{op}" + says(name)):
                overload(**{**given, name: split[name]})
        with pytest.raises(RuntimeError, match=f"^fp4::{op}" + says(tensors[0])):
            overload(*(split.get(name, given[name]) for name in names[: len(args)]), **kwargs)


def test_a_split_argument_says_how(mesh):
    x = distribute_tensor(torch.randn(8, 64), mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match=says("x", "S")):
        torch.ops.fp4.quantize_fp8(x)
    values, _ = torch.ops.fp4.quantize_fp8(x.to_local())
    assert torch.equal(values, torch.ops.fp4.quantize_fp8(x.full_tensor())[0])


def test_fp4_tensors_name_the_argument(mesh):
    def split(t):
        return whole(t, mesh)

    w, x = torch.randn(4, 32, 64), torch.randn(8, 64)
    q = fp4_ops.quantize(w, "nvfp4")
    parts = {"packed": q.packed, "block_scale": q.block_scale, "global_scale": q.global_scale}
    for name, part in parts.items():
        with pytest.raises(RuntimeError, match="^FP4Tensor" + says(name)):
            fp4_ops.FP4Tensor(**{**parts, name: split(part)}, format="nvfp4", dtype=w.dtype)
    with pytest.raises(RuntimeError, match=says("x")):
        fp4_ops.quantize(split(w), "nvfp4")
    with pytest.raises(RuntimeError, match=says("global_scale")):
        fp4_ops.quantize(w, "nvfp4", global_scale=split(torch.rand(4)))
    ends = torch.tensor([2, 4, 4, 8], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="on an FP4Tensor" + says("offs")):
        F.grouped_mm(x, q.mT, offs=split(ends))
    with pytest.raises(RuntimeError, match="on an FP4Tensor" + says("src")):
        q.clone().copy_(split(w))
    with pytest.raises(RuntimeError, match="on an FP4Tensor" + says("other")):
        q.add(split(w))
    # A DTensor that comes first is asked first, before the FP4Tensor: torch's own error.
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        F.linear(split(x), q[0])


def split_parameters(module: nn.Module, mesh) -> None:
    for name, p in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]), False))


def test_prepare_names_the_experts_and_the_parameter(mesh):
    model = tiny()
    experts = [name for name, module in model.named_modules() if is_experts(module)]
    for name in experts:
        split_parameters(model.get_submodule(name), mesh)
    with pytest.raises(
        ValueError, match=rf"{experts[0]}: \w+ is a DTensor, placed S.* on 1 process; each process"
    ):
        fp4_ops.prepare(model)


def test_a_prepared_model_names_the_argument(mesh):
    model = tiny()
    experts = next(module for module in model.modules() if is_experts(module))
    fp4_ops.prepare(model)
    x = torch.randn(3, model.config.hidden_size)
    ids, topk = torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    experts(x, ids, topk)
    for i, name in enumerate(("x", "topk_ids", "topk_weights")):
        args = [whole(t, mesh) if i == j else t for j, t in enumerate((x, ids, topk))]
        with torch.no_grad(), pytest.raises(RuntimeError, match="^fp4::moe" + says(name)):
            experts(*args)
