"""Fake kernels return the same metadata as the real kernels, for any shapes, also symbolic ones."""

from __future__ import annotations

import pytest
import torch
from samples import FLOATS, SAMPLES, sample
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

fp4 = torch.ops.fp4
SHAPES = 100


def described(outs, device: str | None = None):
    outs = outs if isinstance(outs, (tuple, list)) else (outs,)
    return [(tuple(o.shape), o.dtype, o.stride(), device or o.device.type) for o in outs]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("op", SAMPLES)
def test_fake_equals_real(op, device):
    for _ in range(SHAPES):
        args, kwargs = sample(op, device)
        real = getattr(fp4, op)(*args, **kwargs)
        with FakeTensorMode() as mode:
            faked = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
            fake = getattr(fp4, op)(*faked, **kwargs)
        assert described(fake) == described(real), (op, args, kwargs)


@pytest.mark.parametrize("op", SAMPLES)
def test_meta_device(op):
    """The meta device: what a model built under `torch.device("meta")` runs."""
    for _ in range(10):
        args, kwargs = sample(op)
        real = getattr(fp4, op)(*args, **kwargs)
        meta = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)
        assert described(getattr(fp4, op)(*meta, **kwargs), "cpu") == described(real)


# The operators that see tokens, and which arguments' first dimension is the number of them.
TOKENS = {
    "quantize": (0,),
    "quantize_int8": (0,),
    "quantize_fp8": (0,),
    "mm": (0,),
    "grouped_mm": (0,),
    "indexed_mm": (0, 4),
    "moe": (0, 1, 2),
    "moe_slots": (0, 1, 2),
    "to_masked": (0,),
}


def floating_sample(op: str):
    """A call with at least two tokens and 2D floating activations, so that every token dimension can vary."""
    while True:
        args, kwargs = sample(op)
        first = args[0]
        if first.dim() == 2 and first.dtype in FLOATS and first.shape[0] >= 2:
            return args, kwargs


def with_tokens(op: str, args: tuple, tokens: int) -> tuple:
    """The same call with another number of tokens."""
    return tuple(
        a[:1].expand(tokens, *a.shape[1:]).contiguous() if i in TOKENS[op] else a for i, a in enumerate(args)
    )


def same(a, b) -> bool:
    leaves = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x.float(), y.float()) for x, y in leaves)


@pytest.mark.parametrize("op", TOKENS)
def test_symbolic_tokens(op):
    """make_fx with symbolic shapes: one graph serves every token count."""
    args, kwargs = floating_sample(op)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]

    def call(*tensors):
        rest = iter(tensors)
        full = [next(rest) if isinstance(a, torch.Tensor) else a for a in args]
        return getattr(fp4, op)(*full, **kwargs)

    # Equal sizes are no promise: 5 tokens and 5 rows of a weight are two symbols.
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        graph = make_fx(call, tracing_mode="symbolic")(*tensors)
    tokens = next(n for n in graph.graph.nodes if n.op == "placeholder").meta["val"].shape[0]
    assert isinstance(tokens, torch.SymInt) and not tokens.node.expr.is_number, "the token count is fixed"
    if op == "to_masked":
        return  # its rows must fit max_m, a number in this graph
    longer = with_tokens(op, args, 17)
    got = graph(*(a for a in longer if isinstance(a, torch.Tensor)))
    assert same(got, getattr(fp4, op)(*longer, **kwargs))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize("op", ["mm", "grouped_mm", "indexed_mm", "moe"])
def test_export_with_dynamic_tokens(op, strict):
    args, kwargs = floating_sample(op)
    positions = TOKENS[op]

    class Module(torch.nn.Module):
        def forward(self, *tokens):
            full = list(args)
            for i, t in zip(positions, tokens):
                full[i] = t
            return getattr(fp4, op)(*full, **kwargs)

    dynamic = tuple(args[i] for i in positions)
    tokens = torch.export.Dim("tokens", min=0)
    program = torch.export.export(
        Module(), dynamic, dynamic_shapes=(tuple({0: tokens} for _ in dynamic),), strict=strict
    )
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert getattr(fp4, op).default in targets
    program = program.run_decompositions()
    assert getattr(fp4, op).default in [n.target for n in program.graph.nodes if n.op == "call_function"]
    fewest = args[0].shape[0] if op == "grouped_mm" else 1  # offs says how many rows there are at least
    for count in (fewest, 17):
        longer = with_tokens(op, args, count)
        got = program.module()(*(longer[i] for i in positions))
        assert same(got, getattr(fp4, op)(*longer, **kwargs))


def test_unbacked_counts():
    """Counts that only the data knows (`.item()`) pass through the converters."""

    def convert(offs, counts):
        m = counts.sum().item()
        return fp4.offs_to_m_indices(offs, m)

    counts = torch.tensor([2, 3])
    offs = counts.cumsum(0).int()
    graph = make_fx(convert, tracing_mode="symbolic")(offs, counts)
    assert torch.equal(graph(offs, counts), convert(offs, counts))


@pytest.mark.parametrize("op", ["mm", "grouped_mm", "indexed_mm", "moe"])
def test_unbacked_tokens(op):
    """A number of tokens that only the data decides (`x[mask]`) needs no hint."""
    args, kwargs = floating_sample(op)
    positions = TOKENS[op]

    class Module(torch.nn.Module):
        def forward(self, mask, *tokens):
            rows = mask.nonzero().flatten()
            full = list(args)
            for i, t in zip(positions, tokens):
                full[i] = t[rows]
            return getattr(fp4, op)(*full, **kwargs)

    tokens = tuple(args[i] for i in positions)
    mask = torch.ones(tokens[0].shape[0], dtype=torch.bool)
    program = torch.export.export(Module(), (mask, *tokens))
    assert same(program.module()(mask, *tokens), getattr(fp4, op)(*args, **kwargs))
