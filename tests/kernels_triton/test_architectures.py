"""Triton kernels compiled for GPUs that this machine does not have: their resources, and the chosen tile.

`make test` tests the choice with invented resource figures, and compiles a random part of the kernels. `make
test-archs` (mark `archs`) compiles the others. test_every_candidate.py tests each candidate separately.
"""

from __future__ import annotations

import itertools
import logging
import random
from typing import Any

import pytest
import torch
from conftest import SEED

pytest.importorskip("triton")

import triton_targets
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton_targets import ARCHITECTURES, device, gpu

from fp4_ops.backends.triton import gemm, launch, operators, ops, samples, tiles
from fp4_ops.backends.triton.tiles import Problem, Tile
from fp4_ops.meta.layouts import LAYOUTS

pytestmark = pytest.mark.skipif(launch.INTERPRET, reason="needs the compiler")
needs_ptxas = pytest.mark.skipif(triton_targets.tool("ptxas") is None, reason="this Triton has no ptxas")
archs = pytest.mark.archs

LARGE_STACK = 256
"""Bytes a thread. A few registers that are kept there outside of the loop cost nothing."""

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = (BF16, F16, F32)
FORMAT_NAMES = ("nvfp4", "mxfp4", "int4", "int4_g64", "int4_g32")
ROWS = {
    "bfloat16": (1, False, BF16),
    "float16": (2, False, F16),
    "float32": (3, False, F32),
    "fp8": (1, True, F32),
}
"""Activations -> terms, whether there is a factor for each row, dtype of the output."""


# --- what is chosen ---


def kernel(
    terms: int = 1, kind: str = "nvfp4", mode: str = "mapped", n: int = 1536, k: int = 2048
) -> launch.Spec:
    return launch.Spec(
        mode, False, 1, kind, {"nvfp4": 16, "mxfp4": 32, "int4": 32}[kind], n, k, terms, torch.uint8,
        True, None, False, BF16, None, 0, 8, 1, False, True,
    )  # fmt: skip


def invented_need(spec: launch.Spec, tile: Tile) -> launch.Need:
    """Weights, scales and activations of each stage: about what mma.sync takes."""
    stage = tile.block_n * tile.block_k // 2 + 2 * tile.block_m * tile.block_k * spec.terms
    return launch.Need(tile.stages * stage + 2 * tile.block_n * tile.block_k, 0)


@pytest.fixture
def no_compiler(monkeypatch):
    asked = []

    def need(spec, tile):
        asked.append((spec, tile))
        return invented_need(spec, tile)

    monkeypatch.setattr(launch, "need", need)
    monkeypatch.setattr(launch, "_fits", {})
    return asked


@pytest.mark.parametrize("memory", [48 * 1024, *tiles.SHARED_MEMORY.values()])
def test_the_tile_that_is_chosen_fits_and_is_the_first_that_does(memory, no_compiler):
    for terms, kind, per_expert, experts in itertools.product(
        (1, 2, 3), ("nvfp4", "int4"), (1, 12, 50, 300), (1, 8, 128)
    ):
        for architecture in (80, 90, 100, 120):
            gpu, spec = device(architecture, memory), kernel(terms, kind)
            (tile,) = launch.choose(per_expert * experts, experts, [lambda spec=spec: spec], gpu)
            assert invented_need(spec, tile).shared_memory <= memory
            before = []
            for block_m in tiles.token_blocks(per_expert * experts, experts):
                before += tiles.ranked(per_expert * experts, experts, spec.problem(), block_m, gpu)
            for better in before[: before.index(tile)]:
                assert invented_need(spec, better).shared_memory > memory


def test_more_memory_is_used_where_there_is_more(no_compiler):
    sizes = [
        launch.choose(50 * 128, 128, [lambda: kernel()], device(86, memory))[0]
        for memory in tiles.SHARED_MEMORY.values()
    ]
    assert sizes[0] != sizes[-1] and sizes[-1] == Tile(256, 64, 128, 8, 3)


