"""Builds the extension of fp4_ops against libtorch's stable ABI, and with nvcc the CUDA kernels.

The result is not a Python extension module. It contains only operators, does not depend on CPython, and loads
in every torch from 2.11 on. So one binary works with all Python versions, and the wheel is tagged
accordingly. The CUDA kernels do not use torch: nvcc makes two shared libraries of them, `_sm90.so` for Hopper
GPUs and `_sm80.so` for others. This takes minutes, so they are built only for the GPUs of this machine and
for those that FP4_CUDA_ARCHS names. A further library has the operators that launch them (csrc/cuda). It
needs neither nvcc nor CUDA's headers, and finds the kernels' libraries in its own folder. It is separate from
the first library, because it uses functions that only a libtorch for CUDA has.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import setuptools
from setuptools import find_packages, setup

try:
    if int(setuptools.__version__.partition(".")[0]) < 77:  # --no-build-isolation skips pip's check
        raise ImportError
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    sys.exit(
        f"fp4_ops is built with setuptools 77 or later, and this environment has {setuptools.__version__}. "
        "Run pip install 'setuptools>=77', then repeat the command."
    )

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths, library_paths
except ImportError:
    # torch is not a build requirement. pip would download gigabytes of CUDA to get the headers, and of
    # another torch than the one that will be used.
    sys.exit(
        "fp4_ops is built with the headers of the torch that it will run with, and this environment has no "
        "torch. Install torch 2.11 to 2.15 first, then repeat the command with --no-build-isolation."
    )

# The oldest torch whose stable ABI the sources use: (major << 56) | (minor << 48).
TORCH_TARGET = "0x020b000000000000"

AVX512 = [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512vnni",
    "-mfma",
    "-mf16c",
    "-mprefer-vector-width=512",
    *["-Wno-uninitialized", "-Wno-maybe-uninitialized"],  # gcc 12 warns about its own intrinsics
]

# A kernel file's instruction set is in its name; everything else is built for the baseline, and
# csrc/cpu/dispatch.cpp picks at run time. Nothing is built with -march=native.
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": AVX512,
    "avx512_bf16": [*AVX512, "-mavx512bf16"],
    "amx_bf16": AVX512,  # its tile instructions are written in assembly
    "neon": [],  # every aarch64 processor has it
    "neon_dotprod": ["-march=armv8.2-a+dotprod"],
    "neon_i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
    "neon_bf16": ["-march=armv8.2-a+bf16"],
}

# The platform of the build: this machine, or another one that release/wheels.py names.
PLATFORM = sysconfig.get_platform()
MACHINE = PLATFORM.rpartition("-")[2]
X86, ARM = MACHINE in ("x86_64", "amd64"), MACHINE == "aarch64"

if not PLATFORM.startswith("linux-"):
    sys.exit(
        f"fp4_ops: nothing is built for {PLATFORM}. It runs on Linux, on x86-64 and aarch64. Apple computers "
        "run it in a virtual machine or a container with Linux for aarch64, Windows in WSL 2."
    )


def isa_of(source: Path) -> str | None:
    """Returns the instruction set in a kernel file's name. None is the baseline of every machine."""
    return next((name for name in ISA_FLAGS if source.stem.endswith(f"_{name}")), None)


def is_built(isa: str | None) -> bool:
    return isa is None or (ARM if isa.startswith("neon") else X86)


def cpp_sources() -> list[str]:
    found = sorted([*Path("csrc").glob("*.cpp"), *Path("csrc/cpu").glob("*.cpp")])
    return [str(source) for source in found if is_built(isa_of(source))]


# The names that FP4_CUDA_ARCHS may contain, and nvcc's flag for each. Only SASS is built, because some
# drivers compile PTX of an older GPU incorrectly. wgmma and setmaxnreg exist only for sm_90a. Code for family
# 100f runs on 10.0 and 10.3, and code for 120f on 12.0 and 12.1. Code for 8.0 runs on all of 8.x.
CUDA_ARCHS = {
    "80": "-gencode=arch=compute_80,code=sm_80",
    "86": "-gencode=arch=compute_86,code=sm_86",
    "89": "-gencode=arch=compute_89,code=sm_89",
    "90a": "-gencode=arch=compute_90a,code=sm_90a",
    "100f": "-gencode=arch=compute_100f,code=sm_100f",
    "120f": "-gencode=arch=compute_120f,code=sm_120f",
}
OF_CAPABILITY = {(8, 0): "80", (8, 6): "86", (8, 7): "80", (8, 9): "89", (9, 0): "90a"}
OF_CAPABILITY |= {(10, 0): "100f", (10, 3): "100f", (12, 0): "120f", (12, 1): "120f"}


