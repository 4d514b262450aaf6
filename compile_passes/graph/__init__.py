"""A functional aten graph, node by node: what a node is, what it equals, and what nothing needs."""
