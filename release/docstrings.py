"""Finds docstrings that begin with a word with which no clear sentence begins, and merged lists of arguments.

    python release/docstrings.py

"Of what operators run." tells a reader nothing; "Forces one kernel family for every operator call." does. The
docstring of a function begins with a verb, or names its value as a noun of the field. A list of arguments has
one argument, or several with one description, on each line. `make lint` runs this.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("fp4_ops", "meta", "compile_passes", "benchmarks", "release")
WORDS = ("Of", "Those", "These", "That which", "What")


def wrong(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line number and first line of each docstring that begins with one of `WORDS`.

    A string below an assignment counts as a docstring, too: it describes a constant.
    """
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            text = statement.value.value
            if isinstance(text, str) and text.strip().startswith(tuple(f"{w} " for w in WORDS)):
                yield statement.lineno, text.strip().splitlines()[0]


def merged(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line number of each docstring with a list of arguments that does not begin a new line for
    each, and the line of the text that has two."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        arguments = {a.arg for n in [node, *made] for a in ast.walk(n) if isinstance(a, ast.arg)}
        arguments |= {
            n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        }
        names = "|".join(map(re.escape, arguments)) or "(?!)"
        text = ast.get_docstring(node) or ""
        if not re.search(rf"^(?:{names})(?:, \w+)*: ", text, re.MULTILINE):
            continue  # no list
        for line in text.splitlines():
            if re.search(rf"[.;] (?:{names})(?:, \w+)*: ", line):
                yield node.lineno, line.strip()


def sources() -> list[Path]:
    """Lists the Python files of `FOLDERS`, each once: links to folders are not followed."""
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
    return sorted(p for p in found if p.resolve() == p)


def main() -> int:
    """Prints every docstring that must be corrected. Returns 1 if there are any, else 0."""
    bad = [f"{p.relative_to(ROOT)}:{n}: {line}" for p in sources() for n, line in wrong(p.read_text())]
    if bad:
        print(f"These docstrings must begin with a verb or a noun of the field, not with one of {WORDS}:")
        print("\n".join(bad))
    lists = [f"{p.relative_to(ROOT)}:{n}: {line}" for p in sources() for n, line in merged(p.read_text())]
    if lists:
        print("These lists of arguments need a line for each:")
        print("\n".join(lists))
    return 1 if bad or lists else 0


if __name__ == "__main__":
    sys.exit(main())
