"""`node.meta` has only torch's keys. The passes store their facts about nodes in weights/facts.py, typed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

PASSES = ROOT / "compile_passes"
TORCHS = {
    *("val", "example_value", "unbacked_bindings", "tensor_dict", "grapharg"),
    *("stack_trace", "nn_module_stack", "source_fn_stack"),
}
WHILE_DYNAMO_TRACES = {"_fp4_says_the_same", "fp4_known"}
"""Keys of dynamo/, on nodes of the graph that Dynamo is making: they go when it starts over."""


def keys(tree: ast.AST) -> Iterator[str]:
    """The string keys with which a file reads or writes any `.meta`."""
    known = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript) and is_meta(node.value):
            found = [node.slice]
        elif isinstance(node, ast.Compare) and any(map(is_meta, node.comparators)):
            found = [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_meta(node.func.value):
            given = [*node.args, *(k.value for k in node.keywords)]
            found = [*given[:1], *(k for a in given if isinstance(a, ast.Dict) for k in a.keys)]
            found += [ast.Constant(k.arg) for k in node.keywords]
        elif isinstance(node, ast.Assign):
            pairs = [(t, node.value) for t in node.targets]
            for target, value in list(pairs):
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs += zip(target.elts, value.elts, strict=True)
            made = [value for target, value in pairs if is_meta(target) and isinstance(value, ast.Dict)]
            found = [key for each in made for key in each.keys]
        for key in found:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value
            elif isinstance(key, ast.Name) and isinstance(known.get(key.id), str):
                yield known[key.id]


def is_meta(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


@pytest.mark.parametrize("path", sorted(PASSES.rglob("*.py")), ids=lambda p: str(p.relative_to(PASSES)))
def test_only_torchs_keys(path: Path) -> None:
    allowed = TORCHS | (WHILE_DYNAMO_TRACES if path.parent.name == "dynamo" else set())
    own = set(keys(ast.parse(path.read_text()))) - allowed
    assert not own, f"{path.relative_to(ROOT)} has keys of its own in node.meta: {own}"


@pytest.mark.parametrize(
    "line",
    [
        'node.meta["own"] = 1',
        'node.meta.setdefault("own", 1)',
        'node.meta.update({"own": 1})',
        "node.meta.update(own=1)",
        'new.meta, new.type = {**node.meta, "own": 1}, int',
        '"own" in node.meta',
        'KEY = "own"\nnode.meta[KEY] = 1',
    ],
)
def test_every_way_to_write_is_seen(line: str) -> None:
    assert set(keys(ast.parse(line))) == {"own"}
