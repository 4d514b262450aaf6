"""Index notation: reads from a graph how one element of a tensor is computed."""

from . import arithmetic, conditions, rows, views, written_rows  # noqa: F401  their rules register themselves
