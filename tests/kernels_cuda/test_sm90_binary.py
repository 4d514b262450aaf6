"""The machine code of the Hopper kernels, read without a GPU: it has the expected instructions and no
spills."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import processes
import pytest
from development import development
from places import ROOT

import fp4_ops
from fp4_ops.backends.launchers import library
from fp4_ops.runtime import native

decode, planner, prefill = development("decode"), development("planner"), development("prefill")

BINARY = Path(fp4_ops.__file__).parent / library.FILE
MAX_SHARED = 227 * 1024
TIMES = ROOT / "benchmarks/results/rows_h200.json"


def tool(name: str) -> str:
    triton = pytest.importorskip("triton")
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return str(bundled) if bundled.exists() else shutil.which(name) or pytest.skip(f"no {name}")


def run(command: list[str], **kwargs) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, **kwargs)
    return done.stdout + done.stderr


KERNELS = [kernel for kernel in prefill.KERNELS if not kernel.startswith(("fp16", "int8"))]
pytestmark = pytest.mark.skipif(
    not BINARY.exists() or native.library() is None,
    reason="the Hopper kernels are not built: FP4_CUDA_ARCHS=90a pip install --no-build-isolation -e .",
)


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> dict[str, str]:
    """Kernel -> its SASS."""
    return processes.once(tmp_path_factory, "sm90_sass", disassembled)


def disassembled(folder: Path) -> dict[str, str]:
    subprocess.run(
        [tool("cuobjdump"), "-xelf", "all", str(BINARY)], cwd=folder, check=True, capture_output=True
    )
    found = {}
    for cubin in folder.glob("*.cubin"):
        text = subprocess.run(
            [tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        for name, body in re.findall(r"\.section\s+\.text\.(\S+?),(.*?)(?=\.section|\Z)", text, re.S):
            found[name] = body
    assert found
    return found


@pytest.fixture(scope="module")
def resources() -> dict[str, dict[str, int]]:
    out = subprocess.run(
        [tool("cuobjdump"), "-res-usage", str(BINARY)], capture_output=True, text=True, check=True
    )
    text = out.stdout + out.stderr
    found = re.findall(r"Function (\S+):\s*\n\s*(.*)", text)
    return {
        name: {k: int(v) for k, v in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line)} for name, line in found
    }


def kernels(found: dict, part: str) -> dict:
    chosen = {name: value for name, value in found.items() if part in name}
    assert chosen, f"no kernel named {part}"
    return chosen


def test_prefill_multiplies_weights_from_registers(functions):
    seen = set()
    for name, body in kernels(functions, "prefill_kernel").items():
        # GMMA dst, A (a register: RS form), descriptor of B
        found = re.findall(
            r"(QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3|HGMMA\.64x\d+x16\.F32(?:\.BF16)?)\s+R\d+, R\d+, gdesc", body
        )
        assert found, name
        assert "UTMALDG" in body, name
        seen |= {re.sub(r"64x\d+", "", f) for f in found}
    assert seen == {"QGMMA.x32.F32.E4M3.E4M3", "HGMMA.x16.F32", "HGMMA.x16.F32.BF16"}


@pytest.mark.parametrize("kernel", ["decode_kernel", "gemv_kernel"])
def test_decode_streams_weights_into_registers(functions, kernel):
    for name, body in kernels(functions, kernel).items():
        bf16 = "MmaWords" in name
        assert re.search(r"HMMA\.16816\.F32\.BF16\s" if bf16 else r"HMMA\.16816\.F32\s", body), name
        assert re.search(r"LDG\.E\.NA\.128\.CONSTANT", body), name
        assert "QMMA" not in body, name


@pytest.mark.parametrize("kernel", ["linears_kernel", "router_kernel"])
def test_linears_request_weights_before_they_wait(functions, kernel):
    """Copies past L1 and beside the registers; partial sums cross a cluster without a GPU-wide barrier. The
    first wait is for launches whose weights a kernel before may have written. x is loaded after either, by
    the threads or by the copy engine.
    """
    for name, body in kernels(functions, kernel).items():
        half = "WeightsILNS_6device7ElementE1" in name
        assert re.search(r"HMMA\.16816\.F32\s" if half else r"HMMA\.16816\.F32\.BF16\s", body), name
        first = body[: body.rindex("ACQBULK")]
        loads, other = ("UBLKCP", "LDG.E.128") if "ELb1EEEv" in name else ("LDG.E.128", "UBLKCP")
        assert "LDGSTS.E.BYPASS.LTC256B.128" in first and loads not in first, name
        assert loads in body and other not in body, name
        assert "MEMBAR" not in body, name


@pytest.mark.parametrize(
    "kernel",
    [
        "decode_kernel",
        "gemv_kernel",
        "prefill_kernel",
        "10row_kernel",
        "combine_kernel",
        "linears_kernel",
        "router_kernel",
    ],
)
def test_nothing_spills(functions, resources, kernel):
    for name, used in kernels(resources, kernel).items():
        assert used["LOCAL"] == 0, (name, used)
    for name, body in kernels(functions, kernel).items():
        spills = re.findall(r"\b(?:LDL|STL)\S*", body)
        # Outside of products: decode with many warps keeps its place among its runs in memory, and prefill's
        # producers, who have 32 registers, some of theirs among tiles.
        many_warps = re.search(r"MmaWordsI\w+ELi\d+EEELi24", name)
        assert len(spills) <= (20 if many_warps else 12 if kernel == "prefill_kernel" else 0), name
        if kernel in ("decode_kernel", "prefill_kernel"):
            products = [m.start() for m in re.finditer(r"\b(?:H|HG|QG)MMA\.", body)]
            assert not re.search(r"\b(?:LDL|STL)", body[products[0] : products[-1]]), name


def test_rows_are_under_way_before_any_is_used(functions):
    """Rows to be quantised or combined: all loads of 16 bytes come first, all rows are stored by 16 bytes."""
    for name, body in kernels(functions, "10row_kernel").items():
        form, blocks = re.search(r"FormE(\d)ELi\d+ELi(\d)E", name).groups()
        first = body[: re.search(r"MUFU\.EX2|HMNMX2|SHFL\.BFLY", body).start()]
        # Twice in the code where gate and up may be interleaved or halves.
        loads = len(re.findall(r"LDG\.E\.128", first))
        assert loads in (int(blocks) * 2, int(blocks) * 4, int(blocks) * 8), name
        assert len(re.findall(r"LDG\.E\.128", body)) == loads, name
        assert len(re.findall(r"STG\.E\s", body)) == (form in "12"), name  # the scale of fp8 and fp16 rows
        assert re.search(r"STG\.E\.128", body), name
    for name, body in kernels(functions, "combine_kernel").items():
        columns, slots = re.search(r"Li(\d)ELb[01]ELi(\d)E", name).groups()
        width = "64" if "DTypeE1E" in name and columns == "4" else "128"
        first = body[: re.search(r"\bFFMA\b", body).start()]
        assert len(re.findall(rf"LDG\.E\.{width}\s", first)) >= int(slots), name


def test_prefill_products_overlap(functions):
    """Where registers run short, ptxas waits after every product (C7511) and says so in passing."""
    for name, body in kernels(functions, "prefill_kernel").items():
        products, waits = len(re.findall(r"GMMA\.64x", body)), len(re.findall(r"WARPGROUP\.DEPBAR", body))
        assert 0 < waits < products, (name, products, waits)


def test_what_products_are_told_is_uniform(functions):
    """Else every product waits for its descriptor to be moved to a uniform register: a tenth of the time."""
    for name, body in kernels(functions, "prefill_kernel").items():
        inside = body[body.index("GMMA.64x") : body.rindex("GMMA.64x")]
        products, moves = len(re.findall(r"GMMA\.64x", inside)), len(re.findall(r"\bR2UR\b", inside))
        assert moves < products, (name, products, moves)


def reachable(body: str, start: str) -> list[str]:
    """The instructions that can run after the one that contains `start`, by branches and labels."""
    code, at = [], {}
    for line in body.splitlines():
        if label := re.match(r"\s*(\.L_\S+):", line):
            at[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1].strip())
    ahead, seen = [i for i, c in enumerate(code) if start in c], set()
    assert len(ahead) == 1, start
    while ahead:
        i = ahead.pop()
        if i in seen or i >= len(code):
            continue
        seen.add(i)
        ahead += [at[label] for label in re.findall(r"`\((\.L_\w+)\)", code[i])]
        if not re.match(r"(BRA `|EXIT|RET)", code[i]):
            ahead.append(i + 1)
    return [code[i] for i in sorted(seen)]


def test_prefill_roles_keep_to_their_registers(functions):
    """After setmaxnreg a warpgroup that touched a higher register would read another's."""
    for name, body in kernels(functions, "prefill_kernel").items():
        for limit in re.findall(r"USETMAXREG\.\S+ (?:UP0, )?(0x[0-9a-f]+)", body):
            after = reachable(body, re.search(rf"USETMAXREG.*{limit}\b", body)[0].rstrip(" ;"))
            used = [int(r) for c in after for r in re.findall(r"\bR(\d+)\b", c)]
            assert len(after) > 200 and max(used) < int(limit, 16), (name, limit, max(used))


