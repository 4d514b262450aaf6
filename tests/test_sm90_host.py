"""The arithmetic of the Hopper kernels, compiled for the host: every code with every scale byte."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NVCC = shutil.which("nvcc")
U8 = torch.uint8
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc, for its headers")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Calls a function of sm90_host.cu with tensors as pointers and Python ints as int."""
    target = tmp_path_factory.mktemp("host") / "sm90_host.so"
    sources = HERE.parent / "csrc/sm90"
    flags = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-shared", "-Xcompiler=-fPIC"]
    subprocess.run([NVCC, *flags, f"-I{sources}", str(HERE / "sm90_host.cu"), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))

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
    """codes [..., 8] of e2m1, in the order of k, as a word of the layout (csrc/cpu/sm90_layout.h)."""
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
