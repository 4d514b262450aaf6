"""Writes the beginning and the end of every generated header."""

from __future__ import annotations

from collections.abc import Iterable


def header(made_by: str, lines: Iterable[str]) -> str:
    """Returns a header with these lines in namespace fp4. `made_by`: what makes it, and who includes it."""
    start = [f"// Made by {made_by}", "#pragma once", "", "namespace fp4 {", ""]
    return "\n".join([*start, *lines, "", "}  // namespace fp4", ""])
