"""Writes the parts that every rewritten form needs: a layout, packed weights, quantised activations,
products, and a record of what was done."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ... import backends
from ...meta.formats import FORMATS, FP4_FORMATS
from ...meta.layouts import LAYOUTS, preferred_layout
from ...meta.torch_internals import FakeTensorMode
from ..dynamo.api import AttrSource
from ..graph.nodes import aten, shape, value
from ..index.terms import Affine, Const, Mix, Term, affine
from ..naming import input_name, location, module_path
from ..options import Options
from ..recognise.block import EvenParts, Experts, Parts
from ..recognise.pieces import K, N
from ..refusal import Kind, Refusal, need, refuse
from ..report import Load, Site
from ..weights.facts import Facts, refuse_two_precisions
from ..weights.runtime import Swap
from ..weights.specs import Assembly, PackSpec, Piece, Spec, StoredSpec, stored_spec

fp4 = torch.ops.fp4

Operands = tuple[fx.Node | None, ...]
"""(packed, block_scale, global_scale or None): a weight as an argument of the operators."""


class Packed(NamedTuple):
    """A weight of an operator: the parameters that it is made from, and the way it is made."""

    sources: tuple[fx.Node, ...]
    spec: PackSpec | StoredSpec

    @property
    def layout(self) -> str:
        return self.spec.layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [E, N, K]."""
        if self.spec.assembly is not None:
            return self.spec.assembly.shape
        e, n, k = shape(self.sources[0])
        return (e, k, n) if self.spec.transposed else (e, n, k)


class Activations(NamedTuple):
    """The `a_format` of a product's activations, and why it was chosen."""

    format: str
    why: str

    def __str__(self) -> str:
        return f"{self.format} ({self.why})"


class QuantisedRows(NamedTuple):
    """Activations of one product, as arguments of the operators."""

    a: fx.Node
    scale: fx.Node | None = None
    global_scale: fx.Node | None = None
    a_format: str = ""
    finite: fx.Node | None = None
    """bool [..., 1]. False marks rows with NaN or infinity; their products are set to NaN, because no block
    scale can encode that."""


