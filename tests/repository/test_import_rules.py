"""Imports go in one direction: between packages, within compile_passes, and between folders of csrc."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from places import ROOT

ROOMS = {
    "advice": set(),
    "naming": set(),
    "options": set(),
    "refusal": {"advice", "naming"},
    "graph": set(),
    "index": {"graph", "naming", "refusal"},
    "recognise": {"graph", "index", "naming", "refusal", "weights"},
    "weights": {"graph", "refusal"},
    "trace": {"graph", "naming", "refusal", "weights"},
    "neighbours": {"graph"},
    "step": {"graph"},
    "report": {"naming", "refusal"},
    "dynamo.api": set(),
    "dynamo": {"dynamo.api", "graph", "naming", "refusal", "weights"},
    "emit": {
        *("dynamo.api", "graph", "index", "naming"),
        *("options", "recognise", "refusal", "report", "weights"),
    },
    "passes": {
        *("dynamo.api", "emit", "graph", "index", "naming", "neighbours", "options"),
        *("recognise", "refusal", "report", "step", "trace", "weights"),
    },
    "precompiled": {"dynamo.api", "graph", "options", "weights"},
    "pipeline": {
        *("advice", "dynamo", "dynamo.api", "graph", "naming", "options"),
        *("passes", "precompiled", "recognise", "refusal", "report", "trace", "weights"),
    },
    "explain": {"dynamo", "dynamo.api", "naming", "options", "pipeline", "report", "weights"},
    "program": {"advice", "naming", "options", "passes", "report", "trace", "weights"},
    "cli": {"explain", "options"},
}
"""Rooms of compile_passes that each room may import."""
API = "dynamo.api"
"""A file of dynamo/ that counts as a room of its own: it alone has the parts of torch._dynamo."""

PACKAGES = {"meta": set(), "fp4_ops": {"meta"}, "compile_passes": {"meta", "fp4_ops"}}
ENTRIES = {
    *("backend.py", "__init__.py", "__main__.py"),
}
"""Files of fp4_ops that may import compile_passes: the backend's entry and the command line."""

BACKENDS = {
    "base": set(),
    "anywhere": set(),
    "launchers": {"anywhere"},
    "cpu": {"base"},
    "hopper": {"base"},
    "mma": {"base"},
    "triton": {"base", "launchers"},
    "operators": {"anywhere"},
    "samples": {"triton"},
}
"""Rooms of fp4_ops/backends that each room may import: never another backend."""

HOME_ROOMS: dict[str, set[str]] = {
    "runtime": set(),
    "backends": {"runtime"},
    "distributed": {"backends", "runtime"},
    "experts": {"distributed", "runtime"},
    "quantization": {"experts", "runtime"},
    "models": {"backends", "distributed", "experts", "quantization", "runtime"},
    "checkpoints": {"backends", "distributed", "experts", "models", "quantization", "runtime"},
    "integrations": {"checkpoints", "experts", "models", "quantization", "runtime"},
}
"""Folders of fp4_ops that each folder may import."""
TOP = 16
"""Files at the top of fp4_ops: what users call, and what loads the package. Everything else has a room."""

FOLDERS = {
    "common": {"common"},
    "cpu": {"common", "cpu"},
    "device": {"common", "device"},
    "sm90": {"common", "device", "sm90"},
    "sm80": {"common", "device", "sm80", "sm100", "sm120"},  # sources of the one library with all three
    "sm120": {"common", "device", "sm120"},
    "sm100": {"common", "device", "sm90", "sm100"},
    "nvlink": {"nvlink"},
    "cuda": {"common", "cuda", "device"},
    "dev": {"common", "cuda", "dev", "device"},
}


