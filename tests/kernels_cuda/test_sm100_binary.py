"""csrc/sm100 without a GPU of compute capability 10.x: `make test-kernels`.

The machine code for 10.0 and 10.3, and a witness of how tcgen05 takes its operands: PTX of NVIDIA's CuTe DSL,
which compiles without a GPU. test_fp4_rows_launchers.py compares the scales' layout with torch's.
"""

import ctypes
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import emulated
import pytest
from places import HELPERS, ROOT
from test_kernel_archs import ASKED, NVCC, of_kernels, setup
from test_sm100 import CTAS, Case, opened

pytestmark = [
    pytest.mark.skipif(not ASKED, reason="compiles: make test-kernels"),
    pytest.mark.skipif(NVCC is None, reason="needs nvcc"),
]

SOURCE = Path("csrc/sm80/products_sm100.cu")
KERNELS, MOST_REGISTERS = 25, {False: 168, True: 232}
"""A kernel for each candidate and format, and for groups along K those of FP4 rows, which may have more
registers. The compiler asserts shared memory and columns of tensor memory."""
PRODUCTS = ("UTCOMMA", ""), ("UTCOMMA", ".4X"), ("UTCQMMA", "")
"""Opcode for each value of `Kind`: mxfp4, nvfp4, e4m3 rows by mxfp4 weights. Between: `.2CTA` of a pair."""


# --- machine code ---


def compiled(arch: str, folder: Path) -> tuple[Path, str]:
    """The object for an architecture, and what the compiler tells."""
    to = folder / "products.o"
    flags = [flag for flag in setup()["MMA"].flags(["100f"]) if "gencode" not in flag]
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}", "--resource-usage"]
    command = [NVCC, *flags, "-c", str(SOURCE), "-o", str(to)]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return to, told.stdout + told.stderr


def along_k(name: str) -> bool:
    """Returns whether groups lie along K in this kernel."""
    return re.search(r"4KindE\dELb(\d)", name)[1] == "1"


def by_launch_control(name: str) -> bool:
    """Returns whether cluster launch control hands out this kernel's tiles."""
    return "ELb1EEE" in name


def code_of(file: Path) -> dict[str, str]:
    bodies = of_kernels([file], "-sass", pattern=r"Function : (\S+)(.*?)(?=Function : |\Z)")
    assert len(bodies) == KERNELS
    return bodies


@pytest.mark.parametrize("arch", ["100f", "103a"] if ASKED == "all" else ["100f"])
def test_instructions_registers_and_memory(arch, tmp_path):
    """The FP4 tensor cores with four scales for 64 K (nvfp4) or two (mxfp4), those of 32 K for e4m3 rows, and
    no others. Products have scales in tensor memory, which come by copies to it. The copy engine brings
    boxes. Each of these instructions is one of a pair where two thread blocks share a tile, and nowhere else.
    Where cluster launch control hands out tiles, one instruction asks for a cluster, and its response goes to
    all blocks. Nothing is in local memory."""
    file, told = compiled(arch, tmp_path)
    pattern = (
        r"properties for (\w+product_kernel\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers"
    )
    usage = re.findall(pattern, told, re.S)
    assert len(usage) == KERNELS
    for name, *memory, registers in usage:
        most = MOST_REGISTERS[along_k(name)]
        assert memory == ["0", "0", "0"] and int(registers) <= most, (name, memory, registers)
    if arch == "103a":  # Triton's cuobjdump does not read it
        return
    pairs = asking = 0
    for name, body in code_of(file).items():
        kind, ctas = map(int, re.search(r"4KindE(\d)ELb\dELi(\d)", name).groups())
        pair, pairs = ".2CTA" if ctas == 2 else "", pairs + ctas - 1
        product = pair.join(PRODUCTS[kind])
        products = re.findall(r"\b([A-Z]*MMA[.\w]*)(.*?);", body)
        assert {opcode for opcode, _ in products} == {product}, name
        # Products without scales have no operand behind the instruction descriptor but the predicate.
        assert all(re.search(r"idesc\[\w+\], tmem\[\w+\]", operands) for _, operands in products), name
        for instruction, opcode in (
            ("UTCCP", f"UTCCP.T.S{pair}.4x32dp128bit"),
            ("UTMALDG", f"UTMALDG.2D{pair}"),
            ("UTCBAR", "UTCBAR.2CTA.MULTICAST" if pair else "UTCBAR"),
            ("UTCATOMSWS.*FIND", f"UTCATOMSWS{pair}.FIND_AND_SET.ALIGN"),
            ("UBLKCP", None),
        ):
            found = set(re.findall(rf"\b{instruction}[.\w]*", body))
            assert found == ({opcode} if opcode else set()), (name, found)
        asks = ["UGETNEXTWORKID.BROADCAST"] if by_launch_control(name) else []
        assert re.findall(r"\bUGETNEXTWORKID[.\w]*", body) == asks, name
        asking += len(asks)
        assert "LDTM.x16" in body and ("UCGABAR" in body) == (ctas == 2), name
    assert pairs == 5 * CTAS.count(2) and asking == 5 * 2