class Writer:
    """Writes operators into a graph."""

    def __init__(self, gm: fx.GraphModule, options: Options, facts: Facts) -> None:
        self.gm, self.options, self.facts = gm, options, facts
        self.slots: dict[tuple[tuple[fx.Node, ...], Spec], tuple[fx.Node, ...]] = {}
        self.written: set[fx.Node] = set()
        self.site_of: dict[fx.Node, Site] = {}
        """The site of each `fp4::mm`."""
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.inputs = list(gm.graph.find_nodes(op="placeholder"))
        self._last_input = self.inputs[-1]

    # --- nodes ---

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.gm.graph.call_function(target, args, kwargs)
        self.written.add(node)
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        for key in ("val", "stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in old.meta:
                new.meta[key] = old.meta[key]
        old.replace_all_uses_with(new)
        self.replaced[old] = new

    def wrapped(self, ids: fx.Node, experts: int) -> fx.Node:
        """Replace negative ids by those that they mean when they count from the end, as in indexing. The
        operators would skip negative ids."""
        wrapped = self.call(aten.add.Tensor, ids, experts)
        return self.call(aten.where.self, self.call(aten.lt.Scalar, ids, 0), wrapped, ids)

    # --- weights ---

    def layout(self, like: fx.Node, *shapes: tuple[int, int], format: str | None = None) -> str:
        """Return one layout for the weights (N, K) of one operator, on the device of the parameter `like`.

        format: the format that they will get. None means the experts' format.
        """
        v, stored = value(like), self.facts.stored.get(like)
        return preferred_layout(
            v.device.type,
            *shapes,
            dtype=v.dtype,
            format=stored.way.format if stored is not None else format or self.options.format,
            a_format=self.options.wanted,
            batch_invariant=self.options.batch_invariant
            or (stored is not None and stored.way.batch_invariant),
        )

    def pack(
        self,
        experts: Experts,
        layout: str,
        site: fx.Node,
        *,
        interleaved: bool = False,
        format: str | None = None,
    ) -> Packed:
        """Describe the packing of one operand's weights. Raises a refusal if they cannot be packed.

        interleaved: rows of an expert's parts alternate.
        format: as in `layout`.
        """
        format = format or self.options.format
        one = as_it_is(experts, interleaved, site)
        k = next(iter(experts))[0].k
        need(k % 2 == 0, Kind.ODD_K, site, k)
        if one is not None and not self.facts.in_4_bits(one.parameter):
            self.facts.need_own(one.parameter, site)
            return Packed((one.parameter,), PackSpec(format, layout, one.transposed))
        sources, assembly = assemble(experts, interleaved, site)
        for s in sources:
            self.facts.need_own(s, site)
            need(value(s).dtype == value(sources[0]).dtype, Kind.DTYPES_DIFFER, site)
        if any(map(self.facts.in_4_bits, sources)):
            stored = self.facts.stored
            ways = tuple(stored[s].way for s in sources if s in stored)
            return Packed(sources, stored_spec(sources, ways, assembly, layout, site))
        return Packed(sources, PackSpec(format, layout, False, assembly))

    def operands(self, packed: Packed) -> Operands:
        """Return the graph inputs for packed weights, which are made once for each weight."""
        return (*self.slot(*packed), None)[:3]

    def one_expert(self, packed: Packed, e: int) -> Operands:
        """Return expert e's matrix of `operands`."""
        tensors = self.slot(*packed)
        return (*(self.call(aten.select.int, t, 0, e) for t in tensors), None)[:3]

    def slot(self, sources: tuple[fx.Node, ...], spec: Spec) -> tuple[fx.Node, ...]:
        """Return the graph inputs that hold the result of `spec` for these parameters."""
        sources = tuple(n for s in sources for n in self.facts.inputs_of(s))
        key = (sources, spec)
        if key not in self.slots:
            first, nodes = sources[0], []
            for i in range(spec.tensors):
                with self.gm.graph.inserting_after(self._last_input):
                    node = self.gm.graph.placeholder(f"{first.name}_fp4_{len(self.slots)}_{i}")
                source = getattr(first, "_dynamo_source", None)
                order = "i" if getattr(spec, "interleave", False) else ""
                attribute = f"_fp4_{spec.layout}{order}_{int(spec.transposed)}_{i}"
                if len(sources) > 1 or getattr(spec, "assembly", None) is not None:
                    attribute += f"_{len(self.slots)}"
                node._dynamo_source = AttrSource(source, attribute) if source is not None else None
                # Fixed addresses until the weight changes: CUDA graphs need not copy these inputs.
                node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
                self._last_input = node
                nodes.append(node)
            self.slots[key] = tuple(nodes)
        return self.slots[key]

    # --- products ---

    def activations(self, like: fx.Node, layout: str, block: bool = False) -> Activations:
        """Return how rows are quantised for products with a weight in this layout, on the device of the
        parameter `like`. `block`: for `fp4::moe`."""
        how = Activations(*self.options.a_format(value(like).device.type, layout))
        if how.format == "int8" and LAYOUTS[layout].native and not block:
            return Activations("none", "on a GPU only fp4::moe supports int8 activations")
        return how

    def quantised(self, a: fx.Node, activations: Activations, layout: str) -> QuantisedRows:
        """Quantise the rows of one product, and return them with their scales, for weights in this layout."""
        if activations.format not in ("int8", "fp8", *FP4_FORMATS):
            return QuantisedRows(a)
        if activations.format in FP4_FORMATS:
            return self._in_fp4(a, activations.format)
        if activations.format == "int8":
            both = self.call(fp4.quantize_int8.default, a)
        else:
            both = self.call(fp4.quantize_fp8.default, a, layout=LAYOUTS[layout].a_layout)
        return QuantisedRows(self.call(operator.getitem, both, 0), self.call(operator.getitem, both, 1))

    def _in_fp4(self, a: fx.Node, format: str) -> QuantisedRows:
        """Quantise rows as `fp4::moe` does: each row has a global scale of its own. A row with a NaN or
        infinity becomes NaN."""
        call = self.call
        finite = call(aten.all.dim, call(aten.isfinite.default, a), -1, True)
        rows = call(aten.unsqueeze.default, call(aten.where.ScalarOther, finite, a, 0), -2)
        made = call(fp4.quantize.default, rows, format)
        packed, scale, factor = (call(operator.getitem, made, i) for i in range(3))
        packed, scale = (call(aten.squeeze.dim, t, -2) for t in (packed, scale))
        if FORMATS[format].has_global_scale:
            factor = call(aten.where.ScalarOther, call(aten.squeeze.dim, finite, -1), factor, math.nan)
            return QuantisedRows(packed, scale, factor, format)
        return QuantisedRows(packed, scale, None, format, finite)

    def product(
        self,
        name: str,
        rows: QuantisedRows,
        weight: Operands,
        spec: PackSpec | StoredSpec,
        out_dtype: torch.dtype,
        *route: fx.Node,
        bias: fx.Node | None = None,
    ) -> fx.Node:
        """Write one product of `quantised` rows, with the operator of this name. `route`: offsets, ids or
        counts."""
        out = self.call(
            getattr(fp4, name).default, rows.a, *weight, *route, rows.scale, bias, rows.global_scale,
            format=spec.format, layout=spec.layout, a_format=rows.a_format, out_dtype=out_dtype,
        )  # fmt: skip
        return out if rows.finite is None else self.call(aten.where.ScalarOther, rows.finite, out, math.nan)

    # --- what was done ---

    def site(
        self,
        op: str,
        at: fx.Node,
        packed: Sequence[Packed],
        form: str,
        activations: Activations,
        shape_text: str,
        load: Load,
        *,
        activation: str = "",
        why: Refusal | None = None,
    ) -> Site:
        """Record the operator that replaces the node `at`. `packed` has each weight of the operator.

        why: the reason why no better operator was possible.
        """
        sources = list(dict.fromkeys(n for p in packed for n in p.sources))
        stored = {n: self.facts.stored[n].way.kind for n in sources if self.facts.in_4_bits(n)}
        values = [value(n) for n in sources if n not in stored]
        before, after = sum(v.numel() * v.dtype.itemsize for v in values), 0
        for p in packed:
            made = p.spec.shapes(tuple(value(p.sources[0]).shape))
            size = sum(math.prod(sizes) * dtype.itemsize for sizes, dtype in made)
            after += size
            before += size if p.sources[0] in stored else 0
        spec = packed[0].spec
        return Site(
            module=module_path(at),
            op=op,
            reason=why.reason if why is not None else "",
            where=location(at),
            weights=tuple(input_name(self.facts.inputs_of(n)[0]) for n in sources),
            shape=shape_text,
            form=form + (f", weights from {', '.join(dict.fromkeys(stored.values()))}" if stored else ""),
            kernel=kernel(value(sources[0]).device.type, spec.layout),
            format=spec.format,
            layout=spec.layout,
            activation=activation,
            a_format=str(activations),
            bytes_before=before,
            bytes_after=after,
            gain=None if stored else load.gain(before, after),
            change=why.change if why is not None else "",
        )

    def check_uses(
        self, packed: Collection[fx.Node] | None = None, products: Collection[fx.Node] = ()
    ) -> None:
        """Raise ReadTwice if a product that stays, and is not in `products`, reads a weight that was
        packed."""
        if packed is None:
            packed = {s for sources, _ in self.slots for s in sources}
        refuse_two_precisions(self.inputs, packed, products)

    def finish(self, fake_mode: FakeTensorMode) -> tuple[list[int], list[Swap], list[torch.Tensor]]:
        """Return (remaining inputs, the packed ones after them, their fake tensors). Inputs that nothing
        uses any more are removed, so that the graph does not keep the originals alive."""
        swaps, fakes = [], []
        position = {n: i for i, n in enumerate(self.inputs)}
        for (sources, spec), nodes in self.slots.items():
            names = tuple(map(input_name, sources))
            swaps.append(Swap(tuple(position[n] for n in sources), spec, names))
            like = value(sources[0])
            with fake_mode:
                made = [
                    torch.empty(s, dtype=d, device=like.device) for s, d in spec.shapes(tuple(like.shape))
                ]
            for node, fake in zip(nodes, made, strict=True):
                node.meta["val"] = fake
            fakes += made
        swapped = {p for sources, _ in self.slots for p in sources}
        keep = []
        for index, node in enumerate(self.inputs):
            if (node in swapped or self.facts.in_4_bits(node)) and not node.users:
                self.gm.graph.erase_node(node)
            else:
                keep.append(index)
        self.gm.graph.lint()
        self.gm.recompile()
        return keep, swaps, fakes


def kernel(device_type: str, layout: str = "plain") -> str:
    """Return the name of the kernels that run an operator."""
    if device_type == "cpu":
        return f"cpu {torch.ops.fp4.cpu_capability()}"
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return backends.reader_name(layout, device_type, device)


# --- how parameters make one operand ---


class Whole(NamedTuple):
    """One parameter that is an operand without changes."""

    parameter: fx.Node
    transposed: bool
    """True if the parameter is stored as [E, K, N]."""


def as_it_is(experts: Experts, interleaved: bool, site: fx.Node) -> Whole | None:
    """Return the parameter that holds the parts of these experts in order, and nothing else."""
    some = [experts.first, experts.second] if isinstance(experts, EvenParts) else experts
    if len({p.ref.node for parts in some for p in parts}) != 1:
        return None
    (parameter,), assembly = assemble(some, interleaved, site)
    e, *rest = shape(parameter)
    if e != len(experts):
        return None
    transposed = assembly.whole([(len(some), *rest)])  # two are enough if all are equally spaced
    return None if transposed is None else Whole(parameter, transposed)


def assemble(
    experts: Iterable[Parts], interleaved: bool, site: fx.Node
) -> tuple[tuple[fx.Node, ...], Assembly]:
    """Return (parameters, the way they become one operand). Each expert's parts are stacked along the
    rows."""
    sources: dict[fx.Node, int] = {}
    pieces = []
    for parts in experts:
        taken = []
        for p in parts:
            both = of_both(p.ref.index[0]) if len(p.ref.index) == 1 and p.k else None
            at = (both,) if both is not None else tuple(place(i, site) for i in p.ref.index)
            taken.append(Piece(sources.setdefault(p.ref.node, len(sources)), at))
        pieces.append(tuple(taken))
    first = parts[0]
    return tuple(sources), Assembly(tuple(pieces), first.n, first.k, interleaved)


def of_both(index: Term) -> tuple[Any, ...] | None:
    """Describe the single dimension of a parameter if element (n, k) of a matrix is at start + n * step_n
    + k * step_k."""

    def steps(t: Term) -> tuple[int, int, int] | None:
        """Return (start, step of n, step of k)."""
        if t is N or t is K:
            return 0, int(t is N), int(t is K)
        if isinstance(t, Const):
            return t.value, 0, 0
        if isinstance(t, Affine) and (inner := steps(t.base)) is not None:
            return t.start + t.step * inner[0], t.step * inner[1], t.step * inner[2]
        if not isinstance(t, Mix) or not all(isinstance(s, int) for s in t.sizes[1:]):
            return None
        whole, stride = (0, 0, 0), 1
        for part, size in zip(reversed(t.parts), reversed(t.sizes)):
            own = steps(part)
            if own is None:
                return None
            whole = (whole[0] + stride * own[0], whole[1] + stride * own[1], whole[2] + stride * own[2])
            stride = stride * size if part is not t.parts[0] else stride
        return whole

    found = steps(index)
    return ("both", *found) if found is not None and all(found[1:]) else None


def place(index: Term, site: fx.Node) -> tuple[Any, ...]:
    """Describe one dimension of a parameter in a Piece."""
    if isinstance(index, Const):
        return ("at", index.value)
    base, start, step = affine(index)
    if base is not N and base is not K:
        refuse(Kind.WEIGHT_INDEX, site, index)
    return ("n" if base is N else "k", start, step)
