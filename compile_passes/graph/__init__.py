"""Reads and simplifies functional aten graphs: what a node is, which nodes are equal, and which are not
needed."""
