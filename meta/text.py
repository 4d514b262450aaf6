"""Shortens errors and reasons of other programs to one line."""

from __future__ import annotations


def first_line(text: str) -> str:
    """Returns the first line of `text` that is not blank; "" if there is none."""
    return text.strip().partition("\n")[0].rstrip()


def in_short(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if the message is empty."""
    return first_line(str(error)) or type(error).__name__
