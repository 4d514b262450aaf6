"""The machine code of prefill by mma.sync for each GPU, read without one, and its choice of a candidate."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
from development import development
from test_sm90_binary import run, tool

import fp4_ops

prefill = development("prefill")

BINARY = Path(fp4_ops.__file__).parent / "_sm80.so"
pytestmark = pytest.mark.skipif(not BINARY.exists(), reason="_sm80.so is not built")
KERNELS = ["bf16", "bf16_b32", "fp16", "fp16_b32", "int8", "int8_b32"]
CONTIGUOUS = prefill.RowMode.CONTIGUOUS
SIZES = [
    *((128, m, 1536, 2048) for m in (8, 512, 8192, 65536)),
    *((8, m, 28672, 4096) for m in (8, 256, 4096, 16384)),
    *((32, m, 2880, 2944) for m in (4, 256, 4096, 32768)),
    (1, 1, 64, 128),
    (300, 40000, 512, 7168),
]
"""Groups, rows, N and padded K."""


@pytest.fixture(scope="module")
def cubins(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sm80")
    subprocess.run(
        [tool("cuobjdump"), "-xelf", "all", str(BINARY)], cwd=folder, check=True, capture_output=True
    )
    return sorted(folder.glob("*.cubin"))


def products_of(name: str) -> str:
    """The instruction of a kernel whose mangled name has its words."""
    if "9Int8WordsI" in name:
        return r"IMMA\.16832\.S8\.S8\s"
    element = re.search(r"8MmaWordsILNS\w*7ElementE(\d)E", name)[1]
    return {"1": r"HMMA\.16816\.F32\s", "2": r"HMMA\.16816\.F32\.BF16\s"}[element]


def test_kernels_keep_to_their_registers(cubins):
    """All multiply in the rows' type and copy past the registers. Some words of where a thread is lie in
    memory, more where sixteen warps have 128 registers each, or twelve 168."""
    seen = 0
    for cubin in cubins:
        text = run([tool("nvdisasm"), "-c", str(cubin)])
        for name, body in re.findall(r"\.section\s+\.text\.(\S+?),(.*?)(?=\.section\s|\Z)", text, re.S):
            if "4sm8014prefill_kernel" not in name:
                continue
            seen += 1
            for instruction in (
                products_of(name),
                r"LDGSTS\.E\.BYPASS\.128",
                r"LDSM\.16\.M88\.4",
                r"LDGDEPBAR",
            ):
                assert re.search(instruction, body), (cubin.name, name, instruction)
            warps, blocks = map(int, re.search(r"EELi(\d+)ELi1E.*ELi\d+ELi(\d+)EEELb", name).groups())
            spills = re.findall(r"\b(?:LDL|STL)\b", body)
            assert len(spills) <= (80 if warps * blocks >= 12 else 24 if "Int8Words" in name else 16), (
                cubin.name,
                name,
                len(spills),
            )
    assert seen


@pytest.fixture
def library():
    loaded = ctypes.CDLL(str(BINARY))
    yield loaded
    loaded.fp4_kernel_prefill_most_shared(0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sms", [28, 84, 108, 132, 170])
def test_every_gpu_has_a_candidate(library, kernel, sms):
    """With as little shared memory as there is; more rows an expert are given wider tiles."""
    library.fp4_kernel_prefill_most_shared(99 * 1024)
    tokens = []
    for size in SIZES:
        choice = prefill.choose_of(library, CONTIGUOUS, *size, sms, kernel)
        assert choice.candidate >= 0 and 0 < choice.seconds < 1
        name = prefill.candidates_of(library, kernel)[choice.candidate]
        tokens.append(int(re.search(r"tokens (\d+)", name)[1]))
    for few, *_, many in (tokens[:4], tokens[4:8], tokens[8:12]):
        assert few <= 32 and many >= 64, tokens


@pytest.mark.parametrize("kernel", KERNELS)
def test_other_kernels_have_no_candidates(library, kernel):
    assert len(prefill.candidates_of(library, kernel)) > 1
    assert prefill.candidates_of(library, "w4a8") == []
    assert prefill.choose_of(library, CONTIGUOUS, *SIZES[0], 132, "w4a8").candidate == -1
