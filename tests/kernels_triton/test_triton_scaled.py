"""FP4 x FP4 by Triton's `tl.dot_scaled`, without such a GPU: indexing, masks and scales in Triton's
interpreter against float64 and the CPU's operators, what it compiles to, and where it is chosen.

The interpreter has no `dot_scaled`. The fixture of that name stands for it, with the limits of the tensor
cores: one kind of scales for both operands, nvfp4's without their sign.
"""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
import torch
from conftest import SEED, more

pytest.importorskip("triton")

import reference
import triton_targets
from triton_interpreter import INSIDE, compiles, inside, needs_older_numpy

from fp4_ops.backends.triton import launch, operators, ops, tiles
from fp4_ops.backends.triton.scaled import ops as scaled_ops
from fp4_ops.backends.triton.scaled import support
from fp4_ops.backends.triton.scaled import tiles as scaled_tiles
from fp4_ops.backends.triton.scaled.spec import Scaled
from fp4_ops.meta.formats import FORMATS
from fp4_ops.runtime import first_use

pytestmark = needs_older_numpy()
FORMAT_NAMES = ("nvfp4", "mxfp4")

if INSIDE:
    import numpy
    import triton.language as tl
    from triton.language import semantic
    from triton.runtime import interpreter


# --- in the interpreter, by test_in_the_interpreter in test_triton_interpret.py ---

BLACKWELL = tiles.Device("like sm_120", (12, 0), 1 << 40, 170)


def exact(codes, scale, e4m3: bool) -> torch.Tensor:
    """uint8 [rows, K/2] and scales [rows, K/block] -> float64 [rows, K]."""
    scale = torch.from_numpy(scale.view("uint8").copy())
    scale = (scale & 127).view(torch.float8_e4m3fn) if e4m3 else scale.view(torch.float8_e8m0fnu)
    format = "nvfp4" if e4m3 else "mxfp4"
    return reference.dequantize(torch.from_numpy(codes.copy()), scale, torch.ones(()), format)


@pytest.fixture
def dot_scaled(monkeypatch):
    """Replace the instruction by torch, and count its uses."""
    used = []

    def dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, c, fast, a_packed, b_packed, out):
        assert a_format == b_format == "e2m1" and a_packed and b_packed and a.dtype == b.dtype == tl.uint8
        assert a_scale.dtype == b_scale.dtype and out == c.dtype == tl.float32
        e4m3 = a_scale.dtype == tl.float8e4nv
        blocks = 2 * int(a.shape[1]) // (16 if e4m3 else 32)
        for scale, side in ((a_scale, a.shape[0]), (b_scale, b.shape[1])):
            assert [int(n) for n in scale.shape] == [int(side), blocks]
        rows = exact(a.handle.data, a_scale.handle.data, e4m3)
        columns = exact(b.handle.data.T, b_scale.handle.data, e4m3)
        used.append(tuple(int(n) for n in a.shape))
        sums = (torch.from_numpy(c.handle.data) + rows @ columns.T).float().numpy()
        return self.tensor(interpreter.TensorHandle(sums, tl.float32), c.type)

    monkeypatch.setattr(semantic.TritonSemantic, "dot_scaled", dot_scaled)
    monkeypatch.setattr(support, "_wrong", set())
    monkeypatch.setattr(support, "_told", set())
    tiles.pretend(BLACKWELL)
    yield used
    tiles.pretend(None)
    tiles.force(None)


@pytest.fixture
def small_tiles(dot_scaled):
    tiles.force(tiles.Tile(32, 16, 128, 4, 2))
    return dot_scaled


def assert_close(got, want):
    assert torch.isfinite(got).all()
    assert (got.double() - want).norm() <= 2e-6 * want.norm()


def given(a) -> dict:
    return {"a_scale": a.scale, "a_global_scale": a.global_scale, "a_format": a.a_format}


