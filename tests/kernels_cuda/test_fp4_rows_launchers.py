"""Which GPUs run the CUDA kernels for FP4 and fp8 rows, and what those for 10.x make of a weight, without a
GPU."""

import logging
from types import SimpleNamespace

import pytest
import torch

from fp4_ops.backends.launchers import library, scaled, scaled_sm100
from fp4_ops.backends.triton import operators
from fp4_ops.backends.triton.scaled import native
from fp4_ops.meta.formats import FORMATS
from fp4_ops.runtime import first_use
from fp4_ops.runtime import native as runtime

# --- which GPUs ---

NEW = SimpleNamespace(fp4_kernel_scaled=None, fp4_kernel_products=None)
OLD = SimpleNamespace(fp4_kernel_scaled=None)
"""A library that was built before the kernels for 10.x."""


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Pretend a GPU of a capability, whose first uses have an error."""
    for launcher in (scaled, scaled_sm100):
        launcher.built.cache_clear()
    first_use.forget()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def pretend(capability, error=0.0, kernels=NEW, family=runtime.MMA):
        properties = SimpleNamespace(name="a GPU", major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
        monkeypatch.setattr(runtime, "family", lambda _: family)
        monkeypatch.setattr(runtime, "build", lambda _: "a build")
        monkeypatch.setattr(library, "library", lambda _: kernels)
        monkeypatch.setattr(scaled, "library", lambda _: kernels)
        monkeypatch.setattr(native, "first_error", lambda format: error)

    yield pretend
    for launcher in (scaled, scaled_sm100):
        launcher.built.cache_clear()
    first_use.forget()


def runs() -> set[str]:
    return {format for format in (*FORMATS, "fp8") if native.runs(format, 0)}


@pytest.mark.parametrize(
    "capability, launcher, formats",
    [
        ((10, 0), scaled_sm100, {"nvfp4", "mxfp4", "fp8"}),
        ((10, 3), scaled_sm100, {"nvfp4", "mxfp4", "fp8"}),
        ((12, 0), scaled, {"nvfp4", "mxfp4"}), ((12, 1), scaled, {"nvfp4", "mxfp4"}),
        ((8, 0), None, set()), ((11, 0), None, set()),
    ],
)  # fmt: skip
def test_which_kernels_a_gpu_runs(capability, launcher, formats, gpu):
    gpu(capability)
    assert native.launcher(0) is launcher and runs() == formats


def test_without_code_for_the_gpu_triton_runs(gpu):
    """`_sm80.so` may be missing, be built for other GPUs, or be older than the kernels."""
    gpu((10, 0), family=0)
    assert native.launcher(0) is None and not runs()
    scaled_sm100.built.cache_clear()
    gpu((10, 0), kernels=OLD)
    assert native.launcher(0) is None and not runs()


@pytest.mark.parametrize("error", [1e-3, float("inf"), float("nan")])
def test_kernels_whose_first_use_is_wrong_do_not_run(error, gpu, caplog):
    gpu((10, 0), error)
    with caplog.at_level(logging.WARNING, "fp4_ops"):
        assert native.launcher(0) is scaled_sm100 and not runs()
    assert (
        "the CUDA product of nvfp4 rows and weights is wrong on a GPU, compute capability 10.0" in caplog.text
    )
    assert "Triton is used instead" in caplog.text


# --- the weights' scales ---


def random_scale(*shape: int) -> torch.Tensor:
    return torch.randint(0, 0x7F, shape, dtype=torch.uint8)


@pytest.mark.parametrize("rows, columns", [(300, 8), (128, 4), (8, 12), (256, 180)])
def test_scales_are_as_torch_swizzles_them(rows, columns):
    """The scale of row r and column c of a block of 128 by 4 is at 16 (r % 32) + 4 (r // 32) + c, and blocks
    follow each other along K first. `to_blocked` of torch's tests of `scaled_mm` says the same."""
    groups, high = 2, -(-rows // 128) * 128
    scale = random_scale(groups, rows, columns)
    got = scaled_sm100.swizzled(scale.view(torch.float8_e4m3fn), nvfp4=True)
    g, r, c = torch.meshgrid(*map(torch.arange, (groups, rows, columns)), indexing="ij")
    block = r // 128 * (columns // 4) + c // 4
    want = torch.zeros(groups, high * columns, dtype=torch.uint8)
    want[g, 512 * block + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = scale
    assert torch.equal(got, want)
    quantized = pytest.importorskip("torch.testing._internal.common_quantized")
    for one, its in zip(got, scale, strict=True):
        assert torch.equal(one, quantized.to_blocked(its))


def test_scales_of_mxfp4_stay_as_they_are():
    """Also those of 2.0 and more, whose byte begins with 1. Columns that K does not need follow as zeros."""
    scale = torch.arange(128, 256, dtype=torch.uint8).view(1, 64, 2)
    values = scaled_sm100.swizzled(scale, nvfp4=False)[0, : 64 * 16].view(32, 4, 4)[:, :2].transpose(0, 1)
    assert torch.equal(values.reshape(64, 4)[:, :2], scale[0]) and not values[..., 2:].any()


def test_scales_with_a_sign_become_nan():
    scale = torch.arange(256, dtype=torch.uint8).view(1, 64, 4)
    values = (
        scaled_sm100.swizzled(scale, nvfp4=True)[0, : 64 * 16]
        .view(32, 4, 4)[:, :2]
        .transpose(0, 1)
        .reshape(64, 4)
    )
    assert torch.equal(values, scale[0].clamp(max=0x7F))


@pytest.mark.parametrize("capability, fewest", [((10, 0), 64), ((12, 0), 0)])
def test_few_rows_are_left_to_triton(capability, fewest, gpu):
    """On 10.x each call arranges the scales of all four groups."""
    gpu(capability)
    codes = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    w = SimpleNamespace(codes=codes, fmt=FORMATS["nvfp4"], groups=4, n=128, k=256)
    assert native.multiplies(w, "nvfp4") and native.takes(w, "nvfp4", fewest)
    assert not native.takes(w, "nvfp4", fewest - 1) and not native.takes(w, "mxfp4", 10**6)


@pytest.mark.parametrize(
    "capability, a_format, format, n, k, taken",
    [
        ((10, 0), "fp8", "mxfp4", 40, 256, True),
        ((10, 0), "fp8", "mxfp4", 40, 192, False),  # ends inside what the copy engine unpacks
        ((10, 0), "fp8", "mxfp4", 36, 256, False),
        ((10, 0), "fp8", "nvfp4", 40, 256, False),  # has e4m3 scales, which that instruction does not read
        ((10, 0), "fp8", "int4_g32", 40, 256, False),
        ((10, 0), "mxfp4", "mxfp4", 40, 192, True),
        ((12, 0), "fp8", "mxfp4", 40, 256, False),  # its kernels multiply FP4 rows only
    ],
)  # fmt: skip
def test_which_weights_rows_are_multiplied_by(capability, a_format, format, n, k, taken, gpu):
    gpu(capability)
    w = SimpleNamespace(
        codes=SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0)), fmt=FORMATS[format],
        n=n, k=k, groups=1,
    )  # fmt: skip
    assert native.multiplies(w, a_format) is taken


def test_fp8_rows_keep_their_codes_in_order():
    x = torch.randint(0, 127, (5, 128)).to(torch.uint8)
    factor = torch.rand(5)
    order = torch.tensor([3, 1, 4, 0, 2, 1]).int()
    route = scaled.Route(scaled.CONTIGUOUS, torch.tensor([6]).int(), order)
    got, _, _ = scaled_sm100.in_order(scaled.Rows(x.view(torch.float8_e4m3fn), None, factor), route, 1, 6)
    assert got.packed.dtype == torch.float8_e4m3fn and got.scale is None
    assert torch.equal(got.packed.view(torch.uint8), x[order]) and torch.equal(got.factor, factor[order])


@pytest.mark.parametrize("fits", [("up", "down"), ("up",), ("down",), ()], ids=" and ".join)
def test_a_block_uses_the_kernels_if_both_weights_fit(fits, monkeypatch):
    used = []
    monkeypatch.setattr(operators.support, "takes", lambda *_: False)
    monkeypatch.setattr(operators, "device_of", lambda _: 0)
    monkeypatch.setattr(
        operators.cuda, "takes", lambda w, a_format, rows: ("up" if w.n == 128 else "down") in fits
    )
    monkeypatch.setattr(operators.scaled, "moe", lambda *_: used.append("kernels"))
    monkeypatch.setattr(operators, "moe_quantized", lambda *_, a_format: used.append("others"))
    up, down = (torch.ops.fp4.quantize(torch.randn(3, *shape), "mxfp4") for shape in ((128, 96), (96, 64)))
    ids, weights = torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    operators.moe(torch.randn(5, 96), ids, weights, *up, *down, format="mxfp4", a_format="fp8")
    assert used == ["kernels" if len(fits) == 2 else "others"]
