"""Places a model whose experts do not fit on the GPU. The experts stay in host memory, which the GPU can
read. The rest of the model is on the GPU, together with slots for the experts in use.

`fp4::moe_slots` runs such experts (csrc/device/slots.cu). memory_plan.py says how many slots a layer gets. A
machine without a GPU runs the same code, with everything in its memory.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..experts.packed import SLOTS, PackedWeight, slot_weights
from ..host_memory import use_huge_pages
from ..meta.slot_checks import ALIGN, COUNTERS, MOST_EXPERTS, slot_bytes
from .memory_plan import LayerExperts, MemoryPlan, cannot_pin, parse_bytes, plan_memory
from .prompt_parts import divide_prompts

_PORTABLE, _MAPPED = 1, 2
"""CUDA's numbers for memory that every context may use, and that a GPU can address."""


class ExpertSlots(nn.Module):
    """GPU memory for some experts of one module, and the record of which experts it holds. `weights`: as
    `fp4::moe_slots` gets them.

    Both buffers only cache the weights, so no state dict has them. Code that writes to the weights must call
    `reset`.
    """

    slots: Any  # a Tensor, or None once the weights moved to another device
    state: Any

    def __init__(self, weights: list[Tensor | None], count: int, device: torch.device) -> None:
        super().__init__()
        experts = next(w.shape[0] for w in weights if w is not None)
        self.experts, self.count = experts, count
        *codes, up_bias, down_bias = weights
        # A later `.float()` of the model must not need more room.
        widest = (None if b is None else b.to("meta", torch.float32) for b in (up_bias, down_bias))
        size = slot_bytes([*codes, *widest], count)
        room = torch.empty(size, dtype=torch.uint8, device=device)
        state = torch.empty(experts + count + COUNTERS, dtype=torch.int32, device=device)
        self.register_buffer("slots", room, persistent=False)
        self.register_buffer("state", state, persistent=False)
        self.reset()

    def reset(self) -> None:
        """Empties the slots: the next call of each expert fetches its weights again."""
        if self.state is not None:
            with torch.inference_mode(False), torch.no_grad():
                self.state.zero_()
                self.state[: self.experts] = -1

    def read_counters(self) -> tuple[int, int]:
        """Returns how many experts all calls together used, and how many of them had to be fetched. This
        waits for the GPU. On a CPU both stay 0."""
        if self.state is None:
            return 0, 0
        wanted, fetched = self.state[1 - COUNTERS :].tolist()
        return wanted, fetched

    def extra_repr(self) -> str:
        return f"slots={self.count}, experts={self.experts}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertSlots:
        if self.slots is None:
            return self
        if self.state.device != fn(self.state.new_empty(0)).device:
            # The weights move to the same device, so slots are not needed.
            self.slots = self.state = None
            return self
        super()._apply(fn, recurse)
        self.reset()  # biases may have another dtype now
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.reset()


def place_experts(model: nn.Module, gpu_memory: int | str, device: torch.device | None = None) -> MemoryPlan:
    """Moves a model with 4-bit experts to a GPU, within a budget of GPU memory. Returns the plan.

    device: None means the current GPU, or the CPU if there is no GPU.

    If all experts fit, the whole model goes to the GPU. Raises ValueError if the budget is too small, before
    anything is moved, and RuntimeError if the host cannot pin the experts.
    """
    if device is None:
        device = default_device()
    plan = plan_memory(model, gpu_memory)
    if not plan.resident:
        _check_layers(plan)
        shared: dict[int, ExpertSlots] = {}
        with torch.inference_mode(False), torch.no_grad():
            for layer, module in [*_experts_of(model, plan)]:
                key = id(_gate_up(module))
                if key not in shared:
                    shared[key] = _place(module, plan.slots(layer), device)
                module.add_module(SLOTS, shared[key])
    model.to(device)
    model.__dict__["_fp4_memory_plan"] = plan
    divide_prompts(model)
    return plan


def check_placement(gpu_memory: int | str, trainable_inputs: bool, group: Any) -> None:
    """Raises ValueError for arguments of `prepare` and `load_checkpoint` that do not work together."""
    parse_bytes(gpu_memory)
    if trainable_inputs:
        raise ValueError(
            "fp4: trainable_inputs=True, and gpu_memory is given: experts in slots pass no gradients on. "
            "Give one of the two"
        )
    if group is not None:
        raise ValueError(
            "fp4: gpu_memory is given, and the experts are divided over processes (ep_group, "
            "distributed_config). Give one of the two"
        )


