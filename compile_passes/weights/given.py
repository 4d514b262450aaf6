"""Makes ordinary tensors the inputs of one of Dynamo's graphs, and finds weights that are gathered for each
call.

- Under Inductor's `freezing`, a graph holds parameters as attributes. They become inputs, because an input
  can be packed, and packed again when it changes. A rewritten graph is then not frozen. A graph in which
  nothing is rewritten goes to Inductor as it was.
- torchtitan's experts, and others that run their own kernels, read DTensor parameters only by `to_local()`.
  This process's part takes the parameter's place. The graph's exchange with other processes stays as it is.
- A sharding library gathers parameters for each call. In 4 bits, each call would have to pack them again.
  Their memory is reused for other parameters and their versions do not show changes, so the packed weights of
  a rank could be those of an earlier call. Such parameters keep their original values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ...meta.dtensors import split_over_processes
from ...meta.torch_internals import TracingContext, is_precompiling
from ..graph.traced_nodes import asks_for_gradients


class Given(NamedTuple):
    """A graph of Dynamo's with ordinary tensors as inputs."""

    gm: fx.GraphModule
    inputs: list[Any]
    held: Sequence[torch.Tensor] = ()
    """The last inputs. They were attributes, so the caller has no arguments for them."""
    parts: Sequence[int] = ()
    """Indices of inputs that are parts of the caller's DTensors."""

    def adapt(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `call`, which takes these inputs, to take the caller's arguments."""
        if not self.held and not self.parts:
            return call

        def run(*args: Any) -> Any:
            given = [*args, *self.held]
            for i in self.parts:
                given[i] = _local(given[i])
            return call(*given)

        return run


def given(gm: fx.GraphModule, inputs: Sequence[Any]) -> Given:
    """Return a graph with ordinary inputs. It is `gm` itself if its inputs are ordinary. `gm` never
    changes."""
    if is_precompiling():
        return Given(gm, list(inputs))
    source = _with_attributes(gm, inputs)
    # The local part of a parameter has no gradient. A graph that asks for gradients stays as it is.
    return source if asks_for_gradients(source.gm, source.inputs) else _with_parts(source)


def copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


# --- attributes ---


_STATIC = {"_dynamo_static_input_type": "unguarded"}


def _with_attributes(gm: fx.GraphModule, inputs: Sequence[Any]) -> Given:
    """Make inputs of attributes, if some of these are parameters."""
    attributes: dict[str, torch.Tensor] = {**dict(gm.named_parameters(recurse=False))}
    attributes |= dict(gm.named_buffers(recurse=False))
    if not any(isinstance(x, nn.Parameter) for x in attributes.values()):
        return Given(gm, list(inputs))
    graph, sources = copied(gm.graph), getattr(gm, "_param_name_to_source", None) or {}
    last = graph.find_nodes(op="placeholder")[-1:] or None
    found: dict[str, fx.Node] = {}
    for node in list(graph.find_nodes(op="get_attr")):
        name = str(node.target)
        if name not in attributes:
            continue
        if name not in found:
            with graph.inserting_after(last[0] if last else graph._root):
                new = graph.placeholder(name)
            new.meta, new.type = {**node.meta, "tensor_dict": dict(_STATIC)}, type(attributes[name])
            new._dynamo_source = sources.get(name)  # type: ignore[attr-defined]
            found[name], last = new, [new]
        node.replace_all_uses_with(found[name])
        graph.erase_node(node)
    made = fx.GraphModule(gm, graph)
    made.meta.update(gm.meta)
    held = [attributes[name] for name in found]
    return Given(made, [*inputs, *held], held)


# --- parts of DTensors ---


def _with_parts(source: Given) -> Given:
    """Put this process's parts in place of DTensor parameters that the graph reads only by `to_local()`."""
    placeholders = source.gm.graph.find_nodes(op="placeholder")
    from_shards = gathered(x for x in source.inputs if isinstance(x, nn.Parameter))
    parts = [
        i
        for i, (node, x) in enumerate(zip(placeholders, source.inputs, strict=True))
        if isinstance(x, nn.Parameter) and split_over_processes(x) and id(x) not in from_shards
        if _is_read_locally(node, x)
    ]
    if not parts:
        return source
    gm = fx.GraphModule(source.gm, copied(source.gm.graph))
    nodes, inputs = gm.graph.find_nodes(op="placeholder"), list(source.inputs)
    context = TracingContext.try_get()
    known = context.tensor_to_context if context is not None else {}
    for i in parts:
        node, whole = nodes[i], inputs[i]
        inputs[i] = _local(whole)
        inner = getattr(known.get(whole), "inner_contexts", {}).get("_local_tensor")
        if inner is not None:  # the part has the same symbols as Dynamo's fake tensor
            known[inputs[i]] = inner
        if (example := node.meta.get("example_value")) is not None:
            node.meta["example_value"] = example._local_tensor
        node.type = torch.Tensor
        node.meta.setdefault("tensor_dict", {}).update(_STATIC)
        for use in list(node.users):
            use.replace_all_uses_with(node)
            gm.graph.erase_node(use)
    gm.recompile()
    return source._replace(gm=gm, inputs=inputs, parts=parts)


def _local(x: Any) -> torch.Tensor:
    """Return the local part of a DTensor: the same tensor at every call."""
    return x._local_tensor  # type: ignore[no-any-return]


def _is_read_locally(node: fx.Node, x: Any) -> bool:
    """Return whether a DTensor is only used by `to_local()`, and `to_local()` returns the tensor that it
    holds."""
    reads = [_reads_locally(u) and u.args == (node,) for u in node.users]
    return bool(reads) and all(reads) and type(_local(x)) is torch.Tensor


def _reads_locally(node: fx.Node) -> bool:
    """Return whether a node is `to_local()`. Dynamo of torch 2.11 has a function in its place, with the
    arguments stored inside."""
    if node.op == "call_method":
        return node.target == "to_local"
    return getattr(node.target, "__name__", "") == "prim_to_local"


# --- weights that are gathered for each call ---


def gathered(tensors: Iterable[torch.Tensor]) -> dict[int, str]:
    """Return id -> library for each of these tensors that is gathered for a call."""
    fsdp2 = {id(p): "FSDP" for p in _unsharded()}
    found = {}
    for t in tensors:
        if id(t) in fsdp2 or getattr(t, "_fsdp_flattened", False):
            found[id(t)] = "FSDP"
        elif hasattr(t, "ds_id") and hasattr(t, "ds_tensor"):
            found[id(t)] = "DeepSpeed ZeRO-3"
    return found


def _unsharded() -> Iterable[nn.Parameter]:
    """Yield the gathered parameters of all modules under `fully_shard` that run now."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from ...meta.torch_internals import composable_state

    for module in list(composable_state._module_state_mapping):
        state: Any = composable_state._get_module_state(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older torch
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    yield unsharded


def is_flat(source: Any) -> bool:
    """Return whether Dynamo says that an input belongs to a module under FSDP's first version."""
    guard = getattr(source, "guard_source", None)
    guard = guard() if callable(guard) else guard  # a method in older torch
    return guard is not None and guard.is_fsdp_module()