# K: a tile and a bit, one that ends inside a block of scales, one tile, several, less than 64.
SHAPES = [(3, 40, 144), (2, 17, 50), (1, 33, 128), (4, 48, 296), (2, 5, 2)]
PRODUCTS = [(*SHAPES[0], "nvfp4"), (*SHAPES[1], "mxfp4"), (*SHAPES[2], "nvfp4"), (*SHAPES[3], "mxfp4")]
PRODUCTS += [more(*s, f) for s in SHAPES for f in FORMAT_NAMES if (*s, f) not in PRODUCTS]
OPTIONS = {"out_dtype": torch.float32}


@inside
@pytest.mark.parametrize("g, n, k, format", PRODUCTS)
def test_products(g, n, k, format, small_tiles):
    """Against float64, and the operators of the CPU, which multiply the same exactly."""
    m, w = 19, reference.random_weight(format, g, n, k)  # more than one tile
    bias = torch.randn(g, n)
    options = {"format": format, **OPTIONS}
    for _ in range(3 if format == "nvfp4" else 1):  # a factor for all, for each group, for each row
        used = len(small_tiles)
        a = reference.random_activations(m, k, kind=format)
        ids = torch.randint(-1, g + 1, (m,))
        ids[0] = 0
        calls = {"indexed_mm": (ids,)}
        offs = torch.randint(1, m, (g,)).sort().values.int()  # often an empty group; rows past the end
        calls["grouped_mm"] = (offs,)
        for name, args in calls.items():
            got = getattr(operators, name)(a.data, *w.operands(), *args, bias=bias, **given(a), **options)
            of_row = ids if name == "indexed_mm" else reference.m_indices(offs, m)
            assert_close(got, reference.indexed_mm(a.exact, w.dense, of_row, bias))
            assert not got[(of_row < 0) | (of_row >= g)].any()
            here = getattr(torch.ops.fp4, name)(
                a.data, *w.operands(), *args, bias=bias, **given(a), **options
            )
            assert_close(got, here.double())
        b = reference.random_activations(g, 5, k, kind=format)
        masked_m = torch.randint(0, 8, (g,)).int()
        masked_m[0] = 3
        got = operators.grouped_mm_masked(b.data, *w.operands(), masked_m, bias=bias, **given(b), **options)
        there = torch.arange(5) < masked_m[:, None]
        want = (b.exact @ w.dense.mT + bias[:, None].double()) * there[..., None]
        assert_close(got, want)
        one = [None if t is None else t[0] for t in w.operands()]
        got = operators.mm(a.data, *one, bias=bias[0], **given(a), **options)
        assert_close(got, a.exact @ w.dense[0].T + bias[0].double())
        assert len(small_tiles) > used, "another kernel ran"


@inside
@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("offs", [[32, 32, 160, 288], [-7, 400, 64], [], [296]], ids=str)
def test_groups_of_columns(offs, format, small_tiles):
    """Groups that begin and end inside a tile; K ends inside a block; NaN scales stay in their group."""
    m, n, k = 19, 40, 296
    w, a = reference.random_weight(format, n, k), reference.random_activations(m, k, kind=format)
    ends = torch.tensor(offs).clamp(0, k).cummax(0).values.tolist() if offs else []

    def call():
        offsets = torch.tensor(offs, dtype=torch.int32)
        return operators.grouped_mm_k(a.data, *w.operands(), offsets, **given(a), format=format, **OPTIONS)

    got = call()
    assert got.shape == (len(offs), m, n) and (small_tiles or not offs)
    for g, (begin, end) in enumerate(zip((0, *ends), ends)):
        assert_close(got[g], a.exact[:, begin:end] @ w.dense[:, begin:end].T)
    if ends and 0 < ends[0] < k:
        block = ends[0] // reference.BLOCK[format]
        for scale in (a.scale, w.scale):
            scale.view(torch.uint8)[:, block:] = 127 if format == "nvfp4" else 255
        assert torch.equal(call()[0], got[0])


