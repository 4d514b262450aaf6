"""FP4 or e4m3 rows by FP4 weights with tcgen05 (csrc/sm100), emulated: `make test-kernels`.

By their C interface, against float64, bit for bit where sums are exact. test_fp4_rows_gpu.py runs them by the
operators.
"""

import ctypes
import itertools
import os
import random
from pathlib import Path

import emulated
import pytest
import reference
import torch
from conftest import SEED

from fp4_ops.backends.launchers.scaled import ScaledProduct
from fp4_ops.backends.launchers.scaled_sm100 import swizzled

ASKED = os.environ.get("FP4_KERNEL_ARCHS", "")
pytestmark = [
    pytest.mark.skipif(not ASKED, reason="compiles: make test-kernels"),
    pytest.mark.skipif(emulated.cuda_headers() is None, reason="needs CUDA's headers"),
]

MODES = {"dense": 0, "contiguous": 1, "masked": 2}
OUT = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TOKENS = 224, 128, 32, 224, 128
"""Most tokens of a tile, for each candidate."""
CTAS = 2, 2, 1, 2, 2
"""Thread blocks that share a tile."""
SHARED = 232448
SCALES = {
    ("nvfp4", True): (0x30, 0x40, torch.float8_e4m3fn, 16),
    ("nvfp4", False): (0, 0x60, torch.float8_e4m3fn, 16),
    ("mxfp4", True): (126, 129, torch.float8_e8m0fnu, 32),
    ("mxfp4", False): (107, 147, torch.float8_e8m0fnu, 32),
}
"""Range, dtype and K of a scale, for each format, and whether sums in float32 must be exact."""
every_format = pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8"])
"""Formats of the rows. "fp8": e4m3 rows by mxfp4 weights, for which K is a multiple of 128."""


def weights_of(format: str) -> str:
    return "mxfp4" if format == "fp8" else format


def opened(file: Path, multiprocessors: int = 3, capability: int = 100) -> ctypes.CDLL:
    """The kernels, on a GPU with so few multiprocessors that each has several tiles."""
    library = ctypes.CDLL(str(file))
    library.emulator_device(capability, multiprocessors, SHARED)
    library.emulator_seed(torch.initial_seed() % 2**32)
    return library


@pytest.fixture(scope="module")
def built() -> Path:
    return emulated.kernels("sm100")


@pytest.fixture
def kernels(built):
    return opened(built)


def e4m3_codes(shape: tuple[int, ...], exact: bool) -> torch.Tensor:
    """Codes of both signs. exact: zeros, and sizes from 1/4 to 7.5, so that sums in float32 are exact."""
    codes = torch.randint(0, 127, shape)
    if exact:
        codes = torch.randint(5 * 8, 10 * 8, shape) * (torch.rand(shape) < 0.9)
    return (codes + 128 * torch.randint(0, 2, shape)).to(torch.uint8)