@pytest.mark.parametrize("arch", ["80", "120f"])
def test_other_gpus_get_no_code(arch, tmp_path):
    """`_sm80.so` has the source for each of its GPUs. These lack the instructions."""
    file, _ = compiled(arch, tmp_path)
    for name, body in code_of(file).items():
        assert set(re.findall(r"\*/\s+(?:@!?\w+ )?([A-Z]\w*)", body)) <= {
            "LDC",
            "MOV",
            "EXIT",
            "BRA",
            "NOP",
        }, name


# --- CuTe DSL ---


RANK = 1 << 24
"""Bit of an address in shared memory that says whether a thread block is the odd one of its pair."""


def words_of_ptx(text: str, rank: int = 0) -> list[tuple]:
    """The tcgen05 instructions and copies of a kernel without loops, with the numbers that their operands
    have in thread block `rank` of a cluster.

    A branch goes around what one elected thread does, so none is taken. Shared memory begins at 0 but for
    `RANK`, and tensor memory at 0. Parameters are 0: they say whether operands are negated.
    """
    values: dict[str, int] = {"_": 0, "%cluster_ctarank": rank}
    found = []

    def value(name: str) -> int:
        name = name.strip().strip("[]")
        if "+" in name:
            base, offset = name.split("+")
            return value(base) + int(offset)
        if name.startswith("%"):
            return values[name]
        return int(name) if name.lstrip("-").isdigit() else rank * RANK  # a symbol: shared memory

    binary = {
        "add": lambda a, b: a + b, "shr": lambda a, b: a >> b, "shl": lambda a, b: a << b,
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "sub": lambda a, b: a - b,
    }  # fmt: skip
    for line in text.splitlines():
        if not (match := re.match(r"\s*([a-z][\w.:]*)\s+(.*);", line)):
            continue
        opcode, kind = match[1], match[1].split(".")[0]
        operands = re.findall(r"\{[^}]*\}|[^,\s][^,]*", match[2])
        if kind == "tcgen05":
            name = opcode.split(".")[1]
            if name in ("cp", "mma", "commit"):
                found.append((name, opcode, [value(operand) for operand in operands]))
        elif kind == "cp":  # where to, the first row, and the barrier
            to, row, barrier = re.fullmatch(
                r"\[(\S+)\], \[\S+, \{\S+, (\S+)\}\], \[(\S+)\].*", match[2]
            ).groups()
            found.append(("load", opcode, [value(to), value(row), value(barrier)]))
        elif kind == "mov":
            to, source = operands
            if source.startswith("{"):
                low, high = (value(part) for part in source.strip("{}").split(","))
                values[to] = low & 0xFFFFFFFF | high << 32
            elif to.startswith("{"):
                low, high = (part.strip() for part in to.strip("{}").split(","))
                values |= {low: value(source) & 0xFFFFFFFF, high: value(source) >> 32}
            else:
                values[to] = value(source)
        elif kind in binary:
            values[operands[0]] = binary[kind](*map(value, operands[1:]))
        elif kind == "selp":
            values[operands[0]] = value(operands[1 if value(operands[3]) else 2])
        elif kind == "setp":
            values[operands[0]] = int(value(operands[1]) != value(operands[2]))
        elif kind in ("cvt", "cvta", "shfl"):
            values[operands[0]] = value(operands[1])
        elif kind == "ld":  # parameters, and the address of tensor memory
            values |= dict.fromkeys(re.findall(r"%\w+", operands[0]), 0)
    return found


COLUMNS = {"nvfp4": 16, "mxfp4": 8, "fp8": 4}
"""Columns of tensor memory that the scales of A have in a step."""


