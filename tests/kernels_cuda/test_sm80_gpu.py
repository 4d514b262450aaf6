"""The operators on layout mma_bf16 with the kernels of `_sm80.so`, which GPUs other than Hopper use.

decode, gemv and prefill are compared with float64, with the shared memory that those GPUs have.
"""

from pathlib import Path

import emulated
import pytest
import reference
import torch
from development import development

import fp4_ops
from fp4_ops import selftest
from fp4_ops.backends import quantises_int8
from fp4_ops.backends.hopper import HOPPER
from fp4_ops.backends.launchers import library
from fp4_ops.backends.mma import trust
from fp4_ops.runtime import native

planner = development("planner")
BUILT = Path(fp4_ops.__file__).parent / "_sm80.so"
EMULATED = library.FILE != "_sm90.so"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not (EMULATED or native.family(0) == native.MMA),
        reason="needs a GPU that runs _sm80.so",
    ),
]

LAYOUT = "mma_bf16"
SHARED = {"99 KB": 101376, "163 KB": 166912}
BOUND = 1e-4  # of float32 results
KERNELS = ("gemv", "decode", "prefill")
ROWS = (torch.bfloat16, torch.float16)


@pytest.fixture(params=SHARED, autouse=True)
def gpu(request):
    """Return the planner's `Gpu` with so much shared memory."""
    if EMULATED:
        before, file = library.FILE, str(emulated.kernels("sm80"))
    else:
        before, file = "", str(BUILT)
    for module in (native, planner):
        module.use_kernels(file, SHARED[request.param])
    if EMULATED:
        loaded = library.library(native.MMA)
        for one in (loaded, library.library()):  # the GPU is asked by the first that is there
            one.emulator_device(89, emulated.MULTIPROCESSORS, max(SHARED.values()))
        loaded.emulator_seed(torch.initial_seed() % 2**32)
    yield planner.gpu(0)
    if EMULATED:
        library.library().emulator_device(90, emulated.MULTIPROCESSORS, 227 * 1024)
    for module in (native, planner):
        module.use_kernels(before if EMULATED else file, 0)


class Weight:
    """[groups, n, k], packed, and the values it stands for."""

    def __init__(self, format: str, groups: int, n: int, k: int) -> None:
        values = torch.randn(groups, n, k) * (torch.rand(groups, n, 1) + 0.05)
        packed, scale, factor = torch.ops.fp4.quantize(values, format)
        given = factor if factor.numel() else None
        self.values = torch.ops.fp4.dequantize(packed, scale, given, format, torch.float64).cuda()
        ones = None if given is None else torch.ones_like(given)
        unscaled = torch.ops.fp4.dequantize(packed, scale, ones, format, torch.float64)
        by = 1 if given is None else given.double().view(-1, 1, 1)
        self.as_int8 = (reference.int8_weights(unscaled, scale, format) * by).cuda()
        self.packed = [t.cuda() for t in torch.ops.fp4.prepack(packed, scale, given, format, LAYOUT)]
        self.options = {"format": format, "layout": LAYOUT, "out_dtype": torch.float32}


def error(got, want) -> float:
    return selftest.relative_error(got, want)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    "groups, n, k, m", [(5, 64, 208, 8), (3, 128, 2048, 37), (2, 64, 7168, 3), (4, 192, 2880, 6)]
)
def test_products(kernel, format, groups, n, k, m, rows):
    """A kernel that cannot run a size leaves it to the next, so all sizes are right with each."""
    w = Weight(format, groups, n, k)
    x = torch.randn(m, k, device="cuda").to(rows)
    ids = torch.randint(-1, groups, (m,), device="cuda")
    ids[0] = 0
    own = ids >= 0
    want = torch.einsum("mk,mnk->mn", x.double(), w.values[ids.clamp(min=0)]) * own[:, None]
    order = torch.argsort(torch.where(own, ids, groups), stable=True)
    sorted_ids = torch.where(own, ids, groups)[order]
    ends = torch.searchsorted(sorted_ids, torch.arange(groups, device="cuda"), right=True).int()
    with native.only(kernel):
        got = torch.ops.fp4.indexed_mm(x, *w.packed, ids, **w.options)
        assert torch.isfinite(got).all() and error(got, want) <= BOUND
        got = torch.ops.fp4.grouped_mm(x[order].contiguous(), *w.packed, ends, **w.options)
        assert error(got, want[order]) <= BOUND
        got = torch.ops.fp4.mm(x, *(t[0] for t in w.packed), **w.options)
        assert error(got, x.double() @ w.values[0].T) <= BOUND


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("a_format", ["none", "nvfp4", "mxfp4"])
def test_blocks(kernel, format, a_format):
    case = selftest.Case("moe", format, LAYOUT, a_format, "swigluoai" if format == "mxfp4" else "silu")
    with native.only(kernel):
        assert selftest.relative_error(*selftest.block(case, "cuda")) <= selftest.bound(case)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_ends_of_fp16(kernel, format):
    """The largest and the least values of fp16 rows, and weights of scales a thousand times apart: what the
    rows have is not rounded, whatever else is in their row."""
    w = Weight(format, 3, 64, 256)
    x = torch.randn(9, 256, device="cuda")
    x[0::3] *= 60000 / x[0::3].abs().max()
    x[1::3] *= 2.0**-20
    x[2::3, ::2] *= 2.0**-18
    x = x.half()
    ids = torch.arange(9, device="cuda") % 3
    want = torch.einsum("mk,mnk->mn", x.double(), w.values[ids])
    with native.only(kernel):
        got = torch.ops.fp4.indexed_mm(x, *w.packed, ids, **w.options)
    for i in range(3):
        assert error(got[i::3], want[i::3]) <= BOUND


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("activation", ["silu", "silu_interleaved"])
def test_blocks_of_fp16_rows(kernel, activation):
    groups, n, k, m, top_k = 4, 64, 128, 13, 2
    up, down = Weight("nvfp4", groups, 2 * n, k), Weight("nvfp4", groups, k, n)
    x = (torch.randn(m, k, device="cuda") / k**0.5).half()
    ids = torch.rand(m, groups, device="cuda").topk(top_k).indices
    weights = torch.rand(m, top_k, device="cuda")
    h = torch.einsum("mk,menk->men", x.double(), up.values[ids])
    gate, linear = (h[..., ::2], h[..., 1::2]) if activation == "silu_interleaved" else h.chunk(2, -1)
    y = torch.einsum("men,mekn->mek", torch.nn.functional.silu(gate) * linear, down.values[ids])
    want = torch.einsum("mek,me->mk", y, weights.double())
    with native.only(kernel):
        got = torch.ops.fp4.moe(
            x, ids, weights, *up.packed, *down.packed, activation=activation, **up.options
        )
    assert error(got, want) <= 4e-3


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("activation", ["silu", "silu_interleaved", "relu2", "swigluoai"])
def test_blocks_of_int8_rows(activation, format, rows, kernel):
    """What rounded rows and weights make; of decode, what rows make that are as they are. Slots of no expert
    count nothing."""
    groups, inner, hidden, tokens, top_k = 5, 192, 320, 37, 3
    up = Weight(format, groups, reference.rows_per_column(activation) * inner, hidden)
    down = Weight(format, groups, hidden, inner)
    x = (torch.randn(tokens, hidden, device="cuda") / hidden**0.5).to(rows)
    x[1] *= 2.0**-10
    x[2, 7] = 30
    ids = torch.randint(-1, groups, (tokens, top_k), device="cuda")
    weights = torch.rand(tokens, top_k, device="cuda")
    int8 = kernel == "prefill"
    row = reference.int8_rows if int8 else torch.Tensor.double
    of = (up.as_int8, down.as_int8) if int8 else (up.values, down.values)
    want = torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda")
    for j in range(top_k):
        h = reference.indexed_mm(row(x), of[0], ids[:, j], None)
        if activation in ("silu", "relu2"):  # others are gated in the product
            h = h.to(rows).double()
        h = reference.activate(h, activation)
        if activation != "silu":
            h = h.to(rows).double()
        want += weights[:, j, None].double() * reference.indexed_mm(row(h), of[1], ids[:, j], None)
    with native.only(kernel):
        got = torch.ops.fp4.moe(
            x, ids, weights, *up.packed, *down.packed, activation=activation, a_format="int8", **up.options
        )
    assert error(got, want) <= 6e-3


