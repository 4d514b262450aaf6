"""Orders of the bytes inside a packed weight. A layout never changes shapes, dtypes or the byte count.

`plain`: row n, byte j holds the codes of k = 2j (low nibble) and k = 2j + 1 (high nibble); always accepted.

`tile16`: made by `fp4::prepack` for the CPU kernels: panels of 16 rows, interleaved so that one vector
register holds the same few k of 16 rows. Rows past the last whole panel, and matrices whose K no
`TILE16_K` divides, keep the plain order. csrc/cpu/layout.h defines the order inside a panel.
"""

from __future__ import annotations

LAYOUTS = ("plain", "tile16")

TILE16_ROWS = 16
TILE16_K = 32


def preferred_layout(device_type: str) -> str:
    """The layout this device's kernels read fastest."""
    return "tile16" if device_type == "cpu" else "plain"
