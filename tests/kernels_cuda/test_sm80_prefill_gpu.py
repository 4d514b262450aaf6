"""Prefill by mma.sync (csrc/sm80) against float64 over the exactly dequantised weights, by its C interface.

It runs on every GPU that has the kernels. With `--emulate` it runs without a GPU, and with the shared memory
of other GPUs.
"""

import ctypes
import functools
from pathlib import Path

import emulated
import pytest
import reference
import torch
from development import development

import fp4_ops
from fp4_ops.backends.launchers import library
from fp4_ops.meta.formats import ACTIVATIONS

prefill, product = development("prefill"), development("product")

BUILT = Path(fp4_ops.__file__).parent / "_sm80.so"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or (library.FILE == "_sm90.so" and not BUILT.exists()),
        reason="needs a GPU and _sm80.so",
    ),
]

KERNELS = {
    ("nvfp4", torch.bfloat16): "bf16",
    ("mxfp4", torch.bfloat16): "bf16_b32",
    ("nvfp4", torch.float16): "fp16",
    ("mxfp4", torch.float16): "fp16_b32",
    ("nvfp4", torch.int8): "int8",
    ("mxfp4", torch.int8): "int8_b32",
}
"""By the weights' format and the rows."""
FORMATS, ROWS = ("nvfp4", "mxfp4"), (torch.bfloat16, torch.float16, torch.int8)
CANDIDATES = range(8)
INT8_CANDIDATES = 5
INT8_ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
"""The K of each 16 in the order that they have in int8 rows."""
LAYOUT = "mma_bf16"
BOUND = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-6}
DENSE, CONTIGUOUS, MASKED = prefill.RowMode
GATES = ["silu_interleaved", "swigluoai"]


class Kernels:
    """The library's launchers."""

    def __init__(self, path: Path) -> None:
        self.loaded = ctypes.CDLL(str(path))

    @property
    def sms(self) -> int:
        return torch.cuda.get_device_properties(0).multi_processor_count

    def names(self, kernel: str) -> list[str]:
        return prefill.candidates_of(self.loaded, kernel)

    def choose(self, kernel: str, mode: int, groups: int, m: int, n: int, kp: int, config: int = -1):
        return prefill.choose_of(self.loaded, mode, groups, m, n, kp, self.sms, kernel, config)

    def run(self, kernel: str, arguments) -> int:
        size = prefill.workspace_bytes_of(self.loaded, kernel, self.sms)
        # Not flags that are down by chance.
        workspace = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        arguments.workspace = workspace.data_ptr()
        arguments.stream = torch.cuda.current_stream().cuda_stream
        which = prefill.PrefillKernel[kernel]
        code = self.loaded.fp4_kernel_prefill(which, ctypes.c_void_p(arguments.address))
        torch.cuda.synchronize()
        return code

    def most_shared(self, kilobytes: int) -> None:
        self.loaded.fp4_kernel_prefill_most_shared(kilobytes * 1024)


@functools.cache
def load() -> Kernels:
    if library.FILE == "_sm90.so":
        return Kernels(BUILT)
    made = Kernels(emulated.kernels("sm80"))
    made.loaded.emulator_device(90, emulated.MULTIPROCESSORS, 227 * 1024)
    return made


@pytest.fixture
def kernels():
    made = load()
    if library.FILE != "_sm90.so":
        made.loaded.emulator_seed(torch.initial_seed() % 2**32)
    yield made
    made.most_shared(0)


