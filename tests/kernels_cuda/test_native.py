"""The native CUDA runtime loads without a GPU, and the results of its planner do not need one."""

from __future__ import annotations

import ctypes
import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
from development import development
from places import ROOT

from fp4_ops.backends import operators
from fp4_ops.backends.launchers import library
from fp4_ops.distributed import nvlink
from fp4_ops.distributed.local import Local
from fp4_ops.meta.fakes import OPERATORS
from fp4_ops.meta.formats import FORMATS
from fp4_ops.meta.layouts import LAYOUTS
from fp4_ops.meta.operand_checks import Experts, Weight
from fp4_ops.runtime import native

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="needs the native runtime (build with FP4_CUDA_ARCHS=90a)"
)


def test_it_registers_every_operator_for_cuda():
    code = f"import torch, ctypes\ntorch.ops.load_library({str(native.path().parent / '_C.so')!r})\n"
    code += f"torch.ops.load_library({str(native.path())!r})\n"
    code += "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
    code += f"print([n for n in {OPERATORS!r} if not has('fp4::' + n, 'CUDA')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([n for n in OPERATORS if n in operators.ON_EVERY_DEVICE])


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("name", ["_sm90.so", "_sm80.so", "_nvlink.so"])
def test_libraries_of_kernels_share_nothing(name):
    """A unique symbol of a template is one for all libraries of a process, whatever `dlopen` was asked."""
    file = native.path().parent / name
    if not file.exists():
        pytest.skip(f"{name} is not built")
    done = subprocess.run(["nm", "-D", str(file)], capture_output=True, text=True, check=True)
    assert "fp4_" in done.stdout
    assert not re.findall(r" u .*fp4.*", done.stdout)


@pytest.mark.parametrize("family, name", [(native.HOPPER, "_sm90.so"), (native.MMA, "_sm80.so")])
def test_kernels_that_are_built_are_found(family, name):
    """Without them Python's part of the backend would take itself for missing."""
    if not (native.path().parent / name).exists():
        pytest.skip(f"{name} is not built")
    assert library.library(family) is not None


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_it_needs_neither_python_nor_a_libtorch_for_cuda():
    names = subprocess.run(
        ["nm", "-D", str(native.path())], capture_output=True, text=True, check=True
    ).stdout
    words = [line.split() for line in names.splitlines()]
    undefined = {w[-1].split("@")[0]: w[-2] for w in words if len(w) == 2}
    assert not [name for name in undefined if name.startswith(("Py", "_Py", "cuda", "cu"))]
    assert undefined["aoti_torch_get_current_cuda_stream"] == "w"
    assert undefined["torch_exception_get_what_without_backtrace"] == "w"  # of torch 2.13
    needed = subprocess.run(["readelf", "-d", str(native.path())], capture_output=True, text=True).stdout
    assert "libpython" not in needed and "libcuda" not in needed


def test_names_and_structs_are_those_of_c():
    planner = development("planner")
    assert tuple(planner.Kernel.__members__) == native.KERNELS
    assert tuple(name.lower() for name in planner.Routing.__members__) == native.ROUTINGS
    assert ctypes.sizeof(native.Product()) == 24 and ctypes.sizeof(native.Gpu()) == 20


def test_a_plan_tells_its_configuration():
    planner = development("planner")
    plan = planner.plan(planner.product("ids64", 128, 8, 2048, 768), "half", 132)
    assert plan.family.name == "gemv" and plan.gemv.columns == 8 and plan.gemv.slices == 3


def test_models_are_infinite_where_a_kernel_cannot_run():
    planner = development("planner")
    assert math.isinf(planner.decode_us(planner.product("offs", 700, 8, 2048, 768), "half", 132))
    assert 3 < planner.prefill_us(planner.product("dense", 1, 8, 2048, 768), "bf16", 132) < 30


def test_the_kernel_of_a_warm_call_is_found_in_no_time():
    """A plan of a size that was met is looked up: the model runs once."""
    planner = development("planner")
    product = planner.product("offs", 128, 37 * 128, 1536, 2048)
    first = planner.plan(product, "half", 132)
    for _ in range(3):
        assert planner.plan(product, "half", 132) == first


def test_auto_of_experts_on_several_ranks_is_the_planners(monkeypatch):
    """Decided for all experts and all rows, as one rank with all of them would."""
    planner = development("planner")
    monkeypatch.setattr("fp4_ops.backends.launchers.library.multiprocessors", lambda index: 132)
    of = {"groups": 16, "format": FORMATS["nvfp4"], "layout": LAYOUTS["sm90"], "scale_dtype": torch.uint8}
    experts = Experts(Weight(n=1536, k=2048, **of), Weight(n=2048, k=768, **of))

    def chosen(pairs: int) -> str:
        return Local(experts, 128, range(16), (), {}, "auto").chosen(pairs, torch.device("cuda:0"))

    for pairs in (8, 64, 512, 4096, 32768):
        up, down = (planner.product("offs", 128, pairs, *s) for s in ((1536, 2048), (2048, 768)))
        assert chosen(pairs) == ("none" if planner.block_plan(up, down, 1, "auto", 132).few else "fp8")
    assert chosen(8) == "none" and chosen(32768) == "fp8"


def takes_few() -> bool:
    return native.takes_few(128, 300, 16, (1536, 2048), (2048, 768), "none", 132)


def test_only_ends_with_its_block():
    assert takes_few()
    with native.only("prefill"):
        assert not takes_few()
        with native.only("decode"):
            assert takes_few()
        assert not takes_few()
    assert takes_few()