class Step:
    """Holds what a step starts: copies in any order, and products in their order. Places count from the
    first.
    """

    START, COLUMN = 0x3FFF, 0x3FFFFFFF
    """CuTe also keeps in the two high bits of an address of scales which one the instruction reads first."""

    def __init__(self, copies: list[tuple[int, int]], products: list[tuple[int, ...]], columns: int):
        """columns: of tensor memory that the scales of A may have."""
        d, a, b, self.instruction, a_scales, b_scales, _ = products[0]
        self.products = [
            (
                p[0] - d,
                p[1] - a,
                p[2] - b,
                p[3],
                (p[4] & self.COLUMN) - a_scales,
                (p[5] & self.COLUMN) - b_scales,
                bool(p[6]),
            )
            for p in products
        ]
        self.words = a & ~self.START, b & ~self.START
        self.copies = {}
        for operand, first in (("a", a_scales), ("b", b_scales)):
            end = first + columns * (1 if operand == "a" else 2)
            its = [(column, word) for column, word in copies if first <= column < end]
            least = min(word & self.START for _, word in its)
            self.copies[operand] = {
                (column - first, (word & self.START) - least, word & ~self.START) for column, word in its
            }


class Work(ctypes.Structure):
    """`TensorWork` of the emulator."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("kind", "d", "instruction", "a_scales", "b_scales")),
        *(
            ("a", ctypes.c_uint64),
            ("b", ctypes.c_uint64),
            ("keep", ctypes.c_bool),
            *((name, ctypes.c_uint8) for name in ("product", "ctas", "blocks")),
        ),
    ]


def our_step(tokens: int, config: int, format: str) -> tuple[Step, set[int]]:
    """The first step of a tile of so many tokens, and which thread blocks commits tell, as bit masks."""
    kernels = opened(emulated.kernels("sm100"), multiprocessors=CTAS[config])
    log = (Work * 256)()
    kernels.emulator_tensor_log(log, len(log))  # forgets what others started
    case = Case("dense", [tokens], 128 * CTAS[config], 128 if format == "fp8" else 256, format=format)
    assert case.agrees(kernels, config)
    works = log[: kernels.emulator_tensor_log(log, len(log))]
    copies = [(w.d, w.a) for w in works if w.kind == 0]
    products = [(w.d, w.a, w.b, w.instruction, w.a_scales, w.b_scales, w.keep) for w in works if w.kind == 1]
    assert {w.ctas for w in works} == {CTAS[config]}
    return Step(copies, products, COLUMNS[format]), {w.blocks for w in works if w.kind == 2}


@pytest.fixture(scope="module")
def our_text(tmp_path_factory) -> str:
    """PTX of all kernels."""
    to = tmp_path_factory.mktemp("ptx") / "products.ptx"
    flags = [flag for flag in setup()["MMA"].flags(["100f"]) if "gencode" not in flag]
    command = [NVCC, *flags, "-arch=compute_100f", "-ptx", str(SOURCE), "-o", str(to)]
    subprocess.run(command, cwd=ROOT, check=True)
    return to.read_text()


@pytest.fixture(scope="module")
def our_ptx(our_text) -> set[str]:
    """Opcodes of all kernels, as the compiler writes them."""
    return set(re.findall(r"\b(?:tcgen05|cp\.async)[\w.:]+", our_text))


@pytest.mark.parametrize(
    "tokens, config", [(224, 0), (192, 0), (32, 0), (128, 1), (128, 0), (64, 1), (48, 1), (32, 2), (16, 2)]
)
@pytest.mark.parametrize("format", COLUMNS)
def test_as_cute(format, tokens, config, our_ptx, tmp_path):
    """NVIDIA's library makes the same descriptors, the same columns for scales, and the same order.

    With a pair it also has the commits to both thread blocks, and the copies whose bytes the even one counts.
    Pairs with 16 tokens are left out: a block then has eight, and CuTe writes 0 for the stride of eights.
    """
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        pytest.skip("needs nvidia-cutlass-dsl from PyPI")
    ctas = CTAS[config]
    command = [sys.executable, str(HELPERS / "cute_step.py"), str(tokens), str(tmp_path), format, str(ctas)]
    subprocess.run(command, check=True, capture_output=True)
    (ptx,) = tmp_path.glob("*.ptx")
    found = words_of_ptx(ptx.read_text())
    names = [name for name, *_ in found]
    assert names == sorted(names, key=("load", "cp", "mma", "commit").index) and names.count("mma") == 4
    texts = {name: text for name, text, _ in found}
    # Theirs also say which line of a cache stays, and that a copy has no other mode.
    texts["load"] = re.sub(r"\.tile|\.L2::cache_hint", "", texts["load"])
    texts["load"] = texts["load"].replace("2d.shared::cta.", "2d.shared::cluster.")  # of the own block
    texts["mma"] = texts["mma"].removesuffix(".collector::a::discard")
    assert set(texts.values()) <= our_ptx, texts
    assert all(
        (f"cta_group::{ctas}" in text) == (ctas == 2 or name != "load") for name, text in texts.items()
    )
    theirs = Step(
        [tuple(words) for name, _, words in found if name == "cp"],
        [tuple(words) for name, _, words in found if name == "mma"],
        COLUMNS[format],
    )
    mine, told = our_step(tokens, config, format)
    assert mine.instruction == theirs.instruction
    assert mine.words == theirs.words
    if tokens > 128 or config != 0:  # with room for more tokens, the columns of parts are farther apart
        assert mine.products == theirs.products
        assert mine.copies == theirs.copies
    if ctas == 1:
        return
    assert told == {words[1] for name, _, words in found if name == "commit"} == {3}
    for rank in range(ctas):  # each copies its own rows to its own memory, and tells the even one
        _, _, (to, row, barrier) = words_of_ptx(ptx.read_text(), rank)[0]
        assert (to & RANK, row, barrier & RANK) == (rank * RANK, 128 * rank, 0)
    assert (
        f"barrier & {~RANK & 0xFFFFFFFF:#X}u".replace("0X", "0x")
        in (ROOT / "csrc/sm100/ptx_sm100.cuh").read_text()
    )


def around_launch_control(text: str) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Returns what surrounds each request of cluster launch control, and each read response: the opcodes from
    the wait before it to the request or the arrival, and the bytes that an arrival expects.
    """
    listed: list[str] = []
    constants: dict[str, str] = {}
    found: tuple[set[tuple[str, ...]], set[tuple[str, ...]]] = set(), set()
    pattern = (
        r"^\s*(?:@!?%?\w+\s+)?((?:mbarrier\.try_wait|mbarrier\.arrive|clusterlaunchcontrol|ld\.shared"
        r"|fence\.proxy|mov\.(?:b|u)32)[\w.:]*)(?:\s+(.*))?;"
    )
    for opcode, operands in re.findall(pattern, text, re.M):
        if opcode.startswith("mov"):
            constants |= dict([operands.split(", ")]) if operands.count(",") == 1 else {}
            continue
        if "try_wait" in opcode:
            listed = []
        if "expect_tx" in opcode:
            listed.append(constants.get(operands.split(", ")[-1], operands))
        # 16 bytes have several forms, and a wait without `cta` means this block, too.
        opcode = (
            "ld.shared" if opcode.startswith("ld.") else opcode.replace("parity.shared::cta", "parity.shared")
        )
        listed.append(opcode)
        if "try_cancel" in opcode:
            found[0].add(tuple(listed))
        if "arrive" in opcode and any("query_cancel" in one for one in listed):
            found[1].add(tuple(listed))
            listed = []
    return found


