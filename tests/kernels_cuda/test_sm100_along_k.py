"""Groups along K of FP4 rows by FP4 weights with tcgen05 (csrc/sm100), emulated: `make test-kernels`.

By the C interface, against float64, bit for bit where sums are exact. test_fp4_rows_gpu.py runs them by the
operator.
"""

import ctypes
import itertools
import random

import emulated
import pytest
import torch
from test_sm100 import OUT, SCALES, TOKENS, Operand, compiled, drawn, opened, pytestmark, with_error

from fp4_ops.backends.launchers.scaled import ScaledProduct
from fp4_ops.meta.formats import FORMATS, FP4_FORMATS

ALONG_K, KERNEL = "sm100/products_along_k.cuh", "sm100/products_kernel.cuh"
__all__ = ["pytestmark"]
every_format = pytest.mark.parametrize("format", FP4_FORMATS)


@pytest.fixture
def kernels():
    return opened(emulated.kernels("sm100"))


class Case:
    """A product of groups along K, and what it is in float64. `counts`: columns of each group."""

    def __init__(self, m, n, counts, k=None, *, format="nvfp4", exact=True, out=torch.float32):
        self.k = -(-sum(counts) // 32) * 32 if k is None else k
        self.m, self.n, self.format, self.exact, self.out = m, n, format, exact, out
        self.ends = torch.tensor(counts).cumsum(0)
        self.w = Operand((n,), self.k, (), exact, format)
        self.x = Operand((m,), self.k, (m,), exact, format)

    def ranges(self) -> list[slice]:
        return [slice(*pair) for pair in itertools.pairwise([0, *self.ends.tolist()])]

    def run(self, kernels, config: int = -1, **changed) -> torch.Tensor:
        nvfp4 = self.format == "nvfp4"
        x_scale, w_scale = (self.padded(one.scale) for one in (self.x, self.w))
        ends, factor = self.ends.int(), self.w.factor.reshape(1)
        out = torch.full((len(ends), self.m, self.n), torch.nan, dtype=self.out)
        tensors = {
            "x": self.x.packed, "x_scales": x_scale, "x_factor": self.x.factor, "codes": self.w.packed,
            "scales": w_scale, "global_scale": factor, "out": out, "k_ends": ends,
        }  # fmt: skip
        given = ScaledProduct(
            **{name: t.data_ptr() for name, t in tensors.items()},
            m=self.m, groups=len(ends), n=self.n, k=self.k, x_scale_bytes=x_scale.shape[1],
            nvfp4=nvfp4, config=config, out_type=OUT[self.out],
        )  # fmt: skip
        for name, value in changed.items():
            setattr(given, name, value)
        self.code = kernels.fp4_kernel_products(ctypes.byref(given))
        return out

    def padded(self, scale: torch.Tensor) -> torch.Tensor:
        """Rows of a multiple of four bytes. NaN follows the scales of each row."""
        rows, count = scale.shape
        nan = 0x7F if self.format == "nvfp4" else 0xFF
        padded = torch.full((rows, -(-count // 4) * 4), nan, dtype=torch.uint8)
        padded[:, :count] = scale
        return padded

    def expected(self) -> torch.Tensor:
        return torch.stack([self.x.values[:, k] @ self.w.values[:, k].T for k in self.ranges()])

    def agrees(self, kernels, config: int = -1) -> bool:
        got, want = self.run(kernels, config), self.expected()
        if self.code != 0:
            return False
        if self.exact:
            return torch.equal(got, want.to(self.out))
        return bool((got.double() - want).norm() <= 2e-6 * want.norm())


def random_counts(format: str, groups: int, most: int = 700) -> list[int]:
    """Columns of groups that begin and end at any multiple of a block; some groups are empty."""
    block = FORMATS[format].block
    return [random.choice((0, 1, 1, 1)) * random.randint(1, most // block) * block for _ in range(groups)]


GROUPS = {"one": 1, "two": 2, "five": 5, "forty": 40}
SHAPES = [(1, 129), (37, 41), (131, 128), (195, 300), (300, 7), (16, 8)]
"""M and N: less than a tile, tiles and a bit, odd numbers."""


@pytest.mark.parametrize("m, n", SHAPES)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("config", range(len(TOKENS)))
@every_format
def test_products(format, config, groups, m, n, kernels):
    """Every candidate: 144 points, bit for bit."""
    counts = random_counts(format, GROUPS[groups], 700 if GROUPS[groups] < 9 else 90)
    counts[random.randrange(len(counts))] += 2 * FORMATS[format].block
    random_k = -(-sum(counts) // 32) * 32 + random.choice((0, 32, 96))
    assert Case(m, n, counts, random_k, format=format, out=random.choice(list(OUT))).agrees(kernels, config)


SIZES = {
    "K 32768": (33, 65, [12288, 0, 32, 20448]),
    "one group of all K": (70, 200, [832]),
    "300 groups": (5, 24, [32 * (e % 3) for e in range(300)]),
    "all are empty": (20, 72, [0, 0, 0], 64),
    "most of K belongs to no group": (20, 72, [32, 0, 64], 1024),
    "the smallest": (1, 1, [32]),
    "multiples of a step": (140, 136, [512, 256, 0, 768]),
    "many tiles": (400, 400, [96, 0, 352, 32]),
}


@pytest.mark.parametrize("size", SIZES)
@every_format
def test_sizes(format, size, kernels):
    """With the candidate that the sizes suggest."""
    assert Case(*SIZES[size], format=format).agrees(kernels)


def test_groups_along_k_take_cluster_launch_control(kernels):
    """They have unequal times, if there are several. One group has not."""
    for counts, expected in (([96, 0, 352, 32], True), ([480], False)):
        case = Case(400, 400, counts)
        kernels.emulator_requests()
        assert case.agrees(kernels) and (kernels.emulator_requests() > 0) == expected


def test_every_range_of_nvfp4_inside_a_step(kernels):
    """A group begins at each of the first 16 blocks and ends at each of the next 17."""
    for first in range(16):
        counts = [16 * first, *(16 * random.sample(range(1, 18), 1)[0] for _ in range(3)), 0, 256]
        assert Case(9, 24, counts).agrees(kernels, 2), counts


@every_format
def test_the_operator_of_the_cpu_gives_the_same_bits(format, kernels):
    block = FORMATS[format].block
    case = Case(21, 43, [5 * block, 0, 11 * block, 64, 9 * block], format=format)
    if format == "mxfp4":  # has no global scale
        case.w.factor = torch.ones(())
        case.x.factor = torch.ones(21)
    typed, has_factor = SCALES[format, True][2], format == "nvfp4"
    there = torch.ops.fp4.grouped_mm_k(
        case.x.packed, case.w.packed, case.w.scale.view(typed), case.w.factor if has_factor else None,
        case.ends.int(), case.x.scale.view(typed), case.x.factor if has_factor else None,
        format=format, a_format=format, out_dtype=torch.float32,
    )  # fmt: skip
    assert torch.equal(case.run(kernels), there)


@pytest.mark.parametrize("config", range(len(TOKENS)))
@every_format
def test_any_scales(format, config, kernels):
    """Scales of all sizes, also zero, and factors that are no powers of two."""
    assert Case(70, 90, random_counts(format, 4), format=format, exact=False).agrees(kernels, config)


@pytest.mark.parametrize("config", range(len(TOKENS)))
@every_format
def test_a_nan_stays_in_its_group(format, config, kernels):
    """Groups share words of scales and instructions of 64 K. A NaN or a negative scale changes its own."""
    block = FORMATS[format].block
    case = Case(20, 30, [3 * block, 5 * block, 2 * block, 7 * block, 0, 3 * block], 640, format=format)
    want, changes = case.expected().float(), (128, 127) if format == "nvfp4" else (255, 255)
    for operand, rows, change in ((case.x, 20, changes[0]), (case.w, 30, changes[1])):
        row, group = random.randrange(rows), random.choice((0, 1, 2, 3, 5))
        its = case.ranges()[group]
        operand.scale[row, random.randrange(its.start // block, its.stop // block)] |= change
        (want[group, row] if operand is case.x else want[group, :, row]).fill_(torch.nan)
        operand.scale[:, case.ends[-1] // block :] = 255  # of no group
    assert torch.equal(case.run(kernels, config).nan_to_num(1e9), want.nan_to_num(1e9))


@every_format
def test_ends_that_decrease_or_exceed_are_clamped(format, kernels):
    case = Case(20, 30, [64, 96, 0, 96], format=format)
    case.ends = torch.tensor([64, 160, -7, 1 << 20])
    got = case.run(kernels)
    case.ends = torch.tensor([64, 160, 160, 256])
    want = case.expected().float()
    want[3] += case.x.values[:, :160].matmul(case.w.values[:, :160].T).float()  # begins at 0
    assert case.code == 0 and torch.equal(got[:3], want[:3]) and torch.equal(got[3], want[3])


def test_what_it_refuses(kernels):
    """K that ends inside 16 bytes of codes, rows of scales inside a word, a bias, e4m3 rows, other modes."""
    case = Case(3, 40, [128])
    for changed in (
        {"k": 112},
        {"x_scale_bytes": 10},
        {"bias": case.w.packed.data_ptr()},
        {"x_fp8": 1},
        {"mode": 1},
    ):
        assert case.run(kernels, **changed).isnan().all() and case.code == -1, changed
    assert case.agrees(kernels)


# --- errors that the emulator finds ---

ERRORS = {
    "begins at the group": (KERNEL, "tile.k_copied / 2", "0"),
    "16 K before": (ALONG_K, "tile.k_begin / kBoxK * kBoxK", "tile.k_begin"),
    "rows of X": (ALONG_K, "tile.x_row -= tile.group * problem.m,", ""),
    "one matrix of weights": (ALONG_K, ", tile.weights = 0;", ";"),
    "first scale": (KERNEL, "(tile.k_copied + step * Config::Step) /", "(step * Config::Step) /"),
    "steps of a group": (ALONG_K, "ceil_div(tile.k_end - tile.k_copied,", "1 + 0 * ceil_div(tile.k_end,"),
    "shift": (ALONG_K, "shift = first % 4 * 8", "shift = 0"),
    "word more": (ALONG_K, "word <= kWords", "word < kWords"),
    "mask of the end": (ALONG_K, "lowest(end - 4 * word) &", ""),
    "mask of the begin": (ALONG_K, " & ~lowest(begin - 4 * word)", ""),
    "half of a mask": (ALONG_K, "(1u << 8 * bytes) - 1", "~0u"),
    "scales of the weights": (KERNEL, "weights.load(problem_.scales,", "weights.load(problem_.x_scales,"),
    "scales of another tile": (KERNEL, "row_bytes, row, exists", "row_bytes, 0, exists"),
    "block of X": (KERNEL, "row_bytes, tile.x_row + block * 128,", "row_bytes, tile.x_row,"),
    "fence of an empty group": (KERNEL, "tensor_fence_after();  // a tile may have no step", ""),
    "empty groups": (KERNEL, "!Config::AlongK || tile.steps > 0", "true"),
}  # fmt: skip


def cases() -> list[tuple[Case, int]]:
    return [
        (Case(190, 264, [48, 0, 800, 16, 304]), 0),
        (Case(131, 136, [528, 16, 0, 2032]), 1),
        (Case(31, 520, [16, 0, 1056, 32, 208]), 2),
        (Case(190, 264, [32, 0, 800, 96, 320], format="mxfp4"), 0),
        (Case(31, 33, [32, 0, 1056, 32, 2080], format="mxfp4"), 2),
        (Case(190, 264, [48, 0, 800, 16, 304]), 3),
    ]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("sm100"))


@pytest.mark.parametrize("error", [None, *drawn(ERRORS, 4)])
def test_injected_errors_are_found(error, sources, tmp_path):
    library = with_error(ERRORS.get(error), sources, tmp_path)
    found = [case.agrees(library, config) for case, config in cases()]
    assert all(found) if error is None else not all(found)
