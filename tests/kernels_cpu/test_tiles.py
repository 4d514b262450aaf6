"""The kernels for experts with many rows, on any processor with AVX-512.

The AMX kernels run here with emulated tiles (csrc/cpu/amx_tiles.h), which tests their packing and indexing.
On a processor with AMX, test_cpu_dispatch.py runs them unchanged. The kernels of vdpbf16ps run unchanged
here.

The build of the package with emulated tiles is in build/emulated_tiles. Its Python files are copies, and only
the files of _C.so that use tiles are compiled again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import reference
import torch
from places import ROOT

import fp4_ops  # noqa: F401  loads the operators

HERE = ROOT / "build/emulated_tiles"
BUILD = f"""
import sys; sys.path.insert(0, {str(ROOT / "release")!r})
from pathlib import Path
import variants
variants.build(Path({str(HERE)!r}), ["-O2", "-DFP4_EMULATED_TILES"], only=["kernels_amx_bf16.cpp"])
"""
pytestmark = pytest.mark.skipif(
    not torch.ops.fp4.cpu_capability().startswith(("avx512_bf16", "amx")), reason="needs AVX-512 with bf16"
)


@pytest.fixture(scope="module")
def emulated() -> dict[str, str]:
    """The environment of a process that has the kernels with emulated tiles, and no others."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    if not (ROOT / "build/csrc/cpu/gemm.o").exists():
        pytest.skip("the package was not built here: build/ has no objects")
    HERE.mkdir(parents=True, exist_ok=True)
    with open(HERE / "lock", "w") as lock:  # other workers of the same run
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([sys.executable, "-c", BUILD], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    env = processes.environment(FP4_CPU_CAPABILITY="amx_bf16", OMP_NUM_THREADS="1")
    return {**env, "PYTHONPATH": os.pathsep.join([str(HERE), env["PYTHONPATH"]])}


def run(env: dict[str, str], *arguments: str) -> str:
    child = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=HERE, timeout=600
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return child.stdout


def test_it_is_the_emulated_build(emulated):
    found = run(
        emulated, "-c", "import fp4_ops; from fp4_ops.runtime.libraries import library_path as p; print(p())"
    )
    assert Path(found.strip()).is_relative_to(HERE)


@pytest.mark.more
def test_every_kind_of_row_and_weight(emulated):
    """The cases of test_cpu_dispatch.py: experts with few rows, which take no tiles, beside others."""
    script = str(Path(__file__).with_name("test_cpu_dispatch.py"))
    found = json.loads(run(emulated, script, str(torch.randint(0, 2**31, ()).item())))
    assert found.pop("capability") == "amx_bf16"
    wrong = {case: outcome for case, outcome in found.items() if not (isinstance(outcome, int) and outcome)}
    assert not wrong, "\n".join(f"{case}:\n{outcome}" for case, outcome in wrong.items())


def test_sizes_and_scales(emulated):
    run(emulated, __file__, str(torch.randint(0, 2**31, ()).item()))


def test_sizes_and_scales_of_vdpbf16ps():
    HERE.mkdir(parents=True, exist_ok=True)
    env = processes.environment(FP4_CPU_CAPABILITY="avx512_bf16", OMP_NUM_THREADS="1")
    run(env, __file__, str(torch.randint(0, 2**31, ()).item()))


# --- in a process of those kernels ---


def check_sizes() -> None:
    """As many rows as tiles take from each kind and one less, blocks of 16 with a rest, more than share a
    panel; one panel, two, a rest; more K than sums stay in registers for."""
    counts = [5, 6, 7, 8, 16, 24, 25, 0, 31, 32, 49, 129, 1]
    offs = torch.tensor(counts).cumsum(0).int()
    m = sum(counts)
    ids = reference.m_indices(offs, m)
    for n, k in ((16, 32), (33, 64), (48, 544), (7, 98)):
        for format in reference.KERNEL_FORMATS:
            for kind in (torch.float32, torch.bfloat16, torch.int8):
                for layout in ("plain", "tile16"):
                    w = reference.random_weight(format, len(counts), n, k, layout=layout)
                    a = reference.random_activations(m, k, kind=kind)
                    want = reference.indexed_mm(a.exact, w.dense, ids)
                    got = torch.ops.fp4.grouped_mm(
                        a.data, *w.operands(), offs, a.scale, None, a.global_scale,
                        **w.options(), **a.options(), out_dtype=torch.float32,
                    )  # fmt: skip
                    reference.ProductBounds.of(a.exact, w.dense, ids).assert_close(got, want, torch.float32)


def check_scales_at_the_ends() -> None:
    """e8m0 scales that bfloat16 weights could not have: blocks of zeros (byte 0), 2^-126, 2^126. Of seven
    panels five have such, so one of them goes with a panel that has none."""
    packed, scale, _ = torch.ops.fp4.quantize(torch.randn(1, 112, 128), "mxfp4")
    scale = scale.view(torch.uint8).clone()
    for row, byte in ((0, 0), (17, 1), (34, 253), (79, 2), (50, 252)):
        scale[0, row] = byte
    packed[0, 0] = 0
    scale = scale.view(torch.float8_e8m0fnu)
    x = torch.randn(40, 128)
    dense = reference.dequantize(packed, scale, None, "mxfp4")[0]
    x[:, ::2] *= 2.0**-6  # so that no sum overflows
    for a in (x * 2.0**-8, (x * 2.0**-8).bfloat16()):
        got = torch.ops.fp4.mm(a, packed[0], scale[0], None, format="mxfp4", out_dtype=torch.float32).double()
        want = a.double() @ dense.T
        error = (got - want).norm(dim=0) / want.norm(dim=0).clamp(min=2.0**-126)
        assert error.max() < 1e-5, error


def check_not_finite() -> None:
    """A row with an infinity or a NaN is not finite, and no other row notices."""
    w = reference.random_weight("nvfp4", 1, 32, 64)
    x = torch.randn(40, 64)
    x[3, 7], x[5, 40] = torch.inf, torch.nan
    x[6, 0] = torch.tensor(0x7F800001, dtype=torch.int32).view(
        torch.float32
    )  # a NaN whose upper half is none
    x[8] = torch.finfo(torch.float32).max / 2**20
    packed, scale, factor = w.operands()
    bad = torch.tensor([i in (3, 5, 6) for i in range(40)])
    met = w.dense[0][:, [7, 40, 0]].T  # what the three meet
    for a in (x, x.bfloat16()):
        got = torch.ops.fp4.mm(a, packed[0], scale[0], factor[0], format="nvfp4", out_dtype=torch.float32)
        assert torch.equal(got[3][met[0] != 0].double(), (met[0] * torch.inf)[met[0] != 0])
        assert got[5][met[1] != 0].isnan().all() and got[6][met[2] != 0].isnan().all()
        want = a[~bad].double() @ w.dense[0].T
        assert ((got[~bad] - want).norm(dim=1) < 1e-5 * want.norm(dim=1)).all()


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[1]))
    check_sizes()
    check_scales_at_the_ends()
    check_not_finite()
