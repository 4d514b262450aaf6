"""Types of command line options, for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Returns a type that takes whole numbers from `least` to `most`, both included; no `most`: to any."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            bound = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number {bound}")
        return value

    return parse