class Weight:
    """[groups, n, k] of random scales, packed, and the values it stands for."""

    def __init__(self, format: str, groups: int, n: int, k: int) -> None:
        values = torch.randn(groups, n, k) * (torch.rand(groups, n, 1) + 0.01)
        made = torch.ops.fp4.quantize(values, format)
        plain = (*made[:2], made[2] if made[2].numel() else None)
        self.format, self.groups, self.n, self.k = format, groups, n, k
        self.packed = [t.cuda() for t in torch.ops.fp4.prepack(*made, format, LAYOUT)]
        self.values = torch.ops.fp4.dequantize(*plain, format, torch.float64).cuda()
        ones = torch.ones_like(made[2]) if made[2].numel() else None
        self.codes_by_scales = torch.ops.fp4.dequantize(*made[:2], ones, format, torch.float64).cuda()
        self.scales = made[1].double().cuda()
        self.factor = made[2].double().cuda().view(-1, 1, 1) if made[2].numel() else 1.0

    def as_int8(self) -> torch.Tensor:
        return reference.int8_weights(self.codes_by_scales, self.scales, self.format) * self.factor


class Case:
    """Rows, their experts, and what the product of them is."""

    def __init__(
        self,
        w: Weight,
        mode: int,
        counts: list[int],
        unused: int = 0,
        out: torch.dtype = torch.float32,
        bias: torch.dtype | None = None,
        scaled: bool = False,
        gate: str | None = None,
        rows: torch.dtype = torch.bfloat16,
    ) -> None:
        self.w, self.mode, self.kernel = w, mode, KERNELS[w.format, rows]
        if mode == CONTIGUOUS:
            self.m = sum(counts) + unused
            ids = [e for e, count in enumerate(counts) for _ in range(count)] + [-1] * unused
            self.route = torch.tensor(counts, device="cuda").cumsum(0).int()
        elif mode == MASKED:
            self.m = max(*counts, 1) + unused
            ids = [e if i < count else -1 for e, count in enumerate(counts) for i in range(self.m)]
            self.route = torch.tensor(counts, device="cuda").int()
        else:
            self.m, ids, self.route = counts[0], [0] * counts[0], None
        self.ids = torch.tensor(ids, device="cuda", dtype=torch.int64)
        self.scale = torch.rand(len(ids), device="cuda") + 0.5 if scaled else None
        self.k, self.kp, self.weights = w.k, reference.ceil_div(w.k, 128) * 128, w.values
        if rows == torch.int8:
            self.make_int8_rows()
        else:
            self.x = torch.randn(len(ids), w.k, device="cuda").to(rows)
            self.values = self.x.double()
        self.bias = torch.randn(w.groups, w.n, device="cuda").to(bias) if bias else None
        self.gate = ACTIVATIONS[gate] if gate else None
        self.out = out

    def make_int8_rows(self) -> None:
        rows, steps = len(self.ids), self.kp // 128
        x = torch.randint(-127, 128, (rows, self.kp), device="cuda").to(torch.int8)
        x[:, self.k :] = 0
        self.scale = torch.rand(steps, rows, device="cuda") + 0.1
        self.values = (x.double() * self.scale.T.double().repeat_interleave(128, 1))[:, : self.k]
        self.x = x.view(rows, -1, 16)[..., INT8_ORDER].contiguous()
        self.k, self.weights = self.kp, self.w.as_int8()

    def arguments(self, config: int = -1):
        w = self.w
        width = w.n // 2 if self.gate else w.n
        self.result = torch.full((len(self.ids), width), float("nan"), dtype=self.out, device="cuda")
        return prefill.PrefillArguments(
            x=self.x.data_ptr(),
            x_scale=self.scale.data_ptr() if self.scale is not None else None,
            codes=w.packed[0].data_ptr(),
            scales=w.packed[1].data_ptr(),
            global_scale=w.packed[2].data_ptr(),
            bias=self.bias.data_ptr() if self.bias is not None else None,
            out=self.result.data_ptr(),
            group_rows=self.route.data_ptr() if self.route is not None else None,
            m=self.m,
            groups=w.groups,
            n=w.n,
            k=self.k,
            kp=self.kp,
            mode=self.mode,
            out_type=product.DTYPES[self.out],
            bias_type=product.bias_type(self.bias),
            gate=product.gate_of(self.gate),
            config=config,
        )

    def expected(self) -> torch.Tensor:
        want = torch.zeros(len(self.ids), self.w.n, dtype=torch.float64, device="cuda")
        for e in range(self.w.groups):
            mine = self.ids == e
            want[mine] = self.values[mine] @ self.weights[e].T
        if self.scale is not None and self.scale.dim() == 1:
            want *= self.scale.double()[:, None]
        used = self.ids >= 0
        if self.bias is not None:
            want[used] += self.bias.double()[self.ids[used]]
        if self.gate is None:
            return want
        gate, up = want[:, 0::2], want[:, 1::2]
        if self.gate.limit is not None:
            gate, up = gate.clamp(max=self.gate.limit), up.clamp(-self.gate.limit, self.gate.limit)
        want = gate * torch.sigmoid(self.gate.alpha * gate) * (up + self.gate.up_offset)
        return torch.where(used[:, None], want, 0)

    def check(self, kernels: Kernels, config: int = -1) -> None:
        assert kernels.run(self.kernel, self.arguments(config)) == 0
        first = self.result
        error = reference.relative_error(first, self.expected())
        bound = BOUND[self.out] if self.gate is None else max(BOUND[self.out], 1e-3)
        assert error < max(bound, 2e-9 * self.w.k), error
        assert not first[self.ids < 0].any()
        assert kernels.run(self.kernel, self.arguments(config)) == 0
        assert torch.equal(first, self.result)  # the sums have one order


