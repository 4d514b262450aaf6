"""csrc/sm120 without a GPU of compute capability 12.x: `make test-kernels`.

The machine code for 12.0 and 12.1 is read. The emulator, on which test_sm120_gpu.py runs the kernels, is
compared with three independent sources: the PTX ISA's text, CUTLASS' layouts, and the layouts and
instructions of Triton's `tl.dot_scaled`.
"""

import ctypes
import random
import re
import subprocess
from pathlib import Path

import emulated
import numpy as np
import pytest
import reference
import torch
from places import ROOT
from test_kernel_archs import ASKED, NVCC, cuobjdump, of_kernels, setup

pytestmark = [
    pytest.mark.skipif(not ASKED, reason="compiles: make test-kernels"),
    pytest.mark.skipif(NVCC is None, reason="needs nvcc"),
]

SOURCE = Path("csrc/sm80/scaled_sm120.cu")
OPCODES = {
    "1": "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X",
    "0": "OMMA.SF.16864.F32.E2M1.E2M1.E8",
}
"""By whether a kernel is for nvfp4."""
KERNELS, MOST_REGISTERS = 8, 208


# --- machine code ---


def compiled(arch: str, folder: Path) -> tuple[Path, dict[str, tuple[int, int]]]:
    """The object for an architecture, and each kernel's bytes of stack and number of registers."""
    to, library = folder / "scaled_sm120.o", setup()["MMA"]
    flags = [flag for flag in library.flags(["120f"]) if "gencode" not in flag]
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}", "--resource-usage"]
    command = [NVCC, *flags, "-c", str(SOURCE), "-o", str(to)]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    pattern = r"entry function '(\w+scaled_kernel\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers"
    found = re.findall(pattern, told.stdout + told.stderr, re.S)
    return to, {name: (int(stack), int(registers)) for name, stack, registers in found}


@pytest.mark.parametrize("arch", ["120f", "121a"] if ASKED == "all" else ["120f"])
def test_instructions_registers_and_memory(arch, tmp_path):
    """FP4 tensor cores with the format's scales, codes by 16 bytes past the registers and by ldmatrix, and
    next to nothing in local memory. The launch asserts the shared memory when it is compiled."""
    to, usage = compiled(arch, tmp_path)
    assert len(usage) == KERNELS
    for name, (stack, registers) in usage.items():
        assert stack <= 16 and registers <= MOST_REGISTERS, (name, stack, registers)
    if arch == "121a":  # Triton's cuobjdump does not read it
        return
    bodies = of_kernels([to], "-sass", pattern=r"Function : (\S+)(.*?)(?=Function : |\Z)")
    for name, body in ((name, bodies[name]) for name in usage):
        found = set(re.findall(r"\b[A-Z]*MMA\.[\w.]+", body))
        assert found == {OPCODES[re.search(r"ScaledConfigILb(\d)", name)[1]]}, name
        assert re.search(r"LDGSTS\S*128", body) and re.search(r"LDSM\.16\.M88\.4", body), name


# --- the emulator's instruction ---


@pytest.fixture(scope="module")
def instruction(tmp_path_factory):
    """f(a [32, 4], b [32, 2], sfa [32], sfb [32], nvfp4) -> d [32, 4], of words that the lanes hold."""
    to = tmp_path_factory.mktemp("emulator") / "emulator.so"
    sources = [str(file) for file in emulated.EMULATOR.glob("*.cpp")]
    includes = [f"-I{emulated.cuda_headers()}", f"-I{emulated.EMULATOR}"]
    command = ["g++", *emulated.FLAGS, *includes, "-shared", *sources, "-o", str(to), "-lpthread"]
    subprocess.run(command, check=True)
    run = ctypes.CDLL(str(to)).emulator_mma_scaled

    def product(a, b, sfa, sfb, nvfp4):
        d = np.zeros((32, 4), np.float32)
        words = [np.ascontiguousarray(t, np.uint32) for t in (a, b, sfa, sfb)]
        run(*(ctypes.c_void_p(t.ctypes.data) for t in (d, *words)), int(nvfp4))
        return d

    return product


