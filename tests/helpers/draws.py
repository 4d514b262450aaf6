"""Draws one name in n, others with each seed, for `--draw`."""

from __future__ import annotations

import hashlib


def number(seed: object, name: str) -> int:
    """Returns a number that a seed gives a name.

    crc32 would draw the same names together with every seed: two names of one length whose numbers agree
    modulo a power of two with one seed agree with all.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def is_drawn(seed: object, name: str, n: int) -> bool:
    return number(seed, name) % n == 0