@inside
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_each_candidate(format, dot_scaled):
    """Another one each run, with rows of more than two of its tiles."""
    tile = scaled_tiles.SHAPES[(SEED + len(format)) % len(scaled_tiles.SHAPES)]
    tiles.force(tile)
    g, n, k, m = 3, 200, 2 * tile.block_k + 48, 2 * tile.block_m + 5
    w, a = reference.random_weight(format, g, n, k), reference.random_activations(m, k, kind=format)
    ids = torch.randint(-1, g + 1, (m,))
    got = operators.indexed_mm(a.data, *w.operands(), ids, **given(a), format=format, **OPTIONS)
    assert_close(got, reference.indexed_mm(a.exact, w.dense, ids))
    assert set(dot_scaled) == {(tile.block_n, tile.block_k // 2)}


GATED = [("nvfp4", "silu"), ("mxfp4", "swigluoai"), more("nvfp4", "relu2"), more("mxfp4", "situ")]
GATED += [more("mxfp4", "silu"), more("nvfp4", "gelu_tanh_interleaved"), more("mxfp4", "silu(limit=2)")]


@inside
@pytest.mark.parametrize("format, activation", GATED)
def test_moe(format, activation, small_tiles):
    """A hidden value between two codes may land on either: see tests/operators/test_ops_moe.py."""
    g, hidden, inter, tokens, top_k = 3, 72, 50, 7, 2
    rows = reference.rows_per_column(activation) * inter
    b13, b2 = torch.randn(g, rows), torch.randn(g, hidden)
    w13, w2 = (
        reference.random_weight(format, g, rows, hidden),
        reference.random_weight(format, g, hidden, inter),
    )
    x, topk = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
    ids = torch.randint(-1, g + 1, (tokens, top_k))
    ids[0, 0] = 0

    def call(call_of):
        return call_of(
            x, ids, topk, *w13.operands(), *w2.operands(), b13, b2, format=format, activation=activation,
            a_format=format, **OPTIONS,
        )  # fmt: skip

    got = call(operators.moe)
    assert small_tiles, "another kernel ran"
    want = reference.moe(x, ids, topk, w13.dense, w2.dense, b13, b2, activation=activation, a_format=format)
    between = reference.moe_between_codes(
        x, ids, topk, w13.dense, w2.dense, b13, activation=activation, a_format=format
    )
    assert (got.double() - want).norm() <= 5e-2 * want.norm() + between
    assert (got - call(torch.ops.fp4.moe)).norm() <= 5e-2 * want.norm() + 2 * between
    x[2, 5] = torch.nan
    some = ((ids >= 0) & (ids < g)).any(-1)
    assert torch.equal(call(operators.moe).isnan().all(-1), some & (torch.arange(tokens) == 2))


@inside
@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (5, 3, 0, 4), (5, 0, 2, 4), (1, 1, 1, 2)], ids=str)
def test_small_blocks(shape, small_tiles):
    """Without tokens, without choices, without experts; one of each."""
    tokens, g, top_k, inter = shape
    w13, w2 = (reference.random_weight("nvfp4", g, *s) for s in ((2 * inter, 6), (6, inter)))
    x, ids = torch.randn(tokens, 6), torch.zeros(tokens, top_k, dtype=torch.int64)
    got = operators.moe(
        x, ids, torch.ones(tokens, top_k), *w13.operands(), *w2.operands(), format="nvfp4", a_format="nvfp4"
    )
    assert got.shape == (tokens, 6)
    if tokens * g * top_k:
        args = x, ids, torch.ones(1, 1), w13.dense, w2.dense
        want = reference.moe(*args, a_format="nvfp4")
        between = reference.moe_between_codes(*args, a_format="nvfp4")
        assert (got.double() - want).norm() <= 2e-2 * want.norm() + between
    else:
        assert not got.any()


@inside
@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("shape", [(5, 50), (3, 64), (2, 1500), (2, 2), (0, 8)], ids=str)
def test_rows_are_quantised_as_matrices_of_their_own(shape, format):
    x = torch.randn(shape) * torch.exp(3 * torch.randn(shape[0], 1))
    if shape[0] > 1:
        x[0] = 0
        x[1, -1] = -0.0
    if shape[0] > 2:
        x[2] *= 1e-30
    packed, scale, factor = ops.quantize_rows(x, FORMATS[format])
    want, want_scale, want_factor = reference.quantize(x[:, None], format)
    blocks = want_scale.shape[-1]
    assert torch.equal(packed, want[:, 0])
    assert torch.equal(scale[:, :blocks], want_scale[:, 0].view(torch.uint8))
    assert scale.shape[1] % 16 == 0 and not scale[:, blocks:].any()
    assert torch.equal(factor, want_factor if format == "nvfp4" else torch.ones(shape[0]))
    for row, bad in enumerate((torch.nan, -torch.inf)[: shape[0]]):
        x[row, 0] = bad
    assert torch.equal(ops.quantize_rows(x, FORMATS[format])[2].isnan(), ~x.isfinite().all(-1))


