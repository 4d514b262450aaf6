"""Batch invariance of the native kernels (docs/operators.md): a token's bits do not depend on its batch.

Layouts with names that end in `_invariant` guarantee it for every operator; the other layouts only for
decode.
"""

import pytest
import reference
import torch
from conftest import large

from fp4_ops import selftest
from fp4_ops.backends import reader
from fp4_ops.meta.layouts import LAYOUTS
from fp4_ops.runtime import native, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or reader("mma_bf16", "cuda", 0) is None,
        reason="needs a GPU and its native kernels (build with FP4_CUDA_ARCHS)",
    ),
]
TOP_K = 4
SIZES = [(40, 16, 256, 128), large((200, 64, 1024, 768)), large((4096, 8, 1536, 2048))]
"""Tokens, experts, hidden and intermediate size. Prefill shares tiles along K in the last one."""
CASES = [
    *((f, "sm90_invariant", a) for f in ("nvfp4", "mxfp4") for a in ("none", "fp8")),
    *((f, "mma_bf16_invariant", a) for f in ("nvfp4", "mxfp4") for a in ("none", "nvfp4")),
    *((f, "sm90_int4_invariant", "fp8") for f in ("int4_g32", "int4")),
]


def weight(format: str, layout: str, *shape: int) -> tuple[torch.Tensor, ...]:
    w = reference.random_weight(format, *shape, device="cuda", narrow=True)
    return torch.ops.fp4.prepack(w.packed, w.scale, w.global_scale, format, layout)


def routed(tokens: int, experts: int) -> torch.Tensor:
    """Experts [T, TOP_K]. Three tokens in four have the same first one, so it has many rows."""
    most = tokens * 3 // 4
    ids = torch.rand(tokens, experts, device="cuda").argsort(1)[:, :TOP_K]
    ids[:most] = torch.where(ids[:most] == 2, 7, ids[:most])
    ids[:most, 0] = 2
    return ids


def batches(tokens: int):
    """Yields rows of random batches of other sizes."""
    for size in (1, 2, 8, 9, 33, tokens * 3 // 4, *torch.randint(3, tokens, (5,)).tolist()):
        yield torch.randperm(tokens, device="cuda")[:size]


def block(format: str, layout: str, a_format: str, sizes: tuple[int, ...], dtype=torch.bfloat16, **options):
    """Returns fp4::moe of random operands as a function of the rows of its batch."""
    tokens, experts, hidden, inner = sizes
    w13 = weight(format, layout, experts, 2 * inner, hidden)
    w2 = weight(format, layout, experts, hidden, inner)
    x = torch.randn(tokens, hidden, dtype=dtype, device="cuda")
    ids, scores = routed(tokens, experts), torch.rand(tokens, TOP_K, device="cuda")
    return lambda at: torch.ops.fp4.moe(
        x[at], ids[at], scores[at], *w13, *w2, format=format, layout=layout, a_format=a_format,
        out_dtype=torch.float32, **options,
    )  # fmt: skip


def skip_unread(layout: str) -> None:
    if reader(layout, "cuda", 0) is None:
        pytest.skip(f"the kernels of this GPU do not read layout {layout}")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("format", "layout", "a_format"), CASES)
def test_a_tokens_bits_do_not_depend_on_its_batch(format, layout, a_format, sizes):
    skip_unread(layout)
    run = block(format, layout, a_format, sizes)
    want = run(torch.arange(sizes[0], device="cuda"))
    assert want.isfinite().all() and want.norm() > 0
    for at in batches(sizes[0]):
        assert torch.equal(run(at), want[at]), len(at)


