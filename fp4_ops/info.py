"""Defines `fp4_ops.info()`: what was built, what this machine has, and which kernels will run."""

from __future__ import annotations

import platform
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from .backends import available, multiplies_fp4
from .meta.formats import FORMATS, FP4_FORMATS
from .meta.layouts import preferred_layout
from .meta.text import in_short
from .runtime import fitted, native, tuned
from .runtime.libraries import library_path, version_of

_COMPILED = "tests compile its kernels and check what they need; nobody has run them"
TESTED = {"9.0": "tests run its kernels"} | dict.fromkeys(
    ("8.0", "8.6", "8.9", "10.0", "12.0", "12.1"), _COMPILED
)
"""How kernels are tested, by compute capability (test_architectures.py, and tests marked `gpu`)."""
_FAILED = "not used: its first use on this GPU differs from the dequantised product"
_FP4_ROWS = "FP4 rows on FP4 tensor cores"
_BY_CUDA = "by CUDA kernels: compiled and emulated, not run by us"


@dataclass(frozen=True)
class Gpu:
    name: str
    compute_capability: str
    """Compute capability as text, such as "9.0"."""

    @property
    def tested(self) -> str:
        """Says how the kernels for GPUs of this kind are tested."""
        return TESTED.get(self.compute_capability, "tests neither run nor compile its kernels")

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.compute_capability}; {self.tested})"


@dataclass(frozen=True)
class Kernels:
    """Kernels that run on one kind of device."""

    device: str
    family: str
    """Name of the kernels.

    x86: "scalar", "avx2", "avx512", "avx512_bf16" or "amx_bf16". Arm: "neon", "neon_dotprod", "neon_i8mm" or
    "neon_bf16" (i8mm and bf16). GPU: the backends' names. If none runs: "none" with the reason.
    """
    activations: str
    """Activations that the operators take."""
    preferred_layout: str

    def __str__(self) -> str:
        return f"{self.device}: {self.family}; activations {self.activations}; layout {self.preferred_layout}"


@dataclass(frozen=True)
class Info:
    """Versions, build, machine and kernels. `print` shows it as text."""

    fp4_ops: str
    torch: str
    python: str
    triton: str
    library: str
    """Path of the compiled operators, and the oldest torch whose stable ABI they use."""
    formats: tuple[str, ...]
    operators: tuple[str, ...]
    cpu: str
    cpu_features: tuple[str, ...]
    """Features of this processor that fp4_ops has kernels for."""
    gpus: tuple[Gpu, ...]
    kernels: tuple[Kernels, ...]
    constants: tuple[str, ...]
    """Origin of the constants that choose a GPU's kernels, one line for each GPU."""

    def __str__(self) -> str:
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            label = field.name.replace("_", " ") if field.name != "fp4_ops" else field.name
            if field.name in ("gpus", "kernels", "constants"):
                items = [str(v) for v in value] or ["none"]
            else:
                items = [", ".join(value) or "none" if isinstance(value, tuple) else value]
            for i, item in enumerate(items):
                lines.append(f"{label if i == 0 else '':<14}{item}")
        return "\n".join(lines)


def info() -> Info:
    """Returns everything that decides which kernels run on this machine. `print` shows it as text."""
    return Info(
        fp4_ops=version_of("fp4_ops"),
        torch=torch.__version__,
        python=platform.python_version(),
        triton=version_of("triton"),
        library=f"{_library()} (stable ABI of torch 2.11 and later)",
        formats=tuple(FORMATS),
        operators=_operators(),
        cpu=_cpu_name(),
        cpu_features=_cpu_features(),
        gpus=_gpus(),
        kernels=(_cpu_kernels(), *_gpu_kernels()),
        constants=_constants(),
    )


def _library() -> str:
    path = library_path()
    return str(path) if path else "not built"


def _operators() -> tuple[str, ...]:
    from .meta.fakes import OPERATORS

    return tuple(OPERATORS)


def _cpu_name() -> str:
    threads, used = torch.get_num_threads(), torch.ops.fp4.cpu_threads()
    words = f"{threads} threads"
    if used < threads:
        words += f", of which {used} work: the affinity or the container's quota gives no more processors"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {words}"
    except OSError:
        pass
    return f"{platform.machine()}, {words}"


def _cpu_features() -> tuple[str, ...]:
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    x86 = ("avx2", "avx512_f", "avx512_vl", "avx512_vnni", "avx512_bf16", "amx_bf16")
    wanted = ("neon", "dot", "i8mm", "bf16") if platform.machine() == "aarch64" else x86
    return tuple(name for name in wanted if capabilities.get(name))


def _cpu_kernels() -> Kernels:
    try:
        family = torch.ops.fp4.cpu_capability()
    except RuntimeError as error:  # FP4_CPU_CAPABILITY asks for what this machine lacks
        family = f"none: {in_short(error)}"
    return Kernels("cpu", family, "float32, bfloat16, float16, int8, fp8, FP4", preferred_layout("cpu"))


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found.append(Gpu(properties.name, f"{properties.major}.{properties.minor}"))
    return tuple(found)


def _gpu_kernels() -> tuple[Kernels, ...]:
    if not torch.cuda.is_available():
        return ()
    device = torch.cuda.current_device()
    names = [b.name if b.trusted(device) else f"{b.name} ({_FAILED})" for b in available("cuda", device)]
    family = ", ".join(names) or "none: Triton is not installed, and no native kernels for this GPU are built"
    layout = preferred_layout("cuda", dtype=torch.bfloat16)
    if any(multiplies_fp4(name, name) for name in FP4_FORMATS):
        family += f" ({_fp4_rows(device)})"
    return (Kernels("cuda", family, "float32, bfloat16, float16, fp8, FP4", layout),)


def _fp4_rows(device: int) -> str:
    """Says which kernels multiply FP4 rows on FP4 tensor cores, by format if the formats differ, and if fp8
    rows have such kernels."""
    from .backends.triton.scaled import native

    found = {
        name: _BY_CUDA if native.runs(name, device) else "by Triton"
        for name in FP4_FORMATS
        if multiplies_fp4(name, name)
    }
    if native.launcher(device) is None:
        return _FP4_ROWS
    kinds = dict.fromkeys(found.values())
    words = [next(iter(kinds))] if len(kinds) == 1 else [f"{name} {by}" for name, by in found.items()]
    if native.runs("fp8", device):
        words.append(f"fp8 rows by {native.weights_of('fp8')} weights {_BY_CUDA}")
    return f"{_FP4_ROWS}, " + "; ".join(words)


def _constants() -> tuple[str, ...]:
    found = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if family := native.family(i):
            found.append(f"cuda:{i}: {constants_of(torch.cuda.get_device_name(i), family)}")
    return tuple(found) or ("none in use: no GPU here runs native kernels",)


def constants_of(device: str, family: int) -> str:
    """Says where the constants for a family of kernels on GPUs of this name come from."""
    if used := tuned.in_use.get((device, family)):
        return f"measured here ({used[0].date}), {used[1]}"
    group = fitted.groups(native.FOLDERS[family])["planner"]
    return f"built in ({group.device}, commit {group.commit}, {group.date}); fp4_ops tune measures this GPU's"
