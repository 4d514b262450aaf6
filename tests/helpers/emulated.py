"""A Hopper GPU without one: `pytest --emulate tests/kernels_cuda/test_sm90_gpu.py`.

The host's compiler compiles the sources of csrc/device and csrc/sm90. sm90_emulator/ replaces the
instructions that only a GPU has. The tests' tensors stay on the CPU. docs/kernels.md says what such tests
show. The operators of csrc/cuda are compiled without changes, but register as `fp4_emulated::*` for tensors
on the CPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from places import HELPERS, ROOT
from torch.overrides import TorchFunctionMode

from fp4_ops.backends import operators
from fp4_ops.backends.launchers import library
from fp4_ops.meta.fakes import OPERATORS
from fp4_ops.meta.layouts import LAYOUTS
from fp4_ops.runtime import native

EMULATOR = HELPERS / "sm90_emulator"
FOLDERS = {
    "sm90": ("common", "device", "sm90"),
    "sm80": ("common", "device", "sm80", "sm90", "sm100", "sm120"),
}
FOLDERS["sm100"] = FOLDERS["sm80"]
"""Folders of csrc with the kernels of each library. "sm100" is the part of "sm80" with csrc/sm100."""
SOURCES = {
    "sm90": ["*/*.cu"],
    "sm80": ["device/*.cu", "sm80/*.cu"],
    "sm100": ["device/device.cu", "sm80/products_sm100.cu"],
}
MULTIPROCESSORS = 14
WARNINGS = ["-Wall", "-Wno-unknown-pragmas", "-Wno-sign-compare", "-Wno-psabi"]
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-U_FORTIFY_SOURCE", *WARNINGS]  # _FORTIFY_SOURCE would check longjmp


def cuda_headers() -> Path | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        homes.append(str(Path(nvcc).resolve().parent.parent))
    found = (Path(home) / "include" for home in homes if home)
    return next((folder for folder in found if (folder / "cuda_fp8.h").is_file()), None)


def kernels(name: str = "sm90") -> Path:
    """The kernels and the emulator as one library, with the C interface of the kernels."""
    target = ROOT / f"build/{name}_emulated.so"
    assert cuda_headers() is not None
    folders = *(ROOT / "csrc" / folder for folder in FOLDERS[name]), EMULATOR
    files = [*(file for folder in folders for file in folder.iterdir()), ROOT / "build/fitted.h"]
    newest = max(file.stat().st_mtime for file in files)
    with alone(target):
        if target.exists() and target.stat().st_mtime > newest:
            return target
        with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: compile_one(name, source), copy_sources(name, Path(made))))
            put(link(objects, Path(made, "all.so")), target)
    return target


@contextlib.contextmanager
def alone(target: Path) -> Iterator[None]:
    """Lets one process make a file at a time. Another worker of the same run would compile it, too."""
    target.parent.mkdir(exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def copy_sources(name: str, to: Path) -> list[Path]:
    """Copy the folders of a library, with the emulator's instructions. Return all that is compiled."""
    for folder in FOLDERS[name]:
        shutil.copytree(ROOT / "csrc" / folder, to / folder)
    # A source includes headers from its own folder first, so the emulator's instructions are put there.
    shutil.copy(EMULATOR / "ptx.cuh", to / "device")
    for folder in FOLDERS[name][2:]:
        shutil.copy(EMULATOR / f"ptx_{folder}.cuh", to / folder)
    shutil.copytree(EMULATOR, to / "emulator")
    found = [file for pattern in SOURCES[name] for file in to.glob(pattern)]
    return [*found, *(to / "emulator").glob("*.cpp")]


def compiler() -> list[str]:
    return [os.environ.get("CXX", "g++"), *FLAGS]


def compile_one(name: str, source: Path) -> Path:
    """Compile one of the sources that `copy_sources` found."""
    to = source.with_suffix(".o")
    includes = [f"-I{cuda_headers()}", f"-I{EMULATOR}", f"-I{ROOT / 'build'}"]
    device = ["-include", str(EMULATOR / "device.h")] if source.suffix == ".cu" else ["-O3"]
    options = [f"-DFP4_FAMILY={name[2:]}", *includes, *device, "-x", "c++"]
    subprocess.run([*compiler(), *options, "-c", str(source), "-o", str(to)], check=True)
    return to


def link(objects: list[Path], to: Path) -> Path:
    subprocess.run([*compiler(), "-shared", *map(str, objects), "-o", str(to), "-lpthread"], check=True)
    return to


def put(made: Path, target: Path) -> None:
    """Replace the target in one step, because another process may be loading it."""
    whole = target.with_suffix(f".{os.getpid()}")
    shutil.move(made, whole)
    whole.replace(target)