@pytest.mark.parametrize("ctas", [1, 2])
def test_cluster_launch_control_as_cute(ctas, our_text, tmp_path):
    """NVIDIA's dynamic scheduler and its pipeline have the same instructions in the same order.

    To ask: a wait for readers, an arrival at the barrier of each block that expects 16 bytes, the request. To
    read: a wait, the questions to the response, a fence before the next response is written, an arrival at
    block 0. Theirs are the same for one block.
    """
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        pytest.skip("needs nvidia-cutlass-dsl from PyPI")
    command = [sys.executable, str(HELPERS / "cute_clc.py"), str(tmp_path), str(ctas)]
    subprocess.run(command, check=True, capture_output=True)
    (ptx,) = tmp_path.glob("*.ptx")
    theirs, ours = around_launch_control(ptx.read_text()), around_launch_control(our_text)
    assert [len(one) for one in theirs] == [1, 1] and "16" in next(iter(theirs[0]))
    assert ours == theirs
    assert our_text.count("clusterlaunchcontrol.try_cancel") == 10


def test_what_a_barrier_counts_as_cute(tmp_path):
    """A box of codes in containers counts as its bytes in global memory, here as in the emulator."""
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        pytest.skip("needs nvidia-cutlass-dsl from PyPI")
    asked = """
import cutlass
from cutlass.experimental.cuda import tensor_map as maps
kind = maps.TensorMapDataFormat.B4X16_P64
print(maps._derive_tensormap_global_tx_dtype(cutlass.Float4E2M1FNx2, kind).width)
print(maps._PADDED_SUBBYTE_BOX_BYTES[kind])
"""
    told = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True)
    bits, box = map(int, told.stdout.split())
    assert 16 * bits // 8 == 8 and box == 128 * bits // 8
    emulator = (HELPERS / "sm90_emulator/copies.cpp").read_text()
    assert re.search(r"element = unpacks\s+\? 8", emulator)