@pytest.mark.parametrize("kernel", KERNELS)
def test_few_tiles_are_spread_over_the_chip(kernel):
    """Tiles of 64 rows, or shared ones, where those of more would leave most of 132 SMs idle."""
    names = prefill.candidates(kernel)

    def chosen(*size: int) -> Any:
        return prefill.choose(decode.Routing.OFFS, *size, 132, kernel)

    def rows(*size: int) -> int:
        return int(re.match(r"rows (\d+)", names[chosen(*size).candidate])[1])

    def spread(*size: int) -> bool:
        return rows(*size) == 64 or chosen(*size).share_below > 0

    assert spread(8, 2, 4096, 14336) and spread(32, 1, 4096, 7168) and spread(1, 40, 4096, 4096)
    assert not spread(128, 2000, 2048, 768)
    assert rows(8, 20, 28672, 4096) > 64 and rows(1, 2000, 4096, 4096) > 64


def test_dense_rows_are_cut_so_that_tiles_fill_waves():
    def chosen(*size: int, routing: decode.Routing = decode.Routing.DENSE) -> tuple[int, int]:
        choice = prefill.choose(routing, 1, *size, 132)
        return int(re.match(r"rows (\d+)", prefill.candidates()[choice.candidate])[1]), choice.tile_width

    for m, n, k in ((4096, 1536, 2048), (512, 4096, 4096)):  # 22 x 192 tokens, 4 x 128
        rows, width = chosen(m, n, k)
        assert -(-m // width) * (n // rows) % 132 in (0, 128)
    assert chosen(8192, 28672, 4096)[1] == 0  # many waves
    assert chosen(4096, 1536, 2048, routing=decode.Routing.OFFS)[1] == 0  # rows that the host does not know


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_are_shared_where_that_saves_more_than_it_costs(kernel):
    def shared(groups: int, m: int, n: int, kp: int) -> bool:
        routing = decode.Routing.OFFS if groups > 1 else decode.Routing.DENSE
        return prefill.choose(routing, groups, m, n, kp, 132, kernel).share_below > 0

    assert shared(1, 64, 4096, 14336) and shared(1, 128, 2048, 7168) and shared(32, 32, 4096, 7168)
    assert not shared(1, 64, 2048, 512)  # nothing to share out
    assert not shared(128, 1024, 2048, 768)  # tiles that take less than counting them


def test_tiles_are_claimed_where_that_fills_the_last_wave_in_time():
    def claimed(groups: int, m: int, n: int, kp: int, routing=decode.Routing.OFFS) -> bool:
        return prefill.choose(routing, groups, m, n, kp, 132).claims

    assert claimed(128, 4096, 1536, 2048) and claimed(32, 512, 4096, 7168)
    assert claimed(128, 64, 1536, 2048, routing=decode.Routing.MASKED)
    assert claimed(32, 128, 7168, 2048)  # 6.6 waves, but memory is the bound
    assert not claimed(32, 32, 4096, 7168)  # 2.4
    assert not claimed(128, 4096, 2048, 768)  # tiles that take as long as claiming one
    assert not claimed(8, 1024, 28672, 4096)  # nine waves and a tenth of one: shared
    assert not claimed(8, 8192, 28672, 4096)  # pairs of blocks
    assert not claimed(1, 4096, 28672, 4096, routing=decode.Routing.DENSE)


def test_16_bit_rows_of_large_groups_take_the_tiles_that_were_measured():
    """Weights take longer to make than the products of 128 tokens: there by three warpgroups, not two."""
    names = prefill.candidates("half")

    def tile(groups: int, m: int, n: int, kp: int) -> str:
        return names[prefill.choose(decode.Routing.OFFS, groups, m, n, kp, 132, "half").candidate]

    assert tile(128, 32768, 5760, 2944) == tile(32, 8192, 7168, 2048) == "rows 192, tokens 144, cluster 1"
    assert tile(8, 16384, 28672, 4096) == "rows 128, tokens 192, cluster 2"


def test_int4_has_the_candidates_of_nvfp4():
    assert prefill.candidates("int4") == prefill.candidates()
    for groups, n, kp in ((128, 1536, 2048), (32, 4096, 7168), (8, 4096, 14336)):
        for m in (groups // 4, 16 * groups, 100 * groups, 2000 * groups):
            size = decode.Routing.OFFS, groups, m, n, kp, 132
            of_as_many_bytes = prefill.choose(*size, "w4a8_b32")
            assert prefill.choose(*size, "int4").candidate == of_as_many_bytes.candidate


@pytest.mark.parametrize("compute_warps", [planner.FEW_WARPS, planner.MANY_WARPS])
@pytest.mark.parametrize("kp", [128, 768, 1536, 2048, 2944, 4096, 5120, 7168, 14336, 16384])
def test_decode_configurations_fit(kp, compute_warps):
    config = planner.decode_warps(kp, compute_warps)
    assert config is not None
    assert config.shared_bytes <= MAX_SHARED
    assert config.k_warps * config.row_warps <= compute_warps
    assert config.k_warps * config.passes * 256 >= kp
    assert str(config).startswith(f"decode: {config.k_warps} x {config.row_warps} warps")


def test_decode_loads_schedulers_evenly():
    """K = 768: 12 warps, not 15. K = 1280 has 5 slices, for which there is no even number of warps."""
    assert planner.decode_config(8, 128, 2048, 768, 132) == planner.DecodeConfig(3, 4, 1, 4, 8)
    assert planner.decode_config(8, 128, 2048, 1280, 132) == planner.DecodeConfig(5, 3, 1, 4, 8)
    assert planner.decode_config(8, 128, 1536, 2048, 132) == planner.DecodeConfig(8, 2, 1, 4, 8)


def test_decode_takes_more_warps_where_they_share_k_better():
    """gpt-oss (K = 2880) once there is enough to do; where a pass is saved, always."""

    def warps(rows: int, groups: int, n: int, kp: int) -> tuple[int, int, int]:
        config = planner.decode_config(rows, groups, n, kp, 132)
        assert config is not None
        return config.k_warps, config.row_warps, config.passes

    assert warps(4, 128, 5760, 2944) == (12, 1, 1)
    assert warps(128, 128, 5760, 2944) == (12, 2, 1)
    assert warps(1, 16, 8192, 5120) == warps(128, 16, 8192, 5120) == (20, 1, 1)
    assert warps(128, 128, 1536, 2048) == (8, 2, 1)


def recorded_times() -> dict[str, list[tuple[bool, float, float]]]:
    """The rows of benchmarks/h200_rows.py: by kind, whether decode is chosen now, its time and prefill's."""
    found: dict[str, list[tuple[bool, float, float]]] = {}
    kernels = {"16": "half", "bf16": "bf16", "8": "w4a8"}
    for row in json.loads(TIMES.read_text())["rows"]:
        groups, n, k, each, table = (row[name] for name in ("experts", "n", "k", "rows", "table"))
        shapes = [(n, k), (k, n // 2)] if table == "block" else [(n, k)]
        routing, rows = "dense" if table == "dense" else "offs", max(round(each * groups), 1)
        products = [planner.product(routing, groups, rows, n, -(-k // 128) * 128) for n, k in shapes]
        if table == "block":
            name = row["kind"]
            a_format, _, bf16 = name.partition(" ")
            decodes = planner.block_plan(*products, 1, a_format, 132, bf16=bool(bf16)).few
        else:
            name = kernels[row["kind"]]
            decodes = planner.plan(products[0], name, 132).family.name != "prefill"
        kind = f"dense {name}" if table == "dense" else name
        found.setdefault(kind, []).append((decodes, row["decode_us"], row["prefill_us"]))
    return found


def test_decode_or_prefill_as_recorded_times_say():
    found = recorded_times()
    assert len(found) == 10 and all(len(points) > 30 for points in found.values())
    for kind, points in found.items():
        loss = [(d if decodes else p) / min(d, p) - 1 for decodes, d, p in points]
        # Dense fp8 rows: six matrices that both read in nearly the same time.
        assert sum(loss) / len(loss) < (0.015 if kind == "dense w4a8" else 0.007) and max(loss) < 0.11, kind
        assert {decodes for decodes, *_ in points} == {True, False}, kind


def test_few_rows_leave_room_beside_them(functions, resources):
    """Two thread blocks of gemv share a multiprocessor; no barrier lies before the first weights."""
    for name, used in kernels(resources, "gemv_kernel").items():
        assert used["REG"] * 2 * 12 * 32 <= 65536, (name, used)
    for name, body in kernels(functions, "gemv_kernel").items():
        before = body[: re.search(r"LDG\.E\.NA\.128", body).start()]
        assert "BAR.SYNC" not in before, name


def test_gemv_runs_what_is_small():
    """Few bytes for each multiprocessor; a block also where n tiles go round evenly."""

    def product(rows: int, n: int, k: int) -> planner.Product:
        return planner.product("ids64", 128, rows, n, k)

    def alone(*size: int) -> bool:
        return planner.plan(product(*size), "half", 132).family.name == "gemv"

    def block(tokens: int, top_k: int, hidden: int, inter: int) -> bool:
        rows = tokens * top_k
        products = product(rows, 2 * inter, hidden), product(rows, hidden, inter)
        return planner.block_plan(*products, top_k, "none", 132).gemv

    assert alone(8, 2048, 768) and alone(1, 4096, 7168) and alone(1, 7168, 2048)
    assert not alone(8, 1536, 2048)  # decode has more under way
    assert not alone(16, 2048, 768)  # more than the columns of an operand
    assert block(1, 8, 2048, 768) and block(1, 1, 7168, 2048)
    assert not block(2, 8, 2048, 768) and not block(1, 2, 4096, 14336) and not block(1, 4, 2880, 2880)
    assert block(1, 4, 2048, 512) and not block(1, 4, 2880, 512)  # 180 n tiles for 132
    with planner.only("decode"):
        assert not alone(8, 2048, 768) and not block(1, 8, 2048, 768)
    with planner.only("gemv"):
        assert alone(8, 1536, 2048) and block(1, 4, 2880, 512) and not alone(16, 2048, 768)


@pytest.mark.parametrize(
    "rows, columns, n, k", [(8, 8, 7168, 2048), (1, 1, 4096, 14336), (8, 1, 28672, 4096)]
)
@pytest.mark.parametrize("combined", [False, True])
def test_gemv_configurations_fit(rows, columns, n, k, combined):
    config, most = planner.gemv_config(decode.Routing.OFFS, rows, columns, n, k, combined, 132), 12 * 32
    if config is None:
        assert rows * n * k > 132 * most * 16 * 256 / 1.2
        return
    assert config.shared_bytes <= MAX_SHARED and config.units <= most
    assert config.tiles * 132 >= rows * n / 16 and str(config).startswith("gemv: ")


def test_decode_can_be_taken_or_left():
    def decodes(rows: int = 16, groups: int = 8) -> bool:
        product = planner.product("offs", groups, rows, 4096, 4096)
        return planner.plan(product, "half", 132).family.name != "prefill"

    with planner.only("decode"):
        assert decodes(rows=400)
        assert not decodes(groups=1000), "more experts than it takes"
    with planner.only("prefill"):
        assert not decodes()
    assert decodes()
    assert not decodes(rows=400)


def test_where_rows_of_a_product_go():
    """Ids that decode does not sort itself are sorted for it, and gemv has none of them."""
    for rows, kernel in ((1, "gemv"), (300, "decode"), (40000, "prefill")):
        for routing in ("ids32", "ids64"):
            assert (
                planner.plan(planner.product(routing, 128, rows, 1536, 2048), "half", 132).family.name
                == kernel
            )
    with planner.only("gemv"):
        assert planner.plan(planner.product("ids64", 128, 4000, 64, 256), "half", 132).family.name == "decode"
    assert not planner.block_plan(
        *[planner.product("ids64", 8, 2, 128, 128)] * 2, 1, "auto", 132, prefill_alone=True
    ).few


def test_a_decision_is_kept_by_all_that_it_depends_on():
    """Each of these differs from the first in one number, and is decided anew."""
    base = {"routing": "ids64", "groups": 128, "rows": 8, "n": 2048, "kp": 768, "block": 16}
    others = [{"rows": 16}, {"n": 8192}, {"kp": 7168}, {"groups": 2000}, {"routing": "masked"}]
    first = planner.plan(planner.product(**base), "half", 132)
    assert first.family.name == "gemv"
    for change in others:
        made = planner.plan(planner.product(**(base | change)), "half", 132)
        assert (made.family.name, str(made.gemv)) != (first.family.name, str(first.gemv)), change
        assert planner.plan(planner.product(**base), "half", 132).family.name == "gemv"


@pytest.mark.parametrize("kernel", ["fp16", "fp16_b32"])
def test_kernels_of_other_gpus_have_no_candidates(kernel):
    assert prefill.candidates(kernel) == []
    assert prefill.choose(decode.Routing.OFFS, 8, 64, 1024, 1024, 132, kernel).candidate == -1