def imports(path: Path, package: list[str]) -> set[str]:
    """The modules of fp4_ops that a file imports, as dotted names inside it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = package[: len(package) - (node.level - 1)]
        elif node.module and node.module.startswith("fp4_ops"):
            base = []
        else:
            continue
        name = [*base, *(node.module.split(".") if node.module else [])]
        found |= {".".join((*name, a.name)) for a in node.names} if len(name) < 3 else {".".join(name)}
    return found


def package_of(path: Path) -> list[str]:
    top, *rest = path.relative_to(ROOT).parts
    return ["fp4_ops", *([] if top == "fp4_ops" else [top]), *rest[:-1]]


def rooms_of(path: Path) -> set[str]:
    names = (name.split(".") for name in imports(path, package_of(path)))
    inside = (n[2:] for n in names if n[:2] == ["fp4_ops", "compile_passes"] and len(n) > 2)
    return {API if ".".join(n[:2]) == API else n[0] for n in inside}


PASSES = ROOT / "compile_passes"


def test_every_room_is_named():
    rooms = {p.stem for p in PASSES.iterdir() if p.name not in ("__init__.py", "__pycache__")}
    assert rooms | {API} == set(ROOMS)


def test_rules_have_no_circle():
    above: dict[str, set[str]] = {}

    def reached(room: str, way: tuple[str, ...] = ()) -> set[str]:
        assert room not in way, (*way, room)
        if room not in above:
            above[room] = ROOMS[room].union(*(reached(r, (*way, room)) for r in ROOMS[room]))
        return above[room]

    for room in ROOMS:
        assert room not in reached(room)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_the_compile_passes(room):
    file = PASSES / f"{room.replace('.', '/')}.py"
    files = [file] if file.exists() else (PASSES / room).glob("*.py")
    used = set()
    for path in files:
        wrong = rooms_of(path) - ROOMS[room] - {room}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"
        used |= rooms_of(path) - {room}
    assert used == ROOMS[room]  # a rule that nothing needs goes


ADAPTERS = {ROOT / "compile_passes/dynamo/api.py", ROOT / "meta/torch_internals.py"}
"""Files that name private parts of torch, each for all others."""
DOCUMENTED = {"_check"}
"""Names that torch documents, although they begin with an underscore."""


def private_of(tree: ast.AST) -> set[str]:
    """The private names of torch that a file imports or reads, as dotted names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return {name for name in found if name.startswith("torch.") and any(map(_is_private, name.split(".")))}


def _is_private(name: str) -> bool:
    own_namespace = name == "_c10d_functional"  # of operators, below torch.ops
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED and not own_namespace


@pytest.mark.parametrize("package", PACKAGES)
def test_two_files_name_private_torch(package):
    """compile_passes/dynamo/api.py has what is Dynamo's, meta/torch_internals.py the rest."""
    for path in (ROOT / package).rglob("*.py"):
        found = private_of(ast.parse(path.read_text()))
        assert path in ADAPTERS or not found, f"{path.relative_to(ROOT)} names {found}"
    assert all(private_of(ast.parse(path.read_text())) for path in ADAPTERS)


@pytest.mark.parametrize(
    "line",
    [
        *("import torch._dynamo", "from torch import _dynamo", "from torch._guards import TracingContext"),
        *("torch._ops.OpOverload", "torch.utils._pytree.tree_leaves(x)", "import torch.distributed._tensor"),
    ],
)
def test_what_is_private(line):
    assert private_of(ast.parse(line))


@pytest.mark.parametrize("line", ["torch._check(x)", "torch.__version__", "from torch.utils import dlpack"])
def test_what_is_public(line):
    assert not private_of(ast.parse(line))


HOME = ROOT / "fp4_ops"


def names_in(folder: Path) -> set[str]:
    return {p.stem for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}


def files_of(folder: Path, name: str) -> list[Path]:
    """Return the files of a room, which is a folder or one file."""
    return (
        [folder / f"{name}.py"] if (folder / f"{name}.py").exists() else list((folder / name).rglob("*.py"))
    )


def used_of(folder: Path, name: str, depth: int) -> set[str]:
    """Return the neighbours that a room imports. Their names stand at this depth of a dotted name."""
    within = package_of(folder / "any.py")
    modules = (m.split(".") for path in files_of(folder, name) for m in names_imported(path))
    return {m[depth] for m in modules if m[:depth] == within[:depth] and len(m) > depth} & names_in(
        folder
    ) - {name}