@pytest.mark.parametrize(
    ("format", "layout", "a_format", "dtype"),
    [
        ("nvfp4", "mma_bf16_invariant", "none", torch.bfloat16),
        ("mxfp4", "sm90_invariant", "none", torch.float16),
        ("mxfp4", "sm90_invariant", "fp8", torch.bfloat16),
        ("int4_g32", "sm90_int4_invariant", "fp8", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("activation", ["silu_interleaved", "swigluoai"])
def test_gate_and_up_in_alternate_rows(format, layout, a_format, dtype, activation):
    """Prefill's own gate must not run: it divides two tokens with one product."""
    skip_unread(layout)
    run = block(format, layout, a_format, (60, 4, 128, 128), dtype=dtype, activation=activation)
    want = run(torch.arange(60, device="cuda"))
    assert want.isfinite().all() and want.norm() > 0
    for at in batches(60):
        assert torch.equal(run(at), want[at]), len(at)


@pytest.mark.parametrize(("format", "layout", "kind"), [c for c in CASES if c[2] == "fp8"])
def test_selftest_bounds_fp8_rows(format, layout, kind):
    """Prefill rounds weight x scale to e4m3, and here it runs any number of rows."""
    skip_unread(layout)
    for operator, check in (("moe", oracle.block), ("grouped_mm", oracle.product)):
        case = oracle.Case(operator, format, layout, kind, "silu" if operator == "moe" else "")
        assert oracle.relative_error(*check(case, "cuda")) <= selftest.bound(case), operator


@pytest.mark.parametrize(("format", "layout", "a_format"), CASES)
def test_single_products(format, layout, a_format):
    """fp4::mm, grouped_mm, indexed_mm and grouped_mm_masked give a row the same bits in any batch."""
    skip_unread(layout)
    m, experts, n, k = 300, 5, 192, 1024
    w, one = weight(format, layout, experts, n, k), weight(format, layout, n, k)
    a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(experts, (m,), device="cuda", dtype=torch.int32)
    how = {"format": format, "layout": layout, "out_dtype": torch.float32}

    def rows(at):
        if a_format != "fp8":
            return a[at], None
        return torch.ops.fp4.quantize_fp8(a[at], layout=LAYOUTS[layout].a_layout)

    def mm(at):
        x, scale = rows(at)
        return torch.ops.fp4.mm(x, *one, scale, **how)

    def indexed(at):
        x, scale = rows(at)
        return torch.ops.fp4.indexed_mm(x, *w, ids[at], scale, **how)

    def grouped(at):
        order = ids[at].argsort(stable=True)
        x, scale = rows(at[order])
        ends = torch.bincount(ids[at], minlength=experts).cumsum(0).to(torch.int32)
        out = torch.ops.fp4.grouped_mm(x, *w, ends, scale, **how)
        return torch.empty_like(out).index_copy_(0, order, out)

    def masked(at):
        x, scale = rows(at[None].expand(experts, -1))
        count = torch.full((experts,), len(at), device="cuda", dtype=torch.int32)
        return torch.ops.fp4.grouped_mm_masked(x, *w, count, scale, **how)[3]

    for product in (mm, indexed, grouped, masked):
        want = product(torch.arange(m, device="cuda"))
        for at in batches(m):
            assert torch.equal(product(at), want[at]), (product.__name__, len(at))


@pytest.mark.hardware
@pytest.mark.parametrize(("format", "layout", "a_format"), [("nvfp4", "mma_bf16", "none")])
def test_without_the_layout_bits_do_depend_on_the_batch(format, layout, a_format):
    run = block(format, layout, a_format, (4096, 8, 1536, 2048))
    want = run(torch.arange(4096, device="cuda"))
    assert not all(torch.equal(run(at), want[at]) for at in batches(4096))


DECODE = [
    *((f, "sm90", a) for f in ("nvfp4", "mxfp4") for a in ("none", "fp8")),
    *((f, "mma_bf16", "none") for f in ("nvfp4", "mxfp4")),
]


@pytest.mark.parametrize("sizes", SIZES[:2])
@pytest.mark.parametrize(("format", "layout", "a_format"), DECODE)
def test_decode_has_one_order_of_sums(format, layout, a_format, sizes):
    skip_unread(layout)
    run = block(format, layout, a_format, sizes)
    with native.only("decode"):
        want = run(torch.arange(sizes[0], device="cuda"))
        for at in batches(sizes[0]):
            assert torch.equal(run(at), want[at]), len(at)
