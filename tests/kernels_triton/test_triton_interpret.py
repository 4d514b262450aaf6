"""The Triton kernels without a GPU: indexing, masks and offsets in Triton's interpreter, in float32 (its
bfloat16 dot is not to be trusted), and what they compile to for Hopper.
What they need on each GPU: tests/kernels_triton/test_architectures.py."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import SEED, more
from triton_interpreter import INSIDE, compiles, inside, needs_older_numpy, run_inside

triton = pytest.importorskip("triton")
pytestmark = needs_older_numpy()

if INSIDE:
    import reference

    from fp4_ops.backends.triton import activations, ops, samples, tiles
    from fp4_ops.meta import operand_checks
    from fp4_ops.meta.formats import FORMATS
    from fp4_ops.meta.layouts import LAYOUTS


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("which", ["not more", more("more")])
def test_in_the_interpreter(which):
    """Everything marked `inside` here and in test_triton_scaled.py, on CPU tensors, in one process."""
    run_inside(which, __file__, str(Path(__file__).with_name("test_triton_scaled.py")))


FORMAT_NAMES = ("nvfp4", "mxfp4", "int4", "int4_g64", "int4_g32")
KERNEL_FORMATS = ("nvfp4", "mxfp4", "int4", "int4_g32")


@pytest.fixture
def small_tiles():
    if INSIDE:
        tiles.force(tiles.Tile(32, 16, 128, 4, 2))
    yield
    if INSIDE:
        tiles.force(None)


def weight(format: str, g: int, n: int, k: int, bias=None):
    w = reference.random_weight(format, g, n, k)
    return w.dense, ops.weight(
        *w.operands(), bias, operand_checks.Weight(g, n, k, FORMATS[format], LAYOUTS["plain"], w.scale.dtype)
    )


@inside
def test_samples():
    """Runs of any length at any address. The last program says how many compared, and found another byte."""
    x = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    starts, sizes = torch.randint(0, 4900, (77,)), torch.randint(1, 65, (77,))
    at, held = starts + x.data_ptr(), torch.zeros(77, 64, dtype=torch.uint8)
    count, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    samples.launch(at, sizes, held, count, answer, compare=False)
    for i, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist())):
        assert torch.equal(held[i, :size], x[start : start + size]) and not held[i, size:].any()
    assert not count.any() and not answer.any()
    samples.launch(at, sizes, held, count, answer, compare=True)
    assert answer.item() == samples.programs(77) == 3
    for i in (0, 40, 76):
        for place in (0, int(sizes[i]) - 1):
            x[starts[i] + place] ^= 1
            count.zero_()
            samples.launch(at, sizes, held, count, answer, compare=True)
            assert answer.item() & 0xFFFFFFFFFF == 3 and 1 <= answer.item() >> 40 <= 3
            x[starts[i] + place] ^= 1
    samples.launch(at, sizes, held, count, answer, compare=True)
    assert answer.item() & 0xFFFFFFFFFF == 6 and answer.item() >> 40 >= 1


def rows_of(a, dense, ids, bias):
    out = [
        dense[e] @ a[r].double() + bias[e]
        if 0 <= e < dense.shape[0]
        else torch.zeros(dense.shape[1]).double()
        for r, e in enumerate(ids)
    ]
    return torch.stack(out)


def assert_close(got, want):
    assert torch.isfinite(got).all()
    assert (got.double() - want).norm() <= 2e-6 * want.norm()


# K: one tile and a bit; not a multiple of a word, so that rows start at any byte; a short last block.
SHAPES = [(3, 40, 144), (2, 17, 50), (3, 33, 72)]


PRODUCTS = [(*SHAPES[0], format) for format in KERNEL_FORMATS]
PRODUCTS += [(*SHAPES[1], "nvfp4"), more(*SHAPES[2], "mxfp4"), more(*SHAPES[1], "int4_g32")]


@inside
@pytest.mark.parametrize("g, n, k, format", PRODUCTS)
def test_products(g, n, k, format, small_tiles):
    m = 17  # more than one tile
    bias = torch.randn(g, n)
    dense, w = weight(format, g, n, k, bias)
    a = torch.randn(m, k)

    ids = torch.randint(-1, g + 1, (m,))
    got = ops.run_product(ops.prepare_indexed, a, m, w, torch.float32, ids, g, tail=True)
    assert_close(got, rows_of(a, dense, ids.tolist(), bias))

    offs = torch.randint(1, m, (g,)).sort().values.int()
    got = ops.run_product(ops.prepare_grouped, a, m, w, torch.float32, offs)
    of_row = torch.searchsorted(offs, torch.arange(m), right=True).tolist()
    assert_close(got, rows_of(a, dense, of_row, bias))
    assert not got[int(offs[-1]) :].any()

    masked_m = torch.randint(0, 6, (g,)).int()
    masked_m[0] = 3
    b = torch.randn(g, 5, k)
    got = ops.run_product(ops.prepare_masked, b, g * 5, w, torch.float32, masked_m)
    of_row = [e if i < masked_m[e] else -1 for e in range(g) for i in range(5)]
    assert_close(got, rows_of(b.reshape(g * 5, k), dense, of_row, bias))

    one = w._replace(codes=w.codes[0], groups=1, bias=bias[0])
    got = ops.run_product(ops.prepare_dense, a, m, one, torch.float32)
    assert_close(got, rows_of(a, dense, [0] * m, bias))


@inside
@pytest.mark.parametrize("offs", [[-5, 9, 4], [30, 40, 50], [7, 3, 30]])
def test_bad_offsets_are_clamped(offs, small_tiles):
    """As if each were at least the one before and at most M."""
    dense, w = weight("nvfp4", 3, 20, 64)
    a = torch.randn(12, 64)
    got = ops.run_product(ops.prepare_grouped, a, 12, w, torch.float32, torch.tensor(offs, dtype=torch.int32))
    ends = torch.tensor(offs).clamp(0, 12).cummax(0).values
    of_row = torch.searchsorted(ends, torch.arange(12), right=True).tolist()
    assert_close(got, rows_of(a, dense, of_row, torch.zeros(3, 20)))


# The gate comes after the sums, in which every format ends: each format with one gate, each gate with one.
GATED = [("nvfp4", "silu"), *(more(format, "silu") for format in KERNEL_FORMATS[1:])]
GATED += [("nvfp4", "swigluoai"), ("mxfp4", "relu2"), ("nvfp4", "silu(limit=2)"), ("nvfp4", "situ")]
GATED += [*(more("nvfp4", g) for g in ("gelu", "gelu_tanh", "gelu_interleaved"))]


@inside
@pytest.mark.parametrize("format, activation", GATED)
def test_moe(format, activation, small_tiles):
    g, hidden, inter, tokens, top_k = 3, 40, 18, 7, 2
    rows = reference.rows_per_column(activation) * inter
    b13, b2 = torch.randn(g, rows), torch.randn(g, hidden)
    d13, up = weight(format, g, rows, hidden, b13)
    d2, down = weight(format, g, hidden, inter, b2)
    x = torch.randn(tokens, hidden)
    ids = torch.randint(-1, g + 1, (tokens, top_k))
    topk = torch.rand(tokens, top_k)
    got = ops.moe(x, ids, topk, up, down, activation, torch.float32)
    assert_close(got, reference.moe(x, ids, topk, d13, d2, b13, b2, activation=activation))


ROWS = [(*SHAPES[0], "nvfp4", "fp8"), (*SHAPES[1], "mxfp4", "nvfp4"), (*SHAPES[2], "nvfp4", "mxfp4")]
ROWS += [more(*SHAPES[0], "nvfp4", kind) for kind in ("nvfp4", "mxfp4")]
ROWS += [more(*SHAPES[1], "mxfp4", kind) for kind in ("fp8", "mxfp4")]
ROWS += [more(*SHAPES[2], "nvfp4", kind) for kind in ("fp8", "nvfp4")]


@inside
@pytest.mark.parametrize("g, n, k, format, kind", ROWS)
def test_quantised_activations(g, n, k, format, kind, small_tiles):
    """As bfloat16 rows and a factor for each; a masked `a` has one for all, for a group or for a row."""
    bias = torch.randn(g, n)
    dense, w = weight(format, g, n, k, bias)
    kind = {"fp8": torch.float8_e4m3fn}.get(kind, kind)
    masked_m = torch.randint(1, 6, (g,)).int()
    of_row = [e if i < masked_m[e] else -1 for e in range(g) for i in range(5)]
    for _ in range(3 if kind == "nvfp4" else 1):
        a = reference.random_activations(g, 5, k, kind=kind)
        values, factor = activations.rows_of(a.data, a.scale, a.global_scale, a.a_format)
        assert values.dtype == torch.bfloat16
        got = ops.run_product(ops.prepare_masked, values, g * 5, w, torch.float32, masked_m, a_factor=factor)
        assert_close(got, rows_of(a.exact.reshape(g * 5, k), dense, of_row, bias))


COLUMNS = [([32, 32, 160, 288], "nvfp4"), ([32, 32, 160, 288], "int4_g32")]
COLUMNS += [more([32, 32, 160, 288], format) for format in ("mxfp4", "int4")]
COLUMNS += [([-7, 400, 64], "nvfp4"), ([], "int4"), more([300], "nvfp4"), more([0, 64], "int4")]


@inside
@pytest.mark.parametrize("offs, format", COLUMNS, ids=str)
def test_groups_of_columns(offs, format, small_tiles):
    """Groups that begin and end inside a tile of k; offsets are clamped; NaN stays in its group."""
    m, n, k = (*((19, 20), (9, 40))[int(torch.randint(2, ()))], 300)  # several tiles of either
    dense, w = weight(format, 1, n, k)
    a, factor = torch.randn(m, k), torch.rand(m)
    got = ops.grouped_mm_k(a, w, torch.tensor(offs, dtype=torch.int32), torch.float32, factor)
    assert got.shape == (len(offs), m, n)
    ends = torch.tensor(offs).clamp(0, k).cummax(0).values.tolist() if offs else []
    for g, (begin, end) in enumerate(itertools.pairwise((0, *ends))):
        want = (a * factor[:, None]).double()[:, begin:end] @ dense[0, :, begin:end].T
        assert_close(got[g], want)
    if ends and 0 < ends[0] < k:
        a[:, ends[0] :] = torch.nan
        again = ops.grouped_mm_k(a, w, torch.tensor(offs, dtype=torch.int32), torch.float32, factor)
        assert torch.equal(again[0], got[0])


GATES_THEN_FP8 = [("silu", "fp8", 4e-3), ("relu2", "fp8", 4e-3)]
GATES_THEN_FP8 += [more(gate, "fp8", 4e-3) for gate in ("swigluoai", "gelu_tanh_interleaved")]
GATES_THEN_FP4 = [("silu", "nvfp4", 2e-2), more("swigluoai", "mxfp4", 2e-2)]


@inside
@pytest.mark.parametrize("activation, a_format, bound", GATES_THEN_FP8 + GATES_THEN_FP4)
def test_moe_with_quantised_activations(activation, a_format, bound, small_tiles):
    """A hidden value between two codes may land on either: see tests/operators/test_ops_moe.py."""
    g, hidden, inter, tokens, top_k = 3, 40, 18, 7, 2
    rows = reference.rows_per_column(activation) * inter
    b13, b2 = torch.randn(g, rows), torch.randn(g, hidden)
    d13, up = weight("nvfp4", g, rows, hidden, b13)
    d2, down = weight("mxfp4", g, hidden, inter, b2)
    x, topk = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
    ids = torch.randint(-1, g + 1, (tokens, top_k))
    got = activations.moe_quantized(x, ids, topk, up, down, activation, torch.float32, a_format=a_format)
    want = reference.moe(x, ids, topk, d13, d2, b13, b2, activation=activation, a_format=a_format)
    between = reference.moe_between_codes(
        x, ids, topk, d13, d2, b13, activation=activation, a_format=a_format
    )
    assert (got.double() - want).norm() <= bound * want.norm() + between
    if activation != "silu":
        return
    x[2, 5] = torch.nan
    got = activations.moe_quantized(x, ids, topk, up, down, activation, torch.float32, a_format=a_format)
    some = ((ids >= 0) & (ids < g)).any(-1)
    assert torch.equal(got.isnan().all(-1), some & (torch.arange(tokens) == 2))


@inside
@pytest.mark.parametrize("layout", ["plain", "sm90"])
@pytest.mark.parametrize("shape", [(3, 5, 50), (7, 64), (30,), (2, 1500), (3, 0)], ids=str)
def test_quantize_fp8(shape, layout):
    x = torch.randn(shape) * torch.exp(2 * torch.randn(*shape[:-1], 1))
    if x.dim() == 2 and x.numel():
        x[0] = 0
        x[1, -1] = 1e-43
        x[1, :-1] = -0.0
    codes, scale = ops.quantize_fp8(x, LAYOUTS[layout])
    want, want_scale = reference.quantize_fp8(x)
    if layout == "sm90":
        want = reference.sm90_order(want.view(torch.uint8))
    assert torch.equal(scale, want_scale) and torch.equal(codes.view(torch.uint8), want.view(torch.uint8))


@inside
def test_sorting_by_count(small_tiles, monkeypatch):
    monkeypatch.setattr(ops, "SORT_BY_COMPARISON", 0)
    monkeypatch.setattr(ops, "SCAN", 64)
    g, m = 4, 200
    dense, w = weight("mxfp4", g, 16, 32)
    a, ids = torch.randn(m, 32), torch.randint(-1, g + 1, (m,))
    got = ops.run_product(ops.prepare_indexed, a, m, w, torch.float32, ids, g, tail=True)
    assert_close(got, rows_of(a, dense, ids.tolist(), torch.zeros(g, 16)))


@inside
@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("shape", [(3, 5, 50), (7, 64), (30,)], ids=str)
def test_quantize_and_dequantize(shape, format):
    x = torch.randn(shape) * torch.exp(2 * torch.randn(*shape[:-1], 1))
    x.view(-1)[3] = -0.0
    got, want = ops.quantize_matrix(x, FORMATS[format], None), reference.quantize(x, format)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1].view(torch.uint8), want[1].view(torch.uint8))
    assert torch.equal(got[2].flatten(), want[2].flatten())
    back = ops.dequantize(*got, FORMATS[format], torch.float64)
    assert torch.equal(back, reference.dequantize(*want, format))
    codes, scale = ops.quantize_int8(x)
    want = reference.quantize_int8(x)
    assert torch.equal(codes, want[0]) and torch.equal(scale, want[1])


@inside
def test_rows_to_masked_and_back():
    a, offs = torch.randn(13, 5), torch.tensor([3, 3, 9], dtype=torch.int32)
    out, count = ops.copy_groups(a, offs, 13, 4, to_masked=True)
    assert count.tolist() == [3, 0, 4]  # two of the last group's rows do not fit
    want = torch.zeros(3, 4, 5)
    want[0, :3], want[2] = a[:3], a[3:7]
    assert torch.equal(out, want)
    back, ends = ops.copy_groups(out, count, 13, 4, to_masked=False)
    assert ends.tolist() == [3, 3, 7]
    assert torch.equal(back, torch.cat((a[:7], torch.zeros(6, 5))))


# --- what the kernel compiles to ---


def compiled(capability: int, tile, *, kind: str, gated: bool, a_factor: bool = False, mode="mapped"):
    """gemm_kernel for a GPU that need not be there."""
    from triton_targets import gpu

    from fp4_ops.backends.triton import launch

    bf16, f32 = torch.bfloat16, torch.float32
    out = f32 if mode == "k" else bf16
    spec = launch.Spec(
        mode, mode == "mapped", 8, kind, {"nvfp4": 16, "mxfp4": 32, "int4": 128}[kind], 1536, 2048, 1,
        bf16 if kind == "int4" else torch.uint8, kind == "nvfp4", bf16, a_factor, out,
        "silu" if gated else None, 768, tile.block_k, 1, False, True,
    )  # fmt: skip
    with gpu(capability):
        return launch.compiled(spec, tile)


def read_too_early(sass: str) -> list[str]:
    """Instructions after the last wgmma that touch its accumulators before the wait for all of them."""
    code = [
        re.sub(r"^\s*/\*\w+\*/\s*", "", line)
        for line in sass.splitlines()
        if re.match(r"\s+/\*\w{4,}\*/\s", line)
    ]
    products = [i for i, line in enumerate(code) if "HGMMA" in line]
    accumulators: set[int] = set()
    for i in products:
        found = re.search(r"HGMMA\.64x(\d+)x\d+\S* R(\d+),", code[i])
        accumulators |= set(range(int(found[2]), int(found[2]) + int(found[1]) // 2))
    early = []
    for line in code[products[-1] + 1 :]:
        if re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b", line):
            return early
        if accumulators & {int(r) for r in re.findall(r"\bR(\d+)", line)}:
            early.append(line)
    raise AssertionError("no wait for wgmma")


def nvidia_tool(name: str) -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def hopper_tiles():
    """With as many stages as they have there."""
    from fp4_ops.backends.triton import tiles

    found = [t for t in tiles.SHAPES if tiles.usable(t, tiles.Problem(1536, 2048), tiles.HOPPER)]
    assert len(found) == TILES, "keep the number below in step"
    return found


# A gate or a factor comes on top of "plain"; of that and of mxfp4 another third of the tiles each run.
TILES = 10
DRAWN = range(SEED % 3, TILES, 3)
EPILOGUES = [(i, "nvfp4", ("gated", "a_factor")[i % 2]) for i in range(TILES)]
EPILOGUES += [more(i, "nvfp4", ("a_factor", "gated")[i % 2]) for i in range(TILES)]
EPILOGUES += [(DRAWN[0], "mxfp4", "a_factor"), *(more(i, "mxfp4", "a_factor") for i in DRAWN[1:])]
EPILOGUES += [more(i, "nvfp4", "plain") for i in DRAWN]


@pytest.mark.one_in(12)
@compiles
@pytest.mark.skipif(not nvidia_tool("ptxas").exists(), reason="this Triton has no ptxas")
@pytest.mark.parametrize("index, kind, epilogue", EPILOGUES)
def test_hopper_code(index, kind, epilogue, tmp_path):
    """Weights reach wgmma from registers, loads are 16 bytes and asynchronous, nothing spills."""
    gated, a_factor = epilogue == "gated", epilogue == "a_factor"
    kernel = compiled(90, hopper_tiles()[index], kind=kind, gated=gated, a_factor=a_factor)
    ptx = kernel.asm["ptx"]
    instructions = re.findall(r"wgmma\.mma_async[^;]*;", ptx)
    assert instructions, "no wgmma"
    # The left operand in registers is a list of four; in shared memory it would be one descriptor.
    assert all(re.search(r"\},\s*\{[^}]*\},", i) for i in instructions)
    assert "cp.async.cg.shared.global" in ptx
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run(
        [nvidia_tool("cuobjdump"), "-res-usage", cubin], capture_output=True, text=True, check=True
    )
    stack = int(re.search(r"STACK:(\d+)", usage.stdout + usage.stderr).group(1))
    # The largest tile keeps some of its epilogue there, more with a factor for each token.
    assert stack <= (256 if a_factor else 64), f"{stack} bytes of stack: registers spill"
    sass = subprocess.run(
        [nvidia_tool("nvdisasm"), "-c", "-ndf", cubin], capture_output=True, text=True, check=True
    )
    assert not read_too_early(sass.stdout), "accumulators are read while wgmma still writes them"


@pytest.mark.one_in(2)
@compiles
@pytest.mark.skipif(not nvidia_tool("ptxas").exists(), reason="this Triton has no ptxas")
@pytest.mark.parametrize(
    "index, kind, mode", [(0, "nvfp4", "k"), (5, "nvfp4", "k"), (3, "int4", "mapped"), (5, "int4", "mapped")]
)
def test_hopper_code_that_scales_sums(index, kind, mode, tmp_path):
    """Groups of columns, and int4."""
    kernel = compiled(90, hopper_tiles()[index], kind=kind, gated=False, mode=mode)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    sass = subprocess.run(
        [nvidia_tool("nvdisasm"), "-c", "-ndf", cubin], capture_output=True, text=True, check=True
    )
    assert not read_too_early(sass.stdout), "accumulators are read while wgmma still writes them"
