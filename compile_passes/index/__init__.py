"""Index notation: what one element of a tensor is, read from a graph."""

from . import arithmetic, conditions, rows, views, written_rows  # noqa: F401  their rules register themselves
