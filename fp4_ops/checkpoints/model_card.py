"""Writes the README.md of a folder that `quantize` made: the source's describes other weights."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

CARD = "README.md"
SOURCE_CARD = "README.source.md"
"""The name that the source's README.md has in the result."""


def write_card(source: Path, to: Path, facts: list[str], options: Mapping[str, str]) -> None:
    """Writes a card that names the source and says what was done. The source's card, which may name its
    authors and its licence, is kept beside it.

    facts: what is in which format, and how it was chosen.
    options: those of the command that makes such a folder.
    """
    name = _name(source)
    words = [word for option, value in options.items() for word in (f"--{option}", value)]
    lines = [
        f"# {name} in 4 bits",
        "",
        f"fp4_ops {version('fp4_ops')} made this folder from `{name}`:",
        "",
        *(f"- {fact}" for fact in facts),
        "",
        "```",
        shlex.join(["python", "-m", "fp4_ops", "quantize", name, "-o", "OUT", *words]),
        "```",
        "",
        "Load it with `fp4_ops.load_checkpoint(None, FOLDER)`. Its accuracy is not known:",
        "`python -m fp4_ops eval FOLDER --text FILE` measures it.",
    ]
    if (source / CARD).is_file():
        shutil.copyfile(source / CARD, to / SOURCE_CARD)
        lines += [
            "",
            f"The card of `{name}`, which describes the original weights: [{SOURCE_CARD}]({SOURCE_CARD}).",
        ]
    (to / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _name(source: Path) -> str:
    """Returns the name of a folder or, for a snapshot in the cache of the Hugging Face hub, of its model."""
    path = source.resolve()
    for part in path.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return path.name.encode(errors="surrogateescape").decode(errors="replace")  # a name may not be UTF-8
