"""The arithmetic of the Hopper kernels, compiled for the host: every code with every scale byte."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import processes
import pytest
import reference
import torch
from development import development
from places import ROOT

from fp4_ops.backends.launchers import int4, rows
from fp4_ops.meta.formats import FORMATS

HERE = Path(__file__).parent
NVCC = shutil.which("nvcc")
U8 = torch.uint8
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc, for its headers")


def compiled(folder: Path) -> str:
    target = str(folder / "sm90_host.so")
    folders = [f"-I{ROOT / 'csrc' / name}" for name in ("device", "sm90")]
    flags = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-shared", "-Xcompiler=-fPIC"]
    subprocess.run([NVCC, *flags, *folders, str(HERE / "sm90_host.cu"), "-o", target], check=True)
    return target


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Calls a function of sm90_host.cu with tensors as pointers and Python ints as int."""
    library = ctypes.CDLL(processes.once(tmp_path_factory, "sm90_host", compiled))

    def call(name: str, *args):
        getattr(library, name)(
            *(ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in args)
        )

    return call


def scale_bytes() -> torch.Tensor:
    """Every e4m3 scale but NaN, with bit 7 as the layout has it: where the mantissa is 0 or 7."""
    byte = torch.arange(0x7F, dtype=U8)
    flag = ((byte & 7) == 0) | ((byte & 7) == 7)
    return torch.where(flag, byte | 0x80, byte)


def values(byte: torch.Tensor) -> torch.Tensor:
    return byte.view(torch.float8_e4m3fn).double()


def word_of(codes: torch.Tensor) -> torch.Tensor:
    """codes [..., 8] of e2m1, in the order of k, as a word of the layout (csrc/common/sm90_layout.h)."""
    word = torch.zeros(codes.shape[:-1], dtype=torch.int64)
    for k in range(8):
        q, i = divmod(k, 4)
        code = codes[..., k].long()
        word |= (code & 7) << (16 * q + 4 * i) | (code >> 3) << (8 * i + (7, 3)[q])
    return (word - ((word >> 31) << 32)).int()


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [n, 8], words [n], scale bytes [n]): each code in each place with each scale."""
    scales = scale_bytes()
    codes = (torch.arange(16)[:, None] + torch.arange(8) * 3) % 16
    codes, scales = codes.repeat(len(scales), 1), scales.repeat_interleave(16)
    return codes, word_of(codes), scales


def weights(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    sign = torch.where(codes > 7, -1.0, 1.0)
    return sign * E2M1[codes & 7] * values(scales & 0x7F)[:, None]


def nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The distance to the nearest e4m3 value."""
    grid = values(torch.arange(0x7F, dtype=U8))
    return (x.abs()[..., None] - grid).abs().amin(-1)


@pytest.mark.parametrize("fast", [False, True], ids=["any scale", "by bytes"])
def test_fold_gives_a_nearest_e4m3(host, fast):
    scales = scale_bytes()
    if fast:  # half of the eighth of smaller ones is no normal e4m3
        scales = scales[(scales & 0x7F) >= 40]
    got = torch.empty(len(scales), 8, dtype=U8)
    host("fold_tables", scales, len(scales), int(fast), got)
    want = E2M1 * values(scales & 0x7F)[:, None] / 8
    assert torch.equal((values(got) - want).abs(), nearest_e4m3(want))


def test_fold_keeps_the_order_and_the_signs(host):
    codes, words, scales = every_code_and_scale()
    got = torch.empty(len(words), 8, dtype=U8)
    host("fold_words", words, scales, len(words), got)
    want = weights(codes, scales) / 8
    assert torch.equal((values(got) - want).abs(), nearest_e4m3(want))
    nonzero = values(got) != 0
    assert torch.equal(values(got).sign()[nonzero], want.sign()[nonzero])


def test_decode_is_exact_in_fp16(host):
    codes, words, scales = every_code_and_scale()
    got = torch.empty(len(words), 2, 2, 2, dtype=torch.float16)  # q, (i = 0, 2) or (1, 3), which of them
    host("decode_words", words, scales, len(words), got)
    assert torch.equal(got.transpose(-1, -2).reshape(-1, 8).double(), weights(codes, scales))