def test_candidates_have_names(kernels):
    for kernel in KERNELS.values():
        names = kernels.names(kernel)
        count = INT8_CANDIDATES if kernel.startswith("int8") else len(CANDIDATES)
        assert len(names) == len(set(names)) == count


def skip_other_candidates(config: int, rows: torch.dtype) -> None:
    if rows == torch.int8 and config >= INT8_CANDIDATES:
        pytest.skip("int8 rows have fewer candidates")


@pytest.mark.parametrize("format, rows", KERNELS)
@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize("mode", [CONTIGUOUS, MASKED, DENSE])
def test_every_candidate(kernels, config, mode, format, rows):
    """Rows that fill no tile, empty experts, one row, K that ends within a step; two results in one type."""
    skip_other_candidates(config, rows)
    groups = 1 if mode == DENSE else 5
    w = Weight(format, groups, 320, 336)
    counts = [97] if mode == DENSE else [0, 1, 131, 0, 40]
    unused = 0 if mode == DENSE else 3
    Case(w, mode, counts, unused, scaled=True, bias=torch.float32, rows=rows).check(kernels, config)
    Case(w, mode, counts, unused, out=torch.bfloat16, rows=rows).check(kernels, config)


@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gate", GATES)
def test_gates(kernels, gate, format, config):
    w = Weight(format, 3, 192, 256)
    for out in (torch.bfloat16, torch.float16):
        case = Case(w, CONTIGUOUS, [33, 0, 70], 2, out, bias=out, scaled=True, gate=gate, rows=out)
        case.check(kernels, config)


