"""Index notation: what one element of a tensor is, read from a graph."""