def cuda_archs(asked: str) -> list[str]:
    """Returns the keys of `CUDA_ARCHS` that a text names. Forms such as 8.6, sm_86, 90 or 12.1 are allowed,
    and "all"."""
    found, unknown = [], []
    capabilities = {f"{major}{minor}": arch for (major, minor), arch in OF_CAPABILITY.items()}
    for word in re.split(r"[\s,;]+", asked.strip()) if asked.strip() else []:
        name = word.lower().removeprefix("sm_").replace(".", "")
        if name == "all":
            found += CUDA_ARCHS
        elif name in CUDA_ARCHS:
            found.append(name)
        elif name.rstrip("af") in capabilities:
            found.append(capabilities[name.rstrip("af")])
        else:
            unknown.append(word)
    if unknown:
        sys.exit(
            f"fp4_ops: FP4_CUDA_ARCHS is {asked!r}, and nothing is built for {', '.join(unknown)}. It may "
            f"name some of {', '.join(CUDA_ARCHS)}, be 'all', or '' (none). Other GPUs need no build: Triton "
            "compiles their kernels when they run."
        )
    return [arch for arch in CUDA_ARCHS if arch in found]


def archs_asked() -> list[str] | None:
    """Returns the architectures that FP4_CUDA_ARCHS names, or None if it is not set."""
    asked = os.environ.get("FP4_CUDA_ARCHS")
    return None if asked is None else cuda_archs(asked)


def archs_here() -> list[str]:
    """Returns the architectures of this machine's GPUs."""
    if not torch.cuda.is_available():
        return []
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return [arch for capability, arch in OF_CAPABILITY.items() if capability in found]


# Without unique symbols. Otherwise all libraries that a process loads would share the static data of
# templates.
NVCC_FLAGS = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fno-gnu-unique"]

# Any GPU with NVLink can run these kernels. There is machine code for Hopper, and PTX for other GPUs.
NVLINK_FLAGS = [
    "-gencode=arch=compute_80,code=compute_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    *NVCC_FLAGS,
]


BUILD = Path(__file__).parent.resolve() / "build"  # has the generated headers


class KernelLibrary(NamedTuple):
    """A library of CUDA kernels: csrc/device and a folder of its own."""

    name: str
    archs: tuple[str, ...]
    """Architectures that the library may have code for."""
    includes: tuple[str, ...] = ()
    """Other headers that the sources include, as patterns in csrc."""

    @property
    def folders(self) -> tuple[Path, ...]:
        return Path("csrc/device"), Path("csrc", self.name)

    @property
    def sources(self) -> list[Path]:
        return sorted(source for folder in self.folders for source in folder.glob("*.cu"))

    @property
    def headers(self) -> list[Path]:
        found = [file for folder in self.folders for kind in ("*.cuh", "*.h") for file in folder.glob(kind)]
        found += [file for pattern in self.includes for file in Path("csrc").glob(pattern)]
        return [*found, Path("csrc/common/sm90_layout.h"), Path("build/fitted.h")]

    def flags(self, archs: Sequence[str]) -> list[str]:
        return [
            *(CUDA_ARCHS[arch] for arch in archs),
            f"-DFP4_FAMILY={self.name[2:]}",
            f"-I{BUILD}",
            *NVCC_FLAGS,
        ]


HOPPER = KernelLibrary("sm90", ("90a",))
MMA = KernelLibrary(
    "sm80",
    tuple(arch for arch in CUDA_ARCHS if arch != "90a"),
    ("sm100/*", "sm120/*", "sm90/ptx_sm90.cuh"),
)


OLDEST_NVCC, OLDEST_NVCC_OF_FAMILIES = (12, 8), (12, 9)  # the second knows 100f and 120f


def find_nvcc(archs: Sequence[str]) -> tuple[str | None, str]:
    """Returns an nvcc that can build the kernels, or None and the reason."""
    oldest = OLDEST_NVCC_OF_FAMILIES if any(arch.endswith("f") for arch in archs) else OLDEST_NVCC
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    nvcc = next((nvcc for nvcc in found if Path(nvcc).is_file()), shutil.which("nvcc"))
    if nvcc is None:
        return None, "no nvcc (set CUDA_HOME)"
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", text)
    if release is None or tuple(map(int, release.groups())) < oldest:
        version = release.group(0) if release else "of an unknown release"
        return None, f"{nvcc} is {version}, and {'.'.join(map(str, oldest))} is needed"
    return nvcc, ""