def test_silu_of_large_gates_is_torchs(kernels):
    """Infinite gates, NaN, and gates whose exponential float32 does not hold."""
    inf = float("inf")
    edges = [inf, -inf, float("nan"), 1e25, -1e25, 100, -100, 63, -63, 30, -30, 0]
    out, w = torch.bfloat16, Weight("nvfp4", 2, 192, 256)
    case = Case(w, CONTIGUOUS, [33, 70], 0, out, bias=torch.float32, gate="silu_interleaved")
    case.bias[:, 0::2] = torch.tensor(edges, device="cuda").repeat(16)[: 192 // 2]
    assert kernels.run(case.kernel, case.arguments()) == 0
    products = torch.cat([case.values[case.ids == e] @ case.weights[e].T for e in range(2)])
    want = (products + case.bias.double()[case.ids]).float()
    want = torch.nn.functional.silu(want[:, 0::2]) * want[:, 1::2]
    torch.testing.assert_close(case.result.float(), want, rtol=1e-2, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", BOUND)
def test_types(kernels, out, bias):
    Case(Weight("nvfp4", 2, 128, 144), CONTIGUOUS, [19, 8], out=out, bias=bias).check(kernels)


@pytest.mark.parametrize("k", [16, 128, 144, 1040, 2880])
@pytest.mark.parametrize("format, rows", KERNELS)
def test_sizes_of_k(kernels, format, rows, k):
    Case(Weight(format, 2, 64, k), CONTIGUOUS, [1, 17], rows=rows).check(kernels)


@pytest.mark.parametrize("groups, rows", [(1, 1), (70, 1), (200, 0), (33, 3)])
def test_many_experts_of_few_rows(kernels, groups, rows):
    counts = torch.randint(0, rows + 1, (groups,)).tolist()
    counts[-1] = max(counts[-1], 1)
    Case(Weight("nvfp4", groups, 64, 128), CONTIGUOUS, counts).check(kernels)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("config", CANDIDATES)
def test_tiles_that_blocks_share(kernels, config, rows):
    """Few tiles and many steps: parts of K, whose sums meet in a fixed order."""
    skip_other_candidates(config, rows)
    w = Weight("nvfp4", 2, 320, 4480)
    case = Case(w, CONTIGUOUS, [0, 37], out=torch.float32, rows=rows)
    assert kernels.choose(case.kernel, CONTIGUOUS, 2, 37, 320, 4480, config).share_below > 0
    case.check(kernels, config)


def test_rows_with_ends_that_decrease_or_pass_m(kernels):
    """Ends are clamped: no row is written twice, and none beyond the result."""
    w = Weight("nvfp4", 4, 64, 128)
    case = Case(w, CONTIGUOUS, [5, 6, 7, 8])
    case.route = torch.tensor([9, 4, 1000, -3], device="cuda").int()
    case.ids = torch.tensor([0] * 9 + [2] * 17, device="cuda")
    case.check(kernels)


@pytest.mark.parametrize("mode", [CONTIGUOUS, MASKED])
def test_rows_of_no_group_are_left_alone_where_nobody_reads_them(kernels, mode):
    case = Case(Weight("nvfp4", 3, 64, 128), mode, [5, 0, 9], unused=7)
    case.check(kernels)
    zeroed, arguments = case.result, case.arguments()
    arguments.leaves_rest = True
    assert kernels.run(case.kernel, arguments) == 0
    assert case.result[case.ids < 0].isnan().all()
    assert torch.equal(case.result[case.ids >= 0], zeroed[case.ids >= 0])


@pytest.mark.parametrize("kilobytes", [99, 163])
def test_less_shared_memory(kernels, kilobytes):
    """The memory of sm_86, 89 and 120, or of sm_80, leads to another candidate or fewer blocks an SM."""
    kernels.most_shared(kilobytes)
    w = Weight("mxfp4", 2, 192, 512)
    for counts in ([3, 0], [20, 33], [90, 140]):
        Case(w, CONTIGUOUS, counts).check(kernels)


def test_where_nothing_fits_it_says_so(kernels):
    kernels.most_shared(16)
    case = Case(Weight("nvfp4", 1, 64, 128), CONTIGUOUS, [3])
    assert kernels.run("bf16", case.arguments()) == -3


@pytest.mark.parametrize(
    "change", [{"n": 96}, {"kp": 192}, {"k": 20}, {"k": 256}, {"config": 99}, {"groups": 0}]
)
def test_bad_arguments(kernels, change):
    case = Case(Weight("nvfp4", 1, 64, 128), CONTIGUOUS, [3])
    arguments = case.arguments()
    for name, value in change.items():
        setattr(arguments, name, value)
    assert kernels.run("bf16", arguments) == -1
    assert case.result.isnan().all()


def test_no_rows(kernels):
    case = Case(Weight("nvfp4", 2, 64, 128), CONTIGUOUS, [0, 0])
    assert kernels.run("bf16", case.arguments()) == 0
