"""Shortens errors and reasons of other programs, and lists of names, to one line."""

from __future__ import annotations


def first_line(text: str) -> str:
    """Returns the first line of `text` that is not blank; "" if there is none."""
    return text.strip().partition("\n")[0].rstrip()


def in_short(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if the message is empty."""
    return first_line(str(error)) or type(error).__name__


def some_of(names: list[str]) -> str:
    """Returns the first four names, and how many more there are."""
    more = f", and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