def test_multiprocessors_are_the_devices_own(no_compiler):
    """70 tiles of 256 x 64 fill 64 multiprocessors, not 132."""

    def rows(multiprocessors: int) -> int:
        gpu = tiles.Device("some", (9, 0), tiles.SHARED_MEMORY["227 KB"], multiprocessors)
        return launch.choose(50, 1, [lambda: kernel(n=256 * 70)], gpu)[0].block_n

    assert rows(64) == 256 and rows(132) == 128


def test_two_products_of_a_block_agree_on_their_tokens(no_compiler):
    def up(down_tile: Tile) -> launch.Spec:
        return kernel(3)._replace(gate="silu", out_chunk=down_tile.block_k)

    for memory, rows in itertools.product(tiles.SHARED_MEMORY.values(), (8, 1500, 6400, 50000)):
        down_tile, up_tile = launch.choose(rows, 128, [lambda: kernel(1), up], device(86, memory))
        assert down_tile.block_m == up_tile.block_m


def test_16_warps_only_where_hopper_multiplies():
    """And where registers are left: 256 x 128 sums beside another sum, or beside loads of bytes, spill."""
    for architecture, bytes in itertools.product(ARCHITECTURES, (False, True)):
        for terms, two_sums in ((1, False), (1, True), (2, True)):
            problem = Problem(28672, 4096, terms, two_sums=two_sums, bytes=bytes)
            order = tiles.ranked(8192, 8, problem, 128, device(architecture))
            assert any(t.warps == 16 for t in order) == (architecture == 90 and not two_sums and not bytes)


def test_nothing_fits():
    gpu = tiles.Device("a toy", (8, 6), 1000, 4)
    launch._fits.clear()
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RuntimeError, match=r"no tile .* nvfp4 weights fits a toy.* 1000 bytes .*dequantize"),
    ):
        patch.setattr(launch, "need", invented_need)
        launch.choose(64, 8, [lambda: kernel()], gpu)
    launch._fits.clear()


def test_a_tile_is_asked_about_once(no_compiler):
    for _ in range(3):
        launch.choose(640, 8, [lambda: kernel(3)], device(86))
    assert len(no_compiler) == len(set(no_compiler)) > 1
    launch.choose(640, 8, [lambda: kernel(3)], device(80))  # another device: asked again
    assert len(no_compiler) > len(set(no_compiler))


# --- operators, as far as their launches ---


def weight(format: str, *shape: int) -> tuple:
    packed, scale, factor = torch.ops.fp4.quantize(torch.randn(shape), format)
    return packed, scale, factor if factor.numel() else None


def activations(kind: str, *shape: int):
    """a, a_scale"""
    if kind != "fp8":
        return torch.randn(shape).to(getattr(torch, kind)), None
    return torch.ops.fp4.quantize_fp8(torch.randn(shape))