def names_imported(path: Path) -> set[str]:
    """As `imports`, but with what is imported of a package as well as of a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith("fp4_ops")):
            package = package_of(path)
            base = package[: len(package) - (node.level - 1)] if node.level else []
            name = [*base, *(node.module.split(".") if node.module else [])]
            found |= {".".join((*name, a.name)) for a in node.names}
    return found


def test_every_backend_is_named():
    assert names_in(HOME / "backends") - {"__init__"} == set(BACKENDS)


@pytest.mark.parametrize("room", BACKENDS)
def test_backends_never_import_each_other(room):
    assert used_of(HOME / "backends", room, 2) == BACKENDS[room]


@pytest.mark.parametrize("room", HOME_ROOMS)
def test_folders_of_fp4_ops(room):
    assert used_of(HOME, room, 1) & set(HOME_ROOMS) == HOME_ROOMS[room]


def test_every_folder_of_fp4_ops_is_named():
    folders = {p.parent.name for p in HOME.glob("*/__init__.py") if not p.parent.is_symlink()}
    assert folders == set(HOME_ROOMS) | {"dev"}
    assert len(list(HOME.glob("*.py"))) <= TOP


def test_rooms_of_fp4_ops_have_no_circle():
    """Imports inside functions count, too."""
    below = {name: used_of(HOME, name, 1) for name in names_in(HOME)}

    def reached(name: str) -> set[str]:
        found, new = set(), {name}
        while new := {n for m in new for n in below[m]} - found:
            found |= new
        return found

    circles = {frozenset(n for n in reached(name) if name in reached(n)) for name in below}
    assert circles == {frozenset()}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages(package):
    for path in (ROOT / package).rglob("*.py"):
        here = str(path.relative_to(ROOT / package))
        for name in imports(path, package_of(path)):
            parts = name.split(".")
            to = parts[1] if len(parts) > 1 and parts[1] in ("meta", "compile_passes") else "fp4_ops"
            allowed = {package, *PACKAGES[package]}
            if package == "fp4_ops" and here in ENTRIES:
                allowed.add("compile_passes")
            assert to in allowed, f"{package}/{here} imports {name}"


ENGINES = ("vllm",)
"""Other people's engines, each with a room of its name in fp4_ops/integrations."""
LOADS_TRANSFORMERS = {HOME / "prepare.py", HOME / "accuracy.py"}
"""Entries that import fp4_ops/integrations/transformers, when they are called."""


@pytest.mark.parametrize("engine", ENGINES)
def test_only_an_engine_loads_its_room(engine):
    """No file of ours imports the engine but in its room, and none imports the room."""
    room = HOME / "integrations" / engine
    for path in [p for package in PACKAGES for p in (ROOT / package).rglob("*.py")]:
        inside = room in path.parents
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(str(node.module))
            used = {name.partition(".")[0] for name in names}
            assert inside or engine not in used, f"{path.relative_to(ROOT)} imports {engine}"
        if HOME / "integrations" not in path.parents and path not in LOADS_TRANSFORMERS:
            ours = [m for m in names_imported(path) if m.startswith("fp4_ops.integrations")]
            assert not ours, f"{path.relative_to(ROOT)} imports {ours}"


def test_two_entries_load_the_room_of_transformers():
    """`fp4_ops.load_checkpoint` and its like are looked up by name, on first use."""
    for path in LOADS_TRANSFORMERS:
        ours = [m for m in names_imported(path) if m.startswith("fp4_ops.integrations")]
        assert ours and all(m.startswith("fp4_ops.integrations.transformers.") for m in ours)
    for room in ("vllm", "transformers"):
        for path in (HOME / "integrations" / room).glob("*.py"):
            ours = [m.split(".")[2] for m in names_imported(path) if m.startswith("fp4_ops.integrations.")]
            assert set(ours) <= {room}


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_of_csrc(folder):
    for path in (ROOT / "csrc" / folder).iterdir():
        for included in re.findall(r'#include "(?:\.\./)?(\w+)/', path.read_text()):
            assert included in FOLDERS[folder], f"{path.relative_to(ROOT)} includes {included}/"


def test_the_tree_is_the_package():
    """Editors, mypy and setuptools find the two folders at the top level as parts of fp4_ops."""
    links = {p.name: p.readlink() for p in (ROOT / "fp4_ops").iterdir() if p.is_symlink()}
    assert links == {name: Path("..", name) for name in ("meta", "compile_passes")}
