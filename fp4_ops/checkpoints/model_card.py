"""Writes the README.md of a folder that `quantize` made: the source's describes other weights."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path

from ..runtime.libraries import NOT_INSTALLED, version_of
from .hub import snapshot

CARD = "README.md"
KEPT = (
    "license", "license_name", "license_link", "language", "pipeline_tag", "library_name", "datasets"
)  # fmt: skip
"""The keys of the source's front matter that are true of its weights in 4 bits, too. Measurements are not."""
_BASE = ("base_model", "base_model_relation")
_FRONT_MATTER = re.compile(r"\s*---\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)  # as the hub reads it
_KEY = re.compile(r"([A-Za-z][\w-]*)\s*:")


def write_card(
    source: Path, to: Path, facts: list[str], formats: Iterable[str], options: Mapping[str, str]
) -> None:
    """Writes a card that names the source and says what was done. The source's card, which may name its
    authors, is kept beside it.

    facts: what is in which format, and how it was chosen.
    formats: the formats, for the tags by which the hub finds models.
    options: those of the command that makes such a folder.
    """
    of_hub = snapshot(source)
    name = of_hub[0] if of_hub else _folder_name(source)
    version = version_of("fp4_ops")
    folder = name.rpartition("/")[2]
    words = [word for option, value in options.items() for word in (f"--{option}", value)]
    fetch = ["hf", "download", name, "--revision", of_hub[1], "--local-dir", folder] if of_hub else []
    lines = [
        *_front_matter(source, of_hub[0] if of_hub else None, ["fp4_ops", "4-bit", *formats]),
        f"# {name} in 4 bits",
        "",
        f"fp4_ops{f' {version}' * (version != NOT_INSTALLED)} made this folder from `{name}`:",
        "",
        *(f"- {fact}" for fact in facts),
        "",
        "```",
        *[shlex.join(fetch)] * bool(fetch),
        shlex.join(["python", "-m", "fp4_ops", "quantize", folder, "-o", "OUT", *words]),
        "```",
        "",
        "Load it with `fp4_ops.load_checkpoint(None, FOLDER)`. Its accuracy is not known:",
        "`python -m fp4_ops eval FOLDER --text FILE` measures it.",
    ]
    if (source / CARD).is_file():
        kept = _free_name(source)
        shutil.copyfile(source / CARD, to / kept)
        lines += ["", f"The card of `{name}`, which describes the original weights: [{kept}]({kept})."]
    (to / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _folder_name(source: Path) -> str:
    name = source.resolve().name
    return name.encode(errors="surrogateescape").decode(errors="replace")  # a name may not be UTF-8


def _free_name(source: Path) -> str:
    """Returns the name for the source's card in the result: one that no file of the source has."""
    names = (f"README.source{f'-{i}' * (i > 1)}.md" for i in count(1))
    return next(name for name in names if not (source / name).exists())


def _front_matter(source: Path, name: str | None, tags: list[str]) -> list[str]:
    """Returns the lines of the result's front matter, which the hub reads.

    name: the source's name on the hub, None if that is not known. The models that the source itself was made
        from then stay.
    """
    found = _keys(source / CARD)
    keys = (*KEPT, *(() if name else _BASE))
    lines = [line for key in keys for line in found.get(key, ())]
    if name:
        lines += [f"base_model: {name}", "base_model_relation: quantized"]
    own = _items(found.get("tags", []))
    there = {tag.strip("'\"") for tag in own}
    own += [tag for tag in tags if tag not in there]
    return ["---", *lines, "tags:", *(f"- {tag}" for tag in own), "---", ""]


def _keys(card: Path) -> dict[str, list[str]]:
    """Returns the lines of each key of a card's front matter. They are copied as they are: a reader of YAML
    would take the language `no` for False."""
    text = card.read_text(encoding="utf-8-sig", errors="replace") if card.is_file() else ""
    match = _FRONT_MATTER.match(text)
    keys: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in match[1].split("\n") if match else ():
        if key := _KEY.match(line):
            lines = keys[key[1]] = []
        if line.strip() and not line.startswith("#"):
            lines.append(line)
    return keys


def _items(lines: list[str]) -> list[str]:
    """Returns the items of a list in YAML, which is in brackets, or has an item a line."""
    inline = "".join(lines).partition(":")[2].strip()
    if inline.startswith("["):
        items = inline.strip("[]").split(",")
    else:
        items = [inline] if len(lines) == 1 else [line.strip().removeprefix("- ") for line in lines[1:]]
    return [item.strip() for item in items if item.strip()]