@inside
def test_a_row_with_a_negative_scale_is_nan(small_tiles):
    """This holds for weights and activations: tensor cores would read the scale without its sign."""
    w, a = reference.random_weight("nvfp4", 2, 40, 144), reference.random_activations(7, 144, kind="nvfp4")
    w.scale.view(torch.uint8)[1, 33, 4] |= 128
    got = operators.indexed_mm(
        a.data, *w.operands(), torch.tensor([0, 1, 1, 0, 2, 1, 0]), **given(a), format="nvfp4", **OPTIONS
    )
    want = torch.zeros(7, 40, dtype=torch.bool)
    want[[1, 2, 5], 33] = True
    assert torch.equal(got.isnan(), want)
    a.scale.view(torch.uint8)[3, -1] |= 128
    got = operators.mm(a.data, w.packed[0], w.scale[0], w.global_scale[0], **given(a), format="nvfp4")
    assert got.isnan().all(-1).tolist() == [i == 3 for i in range(7)] and got[:3].isfinite().all()


@inside
@pytest.mark.parametrize("format", ["nvfp4", more("mxfp4")])
def test_the_first_use_finds_scales_that_are_read_wrongly_and_races(format, dot_scaled, monkeypatch):
    tile, cpu = tiles.Tile(32, 16, 128, 4, 2), torch.device("cpu")
    assert scaled_ops.first_error(format, tile, BLACKWELL, cpu, 1, 1) < 1e-5
    right = semantic.TritonSemantic.dot_scaled

    def shifted(self, a, a_scale, *args):
        data = numpy.roll(a_scale.handle.data, 1, axis=1)
        handle = interpreter.TensorHandle(data, a_scale.dtype)
        return right(self, a, self.tensor(handle, a_scale.type), *args)

    monkeypatch.setattr(semantic.TritonSemantic, "dot_scaled", shifted)
    assert scaled_ops.first_error(format, tile, BLACKWELL, cpu, 1, 1) > 100 * support.BOUND

    def racing(self, *args):
        sums = right(self, *args)
        sums.handle.data *= 1 + 1e-4 * len(dot_scaled)
        return sums

    monkeypatch.setattr(semantic.TritonSemantic, "dot_scaled", racing)
    assert scaled_ops.first_error(format, tile, BLACKWELL, cpu, 1, 1) == float("inf")


@inside
@pytest.mark.parametrize(
    "rows, weights", [("nvfp4", "mxfp4"), ("mxfp4", "nvfp4"), ("fp8", "nvfp4"), ("fp8", "mxfp4")]
)
def test_other_pairs_take_the_other_path(rows, weights, small_tiles):
    """The instruction reads the scales of both operands in one way."""
    kind = torch.float8_e4m3fn if rows == "fp8" else rows
    w, a = reference.random_weight(weights, 2, 40, 96), reference.random_activations(7, 96, kind=kind)
    tiles.pretend(None)  # whose other path is inline PTX
    monkey = pytest.MonkeyPatch()
    monkey.setattr(support, "has_instructions", lambda device: True)
    ids = torch.tensor([0, 1, 1, 0, 2, 1, 0])
    got = operators.indexed_mm(a.data, *w.operands(), ids, **given(a), format=weights, **OPTIONS)
    monkey.undo()
    assert not small_tiles
    assert_close(got, reference.indexed_mm(a.exact, w.dense, ids))


# --- where it is chosen ---