def is_newer(made: Path, *sources: Path) -> bool:
    return made.exists() and made.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def generated_headers() -> list[Path]:
    """Writes the headers that C++ shares with Python to build/. A file is written only if it changed."""
    root = Path(__file__).parent
    sys.path[:0] = [str(root / "fp4_ops"), str(root / "csrc")]  # to import meta.formats without fp4_ops
    from generate import constants, operator_checks, tables

    headers = {
        "cpu_constants.h": constants.cpu(),
        "fitted.h": constants.fitted(),
        "kernel_libraries.h": constants.kernel_libraries(),
        "operator_checks.h": operator_checks.operator_checks(),
        "tables.h": tables.tables(),
    }
    Path("build").mkdir(exist_ok=True)
    for name, text in headers.items():
        header = Path("build", name)
        if not header.exists() or header.read_text() != text:
            header.write_text(text)
    return [Path("build", name) for name in headers]


INCLUDE_DIRS = [str(BUILD.parent / "csrc"), str(BUILD)]
CXX_FLAGS = [
    "-O3",
    "-std=c++20",
    "-g0",  # overrides the flags of Python's own build
    "-Wall",
    "-Wno-unknown-pragmas",
    "-fvisibility=hidden",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
]


def compile_if_older(made: Path, sources: Sequence[Path], compile_to: Callable[[str], object]) -> None:
    """Makes the file under a temporary name first, so that an incomplete file is never used."""
    if not is_newer(made, *sources):
        part = made.with_suffix(f".part{made.suffix}")
        compile_to(str(part))
        part.replace(made)


def compile_all(
    command: Sequence[str], sources: Sequence[Path], headers: Sequence[Path], folder: Path
) -> list[str]:
    """Compiles sources in parallel and returns the objects. Without parallel compilation this would take
    minutes."""
    folder.mkdir(parents=True, exist_ok=True)
    objects = [folder / f"{source.stem}.o" for source in sources]

    def compile_one(source: Path, to: Path) -> None:
        of_source = [*command, "-c", str(source), "-o"]
        compile_if_older(to, [source, *headers], lambda part: subprocess.run([*of_source, part], check=True))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    return [str(o) for o in objects]


def runtime_headers() -> list[Path]:
    """Lists the headers that csrc/cuda includes."""
    rooms = Path("csrc/cuda"), Path("csrc/common"), Path("csrc/device"), Path("build")
    return [Path(__file__), *(header for room in rooms for header in room.glob("*.h"))]


def compiler() -> list[str]:
    """Returns the C++ compiler and its flags, for sources without an instruction set of their own."""
    includes = [f"-I{folder}" for folder in [*INCLUDE_DIRS, *include_paths()]]
    return [os.environ.get("CXX", "g++"), *CXX_FLAGS, *includes, "-fPIC"]