def test_the_check_of_a_first_use_has_int8_rows():
    """They are far enough from the reference to be seen, and within its bound."""
    with native.only("prefill"):
        for format in ("nvfp4", "mxfp4"):
            case = selftest.Case("moe", format, LAYOUT, "int8", "silu")
            off = selftest.relative_error(*selftest.block(case, "cuda"))
            assert 4e-3 < off < 0.7 * trust.INT8_FACTOR * trust.BOUND, off


def test_who_has_int8_rows():
    assert quantises_int8("cuda", LAYOUT) and not quantises_int8("cuda", "plain")
    assert not HOPPER.takes("int8", LAYOUT)


def test_int8_rows_that_are_not_finite():
    """NaN in each of their results, and in no other row's. Zeros are zeros, and so are values too small to
    have a scale."""
    up, down = Weight("nvfp4", 2, 256, 256), Weight("nvfp4", 2, 256, 128)
    x = torch.randn(8, 256, device="cuda").bfloat16()
    x[1, 200], x[3, 5], x[4], x[5] = float("nan"), float("inf"), 0, 2.0**-130
    ids, weights = torch.zeros(8, 1, dtype=torch.int64, device="cuda"), torch.ones(8, 1, device="cuda")
    with native.only("prefill"):
        got = torch.ops.fp4.moe(x, ids, weights, *up.packed, *down.packed, a_format="int8", **up.options)
    bad = torch.tensor([1, 3], device="cuda")
    assert not torch.isfinite(got[bad]).any()
    assert torch.isfinite(got[[0, 2, 4, 5, 6, 7]]).all() and not got[4:6].any()


@pytest.mark.parametrize("k", [768, 2048, 2880, 4096, 7168, 14336, 18432])
def test_every_model_has_a_configuration(gpu, k):
    """Also for many rows, whose ids decode keeps beside the rest."""
    for rows in (8, 300):
        config = planner.decode_config(rows, 64, 2048, k, gpu)
        assert config is not None and config.shared_bytes <= gpu.shared_bytes


@pytest.mark.parametrize("layout", ["sm90", "sm90_int4"])
def test_layouts_of_hopper_are_refused_in_words(layout):
    format = "nvfp4" if layout == "sm90" else "int4"
    w = torch.ops.fp4.quantize(torch.randn(2, 64, 128), format)
    packed = [t.cuda() for t in torch.ops.fp4.prepack(*w[:2], w[2] if w[2].numel() else None, format, layout)]
    x = torch.randn(4, 128).cuda().bfloat16()
    if layout == "sm90_int4":
        x, scale = torch.zeros(4, 128).to(torch.float8_e4m3fn).cuda(), torch.ones(4).cuda()
    ends = torch.tensor([2, 4], dtype=torch.int32).cuda()
    given = {"a_scale": scale} if layout == "sm90_int4" else {}
    words = rf"layout is '{layout}', whose kernels need compute capability 9.0; this GPU has \d+.\d"
    with pytest.raises(RuntimeError, match=words):
        torch.ops.fp4.grouped_mm(x, *packed, ends, format=format, layout=layout, **given)