@pytest.mark.parametrize("format", reference.FP4_FORMATS)
@pytest.mark.parametrize("layout", ["sm90", "mma_bf16"])
@pytest.mark.parametrize("k", [16, 336])
def test_the_device_packs_as_the_cpu_does(host, layout, k, format):
    groups, n, kp, bf16 = 3, 64, -(-k // 128) * 128, int(layout == "mma_bf16")
    w = reference.random_weight(format, groups, n, k, narrow=True)
    want = torch.ops.fp4.prepack(*w.operands(), format, layout)
    packed, scales = (torch.full_like(t, 0x55) for t in want[:2])
    e4m3 = w.scale.view(U8)
    if format == "mxfp4":
        e4m3, factor = rows._e4m3_from_e8m0(w.packed, e4m3, FORMATS[format], layout)
        assert torch.equal(factor, want[2])
    block = FORMATS[format].block
    host("pack", w.packed, e4m3.contiguous(), groups * n, k, kp, block, bf16, packed, scales)
    assert torch.equal(packed, want[0]) and torch.equal(scales, want[1])
    got = torch.full((groups, n, kp), float("nan"), dtype=torch.float64)
    host("dequantize", packed, scales, want[2], groups * n, n, kp, block, bf16, got)
    assert torch.equal(got, torch.ops.fp4.dequantize(*want, format, torch.float64, layout=layout))


@pytest.mark.parametrize("format", reference.FP4_FORMATS)
@pytest.mark.parametrize("layout", ["sm90", "mma_bf16"])
@pytest.mark.parametrize("k", [16, 128, 336, 768])
def test_decode_multiplies_what_the_layout_holds(host, layout, k, format):
    """Lanes' fragments of weights and rows, put through mma.sync as PTX defines it."""
    n, kp, bf16 = 64, -(-k // 128) * 128, layout == "mma_bf16"
    w = reference.random_weight(format, n, k, narrow=True)
    packed, scales, factor = torch.ops.fp4.prepack(*w.operands(), format, layout)
    x = torch.nn.functional.pad(torch.randn(8, k), (0, kp - k)).to(torch.bfloat16 if bf16 else torch.float16)
    got = torch.empty(8, n)
    host("decode_product", packed, scales, x, n, kp, FORMATS[format].block, int(bf16), got)
    want = x[:, :k].double() @ w.dense.double().T / factor.double()
    assert reference.relative_error(got * (128 if bf16 else 1), want) < 1e-5


@pytest.mark.parametrize("format", reference.FP4_FORMATS)
@pytest.mark.parametrize("k", [16, 128, 336])
def test_prefill_takes_plain_rows_for_bf16_words(host, k, format):
    n, kp = 128, -(-k // 128) * 128
    w = reference.random_weight(format, n, k, narrow=True)
    packed, scales, factor = torch.ops.fp4.prepack(*w.operands(), format, "mma_bf16")
    got = torch.full((n, kp), float("nan"))
    host("bf16_operand", packed, scales, n, kp, FORMATS[format].block, got)
    assert torch.equal(got[:, :k].double() * factor.double(), w.dense.double()) and not got[:, k:].any()


def test_every_code_and_scale_is_exact_in_bf16(host):
    n, k = 128, 2048  # a row for each scale, each code in each place
    scale = torch.arange(0x80, dtype=U8).clamp(max=0x7E)[:, None].repeat(1, k // 16).view(torch.float8_e4m3fn)
    codes = (torch.arange(k // 16)[:, None] + torch.arange(16) * 3).flatten() % 16
    packed = (codes[::2] | codes[1::2] << 4).to(U8).repeat(n, 1)
    plain = packed, scale, torch.tensor(1.0)
    words, scales, _ = torch.ops.fp4.prepack(*plain, "nvfp4", "mma_bf16")
    got = torch.empty(n, k)
    host("bf16_operand", words, scales, n, k, 16, got)
    assert torch.equal(got.double(), torch.ops.fp4.dequantize(*plain, "nvfp4", torch.float64))


@pytest.mark.parametrize("k", [128, 768, 2048, 2880, 4096, 7168, 14336, 18432])
@pytest.mark.parametrize("shared", [101376, 166912, 232448])
def test_decode_fits_into_the_shared_memory_of_each_gpu(host, k, shared):
    """The planner counts no less than the launcher asks for. Hopper has kernels for the long ring alone."""
    planner = development("planner")
    hopper, mma = planner.KernelFamily.HOPPER, planner.KernelFamily.MMA
    bytes_ = torch.empty(1, dtype=torch.int32)
    kp = -(-k // 128) * 128
    for family, count, warps in itertools.product((mma, hopper), (8, 300, 2048), (16, 24)):
        gpu = planner.Gpu(family, 108, shared, 1_400_000)
        config = planner.decode_warps(kp, warps, rows=count, on=gpu)
        if config is None:
            never = family == hopper and shared < 232448  # there is no such GPU
            assert never or (shared == 101376 and k > 7168 and (warps == 24 or k == 18432))
            continue
        split = config.k_warps, config.row_warps, config.passes, config.ring
        host("decode_bytes", *split, count, 1, bytes_)
        assert bytes_.item() <= config.shared_bytes <= shared
        assert config.shared_bytes - bytes_.item() < 1024 and config.k_warps * config.row_warps <= warps
        assert config.ring == 4 or (config.ring == 2 and family == mma)
        assert config.k_warps * config.passes * 256 >= kp


def test_half_order_is_what_the_fragments_multiply(host):
    """Instruction 2s + q, lane t: codes 0 and 2 with K 2t and 2t + 1 of the activations, 1 and 3 8 on."""
    k = 256
    position = torch.empty(k, dtype=torch.int32)
    host("half_positions", k, position)
    assert position.sort().values.tolist() == list(range(k))
    for t, s, q, i in itertools.product(range(4), range(2), range(2), range(4)):
        column = 16 * (2 * s + q) + (2 * t + i // 2) + (8 if i in (1, 3) else 0)
        assert position[64 + 16 * t + 8 * s + 4 * q + i] == 64 + column
    x = torch.arange(k, dtype=torch.float32)[None] + 1
    ordered, factor = reference.half_rows(x)
    assert torch.equal(ordered[0].float()[position.long()] * factor, x[0])
    assert torch.equal(reference.plain_rows(ordered).float() * factor, x)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_rows_are_quantised_as_fp4_quantize_does(host, format):
    """Each block of a row by itself, with ties, zeros, tiny and huge ones; the row's factor apart."""
    block = 16 if format == "nvfp4" else 32
    x = torch.randn(2000, 4 * block) * 10 ** torch.empty(2000, 1).uniform_(-6, 6)
    x[:500] = torch.randint(-24, 25, (500, 4 * block)) / 4  # ties, where a block's scale is one
    x[:500, 0] = 6 * 448 if format == "nvfp4" else 6
    x[:500, block::block] = 6
    x[500:600] = 0
    x[600:700, :block] = 0
    x[700:800] *= 2.0**-140
    x[800:900, :block] *= 1e-9
    codes, scale, factor = torch.ops.fp4.quantize(x[:, None], format)
    factor = factor if format == "nvfp4" else torch.ones(len(x))
    ones = torch.ones(len(x)) if format == "nvfp4" else None
    want = torch.ops.fp4.dequantize(codes, scale, ones, format, torch.float64)[:, 0]
    got, got_factor = torch.empty(x.shape), torch.empty(len(x))
    host("quantize_rows", x, *x.shape, int(format == "nvfp4"), got, got_factor)
    assert torch.equal(got_factor, factor)
    assert torch.equal(got.double(), want)
    assert torch.equal(got, got.bfloat16().float())


def test_int4_is_folded_to_the_nearest_e4m3(host):
    """Every code in each place, with every bfloat16 scale up to 56 and with others of float32."""
    scales = torch.arange(0x4261, dtype=torch.int16).view(torch.bfloat16).float()
    scales = torch.cat((scales, torch.rand(4000) * 56, torch.rand(4000).exp2() * 2.0**-6))
    assert scales[0x4260] == 56
    codes = (torch.arange(16)[:, None] + torch.arange(8) * 3) % 16
    codes, scales = codes.repeat(len(scales), 1), scales.repeat_interleave(16)
    plain = (codes[:, ::2] | codes[:, 1::2] << 4).to(U8)
    words = int4._nibbles(plain).view(torch.int32).flatten()
    got = torch.empty(len(words), 8, dtype=U8)
    host("int4_words", words, scales, len(words), got)
    value = torch.where(codes > 7, codes - 16, codes).float()
    assert torch.equal(values(got), (value * scales[:, None]).to(torch.float8_e4m3fn).double())


@pytest.mark.parametrize("format", reference.INT4_FORMATS)
def test_int4_lies_where_the_kernel_reads_it(host, format):
    """Operand A as PrefillBlock's lanes make it of the packed bytes and the scales of its rows."""
    groups, n, k = 2, 128, 336
    w = reference.random_weight(format, groups, n, k)
    packed, scales, factor = torch.ops.fp4.prepack(*w.operands(), format, "sm90_int4")
    kp, block = 2 * packed.shape[-1], reference.BLOCK[format]
    words = packed.view(torch.int32).view(groups, n // 16, kp // 64, 8, 4, 2, 2)  # g, t, row of the pair, s
    # As Int4Weights takes them: by step and group of the step, g, row of the pair; block t's of 64 k each.
    each = scales.view(groups, n // 16, kp // block, 8, 2).repeat_interleave(block // 16, 2)
    each = each.unflatten(2, (kp // 64, 4)).permute(0, 1, 2, 4, 3, 5).unsqueeze(-1).expand(words.shape)
    got = torch.empty(words.numel(), 2, 4, dtype=U8)  # q, i
    host("int4_words", words.flatten().contiguous(), each.flatten().contiguous(), words.numel(), got)
    code = values(got).view(groups, n // 16, kp // 64, 8, 4, 2, 2, 2, 4)  # ..., g, t, row, s, q, i
    code = code.permute(0, 1, 3, 5, 2, 4, 6, 7, 8).reshape(groups, n, kp)
    folded = code * factor.double()[:, None, None]
    assert torch.equal(folded[..., :k], reference.fold_int4(w.packed, w.scale, format))
    assert not folded[..., k:].any()


@pytest.mark.parametrize("padded", [128, 768, 2048, 2944, 16384])
def test_rows_are_stored_in_the_layouts_order(host, padded):
    column = torch.full((padded,), -1, dtype=torch.int32)
    host("fp8_columns", padded // 16, column)
    assert torch.equal(column, reference.sm90_order(torch.arange(padded, dtype=torch.int32)))
    host("half_columns", padded // 16, column)
    assert torch.equal(column, torch.arange(padded, dtype=torch.int32))


@pytest.mark.parametrize("rows", [1, 7, 70, 700, 5000, 2**31 - 1])
def test_every_block_of_a_row_is_taken_once(host, rows):
    for blocks in range(8, 2049, 8):  # rows are padded to 128 columns
        plan, taken = torch.zeros(2, dtype=torch.int32), torch.zeros(2048, dtype=torch.int32)
        host("row_plan_of", rows, blocks, plan, taken)
        lanes, each = plan.tolist()
        assert taken[: lanes * each].eq(1).all() and lanes * each >= blocks
        # What csrc/device/rows.cu has kernels for.
        assert (lanes, each) in [(16, 3), *((32, i) for i in (1, 2, 3, 4))] or (
            lanes % 32 == 0 and 32 < lanes <= 512 and each in (1, 2, 4)
        )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("steps", [1, 2, 4, 6, 7, 16, 23, 56, 112])
@pytest.mark.parametrize("blocks", [1, 66, 132])
@pytest.mark.parametrize("share_below", [0, 50, 132])
def test_tiles_are_shared_out_whole(host, steps, blocks, share_below):
    """Every step of every tile belongs to one part; what is left over full waves is even."""
    least, most_parts = 3, 4
    for tiles in [*range(1, 2 * blocks + 2), 10 * blocks + 7, 300 * blocks]:
        kinds, begin = torch.zeros(3, dtype=torch.int32), torch.full((blocks + 1,), -1, dtype=torch.int32)
        host("shares_of", tiles, steps, share_below, blocks, kinds, begin)
        whole, left, parts = kinds.tolist()
        assert whole + left == tiles and parts <= blocks and (parts == 0) == (left == 0)
        assert (left == 0) == (tiles % blocks == 0 or tiles % blocks >= share_below)
        if left == 0:
            continue
        assert whole % blocks == 0 and left < 2 * blocks
        begin = begin[: parts + 1]
        size, at = begin.diff(), begin % steps
        assert begin[0] == 0 and begin[-1] == left * steps and size.ge(0).all()
        assert size.max() <= left * steps / parts + 2 * (least - 1) + 1
        assert (at.eq(0) | (at.ge(least) & at.le(steps - least))).all()  # no part of a tile is shorter
        inside = (begin[at > 0] // steps).long()
        assert len(inside) == 0 or inside.bincount().max() < most_parts + 1


def test_quotients_are_rounded_once(host):
    """For every mantissa of the divisor, and however the approximate inverse is off."""
    count = 2**23
    d = (torch.arange(count, dtype=torch.int32) + (127 << 23)).view(torch.float32)  # every mantissa
    for ulps in (-1, 0, 1):
        power = 2.0 ** torch.randint(0, 60, (count,))
        a = torch.randn(count).bfloat16().float() * 2.0 ** torch.randint(-3, 60, (count,))
        inverse = ((1 / (d * power)).view(torch.int32) + ulps).view(torch.float32)
        got = torch.empty(count)
        host("quotients", a, d * power, inverse, count, got)
        want = a / (d * power)
        sure = want.abs() >= 2.0**-64
        assert sure.float().mean() > 0.9
        wrong = (got != want) & sure  # one was seen in some 10^9, which no later run has found again
        assert wrong.sum() <= 2 and ((got - want).abs() <= 2.0**-23 * want.abs())[wrong].all()