class Operand:
    """[.., rows, k] of codes and scales, and its values in float64."""

    def __init__(
        self, lead: tuple[int, ...], k: int, factors: tuple[int, ...], exact: bool, format: str = "nvfp4"
    ):
        low, high, typed, block = SCALES[weights_of(format), exact]
        self.scale = torch.randint(low, high, (*lead, k // block)).to(torch.uint8)
        self.factor = 2.0 ** torch.randint(-9, 3, factors) if exact else torch.rand(factors) + 0.1
        if format == "fp8":
            self.packed = e4m3_codes((*lead, k), exact)
            values = self.packed.view(torch.float8_e4m3fn).double()
        else:
            self.packed = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8)
            values = reference.E2M1[reference.unpack_codes(self.packed).long()]
        values *= reference.scale_values(self.scale.view(typed)).repeat_interleave(block, -1)
        self.values = values * self.factor.double().view(*factors, *[1] * (values.dim() - len(factors)))


class Case:
    """A product: operands, groups, and what it is in float64."""

    def __init__(self, mode, counts, n, k, *, format="nvfp4", exact=True, out=torch.float32, bias=None):
        k = -(-k // 128) * 128 if format == "fp8" else k
        groups, self.mode, self.exact, self.out = len(counts), mode, exact, out
        self.format, self.w = format, Operand((groups, n), k, (groups,), exact, weights_of(format))
        self.bias = None if bias is None else torch.randint(-8, 9, (groups, n)).to(bias)
        self.group_rows, self.unused = None, random.choice((0, 0, 5))
        if mode == "masked":
            self.m = max(*counts, 1) + random.randint(0, 3)
            self.group_rows, self.rows = torch.tensor(counts), groups * self.m
            self.ids = reference.masked_indices(self.group_rows, self.m).reshape(-1)
        elif mode == "contiguous":
            self.m = self.rows = sum(counts) + self.unused
            self.group_rows = torch.tensor(counts).cumsum(0)
            self.ids = reference.m_indices(self.group_rows, self.m)
        else:
            self.m = self.rows = counts[0]
            self.ids = torch.zeros(self.m, dtype=torch.long)
        self.x = Operand((self.rows,), k, (self.rows,), exact, format)

    def without_scales_of_rows(self) -> "Case":
        """Has e4m3 rows with a factor only, as the operators take them. Their scales are ones."""
        self.x.values /= reference.scale_values(self.x.scale.view(torch.float8_e8m0fnu)).repeat_interleave(
            32, -1
        )
        self.x.scale = None
        return self

    def run(self, kernels, config: int = -1, **changed: int) -> torch.Tensor:
        groups, n, k = self.w.values.shape
        # Garbage follows the scales of each row, and garbage surrounds the operands.
        nvfp4, x_scale = self.format == "nvfp4", None
        if self.x.scale is not None:
            count = self.x.scale.shape[1]
            x_scale = torch.full(
                (self.rows, -(-count // 16) * 16), 0x7F if nvfp4 else 0xFF, dtype=torch.uint8
            )
            x_scale[:, :count] = self.x.scale
        out = torch.full((self.rows, n), torch.nan, dtype=self.out)
        group_rows = None if self.group_rows is None else self.group_rows.int()
        scales = swizzled(self.w.scale, nvfp4)
        tensors = {
            "x": self.x.packed, "x_scales": x_scale, "x_factor": self.x.factor, "codes": self.w.packed,
            "scales": scales, "global_scale": self.w.factor, "bias": self.bias, "out": out,
            "group_rows": group_rows,
        }  # fmt: skip
        given = ScaledProduct(
            **{name: t.data_ptr() for name, t in tensors.items() if t is not None},
            m=self.m, groups=groups, n=n, k=k, x_scale_bytes=0 if x_scale is None else x_scale.shape[1],
            nvfp4=nvfp4, x_fp8=self.format == "fp8", config=config,
            mode=MODES[self.mode], out_type=OUT[self.out],
            bias_type=0 if self.bias is None else OUT[self.bias.dtype],
        )  # fmt: skip
        for name, value in changed.items():
            setattr(given, name, value)
        self.code = kernels.fp4_kernel_products(ctypes.byref(given))
        return out

    def expected(self) -> torch.Tensor:
        """float64, with zeros in rows of no group."""
        found = torch.zeros(self.rows, self.w.values.shape[1], dtype=torch.float64)
        for e, its in enumerate(self.w.values):
            here = self.ids == e
            found[here] = self.x.values[here] @ its.T
            if self.bias is not None:
                found[here] += self.bias[e].double()
        return found

    def agrees(self, kernels, config: int = -1) -> bool:
        got, want = self.run(kernels, config), self.expected()
        if self.code != 0:
            return False
        if self.exact:
            return torch.equal(got, want.to(self.out))
        zeros = not got[self.ids < 0].any()
        return zeros and bool((got.double() - want).norm() <= 2e-6 * want.norm())


def random_counts(tokens: int, mode: str) -> list[int]:
    """Rows of each group: none, few, those of a tile of so many tokens, and more."""
    if mode == "dense":
        return [random.choice((1, tokens, tokens + 3))]
    return random.sample([0, random.randint(1, 9), random.randint(10, tokens), tokens + 5], 4)


SHAPES = [
    *itertools.product((40, 128, 136), (64, 256, 320)),
    *((8, 448), (264, 64), (256, 128), (120, 576), (384, 192)),
]
"""N and K: less than a tile, tiles and a bit, with K that ends in every part of a step."""


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("config", range(len(TOKENS)))
@pytest.mark.parametrize("mode", MODES)
@every_format
def test_products(format, mode, config, n, k, kernels):
    """Every candidate and kind of groups: 126 points of each format, bit for bit."""
    bias, out = random.choice((None, torch.float32, torch.bfloat16)), random.choice(list(OUT))
    case = Case(mode, random_counts(TOKENS[config], mode), n, k, format=format, bias=bias)
    assert case.agrees(kernels, config)
    if format == "fp8":
        case.without_scales_of_rows()
    case.out = out
    assert case.agrees(kernels, config)


SIZES = {
    "K 2880": ("contiguous", [5, 0, 17, 2], 48, 2880),
    "N 32768": ("contiguous", [3, 0, 2], 32768, 64),
    "N 32768, one row": ("dense", [1], 32768, 128),
    "256 groups": ("contiguous", [int(e % 9 == 0) for e in range(256)], 16, 128),
    "256 groups, masked": ("masked", [e % 7 % 3 for e in range(256)], 16, 64),
    "empty": ("contiguous", [0, 0, 0], 128, 128),
    "no rows": ("masked", [0, 0, 0], 128, 128),
    "one row": ("dense", [1], 128, 2048),
    "partial masks": ("masked", [1, 0, 40, 13], 136, 192),
    "many rows": ("contiguous", [300, 0, 170], 264, 320),
    "long rows": ("dense", [200], 136, 4096),
}


@pytest.mark.parametrize("size", SIZES)
@every_format
def test_sizes(format, size, kernels):
    """With the candidate that the sizes suggest."""
    assert Case(*SIZES[size], format=format).agrees(kernels)


@every_format
def test_the_operators_of_the_cpu_give_the_same_bits(format, kernels):
    """W4A4 is one definition: codes, block scales and factors of both. fp8 rows have factors only."""
    case, weights = Case("contiguous", [7, 0, 20, 1], 40, 320, format=format), weights_of(format)
    typed = SCALES[weights, True][2]
    if weights == "mxfp4":  # has no global scale
        case.w.factor = None
    if format == "fp8":
        case.without_scales_of_rows()
        x, scale, factor, a_format = case.x.packed.view(torch.float8_e4m3fn), case.x.factor, None, ""
    else:
        case.x.factor = case.x.factor if format == "nvfp4" else None
        x, scale, factor, a_format = case.x.packed, case.x.scale.view(typed), case.x.factor, format
    there = torch.ops.fp4.grouped_mm(
        x, case.w.packed, case.w.scale.view(typed), case.w.factor, case.group_rows.int(), scale, None, factor,
        format=weights, a_format=a_format, out_dtype=torch.float32,
    )  # fmt: skip
    assert torch.equal(case.run(kernels), there)


@pytest.mark.parametrize("config", range(len(TOKENS)))
@every_format
def test_any_scales(format, config, kernels):
    """Scales of all sizes, also zero, and factors that are no powers of two."""
    assert Case("contiguous", [3, 0, 140], 72, 448, format=format, exact=False).agrees(kernels, config)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [i for i, ctas in enumerate(CTAS) if ctas == 2])
@every_format
def test_pairs_give_the_bits_of_one_thread_block(format, config, mode, kernels):
    """Sums are not exact here. 392 weight rows are four tiles, 264 are three: one pair has no second one."""
    n = random.choice((264, 392))
    case = Case(mode, random_counts(TOKENS[config], mode), n, 448, format=format, exact=False)
    one = case.run(kernels, CTAS.index(1))
    assert case.code == 0 and torch.equal(case.run(kernels, config), one) and case.code == 0


@pytest.mark.parametrize("multiprocessors", [1, 2, 5])
@pytest.mark.parametrize("config", range(len(TOKENS)))
def test_any_number_of_multiprocessors(config, multiprocessors, built):
    """A pair needs two of them, so an odd one stays without work. A launch always has one pair."""
    assert Case("contiguous", [9, 0, 70], 264, 320).agrees(opened(built, multiprocessors), config)


@pytest.mark.parametrize("config", range(len(TOKENS)))
@every_format
def test_a_row_with_a_nan_or_negative_scale_is_nan(format, config, kernels):
    """A scale of rows and one of weights are wrong. The other rows stay as they are. ue8m0 has no sign."""
    case = Case("contiguous", [9, 20], 56, 320, format=format)
    want, changes = case.expected().float(), (128, 127) if format == "nvfp4" else (255, 255)
    for row, change in zip(random.sample(range(29), 2), changes):
        case.x.scale[row, random.randrange(case.x.scale.shape[1])] |= change
        want[row] = torch.nan
    for weight, change in zip(random.sample(range(56), 2), changes):
        case.w.scale[1, weight, random.randrange(case.w.scale.shape[2])] |= change
        want[9:29, weight] = torch.nan
    if format == "fp8":  # a code can be NaN, too
        row = random.randrange(29)
        case.x.packed[row, random.randrange(case.x.packed.shape[1])] |= 127
        want[row] = torch.nan
    assert torch.equal(case.run(kernels, config).nan_to_num(1e9), want.nan_to_num(1e9))


SCHEDULES = {
    "groups of rows": ("contiguous", [300, 0, 170, 40], 520, True),
    "few tiles": ("contiguous", [30, 0, 17], 40, False),
    "one group": ("contiguous", [600], 520, False),
    "dense": ("dense", [600], 520, False),
    "masked": ("masked", [300, 0, 170], 520, False),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_which_products_take_cluster_launch_control(schedule, kernels):
    """Products take it if tiles take unequal times, a cluster has several, and the caller names none."""
    mode, counts, n, expected = SCHEDULES[schedule]
    case = Case(mode, counts, n, 128)
    kernels.emulator_requests()
    assert case.agrees(kernels) and (kernels.emulator_requests() > 0) == expected


@pytest.mark.parametrize("config", [i for i in range(len(TOKENS)) if i >= 3])
def test_many_groups_by_cluster_launch_control(config, kernels):
    """Ids of clusters come in any order, also across chunks of 32 groups; most of the last have no tile."""
    assert Case("contiguous", [random.choice((0, 3, 20, 150)) for _ in range(90)], 264, 64).agrees(
        kernels, config
    )
    assert Case("masked", [random.choice((0, 3, 20, 300)) for _ in range(40)], 40, 64).agrees(kernels, config)


def test_offsets_that_decrease_or_exceed_are_clamped(kernels):
    case = Case("contiguous", [4, 3, 0, 5], 40, 64)
    rows = case.group_rows
    case.group_rows = torch.tensor([rows[0], rows[1], -7, 1 << 20])
    case.ids[case.ids < 0] = 3  # the last group ends where the rows do
    assert case.agrees(kernels)


def test_what_it_refuses(built):
    """K that ends inside an instruction, N inside 16 bytes of results, a candidate too much, other GPUs."""
    kernels = opened(built)
    case = Case("dense", [3], 40, 128)
    for changed in ({"k": 96}, {"n": 36}, {"config": len(TOKENS)}, {"x_scale_bytes": 8}, {"mode": 1}):
        assert case.run(kernels, **changed).isnan().all() and case.code == -1, changed
    assert case.agrees(kernels)
    assert case.run(kernels, x_fp8=1).isnan().all() and case.code == -1  # by nvfp4
    case = Case("dense", [3], 40, 256, format="fp8")
    for changed in ({"k": 192}, {"codes": case.w.packed.data_ptr() + 16}):
        assert case.run(kernels, **changed).isnan().all() and case.code == -1, changed
    assert case.agrees(kernels)
    for capability in (90, 120):
        case.run(opened(built, capability=capability))
        assert case.code != 0


# --- errors that the emulator finds ---

KERNEL, CONFIG = "sm100/products_kernel.cuh", "sm100/products_config.cuh"
HOST, WALK, PTX = "sm100/products_host.cuh", "sm100/products_walk.cuh", "sm100/ptx_sm100.cuh"
WAIT = "barrier_wait(smem_address(&shared_.{}), {});\n"
EMPTY = WAIT.format("empty[ring.index]", "ring.parity ^ 1")
COMMIT = "tensor_commit<kCtas>(smem_address(&shared_.sums_full[buffer.index]), kPair);"
ERRORS = {
    "stride of codes": (CONFIG, "stride_between_eight_rows(8 * kRowBytes)", "stride_between_eight_rows(512)"),
    "stride of scales": (CONFIG, "stride_between_eight_rows(8 * 16)", "stride_between_eight_rows(256)"),
    "no swizzle": (CONFIG, "kDescriptorVersion | kSwizzle128 |", "kDescriptorVersion |"),
    "no version": (CONFIG, "uint64_t(1) << 46", "uint64_t(0) << 46"),
    "next part": (CONFIG, "kNextPart = kRowBytes / kParts / 16", "kNextPart = kRowBytes / kParts / 8"),
    "type of B": (CONFIG, "kE2m1B = 1 << 10", "kE2m1B = 1 << 11"),
    "tokens": (CONFIG, "(tokens / 8) << 17", "(tokens / 16) << 17"),
    "scales of A": (KERNEL, "a_scales + scales * kBlockColumns,", "a_scales,"),
    "scales of B": (KERNEL, "b_scales + scales * Config::Blocks", "b_scales + scales"),
    "first scale": (KERNEL, "first = i % Config::BlockParts * Config::PartScales", "first = 0"),
    "scales of half a step": (CONFIG, "BlockParts = 4 / PartScales", "BlockParts = 1"),
    "type of scales": (CONFIG, "kUe8m0 = 1 << 23", "kUe8m0 = 0"),
    "blocks of weights": (HOST, "ceil_div(a.k, a.nvfp4 ? 64 : 128)", "std::max(1, a.k / 128)"),
    "rows of weights' scales": (HOST, "a.groups) * ceil_div(a.n, kRows)", "a.groups) * (a.n / kRows)"),
    "block of scales": (KERNEL, "(i * Config::Blocks + block) * kBlockColumns", "(block * 4 + i) * 4"),
    "rows of scales": (KERNEL, "pick(row[0].x, row[1].x,", "pick(row[1].x, row[0].x,"),
    "next scales": (KERNEL, "load_scales(tile, step + kScaleWarps,", "load_scales(tile, step + 1,"),
    "scales of the tile": (KERNEL, "scale_row = tile.weights * tiles + own;", "scale_row = own;"),
    "boxes": (KERNEL, "ceil_div(tokens, kBoxRows)", "max(1, tokens / kBoxRows)"),
    "first product": (KERNEL, "step > 0);", "true);"),
    "later products": (KERNEL, "keep || i > 0", "keep"),
    "lanes": (KERNEL, "static_cast<uint32_t>(quarter * kWarp) << 16", "0"),
    "buffer of sums": (KERNEL, "sums = columns + buffer.index * Config::MaxTokens", "sums = columns"),
    "full": (KERNEL, WAIT.format("full[ring.index]", "ring.parity"), ""),
    "empty, copies": (KERNEL, EMPTY + "      if (rank_", "if (rank_"),
    "empty, scales": (KERNEL, EMPTY + "        store", "store"),
    "sums full": (KERNEL, WAIT.format("sums_full[buffer.index]", "buffer.parity"), ""),
    "sums empty": (KERNEL, WAIT.format("sums_empty[buffer.index]", "buffer.parity ^ 1"), ""),
    "wait for loads": (KERNEL, "tensor_load_wait(values);", ""),
    "fence of loads": (KERNEL, "tensor_fence_before();\n      arrive", "arrive"),
    "fence of scales": (KERNEL, "fence_async_proxy();\n", "\n"),
    "fence of products": (KERNEL, "tensor_fence_after();\n      start_step", "start_step"),
    "early commit": (KERNEL, "    }\n    " + COMMIT, "      if (step == 0) " + COMMIT + "\n    }"),
    "fp8: type of weights": (CONFIG, "? 5 << 7 :", "? 1 << 7 :"),
    "fp8: types in the other order": (CONFIG, "? 5 << 7 :", "? 5 << 10 :"),
    "fp8: one scale of each operand": (CONFIG, "scale << 29 | scale << 4", "scale << 29"),
    "fp8: scales of a part": (CONFIG, "PartScales = Part /", "PartScales = Fp8 ? 2 : Part /"),
    "fp8: bytes of containers": (KERNEL, "kCopied = Config::Step / 2", "kCopied = kRowBytes"),
    "fp8: no containers": (HOST, "a.k / 2, kRows, a.x_fp8)", "a.k / 2, kRows)"),
    "fp8: codes of a row": (HOST, "unpacks ? 2 * bytes : bytes", "bytes"),
    "fp8: bytes of X": (HOST, "a.x_fp8 ? a.k : a.k / 2", "a.k / 2"),
    "fp8: steps": (HOST, "a.x_fp8 ? 128 : 256", "256"),
    "fp8: ones": (KERNEL, "0x7F7F7F7Fu;", "0x7F7F807Fu;"),
}  # fmt: skip


EMPTY_TOLD, COPY_OF_X = "&shared_.empty[ring.index]), {});", "load_box<{}>(smem_address(shared_.x["
REMOTE, FENCE = "barrier_arrive_remote(smem_address(&barrier), ", "fence_async_proxy();\n        arrive"
OWN_WALK = "TileWalk<typename Config::Widths, "
ERRORS |= {
    "pair: " + name: error
    for name, error in {
        "empty, odd block": (KERNEL, EMPTY + "      if (", "if (rank_ == 0) " + EMPTY + "      if ("),
        "empty, scales of the odd block": (
            KERNEL, EMPTY + "        store_", "if (rank_ == 0) " + EMPTY + "        store_",
        ),
        "empty told to one block": (KERNEL, EMPTY_TOLD.format("kPair"), EMPTY_TOLD.format("1")),
        "sums full told to one block": (KERNEL, COMMIT, COMMIT.replace("kPair", "1")),
        "barrier of the odd block": (KERNEL, "told = leading_barrier<kCtas>(full)", "told = full"),
        "copies of one block": (KERNEL, COPY_OF_X.format("kCtas"), COPY_OF_X.format("1")),
        "bytes of one block's weights": (KERNEL, "bytes = with_weights *", "bytes = 1 *"),
        "bytes of no weights": (KERNEL, "min(kCtas, tiles - tile.column * kCtas)", "kCtas"),
        "bytes of one block's tokens": (KERNEL, "+ kCtas * boxes * kBoxRows", "+ boxes * kBoxRows"),
        "first half of the tokens": (KERNEL, "tile.x_row + rank_ * tokens", "tile.x_row"),
        "halves in the other order": (KERNEL, "rank_ * tokens", "(rank_ ^ (kCtas - 1)) * tokens"),
        "whole boxes": (KERNEL, "x_row + rank_ * tokens", "x_row + rank_ * boxes * kBoxRows"),
        "weights of the even block": (KERNEL, "tile.column * kCtas + rank_; }", "tile.column * kCtas; }"),
        "no weights": (KERNEL, "has_weights = own < tiles", "has_weights = true"),
        "arrivals of scales": (KERNEL, "1 + kCtas * kWarp", "1 + kWarp"),
        "arrivals of results": (KERNEL, "kCtas * kStoreThreads", "kStoreThreads"),
        "arrivals at the own barrier": (KERNEL, REMOTE + "0)", REMOTE + "cluster_rank())"),
        "both multiply": (KERNEL, "if (rank_ == 0) multiply", "multiply"),
        "out of step": (WALK, OWN_WALK + "Config::Ctas>", OWN_WALK + "1>"),
        "columns of one block": (HOST, "ceil_div(a.n, ctas * kRows)", "ceil_div(a.n, kRows)"),
        "rows of one block": (CONFIG, "kRowsOfA = kCtas * kRows", "kRowsOfA = kRows"),
        "scales of half of the tokens": (KERNEL, "row < tile.rows &&", "row < tile.rows / kCtas &&"),
        "fence of scales, odd block": (KERNEL, FENCE, "if (rank_ == 0) " + FENCE),
        "products of one block": (KERNEL, "tensor_multiply<kCtas,", "tensor_multiply<1,"),
        "scales of one block": (KERNEL, "tensor_copy<kCtas>(b_scales", "tensor_copy<1>(b_scales"),
        "the end": (KERNEL, "cluster_sync();", "__syncthreads();"),
    }.items()
}  # fmt: skip

ASKS, FULL = (
    "barrier_wait(smem_address(&shared_.responses_empty",
    "barrier_wait(smem_address(&shared_.responses_full",
)
TOLD, ZEROES = "responses_empty[read_.index]), 0)", "if (Config::Clc) zero_share(walk.id());"
READERS = "kCtas * kThreads - (kCtas - 1) * kWarp"
ERRORS |= {
    "launch control: " + name: error
    for name, error in {
        "reads before the response": (WALK, FULL, "if (false) " + FULL),
        "overwrites a response": (WALK, ASKS, "if (false) " + ASKS),
        "one block gets no response": (PTX, "try_cancel(smem, barrier)", "try_cancel(smem, barrier, false)"),
        "bytes of one block": (WALK, "lane < Config::Ctas", "lane < 1"),
        "half of the bytes": (WALK, "lane, sizeof(uint4)", "lane, sizeof(uint4) / 2"),
        "fence of a response": (WALK, "sm90::fence_async_proxy();", ""),
        "readers of one block": (KERNEL, READERS, "kThreads"),
        "readers that start no products": (KERNEL, READERS, "kCtas * kThreads"),
        "tells the own block": (WALK, TOLD, TOLD.replace("0)", "sm90::cluster_rank())")),
        "asks again": (WALK, "if (!cancelled) return false;", ""),
        "both blocks ask": (KERNEL, "shared_, rank_ == 0)", "shared_, true)"),
        "no block asks": (KERNEL, "shared_, rank_ == 0)", "shared_, false)"),
        "index of a block": (WALK, "static_cast<int>(first_block) / Config::Ctas", "first_block"),
        "own index": (WALK, "id = blockIdx.x / Config::Ctas", "id = blockIdx.x"),
        "ids that fall": (WALK, "if (id_ < before) walk_.restart();", ""),
        "too few clusters": (HOST, "filled + (a.m - filled) / tokens", "filled"),
        "no cluster for one tile more": (HOST, " + a.m / (2 * tokens)", ""),
        "the same of one group": (HOST, " + (a.m > 2 * tokens)", ""),
        "rows of no group": (KERNEL, ZEROES, ""),
        "rows of no group of others": (KERNEL, ZEROES, ZEROES.replace("walk.id()", "blockIdx.x / kCtas")),
    }.items()
}  # fmt: skip


def compiled(made: Path) -> tuple[Path, list[Path]]:
    """A copy of the sources, and the objects of all but the kernels."""
    found = emulated.copy_sources("sm100", made)
    others = [emulated.compile_one("sm100", file) for file in found if file.name != "products_sm100.cu"]
    return made, others


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("sm100"))


def cases() -> list[tuple[Case, int]]:
    """Several tiles for each block, and tiles that need all that a candidate has."""
    return [
        (Case("contiguous", [220, 0, 37, 5], 264, 832), 0),
        (Case("masked", [70, 3, 128], 136, 2048), 1),
        (Case("contiguous", [3, 260, 0, 121], 520, 2880), 0),
        (Case("contiguous", [31, 33, 0, 64], 520, 2880), 2),
        (Case("contiguous", [40, 32, 0, 30], 1040, 64), 2),  # products run ahead of results
        (Case("contiguous", [40, 32, 0, 130], 2088, 64), 1),
        (Case("contiguous", [190, 0, 37, 5], 264, 832, format="mxfp4"), 0),
        (Case("contiguous", [190, 0, 37, 5], 264, 640, format="fp8"), 0),
        (Case("masked", [31, 3, 40], 136, 384, format="fp8").without_scales_of_rows(), 1),
        (Case("masked", [31, 3, 40], 136, 384, format="fp8").without_scales_of_rows(), 2),
        (Case("contiguous", [3, 260, 0, 121], 520, 832), 3),
        (Case("contiguous", [40, 32, 0, 130], 2088, 64), 4),
        (Case("masked", [70, 3, 128], 136, 320), 4),
        (Case("contiguous", [390], 136, 64), 4),  # five tiles, not four
        (Case("dense", [390], 136, 64), 4),
    ]


def drawn(errors: dict, count: int) -> list[str]:
    return list(errors) if ASKED == "all" else random.Random(SEED).sample(list(errors), count)


def with_error(error: tuple[str, str, str] | None, sources, to: Path) -> ctypes.CDLL:
    """Returns the kernels with a file's text replaced."""
    made, others = sources
    name, old, new = error or (KERNEL, "kernel", "kernel")
    file = made / name
    text = file.read_text()
    assert text.count(old) == 1 or error is None
    try:
        file.write_text(text.replace(old, new))
        kernels = emulated.compile_one("sm100", made / "sm80/products_sm100.cu")
        library = opened(emulated.link([*others, kernels], to / "kernels.so"), multiprocessors=2)
        library.emulator_patience(30 if error is None else 5)
    finally:
        file.write_text(text)
    return library


@pytest.mark.parametrize("error", [None, *drawn(ERRORS, 8)])
def test_injected_errors_are_found(error, sources, tmp_path):
    library = with_error(ERRORS.get(error), sources, tmp_path)
    assert all(case.agrees(library, config) for case, config in cases()) == (error is None)