@pytest.mark.parametrize(
    "capability, first", [((10, 0), (3, 6)), ((10, 3), (3, 6)), ((12, 0), (3, 6)), ((12, 1), (3, 8))]
)
def test_by_capability_and_triton(capability, first):
    gpu = dataclasses.replace(tiles.HOPPER, capability=capability)
    for version in ((3, 5), (3, 6), (3, 7), (3, 8), (3, 9), (4, 0)):
        assert support.has_instructions(gpu, version) == (version >= first)


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 6), (8, 9), (9, 0), (11, 0), (12, 2)], ids=str)
def test_other_gpus_have_none(capability):
    assert not support.has_instructions(dataclasses.replace(tiles.HOPPER, capability=capability), (9, 9))


def launched(architecture: int, rows: str, weights: str, monkeypatch, m: int = 40) -> list:
    """The product kernels that operators of all modes would run; the first use is taken as right."""
    monkeypatch.setattr(support, "trusted", lambda *_: True)
    g, n, k = 4, 192, 256
    w = reference.random_weight(weights, g, n, k)
    w13 = reference.random_weight(weights, g, 2 * k, n)
    kind = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}.get(rows, rows)
    a, columns = reference.random_activations(m, k, kind=kind), torch.tensor([64, k], dtype=torch.int32)
    b = reference.random_activations(g, m, k, kind=kind)
    offs, ids = torch.tensor([3, 3, 20, m], dtype=torch.int32), torch.randint(0, g, (m,))
    one = [None if t is None else t[0] for t in w.operands()]
    with triton_targets.gpu(architecture) as kernels:
        operators.mm(a.data, *one, **given(a), format=weights)
        operators.grouped_mm(a.data, *w.operands(), offs, **given(a), format=weights)
        operators.grouped_mm_masked(b.data, *w.operands(), offs, **given(b), format=weights)
        operators.indexed_mm(a.data, *w.operands(), ids, **given(a), format=weights)
        operators.grouped_mm_k(a.data, *one, columns, **given(a), format=weights)
        operators.moe(
            torch.randn(m, n), ids[:, None], torch.ones(m, 1), *w13.operands(), *w.operands(), format=weights,
            a_format=rows if rows in ("nvfp4", "mxfp4", "fp8") else "none",
        )  # fmt: skip
    return [k for k in kernels.launched if k.name in ("gemm_kernel", "scaled_kernel")]


OTHERS = [(a, f, f) for a in (89, 90) for f in FORMAT_NAMES]
OTHERS += [(120, "nvfp4", "mxfp4"), (100, "fp8", "nvfp4"), (120, "bfloat16", "nvfp4")]
OTHERS = [p if i == SEED % len(OTHERS) else more(*p) for i, p in enumerate(OTHERS)]


@pytest.mark.more
@compiles
@pytest.mark.parametrize("architecture, rows, weights", OTHERS)
def test_the_path_of_all_gpus(architecture, rows, weights, monkeypatch):
    """For GPUs without the instructions, for other pairs of formats, for fp8 rows, for rows as they are."""
    assert {k.name for k in launched(architecture, rows, weights, monkeypatch)} == {"gemm_kernel"}


@compiles
@pytest.mark.parametrize("triton_version", [more((3, 6)), (3, 8)])
def test_sm_121_goes_by_the_version(triton_version, monkeypatch):
    monkeypatch.setattr(support, "_triton", lambda: triton_version)
    here = support.has_instructions(dataclasses.replace(tiles.HOPPER, capability=(12, 1)))
    assert here == (triton_version == (3, 8))
    if not here:
        assert {k.name for k in launched(121, "nvfp4", "nvfp4", monkeypatch)} == {"gemm_kernel"}