class Build(BuildExtension):
    """Adds the flags of `ISA_FLAGS` to the sources whose name ends in that instruction set, and runs nvcc.

    Objects stay in build/, because they take minutes. An editable build and a build of a wheel both find them
    there.
    """

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile
        headers = [header for room in ("common", "cpu") for header in Path("csrc", room).glob("*.h")]
        shared = [*headers, *generated_headers(), Path(__file__)]

        def compile_with_isa(obj, src, ext, cc_args, extra, pp_opts):
            isa = ISA_FLAGS.get(isa_of(Path(src)), [])
            compile_if_older(
                Path(obj),
                [Path(src), *shared],
                lambda part: compile_one(part, src, ext, cc_args, [*extra, *isa], pp_opts),
            )

        def compile_in_parallel(
            sources, output_dir=None, macros=None, include_dirs=None, debug=0, extra_preargs=None,
            extra_postargs=None, depends=None,
        ):  # fmt: skip
            """Compiles in the same way as distutils, but several sources at a time."""
            macros, objects, extra, pp_opts, build = self.compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            cc_args = self.compiler._get_cc_args(pp_opts, debug, extra_preargs)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = [
                    pool.submit(self.compiler._compile, to, *build[to], cc_args, extra, pp_opts)
                    for to in objects
                    if to in build
                ]
                for one in made:
                    one.result()
            return objects

        self.compiler._compile = compile_with_isa
        self.compiler.compile = compile_in_parallel
        self.build_temp = "build" if platform.machine() == MACHINE else f"build/{MACHINE}"
        super().build_extensions()
        in_place = self.inplace or getattr(self, "editable_mode", False)
        folder = (Path() if in_place else Path(self.build_lib)) / "fp4_ops"
        for library in (HOPPER, MMA):
            self._build_kernels(library, folder)
        built = any((folder / f"_{library.name}.so").exists() for library in (HOPPER, MMA))
        self._build_runtime(folder / "_C_cuda.so", wanted=built)
        self._build_nvlink(folder / "_nvlink.so", wanted=built)
        if not in_place and platform.machine() == MACHINE:
            self._copy_into_sources(folder)

    def _copy_into_sources(self, built: Path) -> None:
        """Put the libraries beside the sources, too.

        Python started in the clone imports fp4_ops/ from there, not from site-packages. `pip install .`
        and then `python -m fp4_ops info` in the clone must find the libraries in both places.
        """
        sources = Path("fp4_ops")
        for library in sources.glob("*.so"):
            if not (built / library.name).exists():
                library.unlink()
        for library in built.glob("*.so"):
            target = sources / library.name
            compile_if_older(target, [library], partial(shutil.copyfile, library))

    def _build_runtime(self, target: Path, wanted: bool) -> None:
        """Builds the operators of csrc/cuda, if the kernels that they launch are built."""
        if not wanted:
            target.unlink(missing_ok=True)
            return
        sources = [*sorted(Path("csrc/cuda").glob("*.cpp")), Path("csrc/glibc.cpp")]
        headers = runtime_headers()
        if is_newer(target, *sources, *headers):
            return
        objects = compile_all(compiler(), sources, headers, Path("build/cuda"))
        # With a CUDA build of torch, libtorch_cuda is found through libtorch. A CPU build has no
        # libtorch_cuda, and can also load this library.
        libraries = [*(f"-L{folder}" for folder in library_paths()), "-Wl,--no-as-needed", "-ltorch"]
        libraries += ["-ltorch_cpu", "-lc10", "-ldl"]
        subprocess.run([compiler()[0], "-shared", *objects, *libraries, "-o", str(target)], check=True)

    def _build_nvlink(self, target: Path, wanted: bool) -> None:
        """Builds the exchange between GPUs of csrc/nvlink, if kernels for these GPUs are built."""
        if not wanted:
            target.unlink(missing_ok=True)
            return
        folder = Path("csrc/nvlink")
        sources = sorted(folder.glob("*.cu"))
        headers = [*folder.glob("*.cuh"), *folder.glob("*.h"), Path(__file__)]
        if is_newer(target, *sources, *headers):
            return
        nvcc, why = find_nvcc([])
        if nvcc is None:
            target.unlink(missing_ok=True)
            print(f"fp4_ops: {why}, so torch.distributed carries the exchange between GPUs")
            return
        command = [nvcc, *NVLINK_FLAGS]
        objects = compile_all(command, sources, headers, Path("build/nvlink"))
        subprocess.run([*command, "-shared", *objects, "-o", str(target)], check=True)

    def _build_kernels(self, library: KernelLibrary, folder: Path) -> None:
        target, made = folder / f"_{library.name}.so", Path("build", library.name)
        asked, cross, record = archs_asked(), platform.machine() != MACHINE, made / "archs"
        # A library that was built before is kept up to date, because newer Python code must not call older
        # kernels.
        before = record.read_text().split() if record.exists() and target.exists() else []
        if target.exists() and not before:
            before = list(library.archs)
        wanted = [*before, *archs_here()] if asked is None else asked
        archs = [] if cross else [arch for arch in library.archs if arch in wanted]
        if archs and archs == before and is_newer(target, *library.sources, *library.headers):
            return
        nvcc, why = find_nvcc(archs)
        if not archs or nvcc is None:
            target.unlink(missing_ok=True)
            if archs and asked:
                sys.exit(f"fp4_ops: FP4_CUDA_ARCHS asks for CUDA kernels, but {why}")
            if cross:
                why = f"this is a cross build for {MACHINE}"
            elif not archs:
                names = ", ".join(library.archs)
                why = f"this machine has no GPU of {names}, and FP4_CUDA_ARCHS names none of these"
            print(f"fp4_ops: {why}, so {target.name} is not built. Other GPUs do not need it")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [nvcc, *library.flags(archs)]
        headers = [*library.headers, Path(__file__)]
        objects = compile_all(command, library.sources, headers, made / "_".join(archs))
        subprocess.run([*command, "-shared", *objects, "-o", str(target)], check=True)
        record.write_text(" ".join(archs))


DEVELOPMENT = "fp4_ops.dev"
"""A package for tests, benchmarks and tools. Its module works with one version of Python
(release/dev_module.py)."""


class AnyPythonWheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    # fp4_ops/meta and fp4_ops/compile_passes are links, which find_packages follows.
    packages=find_packages(include=["fp4_ops", "fp4_ops.*"], exclude=[DEVELOPMENT]),
    package_data={"": ["constants.json", "kernels.json"]},
    ext_modules=[
        CppExtension(
            "fp4_ops._C",
            cpp_sources(),
            include_dirs=INCLUDE_DIRS,
            extra_compile_args=CXX_FLAGS,
            py_limited_api=True,
        )
    ],
    cmdclass={
        "build_ext": Build.with_options(use_ninja=False, no_python_abi_suffix=True),
        "bdist_wheel": AnyPythonWheel,
    },
)