@pytest.mark.parametrize("int4", [False, True])
def test_the_runtime_decides_as_the_planner_of_tests(int4):
    planner, rng = development("planner"), random.Random(torch.initial_seed())
    for _ in range(200):
        groups, rows, sms = (rng.choice(of) for of in ((1, 8, 128), (1, 9, 300, 40000), (14, 132)))
        sizes = [(64 * rng.randint(1, 80), 128 * rng.randint(1, 56)) for _ in range(2)]
        a_format, block = rng.choice(("auto", "fp8", "none", "nvfp4")), rng.choice((16, 32))
        products = [planner.product("offs", groups, rows, *size, block) for size in sizes]
        want = planner.block_plan(*products, 1, a_format, sms, prefill_alone=int4).few
        assert native.takes_few(groups, rows, block, *sizes, a_format, sms, prefill_alone=int4) == want


def test_a_missing_runtime_says_how_to_build_it(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(RuntimeError, match="FP4_CUDA_ARCHS=90a"):
        takes_few()


def test_kernels_of_no_build_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"kernels do not load: .*none\.so.* FP4_CUDA_ARCHS"):
        native.use_kernels(str(tmp_path / "none.so"))
    assert takes_few()


NAMES = re.findall(r'find\(k\.\w+, "(fp4_kernel_\w+)"', (ROOT / "csrc/cuda/library.cpp").read_text())
ONLY = {
    90: ["linears", "attention", "cached_attention", "top_experts", "router", "update_cache"],
    80: ["prefill_most_shared"],
}
"""What only kernels of one family have."""


def kernels_without(lacking: str, family: int, folder: Path) -> str:
    """Makes a library of kernels that do nothing, and lacks one."""
    others = {f"fp4_kernel_{name}" for f in ONLY if f != family for name in ONLY[f]} | {lacking}
    names = [name for name in NAMES if name not in others and name != "fp4_kernel_family"]
    text = "".join(f"int {name}() {{ return 1; }}\n" for name in names)
    source, made = folder / f"{lacking}.c", folder / f"{lacking}_{family}.so"
    source.write_text(f"{text}int fp4_kernel_family() {{ return {family}; }}\n")
    subprocess.run([os.environ.get("CC", "gcc"), "-shared", "-fPIC", source, "-o", made], check=True)
    return str(made)


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "gcc")) is None, reason="needs a C compiler")
@pytest.mark.parametrize("family", ONLY)
def test_kernels_of_an_older_build_are_refused(family, tmp_path):
    """A function that they lack was a null pointer, which the first call of its operator called."""
    assert {f"fp4_kernel_{name}" for names in ONLY.values() for name in names} < set(NAMES)
    for name in ["place", *ONLY[family]]:
        made = kernels_without(f"fp4_kernel_{name}", family, tmp_path)
        with pytest.raises(RuntimeError, match=rf"{made} has no fp4_kernel_{name};.* Rebuild both: pip"):
            native.use_kernels(made)
    assert takes_few()


def test_pythons_part_refuses_libraries_of_another_build(monkeypatch, tmp_path):
    source, made = tmp_path / "none.c", tmp_path / "none.so"
    source.write_text("int nothing;\n")
    subprocess.run([os.environ.get("CC", "gcc"), "-shared", "-fPIC", source, "-o", made], check=True)
    monkeypatch.setattr(library, "FILE", str(made))
    monkeypatch.setattr(native, "used", {})
    monkeypatch.setattr(nvlink, "FILE", str(made))
    for load, name in (
        (library.library.__wrapped__, "fp4_kernel_decode"),
        (nvlink.library.__wrapped__, "fp4_nvlink_gather"),
    ):
        with pytest.raises(ImportError, match=rf"{made} has no {name}: .*different builds\. Rebuild both"):
            load()


THROWS = {
    "no kernels of a family": (
        'native.work(native.product("dense", 1, 64, 256, 256), "bf16", native.Gpu(70, 80, 98304, 0))',
        r"kernels do not load: .*_sm70\.so.* FP4_CUDA_ARCHS",
    ),
    "no such a_format": ('native.takes_few(8, 64, 16, (256, 256), (256, 256), "int7", 132)', "int7"),
    "no such GPU": ("native.gpu(99)", "cuda:99|do not load"),
    "no such file": ('native.use_kernels("nowhere.so")', r"do not load: .*nowhere\.so"),
}


@pytest.mark.parametrize("what", THROWS)
def test_what_the_runtime_throws_is_raised_here(what):
    """In a process of its own: it ended by SIGABRT where a C++ exception left through ctypes."""
    call, words = THROWS[what]
    code = f"""
from fp4_ops.runtime import native
try:
    {call}
except RuntimeError as error:
    print(error)
assert not native.takes_few(128, 10**6, 16, (1536, 2048), (2048, 768), "none", 132)
"""
    env = processes.environment()
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(words, done.stdout), done.stdout


def test_no_exception_can_leave_a_function_for_python():
    """The next one that somebody writes, too."""
    text = (ROOT / "csrc/cuda/planner.cpp").read_text()
    functions = re.findall(r"^FP4_FOR_PYTHON .*?(?:^}|}$)", text, re.M | re.S)
    names = [re.search(r"fp4_cuda_\w+", f).group() for f in functions]
    without = {"fp4_cuda_thrown", "fp4_cuda_only"}  # a number or a pointer is all that they touch
    assert len(names) > 8 and {n for n, f in zip(names, functions) if "caught(" not in f} == without


def test_an_operator_without_a_gpu_is_torchs_error():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ops.fp4.quantize_int8(torch.randn(2, 32, device="cuda"))