@compiles
@pytest.mark.parametrize("architecture, format", [more(100, "nvfp4"), more(120, "mxfp4"), more(103, "mxfp4")])
def test_every_operator_takes_it(architecture, format, monkeypatch):
    kernels = launched(architecture, format, format, monkeypatch)
    assert len(kernels) == 7 and {k.name for k in kernels} == {"scaled_kernel"}
    assert {k.constants["MODE"] for k in kernels} == {"dense", "mapped", "masked", "k"}
    assert all(k.constants["NVFP4"] == (format == "nvfp4") for k in kernels)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Set the result of each tile's first use, and record the tiles asked for. Nothing is compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(support, "_wrong", set())
    monkeypatch.setattr(support, "_told", set())
    monkeypatch.setattr(support.launch, "INTERPRET", False)
    monkeypatch.setattr(launch, "fits", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    first_use.forget()
    found, tiles_asked = {}, []

    def first_error(format, tile, device, place):
        tiles_asked.append((format, tile))
        return found.get(format, 0.0)

    monkeypatch.setattr(scaled_ops, "first_error", first_error)
    yield found, tiles_asked
    first_use.forget()


def spec(format: str) -> Scaled:
    return Scaled(
        "mapped", True, 1, format, 1536, 2048, 128, None, True, torch.float32, scaled_ops.first_error
    )


@compiles
def test_each_tile_is_checked_once(asked):
    _, tiles_asked = asked
    for _ in range(2):
        for format in FORMAT_NAMES:
            for rows in (8, 5000):
                launch.choose(rows, 8, [lambda f=format: spec(f)], BLACKWELL)
        first_use.forget()  # another process reads what the first has found
    assert len(tiles_asked) == len(set(tiles_asked)) == 4


@compiles
@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_a_format_that_is_wrong_is_not_used_again(wrong, asked, caplog):
    """One warning, and the path of all GPUs; the other format is another matter."""
    found, tiles_asked = asked
    found["nvfp4"] = wrong
    w = ops.WeightArgs(*torch.zeros(3, 8, 64, dtype=torch.uint8)[:, None], None, 1, 8, 128, FORMATS["nvfp4"])
    tiles.pretend(BLACKWELL)
    try:
        for rows in (8, 5000, 8):
            tile = operators.or_else(
                w, "nvfp4", lambda rows=rows: launch.choose(rows, 8, [lambda: spec("nvfp4")], BLACKWELL), int
            )
            assert tile == 0
    finally:
        tiles.pretend(None)
    assert len(tiles_asked) == 1 and len(caplog.records) == 1
    assert "wrong on like sm_120" in caplog.text and "rows as bfloat16" in caplog.text
    assert launch.choose(8, 8, [lambda: spec("mxfp4")], BLACKWELL)


@compiles
def test_what_does_not_compile_as_meant_is_said_once(asked, monkeypatch, caplog):
    """A Triton that multiplies by bfloat16 what it is given."""
    monkeypatch.setattr(launch, "fits", lambda *_: False)
    w = ops.WeightArgs(*torch.zeros(3, 8, 64, dtype=torch.uint8)[:, None], None, 1, 8, 128, FORMATS["nvfp4"])
    tiles.pretend(BLACKWELL)
    try:
        for _ in range(2):
            choose = lambda: launch.choose(8, 8, [lambda: spec("nvfp4")], BLACKWELL)  # noqa: E731
            assert operators.or_else(w, "nvfp4", choose, int) == 0
    finally:
        tiles.pretend(None)
    assert len(caplog.records) == 1 and "no tile" in caplog.text and "rows as bfloat16" in caplog.text


@compiles
def test_while_a_graph_is_captured_nothing_is_checked(asked, monkeypatch, caplog):
    _, tiles_asked = asked
    with monkeypatch.context() as patch:
        patch.setattr(first_use, "capturing", lambda: True)
        with pytest.raises(launch.NoTile):
            launch.choose(8, 8, [lambda: spec("nvfp4")], BLACKWELL)
        assert not tiles_asked
    assert launch.choose(8, 8, [lambda: spec("nvfp4")], BLACKWELL) and not caplog.records


# --- what it compiles to ---


SOME_STACK = 128
"""Bytes a thread: 128 x 128 x 256 on sm_120 takes 72, where K ends inside a tile."""

BLACKWELLS = {(100, 103): "tcgen05.mma", (120,): "mma.sync"}


def forms():
    """Each shape of each family in both formats, with a mode, sizes, bias, factor and dtype drawn."""
    for i, tile in enumerate(scaled_tiles.SHAPES):
        for family in BLACKWELLS:
            gpu = dataclasses.replace(tiles.HOPPER, capability=divmod(family[0], 10))
            if scaled_tiles.usable(tile, 4096, gpu):
                for format in FORMAT_NAMES:
                    yield pytest.param(tile, family, format, i, id=f"sm_{family[0]}-{tile}-{format}")


def drawn(tile, format: str, i: int, rng) -> Scaled:
    mode = ("mapped", "dense", "masked", "k")[i % 4]
    n, k = rng.choice(((1536, 2048), (2880, 2880), (4096, 14336), (1504, 1060)))
    block = FORMATS[format].block
    stride = rng.choice((-(-k // block), -(-k // block // 16) * 16))
    bias = None if mode == "k" else rng.choice((None, torch.bfloat16, torch.float32))
    out = rng.choice((torch.bfloat16, torch.float32))
    rows, factor = mode == "mapped" and rng.random() < 0.7, rng.random() < 0.7
    return Scaled(mode, rows, rng.choice((1, 8)), format, n, k, stride, bias, factor, out, None)


def problems_of(kernel, spec: Scaled, tile, family: tuple[int, ...], folder) -> list[str]:
    found = []
    ptx = kernel.asm["ptx"]
    products = re.findall(r"(?m)^.*?((?:tcgen05\.mma|mma\.sync|wgmma)\.\S+)", ptx)
    if not products or any(BLACKWELLS[family] not in p or "block_scale" not in p for p in products):
        found.append(f"multiplies by {set(products)}")
    if not spec.as_meant(kernel):
        found.append("not with the scales of the format")
    # A group of columns may begin with any 16 k, which are 8 bytes.
    copies = "cp.async.ca" if spec.mode == "k" and spec.format == "nvfp4" else "cp.async.cg"
    if spec.k % 32 == 0 and copies not in ptx:
        found.append("loads pass through registers")
    for a in family:
        made = kernel.asm["cubin"] if a == family[0] else triton_targets.assemble(ptx, a, folder)
        if (stack := triton_targets.stack(made, folder)) > SOME_STACK:
            found.append(f"sm_{a}: {stack} bytes of stack")
        if kernel.metadata.shared > triton_targets.BLOCK_MEMORY[a]:
            found.append(f"sm_{a}: {kernel.metadata.shared} bytes of shared memory")
    if (getattr(kernel.metadata, "tmem_size", 0) or 0) > launch.TENSOR_MEMORY:
        found.append("tensor memory")
    return [f"{tile} {spec}: {what}" for what in found]


@compiles
@pytest.mark.archs
@pytest.mark.parametrize("tile, family, format, i", list(forms()))
def test_every_shape_compiles_to_fp4_products(tile, family, format, i, tmp_path):
    """With the most stages, which is where it needs most; K a multiple of the tile's and not."""
    rng = random.Random(f"{tile} {family} {format}")
    spec = drawn(tile, format, i, rng)
    if not scaled_tiles.usable(tile, spec.k, dataclasses.replace(tiles.HOPPER, capability=(12, 0))):
        spec = spec._replace(k=14336, a_scales=14336 // FORMATS[format].block)
    with triton_targets.short_cache(), triton_targets.gpu(family[0]):
        kernel = launch.compiled(spec, tile)
    assert not problems_of(kernel, spec, tile, family, tmp_path)


@compiles
@pytest.mark.archs
@pytest.mark.parametrize("terms", [2, 3])
def test_products_into_one_sum_wait_for_each_other(terms):
    """The kernel for all GPUs gets float16 and float32 rows: where Triton 3.6 to 3.8 overlap two products
    into one sum of tensor memory, results are wrong."""
    tile = tiles.Tile(128, 64, 128, 8, 3)
    spec = launch.Spec(
        "mapped", True, 1, "nvfp4", 16, 1536, 2048, terms, torch.uint8, True, None, False, torch.float32,
        None, 0, 8, 1, False, True,
    )  # fmt: skip
    with triton_targets.gpu(100):
        code = launch.compiled(spec, tile).asm["ttgir"]
    loop = code[code.index("scf.for") :]
    order = re.findall(r"(?m)^\s*(?:%\S+ = )?ttng\.(tc_gen5_mma|wait_barrier)\b", loop)
    assert order[: 2 * terms] == ["tc_gen5_mma", "wait_barrier"] * terms
