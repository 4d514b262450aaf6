"""Provides an aarch64 Linux with Python and torch under qemu-user, to build and test the wheel for aarch64.

    make test-aarch64                        the operators, and each family of kernels (tests/kernels_cpu/)
    python release/aarch64.py -m pytest …  Python there, with this repository's wheel and tests
    python release/aarch64.py              fetches what this needs; status 75 if it cannot

Debian's packages and PyPI's wheels are fetched once into a cache ($FP4_AARCH64_CACHE, else ~/.cache/fp4_ops).
torch's aarch64 wheels are CUDA builds that do not load without some gigabytes of CUDA libraries. Stand-ins
take their place: each function that torch asks them for returns cudaErrorNoDevice.
"""

from __future__ import annotations

import collections
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parent.parent
TORCH, NUMPY = "torch==2.13.0", "numpy==2.3.5"
NO_DEVICE = 100  # cudaErrorNoDevice
PYTHON = "usr/bin/python3.11"
DEBIAN = (
    "libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5", "libssl3",
    "libsqlite3-0", "libuuid1", "libcrypt1", "libgomp1", "python3.11-minimal", "libpython3.11-minimal",
    "libpython3.11-stdlib",
)  # fmt: skip
# Pure Python packages, so those of this environment can be used.
PURE = (
    "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "fsspec", "filelock", "tqdm", "_pytest",
    "pytest", "pluggy", "iniconfig", "packaging", "pygments", "expecttest", "py",
)  # fmt: skip
# torch reads /proc/cpuinfo. qemu would show that of the real machine, which torch for aarch64 cannot parse.
CPUINFO = """processor\t: {}
BogoMIPS\t: 100.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0b
CPU revision\t: 1

"""
TOOLS = {
    "qemu-aarch64": "qemu-user",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "apt-get": "apt",
    "dpkg": "dpkg",
}


CPUS = {"neon": "cortex-a72", "neon_dotprod": "neoverse-n1", "neon_bf16": "max,sve=off,sme=off"}
"""Processors of qemu 7, by the kernels that run on them. The last one has i8mm and bf16, like Neoverse V1."""


UNAVAILABLE = 75
"""The exit status if something outside of this repository is missing (EX_TEMPFAIL)."""


def unavailable(why: str) -> NoReturn:
    print(f"aarch64: {why}", file=sys.stderr)
    sys.exit(UNAVAILABLE)


def fetch(what: str, command: list[str], **options: Any) -> None:
    """Runs a command that needs the network."""
    if subprocess.run(command, **options).returncode:
        unavailable(f"{what} cannot be fetched (no network, or no mirror that has it)")


def missing_tools() -> list[str]:
    """Returns Debian's packages that must be installed first."""
    return [package for tool, package in TOOLS.items() if shutil.which(tool) is None]


