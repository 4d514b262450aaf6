"""`fp4_ops.rewrite` returns an exported program with 4-bit experts, as a module to run, compile or export
again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ..meta.layouts import byte_view
from ..meta.torch_internals import pytree
from . import advice
from .naming import note_path
from .options import parse
from .passes import PassLog, Rewritten
from .passes import rewrite as rewrite_graph
from .report import Frame, Site
from .trace.capture import capture, mutated_inputs
from .weights.facts import Facts, Stays, in_one_precision

_CONSTANT = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class RewrittenProgram(nn.Module):
    """Takes the program's arguments. Packed experts and all other parameters are its buffers.

    `report`: the same report as that of `fp4_ops.explain`.
    """

    def __init__(
        self, graph: fx.GraphModule, constants: dict[str, torch.Tensor], spec: Any, report: Frame
    ) -> None:
        super().__init__()
        self.graph_module, self.report, self._out_spec = graph, report, spec
        # AOTInductor calls inputs arg0_1 and so on, and constants by the names of their buffers.
        named = {f"constant_{name}": tensor for name, tensor in constants.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in named.items()}
        for name, tensor in named.items():
            self.register_buffer(name, byte_view(tensor))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        constants = (self._constant(name, dtype) for name, dtype in self._dtypes.items())
        out = self.graph_module(*constants, *given)
        return pytree.tree_unflatten(list(out), self._out_spec)

    def _constant(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self, name)
        return tensor.view(dtype) if tensor.dtype == torch.uint8 else tensor


def rewrite(program: ExportedProgram, options: Mapping[str, Any] | None = None) -> RewrittenProgram:
    """Returns `program` with its experts in 4 bits. `options` may have "format" and "activation", as for the
    backend.

    Raises ValueError if the program writes to its buffers or inputs, or if nothing in it could be rewritten
    (the message says why). The program is not changed. The result can be exported again.
    """
    chosen = parse(None, options)
    source = program.graph_module
    fakes = [n.meta["val"] for n in source.graph.find_nodes(op="placeholder")]
    report = Frame("exported program")
    passes = PassLog(report.name, report.passes)
    specs = program.graph_signature.input_specs
    values = [_value(program, spec) if spec.kind in _CONSTANT else None for spec in specs]

    def attempt(each: Stays, stay: Stays) -> tuple[Rewritten | None, list[Site], list[Site]]:
        with passes.timed("capture", source.graph) as made:
            gm, fake_mode, stored = capture(source, fakes)
            made.append(gm.graph)
        if mutated_inputs(gm.graph) or any(s.kind is not OutputKind.USER_OUTPUT for s in _outputs(program)):
            raise ValueError(f"fp4: the program writes to its buffers or inputs. Change: {advice.PURE}")
        facts = Facts(set(), stored=stored)
        placeholders = gm.graph.find_nodes(op="placeholder")
        for i, (node, spec, own) in enumerate(zip(placeholders, specs, values, strict=True)):
            if own is not None:
                facts.fixed.add(node)
                note_path(node, spec.target)
            facts.note_stays(i, node, each, stay)
        return rewrite_graph(gm, facts, chosen, fake_mode, passes)

    rewritten, report.sites, report.unrouted = in_one_precision(attempt)
    if rewritten is None:
        raise ValueError(f"fp4: nothing was rewritten: {_reasons(report)}")
    report.also = rewritten.also

    constants: dict[str, torch.Tensor] = {}
    order: list[fx.Node] = []
    inputs = rewritten.gm.graph.find_nodes(op="placeholder")
    for node, index in zip(inputs, rewritten.keep):
        value = values[index]
        if value is not None:
            constants[node.name] = value.detach()
            order.append(node)
    packed = iter(inputs[len(rewritten.keep) :])
    for swap in rewritten.swaps:
        for tensor in swap.spec.pack(*(values[i] for i in swap.indices)):  # type: ignore[arg-type]
            node = next(packed)
            constants[node.name] = tensor
            order.append(node)
    _constants_first(rewritten.gm, order)
    return RewrittenProgram(rewritten.gm, constants, program.call_spec.out_spec, report)


def _reasons(report: Frame) -> str:
    """Return the reasons why nothing was rewritten."""
    left = [*(s for s in report.sites if not s.rewritten), *report.unrouted]
    reasons = [f"{s.reason} ({s.where}). Change: {s.change}" for s in left]
    own = Counter(s.op for s in report.sites if s.op is not None)
    if own:
        operators = ", ".join(f"{n} {op}" for op, n in own.items())
        rest = "what is left is listed here" if reasons else "it runs in 4 bits as it is"
        reasons.insert(0, f"the program already holds {own.total()} fp4 operators ({operators}); {rest}")
    return "; ".join(reasons) or "nothing in it looks like experts"


def _outputs(program: ExportedProgram) -> list[Any]:
    return list(program.graph_signature.output_specs)


def _value(program: ExportedProgram, spec: Any) -> torch.Tensor:
    known = program.state_dict if spec.target in program.state_dict else program.constants
    tensor: torch.Tensor = known[spec.target]
    return tensor


def _constants_first(gm: fx.GraphModule, constants: list[fx.Node]) -> None:
    """Put placeholders into the order in which RewrittenProgram passes them."""
    first = gm.graph.find_nodes(op="placeholder")[0]
    anchor = None
    for node in constants:
        if anchor is None:
            if node is not first:
                first.prepend(node)
        else:
            anchor.append(node)
        anchor = node
    gm.graph.lint()
    gm.recompile()