def default_device() -> torch.device:
    """Returns the current GPU, or the CPU if there is no GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def reset_slots(module: nn.Module) -> None:
    """Empties the slots of an experts module, because its weights or biases changed."""
    slots = module._modules.get(SLOTS)
    if isinstance(slots, ExpertSlots):
        slots.reset()


def _check_layers(plan: MemoryPlan) -> None:
    for layer in plan.layers:
        if layer.experts > MOST_EXPERTS:
            raise ValueError(
                f"fp4: {layer.name} has {layer.experts} experts; slots are for at most {MOST_EXPERTS}. Give "
                "a gpu_memory in which all experts fit"
            )


def _experts_of(model: nn.Module, plan: MemoryPlan) -> Iterator[tuple[LayerExperts, Any]]:
    """Yields each prepared module with its layer of the plan. Modules that share weights have one layer."""
    layers = {id(_gate_up(model.get_submodule(layer.name))): layer for layer in plan.layers}
    for name, module in model.named_modules():
        recipe = getattr(module, "_fp4_recipe", None)
        if recipe is None:
            continue
        if recipe.part is not None:
            raise ValueError(f"fp4: gpu_memory is given, and {name} has {recipe.part}. Leave gpu_memory out")
        yield layers[id(_gate_up(module))], module


def _gate_up(module: Any) -> nn.Module:
    weight: nn.Module = module._modules[module._fp4_recipe.form.gate_up]
    return weight


def _place(module: Any, count: int, device: torch.device) -> ExpertSlots:
    """Moves the weights of one module to host memory that the device reads, in the device's layout."""
    form = module._fp4_recipe.form
    weights: list[PackedWeight] = [module._modules[form.gate_up], module._modules[form.down]]
    weights[0].shared_layout.settle(device.type)
    held = [(w, name, t) for w in weights for name, t in w._buffers.items() if t is not None]
    block = host_block(sum(-(-t.nbytes // ALIGN) * ALIGN for _, _, t in held))
    at, views = 0, []
    for _, _, t in held:
        views.append(block[at : at + t.nbytes])
        views[-1].copy_(t.contiguous().view(torch.uint8).reshape(-1))
        at += -(-t.nbytes // ALIGN) * ALIGN
    if device.type == "cuda":
        mapped = map_block(block, device)
        views = [mapped[v.storage_offset() :][: v.numel()] for v in views]
    for view, (weight, name, t) in zip(views, held, strict=True):
        weight._buffers[name] = view.view(t.dtype).view(t.shape)
    return ExpertSlots(slot_weights(module), count, device)


def host_block(size: int) -> Tensor:
    """Returns `size` bytes of host memory, uint8. No other data is in the same pages."""
    return use_huge_pages(torch.frombuffer(mmap.mmap(-1, max(1, size)), dtype=torch.uint8))


class _Mapped:
    """Wraps host memory with the interface from which torch makes a GPU tensor."""

    def __init__(self, block: Tensor) -> None:
        self.block = block
        address = (block.data_ptr(), False)
        self.__cuda_array_interface__ = {
            "shape": (block.numel(),), "typestr": "|u1", "data": address, "version": 3,
        }  # fmt: skip


def map_block(block: Tensor, device: torch.device) -> Tensor:
    """Pins host memory and returns it as a tensor of the GPU, which reads it over the link. It is unpinned
    when the last such tensor is gone."""
    with torch.cuda.device(device):
        cudart: Any = torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(block.data_ptr(), block.nbytes, _PORTABLE | _MAPPED))
        if error:
            raise RuntimeError(cannot_pin(block.nbytes, error))
        named = _Mapped(block)
        mapped = torch.as_tensor(named, device=device)
        weakref.finalize(named, _unpin, block.data_ptr()).atexit = False
    if mapped.data_ptr() != block.data_ptr():
        raise RuntimeError(
            "fp4: this GPU does not read host memory at the host's addresses, so experts cannot stay there. "
            "Give a gpu_memory in which all experts fit"
        )
    return mapped


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # a kernel may still read it
    torch.cuda.cudart().cudaHostUnregister(address)
