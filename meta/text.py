"""How errors and reasons of others are quoted in one line."""

from __future__ import annotations


def first_line(text: str) -> str:
    """The first line of `text` that says anything; empty if none does."""
    return text.strip().partition("\n")[0].rstrip()


def in_short(error: BaseException) -> str:
    """The first line of what an error says; the name of its type if it says nothing."""
    return first_line(str(error)) or type(error).__name__