def call_everything(format: str, kind: str, rows: int, groups: int = 4, n: int = 256, k: int = 512) -> None:
    """Each operator over the product kernel."""
    w, (a, scale) = weight(format, groups, n, k), activations(kind, rows, k)
    end = torch.full((groups,), rows, dtype=torch.int32)
    operators.grouped_mm(a, *w, end, scale, format=format)
    operators.indexed_mm(a, *w, torch.zeros(rows, dtype=torch.int64), scale, format=format)
    masked, masked_scale = activations(kind, groups, rows // groups, k)
    operators.grouped_mm_masked(masked, *w, end, masked_scale, format=format)
    one = tuple(None if t is None else t[0] for t in w)
    operators.mm(a, *one, scale, format=format)
    operators.grouped_mm_k(a, *one, torch.tensor([k // 2, k], dtype=torch.int32), scale, format=format)
    if kind != "fp8":
        down = weight(format, groups, k, n // 2)
        ids, topk = torch.zeros(rows // 2, 2, dtype=torch.int64), torch.rand(rows // 2, 2)
        for a_format in ("none", "fp8"):
            operators.moe(a[: rows // 2], ids, topk, *w, *down, format=format, a_format=a_format)


# bf16 and few rows an expert are what the issue saw working; of the rest, a GPU of 99 KB first.
SITUATIONS = [(a, kind) for a in ARCHITECTURES for kind in ROWS]
DRAWN = random.Random(SEED).sample([s for s in SITUATIONS if s[0] in (86, 89, 120, 121)], 1)


# sm_89 gets sm_86's kernels, sm_121 sm_120's (test_every_candidate.py), and they have as much memory.
LIKE_ANOTHER = (89, 121)


def when(situation: tuple[int, str]) -> Any:
    if situation in DRAWN:
        return situation
    mark = pytest.mark.archs_all if situation[0] in LIKE_ANOTHER else archs
    return pytest.param(*situation, marks=mark)


@pytest.mark.more
@needs_ptxas
@pytest.mark.parametrize("architecture, kind", map(when, SITUATIONS))
def test_operators_find_a_tile(architecture, kind, tmp_path):
    """Prefill and decode: each launch passes Triton's own check of the memory that the device has."""
    rng = random.Random(SEED + architecture)
    for rows in (8, 2000) if (architecture, kind) not in DRAWN else (2000,):
        with gpu(architecture) as kernels:
            call_everything(rng.choice(FORMAT_NAMES), kind, rows)
        products = [k for k in kernels.launched if k.name == "gemm_kernel"]
        assert len(products) == (5 if kind == "fp8" else 9)
        assert all(k.metadata.shared <= triton_targets.BLOCK_MEMORY[architecture] for k in kernels.launched)
        stacks = {f"{k.name} {k.constants}": k.stack(tmp_path) for k in kernels.launched}
        assert max(stacks.values()) <= LARGE_STACK, max(stacks, key=stacks.get)


MODELS = {
    "qwen3-30b": (128, 2048, 768, 8),
    "mixtral": (8, 4096, 14336, 2),
    "gpt-oss-20b": (32, 2880, 2880, 4),
}
"""experts, hidden, intermediate, top_k"""


def unwritten_weight(g: int, n: int, k: int) -> tuple:
    """nvfp4, as large as it is and never touched."""
    scale = torch.empty(g, n, k // 16, dtype=torch.float8_e4m3fn)
    return torch.empty(g, n, k // 2, dtype=torch.uint8), scale, torch.empty(g)


@archs
@needs_ptxas
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("architecture", [80, 86])
def test_blocks_of_known_models(architecture, model, dtype):
    """Prompts of 256 tokens and more, where a GPU of 99 KB ran out of it."""
    g, hidden, inter, top_k = MODELS[model]
    up, down = unwritten_weight(g, 2 * inter, hidden), unwritten_weight(g, hidden, inter)
    for tokens in (256, 2048):
        x, ids = torch.empty(tokens, hidden, dtype=dtype), torch.zeros(tokens, top_k, dtype=torch.int64)
        with gpu(architecture) as kernels:
            operators.moe(x, ids, torch.empty(tokens, top_k), *up, *down, format="nvfp4")
        assert [k.name for k in kernels.launched].count("gemm_kernel") == 2


def grouped(a: torch.Tensor, w: tuple) -> None:
    operators.grouped_mm(a, *w, torch.full((w[0].shape[0],), len(a), dtype=torch.int32), format="nvfp4")


@needs_ptxas
def test_what_was_asked_is_what_runs():
    """The kernel that is asked for its needs is the one that is launched, not compiled for it again."""
    w, a = weight("nvfp4", 2, 128, 256), torch.randn(8, 256).bfloat16()
    with gpu(89) as kernels:
        grouped(a, w)
        caches = gemm.gemm_kernel.device_caches[driver.active.get_current_device()]
        assert len(caches[0]) == 1 and kernels.launched[-1].name == "gemm_kernel"


@needs_ptxas
def test_a_refused_launch_takes_the_next_tile_and_says_so_once(caplog):
    w, a = weight("nvfp4", 2, 128, 256), torch.randn(8, 256).bfloat16()
    with gpu(86) as kernels, caplog.at_level(logging.WARNING, "fp4_ops"):
        grouped(a, w)
        first = kernels.launched[-1].tile
        kernels.refuse[first] = OutOfResources(102400, 101376, "shared memory")
        for _ in range(2):
            grouped(a, w)
        second = kernels.launched[-1].tile
        assert second != first
        assert len(caplog.records) == 1
        assert str(first) in caplog.text and "102400" in caplog.text and "sm_86" in caplog.text
        # The driver's own words, and inside of a block, where both products are chosen again.
        kernels.refuse[second] = RuntimeError("Triton Error [CUDA]: too many resources requested for launch")
        grouped(a, w)
        third = kernels.launched[-1].tile
        assert third not in (first, second) and len(caplog.records) == 2
        down = weight("nvfp4", 2, 256, 64)
        ids, topk = torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2)
        operators.moe(a[:4], ids, topk, *w, *down, format="nvfp4")
        used = [k.tile for k in kernels.launched[-4:] if k.name == "gemm_kernel"]
        assert len(used) == 2 and not {first, second} & set(used)
        # Another error is the caller's.
        kernels.refuse[third] = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            grouped(a, w)


@needs_ptxas
def test_a_gpu_without_float8_gets_bytes():
    """Below sm_89 Triton has no float8 pointers; rows of every dtype are copied as bits."""
    offs = torch.tensor([3, 5], dtype=torch.int32)
    dtypes = (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.uint8,
        torch.int8,
        torch.bool,
    )
    for dtype in (*dtypes, *FLOATS, torch.float64, torch.int64):
        rows = torch.zeros(5, 48).to(dtype)
        with gpu(86) as kernels:
            masked, count = operators.to_masked(rows, offs, 4)
            back, _ = operators.from_masked(masked, count, 5)
        assert masked.dtype == back.dtype == dtype
        assert [k.name for k in kernels.launched] == ["copy_groups"] * 2


def elementwise(op: str) -> None:
    rows = torch.tensor([5, 7], dtype=torch.int32)
    if op == "rows":
        for dtype in (BF16, torch.float8_e4m3fn):
            operators.to_masked(torch.zeros(7, 40).to(dtype), rows, 4)
            operators.from_masked(torch.zeros(2, 4, 40).to(dtype), rows, 8)
    elif op == "samples":
        at, held = torch.zeros(40, dtype=torch.int64), torch.zeros(40, samples.RUN, dtype=torch.uint8)
        for compare in (False, True):
            count = torch.zeros(1, dtype=torch.int64)
            samples.launch(at, at, held, count, count.clone(), compare)
    elif op == "many experts":
        w, a = weight("nvfp4", 384, 16, 64), torch.zeros(3000, 64, dtype=BF16)
        operators.indexed_mm(a, *w, torch.zeros(3000, dtype=torch.int64), format="nvfp4")
        ends = torch.full((384,), 7, dtype=torch.int32)
        grouped(a, w)
        operators.from_masked(operators.to_masked(a, ends, 4)[0], ends, 8)
    elif op == "sort by count":
        w, a = weight("nvfp4", 4, 32, 64), torch.zeros(9000, 64, dtype=BF16)
        operators.indexed_mm(a, *w, torch.zeros(9000, dtype=torch.int64), format="nvfp4")
    else:
        for dtype in FLOATS:
            x = torch.randn(3, 6, 1536).to(dtype)
            if op == "quantize_fp8":
                for layout in ("plain", "sm90"):
                    ops.quantize_fp8(x, LAYOUTS[layout])
            elif op == "quantize_int8":
                operators.quantize_int8(x)
            else:
                packed = weight(op, 3, 6, 1536)
                operators.quantize(x, op)
                operators.dequantize(*packed, op, dtype)
                operators.dequantize(*packed, op, torch.float64)


OTHERS = ("quantize_fp8", "quantize_int8", "rows", "samples", "sort by count", "many experts", *FORMAT_NAMES)


@pytest.mark.one_in(4)
@needs_ptxas
@pytest.mark.parametrize("op", OTHERS)
@pytest.mark.parametrize(
    "architecture",
    [a if a == ARCHITECTURES[SEED % 7] else pytest.param(a, marks=archs) for a in ARCHITECTURES],
)
def test_other_kernels(op, architecture, tmp_path):
    """What comes before and after products, too: no float8 below sm_89, little memory, no stack."""
    with gpu(architecture) as kernels:
        elementwise(op)
    others = [k for k in kernels.launched if k.name != "gemm_kernel"]
    assert others
    for k in others:
        assert k.metadata.shared <= 48 * 1024, k.name
        assert k.stack(tmp_path) <= LARGE_STACK, k.name