class Operands:
    """A [16, 64] and B [8, 64] of codes with block scales, and the product in float64."""

    def __init__(self, nvfp4: bool):
        self.nvfp4, self.block = nvfp4, 16 if nvfp4 else 32
        self.a, self.b = (torch.randint(0, 16, (rows, 64)) for rows in (16, 8))
        self.sfa, self.sfb = (
            (torch.randint(0x20, 0x50, (rows, 64 // self.block)) if nvfp4
             else torch.randint(120, 134, (rows, 64 // self.block))).to(torch.uint8)
            for rows in (16, 8)
        )  # fmt: skip
        dtype = reference.SCALE_DTYPE["nvfp4" if nvfp4 else "mxfp4"]
        a, b = (
            reference.E2M1[codes] * reference.scale_values(scale.view(dtype)).repeat_interleave(self.block, 1)
            for codes, scale in ((self.a, self.sfa), (self.b, self.sfb))
        )
        self.product = a @ b.T

    def scales(self, row_of, scale: torch.Tensor) -> np.ndarray:
        """The word of each lane: the scales of row_of(lane), or garbage if that is None."""
        words = np.random.default_rng(random.getrandbits(64)).integers(0, 2**32, 32, dtype=np.uint32)
        for lane in range(32):
            if (row := row_of(lane)) is not None:
                word = int.from_bytes(bytes(scale[row].tolist()), "little")
                words[lane] = word if self.nvfp4 else words[lane] & 0xFFFF0000 | word
        return words

    def codes(self, codes: torch.Tensor, place, registers: int) -> np.ndarray:
        """The words of each lane: nibble i of the registers together is the code at place(lane, i)."""
        words = np.zeros((32, registers), np.uint32)
        for lane in range(32):
            for i in range(8 * registers):
                row, k = place(lane, i)
                words[lane, i // 8] |= np.uint32(int(codes[row, k]) << 4 * (i % 8))
        return words

    def check(self, d: np.ndarray, place) -> None:
        for lane in range(32):
            for i in range(4):
                row, column = place(lane, i)
                assert d[lane, i] == np.float32(self.product[row, column]), (lane, i)


def crd(layout, index: int) -> int:
    """CuTe's layout function: `shape` and `stride` of one mode, the leftmost coordinate fastest."""
    found = 0
    for size, stride in zip(*layout):
        found += index % size * stride
        index //= size
    return found


# (threads, values), each ((shape), (stride)), into a column-major matrix of M or N rows:
# include/cute/atom/mma_traits_sm120.hpp, SM120_16x8x64_TN_VS, and SM80_16x8_Row.
CUTLASS_A = ((4, 8), (128, 1)), ((8, 2, 2), (16, 8, 512))
CUTLASS_B = ((4, 8), (64, 1)), ((8, 2), (8, 256))
CUTLASS_C = ((4, 8), (32, 1)), ((2, 2), (16, 8))
CUTLASS_SFA, CUTLASS_SFB = ((2, 2, 8), (8, 0, 1)), ((4, 8), (0, 1))


def cutlass(layout, rows: int):
    threads, values = layout
    return lambda lane, i: divmod(crd(threads, lane) + crd(values, i), rows)[::-1]


@pytest.mark.parametrize("nvfp4", [True, False])
def test_as_cutlass(nvfp4, instruction):
    """CUTLASS' layouts say where each operand is. Threads that they map to one row hold the same scales."""
    x = Operands(nvfp4)
    d = instruction(
        x.codes(x.a, cutlass(CUTLASS_A, 16), 4),
        x.codes(x.b, cutlass(CUTLASS_B, 8), 2),
        x.scales(lambda lane: crd(CUTLASS_SFA, lane), x.sfa),
        x.scales(lambda lane: crd(CUTLASS_SFB, lane), x.sfb),
        nvfp4,
    )
    x.check(d, cutlass(CUTLASS_C, 16))


@pytest.mark.parametrize("nvfp4", [True, False])
def test_as_the_ptx_isa(nvfp4, instruction):
    """Its sections "Matrix Fragments for mma.m16n8k64" and "Block Scaling for mma.sync": with selectors
    {0, 0} threads 0 and 1 of a quad give A's scales, thread 0 gives B's, from the lowest byte on."""
    x = Operands(nvfp4)

    def place_a(lane, i):
        group, thread = lane >> 2, lane % 4
        first = i < 8 or 16 <= i < 24
        return group if first else group + 8, thread * 8 + (i & 7) + (0 if i < 16 else 32)

    def place_b(lane, i):
        return lane >> 2, lane % 4 * 8 + (i & 7) + (0 if i < 8 else 32)

    def place_c(lane, i):
        return (lane >> 2) + (0 if i < 2 else 8), lane % 4 * 2 + (i & 1)

    d = instruction(
        x.codes(x.a, place_a, 4),
        x.codes(x.b, place_b, 2),
        x.scales(lambda lane: {0: lane >> 2, 1: (lane >> 2) + 8}.get(lane % 4), x.sfa),
        x.scales(lambda lane: lane >> 2 if lane % 4 == 0 else None, x.sfb),
        nvfp4,
    )
    x.check(d, place_c)


# --- Triton ---


@pytest.fixture(scope="module", params=["nvfp4", "mxfp4"])
def triton_kernel(request, tmp_path_factory):
    """What Triton makes of `tl.dot_scaled` for sm_120, and whether that is for nvfp4."""
    pytest.importorskip("triton")
    import dot_scaled_kernel

    nvfp4 = request.param == "nvfp4"
    return dot_scaled_kernel.compiled(120, nvfp4), nvfp4


def test_as_triton(triton_kernel, instruction, tmp_path):
    """Triton's lanes hold the scales where the emulator reads them, its instruction has our text, and both
    become the same machine code."""
    kernel, nvfp4 = triton_kernel
    vector, kind = ("4X", "ue4m3") if nvfp4 else ("2X", "ue8m0")
    text = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::"
    ours = (ROOT / "csrc/sm120/ptx_sm120.cuh").read_text()
    assert text in ours and f'FP4_MMA("{vector}", "{kind}")' in ours and "%10, {0, 0}, %11, {0, 0};" in ours
    theirs = f"{text}{vector}.f32.e2m1.e2m1.f32.{kind} "
    found = [line for line in kernel.asm["ptx"].splitlines() if "mma.sync" in line]
    assert found and all(theirs in line and line.count("{ 0, 0 }") == 2 for line in found)

    # #linear = ..<{register = [..], lane = [[row, k], ..], ..}>: the operands' scales, in this order.
    used = re.search(
        r"tt\.dot_scaled.*?x(?:f8E4M3FN|i8), (#\w+)> \*.*?x(?:f8E4M3FN|i8), (#\w+)>", kernel.asm["ttgir"]
    )
    x, rows = Operands(nvfp4), []
    for name in used.groups():
        bases = re.search(rf"{name} = #ttg\.linear<\{{.*?lane = (\[\[.*?\]\])", kernel.asm["ttgir"])[1]
        bits = [int(row) for row, _ in re.findall(r"\[(\d+), (\d+)\]", bases)]
        rows.append(lambda lane, bits=bits: sum(row for i, row in enumerate(bits) if lane >> i & 1))
    d = instruction(
        x.codes(x.a, cutlass(CUTLASS_A, 16), 4),
        x.codes(x.b, cutlass(CUTLASS_B, 8), 2),
        x.scales(rows[0], x.sfa),
        x.scales(rows[1], x.sfb),
        nvfp4,
    )
    x.check(d, cutlass(CUTLASS_C, 16))

    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    sass = subprocess.run([cuobjdump(), "-sass", str(cubin)], capture_output=True, text=True, check=True)
    assert set(re.findall(r"\bOMMA\.[\w.]+", sass.stdout)) == {OPCODES[str(int(nvfp4))]}
