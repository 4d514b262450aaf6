"""The private parts of torch that this package uses. No other file names them; dynamo/api.py has Dynamo's.

torch 2.11 to 2.15 have all of them, and none of them has a public name. A name of `_LATE` is imported when it
is first used, because importing Inductor or torch.distributed takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode
from torch._library.simple_registry import GenericTorchDispatchRuleHolder
from torch._library.simple_registry import singleton as dispatch_rules
from torch._logging import _internal as logging_internals
from torch._logging import trace_structured
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module
from torch.fx.node import _side_effectful_functions
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._sympy.symbol import SymT, symbol_is_type

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import torch.distributed._composable_state as composable_state
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._inductor import config as inductor_config
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.inductor_prims import force_stride_order
    from torch.distributed.distributed_c10d import _resolve_process_group as resolve_process_group

    dynamo_backends: dict[str, EntryPoint | None]

__all__ = [
    "CustomGraphPass", "DataDependentOutputException", "FakeTensor", "FakeTensorMode",
    "FunctionalTensor", "FunctionalTensorMode", "GenericTorchDispatchRuleHolder", "HigherOrderOperator",
    "OpOverload", "OpOverloadPacket", "SymT", "TorchDispatchMode", "TracingContext", "compile_fx",
    "composable_state", "detect_fake_mode", "disable_fake_tensor_cache", "dispatch_rules",
    "dynamo_backends", "enable_python_dispatcher", "force_stride_order", "inductor_config",
    "is_traceable_wrapper_subclass",
    "list_mode_options",
    "logging_internals", "make_graph_module", "pytree", "reset_cudagraph_trees",
    "resolve_process_group", "symbol_is_type", "symmetric_memory", "trace_structured", "without_modes",
]  # fmt: skip

_LATE = {
    "CustomGraphPass": ("_inductor.custom_graph_pass", "CustomGraphPass"),
    "compile_fx": ("_inductor.compile_fx", "compile_fx"),
    "force_stride_order": ("_inductor.inductor_prims", "force_stride_order"),
    "dynamo_backends": ("_dynamo.backends.registry", "_BACKENDS"),
    "composable_state": ("distributed._composable_state", None),
    "inductor_config": ("_inductor.config", None),
    "list_mode_options": ("_inductor", "list_mode_options"),
    "reset_cudagraph_trees": ("_inductor.cudagraph_trees", "reset_cudagraph_trees"),
    "resolve_process_group": ("distributed.distributed_c10d", "_resolve_process_group"),
    "symmetric_memory": ("distributed._symmetric_memory", None),
}
"""Maps each name to a module of torch and the name there. None means the module itself."""


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, own = _LATE[name]
    module = importlib.import_module(f"torch.{place}")
    return module if own is None else getattr(module, own)


# --- the dispatcher: small calls skip an operator's Python kernel, which would take most of their time ---

BelowAutograd = torch._C._AutoDispatchBelowAutograd
AFTER_AUTOGRAD = torch._C._after_autograd_keyset
no_torch_function = torch._C._disabled_torch_function_impl
"""A value for `__torch_function__` of a tensor subclass. torch's functions then run no Python code for the
class."""
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
asks_for_gradient = torch._C._any_requires_grad
in_functorch = torch._C._are_functorch_transforms_active


def in_forward_ad() -> bool:
    """Return whether a level of forward-mode differentiation is entered."""
    return forward_ad._current_level >= 0


def current_raw_stream(device: int) -> int:
    """Return the number of the current CUDA stream, without an object for it."""
    return torch._C._cuda_getCurrentRawStream(device)


# --- functional tensors: torch.func.functionalize cannot trace symbolic sizes ---


def without_functionalization() -> AbstractContextManager[object]:
    """Turn C++'s functionalisation off while FunctionalTensorMode works."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def functional_value(t: FunctionalTensor) -> torch.Tensor:
    """Return the current value of a functional tensor."""
    torch._sync(t)
    return torch._from_functional_tensor(t.elem)


def has_new_values(t: FunctionalTensor) -> bool:
    torch._sync(t)
    return bool(torch._functionalize_has_data_mutation(t.elem))  # type: ignore[attr-defined]


def has_new_shape(t: FunctionalTensor) -> bool:
    return torch._functionalize_has_metadata_mutation(t.elem)


# --- TorchScript: it has no public switch for one step of a trace ---


torchscript_trace = torch._C._get_tracing_state
"""() -> the trace that TorchScript is recording, or None."""


def without_recording(step: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return step(). TorchScript records the result as a constant."""
    recording = torchscript_trace()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return step()
    finally:
        torch._C._set_tracing_state(recording)  # type: ignore[attr-defined]


# --- functions that Dynamo's graphs call ---

assert_async = torch._assert_async
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast
functorch_depth = torch._C._functorch.get_dynamic_layer_stack_depth
"""() -> how many levels of torch.func (vmap, jvp) are entered."""
leave_functorch_levels = torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth
"""(depth) leaves all levels above this depth."""


def below_functorch(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the wrappers of vmap and similar functions. It has the memory; the wrappers
    have none."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


set_grad_enabled = torch._C._set_grad_enabled
enter_inference_mode = torch.autograd.grad_mode._enter_inference_mode
exit_inference_mode = torch.autograd.grad_mode._exit_inference_mode
side_effects = frozenset(_side_effectful_functions)


def einsum_in_order(equation: str, operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the result of torch.einsum with products from left to right, without opt_einsum's order."""
    return cast(torch.Tensor, torch._VF.einsum(equation, operands))  # type: ignore[attr-defined]


# --- what torch is doing ---


def is_precompiling() -> bool:
    """Return whether torch compiles code that will be saved and loaded in another process."""
    config: Any = importlib.import_module("torch._functorch.config")
    return bool(getattr(config, "bundled_autograd_cache", False))


def graphs_compiled() -> int:
    """Return how many graphs Dynamo has given to a backend in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