class Machine:
    def __init__(self) -> None:
        if packages := missing_tools():
            unavailable(f"install these first: apt-get install {' '.join(packages)}")
        base = os.environ.get("FP4_AARCH64_CACHE") or "~/.cache/fp4_ops"
        self.folder = Path(base).expanduser() / "aarch64"
        self.root, self.site = self.folder / "root", self.folder / "site"
        done = self.folder / "done"
        wanted = f"{TORCH} {NUMPY} {DEBIAN} {PURE}"
        if not done.exists() or done.read_text() != wanted:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._make()
            done.write_text(wanted)

    def torch_libraries(self) -> Path:
        return self.site / "torch" / "lib"

    def python(
        self, *args: str, paths: Iterable[Path] = (), cpu: str = CPUS["neon_bf16"], capture: bool = False,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Runs Python in that environment. `capture`: the result has its output."""
        path = ":".join(map(str, [*paths, self.site]))
        settings = {
            "QEMU_LD_PREFIX": str(self.root),
            "PYTHONPATH": path,
            "PYTHONSAFEPATH": "1",
            **env,
        }
        command = ["qemu-aarch64", "-cpu", cpu, str(self.root / PYTHON), *args]
        return subprocess.run(command, env={**os.environ, **settings}, capture_output=capture, text=True)

    def _make(self) -> None:
        print(f"== fetching Python and torch for aarch64 into {self.folder} (some minutes, once)")
        self.site.mkdir(parents=True)
        self._debian()
        for wheel in (TORCH, NUMPY):
            self._wheel(wheel)
        self._pure()
        self._processors()
        self._stand_ins()

    def _debian(self) -> None:
        apt = self.folder / "apt"
        (apt / "lists" / "partial").mkdir(parents=True)
        options = ["-oAPT::Architecture=arm64", "-oAPT::Architectures=arm64", "-oAPT::Sandbox::User=root",
                   f"-oDir::State::Lists={apt / 'lists'}", "-oDir::State::status=/dev/null"]  # fmt: skip
        # Without a network `update` succeeds, and `download` finds nothing.
        fetch("Debian's list of packages", ["apt-get", "-qq", *options, "update"])
        fetch("Python for aarch64", ["apt-get", "-qq", *options, "download", *DEBIAN], cwd=apt)
        self.root.mkdir()
        for package in apt.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(self.root)], check=True)
        shutil.rmtree(apt)

    def _wheel(self, name: str) -> None:
        to = self.folder / "wheels"
        platforms = [f"manylinux_2_{v}_aarch64" for v in (28, 17)]
        chosen = [option for p in platforms for option in ("--platform", p)]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        only = ["--only-binary=:all:", "--python-version", "3.11"]
        fetch(f"{name} for aarch64", [*pip, *chosen, *only, "-d", str(to), name])
        (wheel,) = to.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.site, [n for n in archive.namelist() if "/include/" not in n])
        wheel.unlink()

    def _pure(self) -> None:
        for name in PURE:
            module = __import__(name)
            source = Path(module.__file__ or "")
            if source.name == "__init__.py":
                shutil.copytree(
                    source.parent, self.site / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
                )
            else:
                shutil.copy(source, self.site)
        shutil.copytree(Path(__import__("markupsafe").__file__).parent, self.site / "markupsafe",
                        ignore=shutil.ignore_patterns("*.so"))  # fmt: skip

    def _processors(self) -> None:
        """Writes files that qemu shows instead of the real ones, because they are below its prefix."""
        cpus = self.root / "sys/devices/system/cpu"
        (self.root / "proc").mkdir()
        cpus.mkdir(parents=True)
        (self.root / "proc/cpuinfo").write_text(CPUINFO.format(0) + CPUINFO.format(1))
        for name in ("possible", "present"):
            (cpus / name).write_text("0-1\n")

    def _stand_ins(self) -> None:
        own = [*self.torch_libraries().glob("*.so*"), *(self.site / "torch").glob("_C*.so")]
        system = [*self.root.glob("lib/**/*.so*"), *self.root.glob("usr/lib/**/*.so*")]
        here = {f.name for f in (*own, *system)}
        needed: set[str] = set()
        library_of: dict[str, str] = {}  # a version of symbols -> the library that has it
        wanted: dict[str, str] = {}  # a symbol -> its version
        defined: set[str] = set()
        for file in own:
            needed.update(re.findall(r"NEEDED.*\[(.*)\]", _readelf("-d", file)))
            library = ""
            for line in _readelf("-V", file).splitlines():
                if found := re.search(r"File: (\S+)", line):
                    library = found.group(1)
                elif found := re.search(r"Name: (\S+)\s+Flags", line):
                    library_of[found.group(1)] = library
        for file in (*own, *system):
            for name, version, undefined in _symbols(file):
                if not undefined:
                    defined.add(name)
                elif file in own:
                    wanted[name] = version
        absent = needed - here
        groups: dict[str, dict[str, list[str]]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )
        for name, version in wanted.items():
            library = library_of.get(version, "")
            if name not in defined and not name.startswith(("Py", "_Py")):
                known = library in absent
                groups[library if known else min(absent)][version if known else ""].append(name)
        for library in absent:
            self._stand_in(library, groups[library], {v for v, of in library_of.items() if of == library})

    def _stand_in(self, library: str, groups: dict[str, list[str]], versions: set[str]) -> None:
        source, script = self.folder / "stand_in.c", self.folder / "stand_in.map"
        text = 'const char* %s(void) { return "no CUDA library"; }\n'
        number = f"int %s(void) {{ return {NO_DEVICE}; }}\n"
        names = [name for group in groups.values() for name in group]
        source.write_text(
            "".join((text if re.search("String|ErrorName", n) else number) % n for n in names) + "\n"
        )
        script.write_text(
            "".join(
                f"{v} {{ global: {' '.join(f'{n};' for n in groups.get(v, ()))} }};\n"
                for v in sorted(versions)
            )
        )
        command = ["aarch64-linux-gnu-gcc", "-w", "-shared", "-fPIC", "-fno-builtin", "-nostdlib"]
        command += [f"-Wl,-soname,{library}", "-o", str(self.torch_libraries() / library), str(source)]
        subprocess.run([*command, *([f"-Wl,--version-script={script}"] if versions else [])], check=True)


def _readelf(option: str, file: Path) -> str:
    return subprocess.run(
        ["readelf", "-W", option, str(file)], capture_output=True, text=True, check=True
    ).stdout


def _symbols(file: Path) -> Iterable[tuple[str, str, bool]]:
    """Yields name, version, and whether another library must define the symbol."""
    for line in _readelf("--dyn-syms", file).splitlines():
        words = line.split()
        if len(words) < 8 or not words[0].endswith(":"):
            continue
        name, _, version = words[7].replace("@@", "@").partition("@")
        if words[6] != "UND" or words[4] == "GLOBAL":
            yield name, version, words[6] == "UND"


def install(to: Path) -> Path:
    """Unpacks the wheel's files into a new folder."""
    (wheel,) = (ROOT / "dist").glob("*_aarch64.whl")
    shutil.rmtree(to, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)
    return to


def main() -> None:
    if len(sys.argv) == 1:
        Machine()
        return
    machine = Machine()
    paths = [install(machine.folder / "fp4_ops"), ROOT / "tests/helpers"]
    cpu = os.environ.get("FP4_AARCH64_CPU") or CPUS["neon_bf16"]
    sys.exit(machine.python(*sys.argv[1:], paths=paths, cpu=cpu, OMP_NUM_THREADS="2").returncode)


if __name__ == "__main__":
    main()
