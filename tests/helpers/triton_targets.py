"""Simulates GPUs for Triton that this machine does not have. Kernels are compiled for them, and Triton checks
their launches (shared memory, tensor memory), but they never run. Operators return uninitialised memory.

    with gpu(86) as compiled:
        register.grouped_mm(...)   # on CPU tensors
    compiled.launched              # the kernels that would have run
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime import driver

from fp4_ops.backends.triton import gemm, launch, tiles
from fp4_ops.backends.triton.scaled.kernel import scaled_kernel
from fp4_ops.backends.triton.tiles import Device, Tile

BLOCK_MEMORY = {
    **{80: 166912, 86: 101376, 89: 101376},
    **{90: 232448, 100: 232448, 103: 232448},
    **{120: 101376, 121: 101376},
}
"""Bytes of shared memory that a thread block may use."""
MULTIPROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 103: 160, 120: 170, 121: 48}
ARCHITECTURES = tuple(a for a in BLOCK_MEMORY if a != 103)
"""Architectures for which the general product kernel is compiled. The kernel for FP4 rows is also compiled
for sm_103."""

FAMILIES = ((80, 86, 89), (90,), (100,), (120, 121))
"""Architectures for which Triton makes the same PTX. The result of ptxas, and the limits of resources,
differ."""

LARGE_STACK = 256
"""The largest allowed stack, in bytes per thread. Known tiles spill at most 160 bytes, which is 40 of 255
registers: some tiles of 256 x 64 and of 128 x 128 sums, with int4 or columns. Smaller tiles would read the
weights more often. The rest is a margin for other random tests and other versions of Triton."""


def device(architecture: int, shared_memory: int | None = None) -> Device:
    return Device(
        f"sm_{architecture}", divmod(architecture, 10), shared_memory or BLOCK_MEMORY[architecture],
        MULTIPROCESSORS[architecture],
    )  # fmt: skip


# JITFunction caches kernels by device, so each of our devices has a new number.
_devices = itertools.count(1000)


@dataclass
class Launched:
    name: str
    metadata: Any
    constants: dict[str, Any]
    cubin: bytes = b""

    @property
    def tile(self) -> Tile:
        """Tile of the product kernel."""
        sizes = (self.constants[name] for name in ("BLOCK_N", "BLOCK_M", "BLOCK_K"))
        return Tile(*sizes, self.metadata.num_warps, self.constants["STAGES"])

    def stack(self, folder: Path) -> int:
        return stack(self.cubin, folder)


@dataclass
class Kernels:
    launched: list[Launched] = field(default_factory=list)
    """The launches, in order."""
    refuse: dict = field(default_factory=dict)
    """Launches that must fail although the kernel fits: maps a tile to the exception."""


class Driver:
    """A driver with the functions that JITFunction and CompiledKernel need."""

    def __init__(self, architecture: int, kernels: Kernels):
        self.target = GPUTarget("cuda", architecture, 32)
        self.kernels = kernels
        self.device = next(_devices)
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": BLOCK_MEMORY[architecture]},
            load_binary=self.load_binary,
        )

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.device

    def get_current_stream(self, _):
        return 0

    def launcher_cls(self, source, metadata):
        """Return a launcher. Triton calls this before it loads the binary."""
        constants = {source.fn.arg_names[i]: value for (i, *_), value in source.constants.items()}
        launched = self.loading = Launched(metadata.name, metadata, constants)

        def launch(*_):
            if launched.name == "gemm_kernel" and launched.tile in self.kernels.refuse:
                raise self.kernels.refuse[launched.tile]
            self.kernels.launched.append(launched)

        return launch

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int):
        self.loading.cubin = cubin
        return None, None, 0, 0, 1024


@contextlib.contextmanager
def gpu(architecture: int, shared_memory: int | None = None):
    """Compile kernels for this architecture. Tiles are chosen for `shared_memory` bytes (None: those of the
    architecture)."""
    kernels = Kernels()
    before = driver._active
    known = dict(launch._fits)
    driver.set_active(Driver(architecture, kernels))
    tiles.pretend(device(architecture, shared_memory))
    try:
        yield kernels
    finally:
        for kernel in (gemm.gemm_kernel, scaled_kernel):
            kernel.device_caches.pop(driver._active.device, None)
        driver._active = before
        tiles.pretend(None)
        launch._fits.clear()
        launch._fits.update(known)


@contextlib.contextmanager
def short_cache():
    """Delete what Triton compiles. A test of thousands of kernels would leave gigabytes."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", folder)
        yield


def retarget(ptx: str, architecture: int) -> str:
    return re.sub(r"(?m)^\.target sm_\w+", f".target {sm_arch_from_capability(architecture)}", ptx)


def assemble(ptx: str, architecture: int, folder: Path) -> bytes:
    """Assemble PTX that Triton made for another architecture of the family."""
    source, made = folder / "kernel.ptx", folder / "kernel.o"
    source.write_text(retarget(ptx, architecture))
    name = f"--gpu-name={sm_arch_from_capability(architecture)}"
    subprocess.run([get_ptxas(architecture).path, "-lineinfo", name, source, "-o", made], check=True)
    return made.read_bytes()


@functools.cache
def tool(name: str) -> Path | None:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return path if path.exists() else None


def stack(cubin: bytes, folder: Path) -> int:
    """Return the bytes of stack of a thread of the kernel: the values that the compiler could not keep in
    registers."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    done = subprocess.run([tool("cuobjdump"), "-res-usage", path], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", done.stdout + done.stderr)[1])
