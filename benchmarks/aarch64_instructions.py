"""Counts the instructions per weight of the aarch64 kernels, under qemu. It measures no times, because that
would need an Arm machine.

    python release/wheels.py --machine aarch64           compiles the kernels
    python benchmarks/aarch64_instructions.py [--ggml FOLDER]

Every family of kernels multiplies one panel (16 x 2048 weights) with 1 row and with 64 rows. The quantisation
of the rows is not counted. --ggml gives ggml's sources (vendor/ggml of the source distribution of ggml-python
0.0.45). ggml's kernels for weights of the same size are compiled with the same -march, and counted in the
same way. The script needs qemu-user and g++-aarch64-linux-gnu.

per_weight: the instructions, divided by the weights. per_product: the instructions, divided by weights times
rows. mix: the instructions that multiply, look up and load, per weight and row.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import record

ROOT, HERE = record.ROOT, Path(__file__).parent / "aarch64"
OBJECTS = ROOT / "build" / "aarch64" / "csrc" / "cpu"
CXX, QEMU = "aarch64-linux-gnu-g++", ["qemu-aarch64", "-cpu", "max"]
WEIGHTS = 16 * 2048
REPEATS = 2, 6
"""Numbers of repetitions of two runs. Their difference leaves out the start and the end of the program."""
FAMILIES = ("scalar", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16")
MIX = ("sdot", "smmla", "bfdot", "bfmmla", "fmla", "smlal", "tbl", "ldr", "ldp")
MARCH = {"dotprod": "armv8.2-a+dotprod", "i8mm": "armv8.2-a+dotprod+i8mm"}
PEERS = {
    "dotprod": ("q4_0", "q4_0_4x4", "mxfp4", "mxfp4_4x4", "nvfp4"),
    "i8mm": ("q4_0_pairs", "q4_0_4x8"),
}
"""ggml's kernels by -march. The names with NxM are its repacked kernels."""


def build(folder: Path, name: str, objects: list[Path], flags: list[str]) -> Path:
    out = folder / name
    command = [CXX, "-static", "-O2", "-std=c++20", *flags, *map(str, objects), "-o", str(out)]
    subprocess.run(command, check=True)
    return out


def panels(folder: Path) -> Path:
    import torch.utils.cpp_extension as cpp

    names = ("scalar", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16")
    objects = [HERE / "panels.cpp", *(OBJECTS / f"kernels_{name}.o" for name in names)]
    if missing := [o.name for o in objects if not o.exists()]:
        raise SystemExit(f"{', '.join(missing)}: compile them first (release/wheels.py --machine aarch64)")
    includes = [f"-I{path}" for path in (ROOT / "csrc", ROOT / "build", *cpp.include_paths())]
    return build(folder, "panels", objects, includes)


def ggml(folder: Path, source: Path, march: str) -> Path:
    cpu = source / "src" / "ggml-cpu"
    flags = [f"-march={march}", "-O3", "-DNDEBUG", "-D_GNU_SOURCE", "-DGGML_USE_CPU_REPACK", "-w"]
    flags += [f"-I{path}" for path in (source / "include", source / "src", cpu)]
    objects = []
    for i, (compiler, file) in enumerate(
        (("gcc", cpu / "arch/arm/quants.c"), ("g++", cpu / "arch/arm/repack.cpp"))
    ):
        objects.append(folder / f"ggml{i}.o")
        command = [f"aarch64-linux-gnu-{compiler}", *flags, "-c", str(file), "-o", str(objects[-1])]
        subprocess.run(command, check=True)
    # Functions that these kernels do not call are not linked.
    flags.append("-Wl,--unresolved-symbols=ignore-all")
    return build(folder, f"ggml_{march}", [HERE / "ggml.cpp", *objects], flags)


def mnemonics(program: Path) -> dict[int, str]:
    text = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", str(program)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {int(at, 16): name for at, name in re.findall(r"^\s*([0-9a-f]+):\s+(\S+)", text, re.M)}


class Counter:
    def __init__(self, folder: Path) -> None:
        self.plugin, self.counts = folder / "counter.so", folder / "counts"
        command = ["gcc", "-O2", "-shared", "-fPIC", str(HERE / "counter.c"), "-o", str(self.plugin)]
        subprocess.run(command, check=True)
        self.names: dict[Path, dict[int, str]] = {}

    def of(self, program: Path, *arguments: str) -> collections.Counter[str]:
        """Counts the instructions of one repetition, by mnemonic."""
        few, many = (self._run(program, *arguments, str(n)) for n in REPEATS)
        many.subtract(few)
        return collections.Counter({name: n / (REPEATS[1] - REPEATS[0]) for name, n in many.items() if n})

    def _run(self, program: Path, *arguments: str) -> collections.Counter[str]:
        if program not in self.names:
            self.names[program] = mnemonics(program)
        command = [*QEMU, "-plugin", str(self.plugin), str(program), *arguments]
        subprocess.run(command, check=True, env={**os.environ, "COUNTS": str(self.counts)})
        names, found = self.names[program], collections.Counter()
        for line in self.counts.read_text().splitlines():
            at, instructions, count = line.split()
            for i in range(int(instructions)):
                found[names.get(int(at, 16) + 4 * i, "?")] += int(count)
        return found


def row(
    kernels: str, activations: str, format: str, rows: int, found: collections.Counter[str]
) -> record.Row:
    total = sum(found.values())
    parts = {name: found[name] / WEIGHTS / rows for name in MIX}
    return {
        "table": "instructions", "kernels": kernels, "activations": activations, "format": format,
        "rows": rows,
        "per_weight": total / WEIGHTS, "per_product": total / WEIGHTS / rows,
        "mix": ", ".join(f"{name} {n:.3f}" for name, n in parts.items() if n >= 0.0005),
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ggml", type=Path, help="the folder of ggml's sources")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp4", "int4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counter, program = Counter(folder), panels(folder)
        for family in args.families:
            for activations in ("bf16",) if family == "neon_bf16" else ("int8", "float32"):
                if (family, activations) == ("neon_i8mm", "float32"):  # the same as neon_dotprod's
                    continue
                for format in args.formats:
                    for n in args.rows:
                        found = counter.of(program, family, activations, format, str(n))
                        yield row(family, activations, format, n, found)
        if args.ggml is not None:
            for isa, kernels in PEERS.items():
                program = ggml(folder, args.ggml, MARCH[isa])
                for kernel in kernels:
                    kind = kernel.partition("_4x")[0].removesuffix("_pairs")
                    repacked = " repacked" if "_4x" in kernel else ""
                    for n in args.rows:
                        found = counter.of(program, kernel, str(n))
                        yield row(f"ggml {isa}{repacked}", "int8", kind, n, found)


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