def runtime() -> Path:
    """The operators of csrc/cuda over the emulated kernels, as a library like `_C_cuda.so`."""
    target = ROOT / "build/sm90_runtime_emulated.so"
    sources = sorted((ROOT / "csrc/cuda").glob("*.cpp"))
    shared = [file for room in ("cuda", "common", "device") for file in ROOT.glob(f"csrc/{room}/*.h")]
    newest = max(file.stat().st_mtime for file in [*sources, *shared, *(ROOT / "build").glob("*.h")])
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    flags = [
        *("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-fvisibility=hidden"),
        *(f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'build'}", f"-I{include}"),
        *(f"-I{include / 'torch/csrc/api/include'}", "-DTORCH_TARGET_VERSION=0x020b000000000000"),
        "-DFP4_EMULATED",
    ]
    compiler = os.environ.get("CXX", "g++")
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]

    def compile_to(folder: str, source: Path) -> str:
        to = f"{folder}/{source.stem}.o"
        subprocess.run([compiler, *flags, "-c", str(source), "-o", to], check=True)
        return to

    with alone(target):
        if target.exists() and target.stat().st_mtime > newest:
            return target
        with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: compile_to(made, source), sources))
            subprocess.run([compiler, "-shared", *objects, *libraries, "-o", f"{made}/all.so"], check=True)
            put(Path(made, "all.so"), target)
    return target


LIBRARIES: list[torch.library.Library] = []
"""Libraries that `pretend` registers. An operator exists as long as its library."""


def register_operators() -> None:
    """`fp4_emulated`, whose kernels the runtime brings, and `fp4_python`, which it calls, on the CPU."""
    names = torch.library.Library("fp4_emulated", "DEF"), torch.library.Library("fp4_python", "FRAGMENT")
    LIBRARIES.extend(names)
    for name in OPERATORS:
        schema = str(getattr(torch.ops.fp4, name).default._schema).removeprefix("fp4::")
        names[0].define(schema)
        names[1].impl(name, without_triton(name), "CPU")


def without_triton(name: str) -> Any:
    """Return Hopper's operator for its layouts, and the CPU's operator for others."""

    def run(*args: Any, **kwargs: Any) -> Any:
        words = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        layout = next((word for word in words if word in LAYOUTS and LAYOUTS[word].native), None)
        found = getattr(torch.ops.fp4, name) if layout is None else operators.implementation(name, layout, 0)
        # Among these operators, only grouped_mm_k calls an operator that the emulated GPU runs.
        with OnCpu() if name == "grouped_mm_k" else contextlib.nullcontext():
            return found(*args, **kwargs)

    return operators.reported(run)


def seed(value: int) -> None:
    """Set the seed that decides the order of the emulated threads."""
    loaded = library.library()
    assert loaded is not None
    loaded.emulator_seed(value % 2**32)


OF_A_STEP = ("attention", "cached_attention", "linears", "router", "top_experts", "update_cache")


def on_gpu(value: Any) -> bool:
    """Return whether an argument names a GPU, as in `x.to("cuda")` and `torch.empty(3, device="cuda:0")`."""
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")


class OnCpu(TorchFunctionMode):
    """Keep tensors for the GPU on the CPU. Operators on Hopper's layouts and of a step run what GPUs run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple("cpu" if on_gpu(value) else value for value in args)
        kwargs = {name: "cpu" if on_gpu(value) else value for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        words = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        native_layout = any(word in LAYOUTS and LAYOUTS[word].native for word in words)
        if str(func).startswith("fp4.") and (native_layout or func.__name__ in OF_A_STEP):
            return getattr(torch.ops.fp4_emulated, func.__name__)(*args, **kwargs)
        return func(*args, **kwargs)


def pretend() -> None:
    """Make torch report a Hopper GPU from now on."""
    library.FILE = str(kernels())  # replaces the path in the package's folder
    library.library.cache_clear()
    loaded = library.library()
    assert loaded is not None
    loaded.emulator_device(90, MULTIPROCESSORS, 227 * 1024)
    register_operators()
    native.FILE = str(runtime())
    native.library.cache_clear()
    native.loaded().fp4_cuda_has_fallbacks(True)
    with contextlib.suppress(ImportError):  # the module of `make dev` has its own planner
        from fp4_ops.dev import planner

        planner.use_kernels(library.FILE, 0)
    of_index = native.family
    native.family = lambda index: of_index(index or 0)  # tensors on the CPU have no index
    native.family.cache_clear = of_index.cache_clear
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=None)
    cuda.current_device = lambda: 0
    cuda.manual_seed_all = cuda.synchronize = lambda *_: None
